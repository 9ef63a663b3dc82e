"""Ready-made sources: each joins an order and a store, and is passed where a fetch function is."""

from __future__ import annotations

from feeder.workers.sources.array_rows import arrays
from feeder.workers.sources.caffe import caffe_lmdb
from feeder.workers.sources.caffe2 import caffe2_lmdb
from feeder.workers.sources.collate import nested
from feeder.workers.sources.datasets import SampleInfo, records, samples
from feeder.workers.sources.images import image_folder
from feeder.workers.sources.iterables import IterableSource, iterable
from feeder.workers.sources.mds import mds
from feeder.workers.sources.mixture import Mixture, mix
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.packing import pack, packing_efficiency
from feeder.workers.sources.pictures import decode_image
from feeder.workers.sources.shards import jsonl, tfrecord, webdataset
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.reading import LeftOut, Piece, Record, RecordError, Seen
from feeder.workers.sources.stores.records import Records
from feeder.workers.sources.tables import arrow, hf, parquet
from feeder.workers.sources.token_files import tokens

__all__ = [
    "IterableSource",
    "LeftOut",
    "Mixture",
    "OrderOptions",
    "Piece",
    "Record",
    "RecordError",
    "Records",
    "SampleInfo",
    "Seen",
    "Source",
    "arrays",
    "arrow",
    "caffe2_lmdb",
    "caffe_lmdb",
    "decode_image",
    "hf",
    "image_folder",
    "iterable",
    "jsonl",
    "mds",
    "mix",
    "nested",
    "pack",
    "packing_efficiency",
    "parquet",
    "records",
    "samples",
    "tfrecord",
    "tokens",
    "webdataset",
]
