"""Ready-made sources: passed where a fetch function is."""

from __future__ import annotations

from workers.sources.array_rows import arrays
from workers.sources.caffe import caffe_lmdb
from workers.sources.caffe2 import caffe2_lmdb
from workers.sources.datasets import SampleInfo, records, samples
from workers.sources.images import image_folder
from workers.sources.iterables import IterableSource, iterable
from workers.sources.options import OrderOptions
from workers.sources.reading import RecordError, Records
from workers.sources.source import Source
from workers.sources.token_files import tokens

__all__ = [
    "IterableSource",
    "OrderOptions",
    "RecordError",
    "Records",
    "SampleInfo",
    "Source",
    "arrays",
    "caffe2_lmdb",
    "caffe_lmdb",
    "image_folder",
    "iterable",
    "records",
    "samples",
    "tokens",
]
