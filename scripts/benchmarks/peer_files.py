"""What users read files with, beside feeder's sources: photographs, rows of Parquet, tar files.

A reader is one epoch in random order: an iterator of batches, whose last column is the sample's
number. A photograph's is its class: each has one of its own.
"""

from __future__ import annotations

import importlib
import io
import os
import tarfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import data
from benchmarks.peer_loaders import SEED, Peer

SIDE, NEAR = 224, 256
"""Of pixels, and how many samples a shuffle of tar files looks ahead."""


class Files(NamedTuple):
    """What is read. Without draws photographs are taken whole, so that all give the same."""

    work: str
    folder: Path
    draws: bool


def size_of(work: str) -> tuple[int, int]:
    """Width and height of photographs."""
    width, _, height = work.partition(" ")[2].partition("x")
    return int(width), int(height)


def _area(files: Files) -> dict[str, Any]:
    """The options of a random crop."""
    width, height = size_of(files.work)
    return {} if files.draws else {"scale": (1, 1), "ratio": (width / height,) * 2}


def torchvision(files: Files, batch_size: int, workers: int) -> Iterator[Any]:
    """ImageFolder and RandomResizedCrop in PyTorch's DataLoader; pixels stay whole numbers."""
    tv, torch = map(importlib.import_module, ("torchvision", "torch.utils.data"))
    crop = tv.transforms.RandomResizedCrop(SIDE, **_area(files))
    flips = [tv.transforms.RandomHorizontalFlip()] * files.draws
    dataset = tv.datasets.ImageFolder(files.folder, tv.transforms.Compose([crop, *flips, np.array]))
    yield from torch.DataLoader(dataset, batch_size, shuffle=True, num_workers=workers)


def datasets(files: Files, batch_size: int, workers: int, *, streams: bool) -> Iterator[Any]:
    """Hugging Face's, over its own copy in Arrow and shuffled as a whole; or streaming."""
    load, path = importlib.import_module("datasets").load_dataset, files.folder / "rows.parquet"
    cache = {} if streams else {"cache_dir": str(files.folder)}
    rows = load("parquet", data_files=str(path), split="train", streaming=streams, **cache)
    ahead = {"buffer_size": data.GROUP_ROWS} if streams else {}
    for batch in rows.shuffle(SEED, **ahead).with_format("numpy").iter(batch_size):
        yield np.asarray(batch["v"]), batch["n"]


def webdataset(files: Files, batch_size: int, workers: int) -> Iterator[Any]:
    """webdataset in PyTorch's DataLoader, a shard for each worker."""
    wds, torch = map(importlib.import_module, ("webdataset", "torch.utils.data"))
    rows = wds.WebDataset(str(files.folder / "{0..1}.tar"), shardshuffle=2, seed=SEED)
    rows = rows.shuffle(NEAR).decode("rgb8").to_tuple("jpg", "cls").batched(batch_size)
    yield from torch.DataLoader(rows, batch_size=None, num_workers=workers)


def ours(files: Files, batch_size: int, workers: int, *, executor: str) -> Iterator[Any]:
    """feeder's sources, on its threads or processes."""
    feeder: Any = importlib.import_module("feeder")
    names = {"rows": ["v", "n"], "tars": ["jpg", "cls"]}.get(files.work, ["image", "label"])
    if files.work == "rows":
        source = feeder.sources.parquet(files.folder / "rows.parquet")
        source = source.shuffle(SEED, window=data.GROUP_ROWS)
    elif files.work == "tars":
        source = feeder.sources.webdataset(files.folder / "*.tar", keys=names)
        source = source.shuffle(SEED, window=NEAR)
    else:
        source = feeder.sources.image_folder(
            files.folder, random_resized_crop=SIDE, random_flip=files.draws, random_shuffle=True,
            draft=files.draws and size_of(files.work)[0] > 1000, **_area(files),
        )  # fmt: skip
    with feeder.init_data_input_workers(
        names, source, batch_size, executor=getattr(feeder, executor)(workers),
        coordinator=feeder.Coordinator(),
    ) as coordinator:  # fmt: skip
        for batch in coordinator["train"]:
            yield [batch[name] for name in names]


THREADS = {"feeder, threads": Peer("feeder", partial(ours, executor="Threads"))}
_OURS = {"feeder, processes": Peer("feeder", partial(ours, executor="Processes")), **THREADS}
_PHOTOS = {"ImageFolder in DataLoader": Peer("torchvision", torchvision), **_OURS}
READERS: Mapping[str, Mapping[str, Peer]] = {
    "photos 480x480": _PHOTOS,
    "photos 500x375": _PHOTOS,
    "photos 2000x1500": _PHOTOS,
    "rows": {
        "datasets": Peer("datasets", partial(datasets, streams=False)),
        "datasets, streaming": Peer("datasets", partial(datasets, streams=True)),
        **THREADS,
    },
    "tars": {"webdataset in DataLoader": Peer("webdataset", webdataset), **_OURS},
}
"""Of each kind of files the readers; all others are compared with the first."""


# ---- files


def make(work: str, samples: int) -> Path:
    """A folder of so many samples, which ends with this process."""
    folder = data.make_folder()
    if work == "rows":
        pq: Any = importlib.import_module("pyarrow.parquet")
        rows = pq.read_table(data.parquet_file()).slice(0, samples)
        pq.write_table(rows, folder / "rows.parquet", row_group_size=data.GROUP_ROWS)
        return folder
    pictures = sorted(data.photographs().glob("class/*"))
    if work == "tars":
        for shard in range(2):
            with tarfile.open(folder / f"{shard}.tar", "w") as tar:
                for number in range(samples)[shard::2]:
                    picture = pictures[number % len(pictures)].read_bytes()
                    for suffix, value in (("jpg", picture), ("cls", b"%d" % number)):
                        member = tarfile.TarInfo(f"{number:06}.{suffix}")
                        member.size = len(value)
                        tar.addfile(member, io.BytesIO(value))
        return folder
    image, scaled = importlib.import_module("PIL.Image"), data.make_folder()
    for number, path in enumerate(pictures[:16]):
        image.open(path).resize(size_of(work)).save(scaled / f"{number}.jpg", quality=90)
    for number in range(samples):
        (folder / f"{number:05}").mkdir()
        os.link(scaled / f"{number % 16}.jpg", folder / f"{number:05}/0.jpg")
    return folder
