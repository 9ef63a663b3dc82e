"""Streams of every source in every order."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

import feeder
from freeze.pairwise import pairwise
from freeze.runs import all_told
from needs import needs
from protos import Datum, TensorProto, TensorProtos
from stores import write_lmdb

NUM_RECORDS, BATCH_SIZE = 23, 4
SHARDS = {"num_shards": 2, "shard_id": 1}
ORDERS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "shards": SHARDS,
    "one shard": {**SHARDS, "stick_to_shard": True},
    "shuffled": {"random_shuffle": True},
    "shuffled shards": {**SHARDS, "random_shuffle": True, "seed": 11},
    "dali window": {**SHARDS, "order": "dali", "random_shuffle": True, "initial_fill": 5},
    "dali padded": {**SHARDS, "order": "dali", "random_shuffle": True, "pad_last_batch": True},
    "dali after epoch": {**SHARDS, "order": "dali", "shuffle_after_epoch": True},
    "dali compound": {**SHARDS, "order": "dali", "shuffle_after_epoch": "compound"},
}


class Walk:
    """A stateful iterator over a worker's numbers."""

    def __init__(self, worker_id: int, epoch: int) -> None:
        self.at, self.worker_id, self.epoch = 0, worker_id, epoch

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> tuple[int, int]:
        if self.at == NUM_RECORDS // (1 + self.worker_id):
            raise StopIteration
        self.at += 1
        return 1000 * self.worker_id + self.at, self.epoch

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


def of_arrays(folder: Path, **order: Any) -> Any:
    return feeder.sources.arrays(np.arange(NUM_RECORDS), np.arange(NUM_RECORDS) ** 2, **order)


def of_tokens(folder: Path, **order: Any) -> Any:
    path = folder / "tokens.bin"
    np.arange(NUM_RECORDS * 5, dtype=np.uint16).tofile(path)
    return feeder.sources.tokens(path, 5, np.uint16, **order)


def of_samples(folder: Path, **order: Any) -> Any:
    return feeder.sources.samples(
        lambda info: (info.idx_in_epoch, info.rng.random()), NUM_RECORDS, **order
    )


def of_records(folder: Path, **order: Any) -> Any:
    return feeder.sources.records([(i, i / 2) for i in range(NUM_RECORDS)], **order)


def of_caffe(folder: Path, **order: Any) -> Any:
    path = folder / "caffe"
    if not path.exists():
        made = [
            Datum(channels=1, height=2, width=2, data=bytes([i] * 4), label=i, encoded=False)
            for i in range(NUM_RECORDS)
        ]
        write_lmdb(path, [datum.SerializeToString() for datum in made])
    return feeder.sources.caffe_lmdb(path, **order)


def of_caffe2(folder: Path, **order: Any) -> Any:
    path = folder / "caffe2"
    if not path.exists():
        made = [
            TensorProtos(
                protos=[
                    TensorProto(data_type=3, dims=[1, 1], byte_data=bytes([i])),
                    TensorProto(data_type=2, dims=[1], int32_data=[i]),
                ]
            )
            for i in range(NUM_RECORDS)
        ]
        write_lmdb(path, [protos.SerializeToString() for protos in made])
    return feeder.sources.caffe2_lmdb(path, **order)


def png(number: int) -> bytes:
    """An image whose pixels are whole numbers on every machine."""
    needs("PIL")
    from PIL import Image

    file = BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def of_images(folder: Path, **order: Any) -> Any:
    path = folder / "images"
    if not path.exists():
        for i in range(NUM_RECORDS):
            file = path / str(i % 3) / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(png(i))
    return feeder.sources.image_folder(path, crop=7, random_crop=True, random_flip=True, **order)


def of_iterators(folder: Path) -> Any:
    return feeder.sources.iterable(Walk)


Make = Callable[..., Any]
ORDERED: dict[str, tuple[Make, list[str]]] = {
    "arrays": (of_arrays, ["x", "y"]),
    "tokens": (of_tokens, ["tokens"]),
    "samples": (of_samples, ["x", "y"]),
    "records": (of_records, ["x", "y"]),
    "caffe_lmdb": (of_caffe, ["image", "label"]),
    "caffe2_lmdb": (of_caffe2, ["image", "label"]),
    "image_folder": (of_images, ["image", "label"]),
}
UNORDERED: dict[str, tuple[Make, list[str]]] = {"iterable": (of_iterators, ["x", "epoch"])}
"""Those whose order is their own."""
POLICIES: dict[str, list[Any]] = {
    "last_batch": ["keep", "drop", "pad", "carry"],
    "last_round": ["uneven", "drop", "pad"],
    "devices": [1, 2],
    "num_worker_threads": [1, 2, 3],
}


def make_source(
    folder: Path, source: str, order: str = "sequential", **settings: Any
) -> feeder.Coordinator:
    make_fetch, names = {**ORDERED, **UNORDERED}[source]
    return feeder.init_data_input_workers(
        names, make_fetch(folder, **ORDERS[order]), BATCH_SIZE, epochs=3, seed=7, timeout=10.0,
        coordinator=feeder.Coordinator(), **settings,
    )  # fmt: skip


def make(folder: Path) -> dict[str, Any]:
    cases = pairwise({"source": [*ORDERED], "order": [*ORDERS], **POLICIES})
    cases += pairwise({"source": [*UNORDERED], **POLICIES})
    return all_told(make_source, cases, folder)
