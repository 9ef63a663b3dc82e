"""Files of each kind, as objects of a store and on a disk, and sources that read them by either."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.ipc
import pyarrow.parquet
import pytest
from PIL import Image

import feeder
from far_server import FarServer, far_server
from feeder import sources
from feeder.workers.sources.far import blocks as blocks_module
from feeder.workers.sources.far import cache as cache_module
from feeder.workers.sources.far import objects as objects_module
from feeder.workers.sources.far import paths
from shards import example, ints, numbered, write_tar, write_tfrecord

BLOCK = 512
NUM = 90


def write_mds(folder: Path, num: int, per_shard: int) -> None:
    """Shards of a number and of some bytes."""
    folder.mkdir()
    entries = []
    for start in range(0, num, per_shard):
        rows = range(start, min(start + per_shard, num))
        columns = {"column_names": ["i", "b"], "column_encodings": ["int", "bytes"],
                   "column_sizes": [8, None]}  # fmt: skip
        head = json.dumps(columns).encode()
        samples = [
            struct.pack("<Iq", 20 + i % 3, i) + bytes([i % 251]) * (20 + i % 3) for i in rows
        ]
        at = 4 + 4 * (len(samples) + 1) + len(head)
        offsets = at + np.cumsum([0, *map(len, samples)])
        data = struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + head
        name = f"shard.{start:05d}.mds"
        (folder / name).write_bytes(data + b"".join(samples))
        entries.append({
            **columns, "format": "mds", "samples": len(samples), "compression": None,
            "version": 2, "zip_data": None,
            "raw_data": {"basename": name, "bytes": int(offsets[-1]), "hashes": {}},
        })  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


def write_files(root: Path) -> None:
    """Write them; some records lie in two blocks."""
    (root / "tokens").mkdir()
    np.arange(7 * NUM, dtype="<u2").tofile(root / "tokens" / "a.bin")
    np.save(root / "tokens" / "b.npy", np.arange(1000, 1000 + 7 * NUM, dtype="<u2"))
    write_mds(root / "mds", NUM, 40)
    (root / "jsonl").mkdir()
    for name, first in (("a", 0), ("b", NUM // 2)):
        lines = (json.dumps({"i": i, "t": [i] * 3}) for i in range(first, first + NUM // 2))
        (root / "jsonl" / f"{name}.jsonl").write_text("\n".join(lines))
    (root / "tar").mkdir()
    for start in range(0, NUM, 30):
        write_tar(root / "tar" / f"{start:03d}.tar", numbered(start, start + 30), start)
    (root / "tfrecord").mkdir()
    records = [example({"i": ints(i), "sq": ints(i, i * i)}) for i in range(NUM)]
    write_tfrecord(root / "tfrecord" / "x.tfrecord", records, is_sealed=True)
    rows = {"i": [*range(NUM)], "x": [[i, i + 0.5] for i in range(NUM)], "unused": ["?"] * NUM}
    for half, part in ((0, slice(0, 50)), (1, slice(50, NUM))):
        table = pyarrow.table({name: pyarrow.array(values[part]) for name, values in rows.items()})
        table = table.set_column(1, "x", table["x"].cast(pyarrow.list_(pyarrow.float64(), 2)))
        folder = root / "parquet" / f"half={half}"
        folder.mkdir(parents=True)
        pyarrow.parquet.write_table(table, folder / "x.parquet", row_group_size=12)
        folder = root / "arrow" / f"half={half}"
        folder.mkdir(parents=True)
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd" if half else None)
        with pyarrow.ipc.new_file(folder / "x.arrow", table.schema, options=options) as file:
            file.write_table(table, max_chunksize=12)
    for i in range(24):
        folder = root / "images" / "cab"[i % 3] / ("deep/er" if i % 5 == 0 else "")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (i, 2 * i, 255 - i)).save(folder / f"{i}.png")
        (folder / "notes.txt").write_text("no image")


@contextmanager
def small_store(files: Path) -> Iterator[FarServer]:
    """The files as objects, with small blocks and short pauses."""
    with pytest.MonkeyPatch.context() as patch, far_server() as far:
        patch.setattr(blocks_module, "BLOCK_BYTES", BLOCK)
        patch.setattr(paths, "BLOCK_BYTES", BLOCK)
        patch.setattr(cache_module, "_LEAST_BYTES", BLOCK)
        patch.setattr(blocks_module, "_AHEAD_BYTES", 8 * 4096)
        patch.setattr(objects_module, "_FIRST_PAUSE_S", 0.001)
        patch.setattr(objects_module, "_SLOW_PAUSE_S", 0.002)
        patch.setattr(objects_module, "_MOST_PAUSE_S", 0.004)
        upload(far, files)
        yield far


def upload(far: FarServer, files: Path) -> None:
    for path in files.rglob("*"):
        if path.is_file() and not path.name.endswith(".feeder-index"):
            far.objects[f"bucket/{path.relative_to(files)}"] = path.read_bytes()


Make = Callable[..., sources.Source]

COLUMNS = {
    "tokens": ["x"], "mds": ["i", "length", "first"], "jsonl": ["i", "t"],
    "webdataset": ["npy", "cls"], "webdataset, origin": ["cls", "__key__"], "tfrecord": ["i", "sq"],
    "parquet": ["i", "x", "half"], "arrow": ["i", "x", "half"],
    "images": ["image", "label"], "images, dali": ["image", "label"],
}  # fmt: skip
KINDS: dict[str, Make] = {
    "tokens": lambda root, **far: sources.tokens(f"{root}/tokens/", 5, "uint16", stride=4, **far),
    "mds": lambda root, **far: sources.mds(f"{root}/mds", ["i", "b"], **far).map(
        lambda row: (row["i"], len(row["b"]), row["b"][0])
    ),
    "jsonl": lambda root, **far: sources.jsonl(f"{root}/jsonl/*.jsonl", **far),
    "webdataset": lambda root, **far: sources.webdataset(
        f"{root}/tar/{{000,030,060}}.tar", ["npy", "cls"], **far
    ),
    "webdataset, origin": lambda root, **far: sources.webdataset(
        f"{root}/tar/*.tar", ["cls", "__key__"], **far
    ),
    "parquet": lambda root, **far: sources.parquet(
        f"{root}/parquet/**/*.parquet", ["i", "x", "half"], row_group_cache=2, **far
    ),
    "arrow": lambda root, **far: sources.arrow(
        f"{root}/arrow/**/*.arrow", ["i", "x", "half"], **far
    ),
    "images": lambda root, **far: sources.image_folder(f"{root}/images", **far),
    "images, dali": lambda root, **far: sources.image_folder(
        f"{root}/images", order="dali", random_shuffle=True, initial_fill=7, **far
    ),
    "tfrecord": lambda root, **far: sources.tfrecord(
        f"{root}/tfrecord/x.tfrecord", verify=True, **far
    ),
}

Change = Callable[[sources.Source], sources.Source]
CHANGES: dict[str, Change] = {
    "in order": lambda source: source,
    "shuffled": lambda source: source.shuffle(),
    "windows": lambda source: source.shuffle(window=16),
    "part": lambda source: source.shuffle(3).skip(7).take(12).repeat(2),
    "shard": lambda source: source.shuffle().shard(1, 3),
    "joined": lambda source: source.take(20).concat(source.skip(5)).shuffle(),
}


def make(kind: str, source: Any, size: int, threads: int, resume: Any = None) -> Any:
    return feeder.init_data_input_workers(
        COLUMNS[kind], source, batch_size=size, epochs=2, num_threads=threads, resume=resume
    )


def batch_bytes(batch: feeder.Batch) -> list[tuple[str, Any, bytes]]:
    return [(name, (a.dtype.str, a.shape), a.tobytes()) for name, a in batch.items()]


def read(feeds: Any, most: int | None = None) -> tuple[list[Any], Any]:
    """The next batches, and the state after them."""
    found: list[Any] = []
    with feeds:
        feed = iter(feeds["train"])
        while most is None or len(found) < most:
            batch = next(feed, None)
            if batch is None:
                break
            found.append(batch_bytes(batch))
        return found, feeds.state_dict()
