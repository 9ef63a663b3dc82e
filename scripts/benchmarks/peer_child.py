"""One measurement of one loader, in a process of its own: what `bench peers` starts.

It is called with what to do and with its arguments, and writes lines of JSON. Its data sets are as
one writes them for PyTorch: samples are tuples whose last item is the sample's number. What is
augmented draws from the process's own generators, as most do; with `draws=False` it does not, so
that every loader has to give the same bytes.
"""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from PIL import Image, ImageEnhance

from benchmarks.fetches import NUMBERS, words_of
from benchmarks.harness import Watch
from benchmarks.peer_files import READERS, SIDE, Files
from benchmarks.peer_loaders import PEERS, SEED

TOKENS = 1024


# ---- data sets


class Samples:
    """So many samples, made from what is in a folder, with draws or without."""

    def __init__(self, folder: Path, samples: int, *, draws: bool) -> None:
        self._folder, self._samples, self._draws = folder, samples, draws

    def __len__(self) -> int:
        return self._samples


class Pictures(Samples):
    """JPEGs, decoded, cropped, resized, flipped and brightened by Pillow."""

    @cached_property
    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("class/*.jpg"))

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        picture = Image.open(self._files[i % len(self._files)]).convert("RGB")
        share, left, top, light = 0.8, 0.5, 0.5, 1.0
        flips = False
        if self._draws:
            share, light = random.uniform(0.5, 1), float(np.random.uniform(0.8, 1.2))
            left, top, flips = random.random(), random.random(), bool(torch.rand(()) < 0.5)
        side = int(share * min(picture.size))
        x, y = int(left * (picture.width - side)), int(top * (picture.height - side))
        box = (x, y, x + side, y + side)
        picture = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
        if flips:
            picture = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = np.array(ImageEnhance.Brightness(picture).enhance(light))
        tensor = torch.from_numpy(pixels).permute(2, 0, 1).float().div_(255)
        return tensor.sub_(0.45).div_(0.225), i


class Text(Samples):
    """Lines of words, masked and made numbers, by Python alone."""

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        words = words_of(i)
        if self._draws:
            words = [word if random.random() > 0.15 else "[mask]" for word in words]
        return torch.tensor([NUMBERS.get(word, 0) for word in words]), i


class Tokens(Samples):
    """Rows of a file of tokens, and the same rows one token later."""

    @cached_property
    def _tokens(self) -> Any:
        return np.memmap(self._folder / "tokens.bin", np.uint16, mode="r")

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        first = (i * TOKENS) % (len(self._tokens) - TOKENS - 1)
        row = torch.from_numpy(self._tokens[first : first + TOKENS + 1].astype(np.int64))
        return row[:-1], row[1:], i


class Tiny(Samples):
    """Sixteen numbers and a label, out of tensors in memory."""

    def __init__(self, folder: Path, samples: int, *, draws: bool) -> None:
        super().__init__(folder, samples, draws=draws)
        made = torch.Generator().manual_seed(0)
        self._x = torch.rand((samples, 16), generator=made)
        self._y = torch.randint(10, (samples,), generator=made)

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return self._x[i], self._y[i], i


DATASETS: Mapping[str, Callable[..., Any]] = {
    "jpeg": Pictures, "text": Text, "tokens": Tokens, "tiny": Tiny,
}  # fmt: skip


# ---- tasks


def timed(make: Callable[..., Any], num_batches: int) -> None:
    """What a sample costs behind the first tenth of an epoch, and the time to the first batch."""
    seen = count = 0
    begin = time.perf_counter()
    loader = make(draws=True)
    batches = iter(loader)

    def take(num: int) -> int:
        nonlocal seen, count
        before = count
        for batch in itertools.islice(batches, num):
            numbers = np.asarray(batch[-1])
            count += len(numbers)
            seen += int(numbers.sum())
        return count - before

    take(1)
    first_s = time.perf_counter() - begin
    warm = max(2, num_batches // 10)
    take(warm - 1)
    watch = Watch()
    with watch:
        # Its workers are there still: the iterator has not ended.
        samples = take(num_batches - warm)
    cost = watch.cost(samples, first_s=first_s)
    next(batches, None)
    loader.close()
    if seen != count * (count - 1) // 2:
        raise RuntimeError("samples were lost, or came twice")
    _tell(asdict(cost))


def checked(make: Callable[..., Any], num_batches: int) -> None:
    """The digest of all samples, whatever their order."""
    loader = make(draws=False)
    total = sum(sum(_digests(batch)) for batch in loader)
    loader.close()
    _tell(f"{total % 2**64:016x}")


TASKS: Mapping[str, Callable[..., None]] = {"timed": timed, "checked": checked}


def _digests(batch: Any) -> Iterator[int]:
    """Of each sample the digest of its bytes."""
    columns = [np.asarray(column) for column in batch]
    for i, number in enumerate(columns[-1].tolist()):
        found = xxhash.xxh3_64(number.to_bytes(8, "little"))
        for column in columns[:-1]:
            found.update(np.ascontiguousarray(column[i]).tobytes())
        yield found.intdigest()


def _tell(what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    """Do what the command line names."""
    task, work, loader, workers, batch_size, samples, folder = sys.argv[1:]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)

    peer = READERS.get(work, PEERS)[loader]

    def make(*, draws: bool) -> Any:
        read: Any = Files(work, Path(folder), draws)
        if work in DATASETS:
            read = DATASETS[work](Path(folder), int(samples), draws=draws)
        return peer.make(read, int(batch_size), int(workers))

    # What it imports is no part of its start.
    importlib.import_module(peer.module)
    TASKS[task](make, -(-int(samples) // int(batch_size)))
