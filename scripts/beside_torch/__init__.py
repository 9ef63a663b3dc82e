"""What of `scripts/bench gpu` needs PyTorch: loaders beside its DataLoader, and work on the device.

Beside `scripts/benchmarks`, for which 3,000 lines are the bound. Of each pair both get the same
samples, and the same steps of `feeder.adapters.torch.device` make the same kind of batch of them.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np

from benchmarks.contenders import feed
from benchmarks.fetches import IMAGES, Array, Size, constant
from benchmarks.harness import Contender, Row, Take, batches

DEVICE, TORCH = "cuda:0", "torch:0"
NUM_WORKERS, MANY_WORKERS = 2, 16
PICTURES = Size(batch_size=128, row_shape=(256, 256, 3), dtype="uint8", chunk_rows=128, bound=20)
"""Batches of 25.2 MB, of which 224 x 224 pixels are left."""
CROP, MEAN, STD = 224, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
JPEG_SIDE, NUM_JPEGS = 480, 64
_LENGTH = 10**9


@cache
def steps(*first: Any) -> Any:
    """Crop, flip and normalise images, after a first step if one is given."""
    on = importlib.import_module("feeder.adapters.torch.device")
    dtype = importlib.import_module("torch").bfloat16
    rest = on.random_resized_crop(CROP), on.random_flip(), on.normalize(MEAN, STD, dtype)
    return on.compose(*first, *rest)


# ---- data sets, as PyTorch wants them


class Batches:
    """One whose items are whole batches: nothing is left to stack."""

    def __init__(self, size: Size) -> None:
        self._batch = size.rows(size.batch_size)

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> Any:
        return self._batch


class Samples(Batches):
    """One of rows that were prepared once."""

    def __getitem__(self, index: int) -> Any:
        row: Array = self._batch[index % len(self._batch)]
        return row


class Made(Samples):
    """The same, made by the worker as `steps` makes them."""

    def __getitem__(self, index: int) -> Any:
        return _made(super().__getitem__(index), index)


class Jpegs:
    """JPEGs of photographs' size: smooth, with noise."""

    def __init__(self) -> None:
        image, rng = importlib.import_module("PIL.Image"), np.random.default_rng(0)
        self._files = []
        for _ in range(NUM_JPEGS):
            coarse = rng.integers(0, 256, (30, 30, 3), np.uint8)
            smooth = image.fromarray(coarse).resize((JPEG_SIDE, JPEG_SIDE), image.BICUBIC)
            noisy = np.asarray(smooth).astype(int) + rng.integers(-9, 10, (JPEG_SIDE, JPEG_SIDE, 3))
            file = io.BytesIO()
            image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> Any:
        return self._files[index % NUM_JPEGS]


class Decoded(Jpegs):
    """The same, decoded by the worker, and made as `steps` makes them."""

    def __getitem__(self, index: int) -> Any:
        decode = importlib.import_module("feeder.sources").decode_image
        return _made(decode(super().__getitem__(index)), index)


def _made(image: Array, index: int) -> Any:
    torch = importlib.import_module("torch")
    return steps()(torch.from_numpy(image[None]), np.random.default_rng(index))[0]


# ---- contenders


def _ready() -> None:
    importlib.import_module("torch").cuda.synchronize()


@contextmanager
def data_loader(
    make_dataset: Callable[[], Any], batch_size: int | None, num_workers: int = NUM_WORKERS,
    *, then: bool = False,
) -> Iterator[Take]:  # fmt: skip
    """PyTorch's DataLoader with pinned memory, and copies that do not wait; `steps` in the loop, if
    they come then."""
    loaders = importlib.import_module("torch.utils.data")
    loader = loaders.DataLoader(
        make_dataset(), batch_size, num_workers=num_workers, pin_memory=True
    )
    read, rng = iter(loader), np.random.default_rng(0)

    def take() -> Any:
        batch = next(read).to(DEVICE, non_blocking=True)
        return steps()(batch, rng) if then else batch

    take()
    yield take
    _ready()


@contextmanager
def feed_loader(
    make_dataset: Callable[[], Any], batch_size: int, on_device: Callable[[], Any] = lambda: None
) -> Iterator[Take]:
    """Feeder's loader over the same samples."""
    adapter = importlib.import_module("feeder.adapters.torch")
    loader = adapter.FeedLoader(
        make_dataset(), batch_size, num_workers=NUM_WORKERS, device=DEVICE, on_device=on_device()
    )
    with loader:
        read = iter(loader)
        next(read)
        yield partial(next, read)
        _ready()


def _decoding() -> Any:
    return steps(importlib.import_module("feeder.adapters.torch.device").decode_jpeg(DEVICE))


@contextmanager
def made_on_gpu() -> Iterator[Take]:
    """A feed of images that the device makes ready."""

    def make(batch: Any, rng: Any) -> Any:
        return {"data": steps()(batch["data"], rng)}

    with feed(partial(constant, PICTURES), PICTURES, devices=(TORCH,), on_device=make) as take:
        yield take


# ---- rows


def rows(copied: Callable[[Size], Contender]) -> Iterator[Row]:
    """All of them; `copied` is a feed on the GPU."""
    whole = partial(data_loader, partial(Batches, IMAGES), None)
    stacked = partial(data_loader, partial(Samples, IMAGES), IMAGES.batch_size)
    ours = partial(feed_loader, partial(Samples, IMAGES), IMAGES.batch_size)
    yield batches("20 MB, DataLoader", whole, ours=False, needs="torch")
    yield batches("20 MB, beside DataLoader", copied(IMAGES), of="20 MB, DataLoader",
                  needs="torch")  # fmt: skip
    yield batches("samples, DataLoader", stacked, ours=False, needs="torch")
    yield batches("samples, FeedLoader", ours, of="samples, DataLoader", needs="torch")
    size = PICTURES.batch_size
    by_workers = partial(data_loader, partial(Made, PICTURES), size)
    in_loop = partial(data_loader, partial(Samples, PICTURES), size, then=True)
    ahead = partial(feed_loader, partial(Samples, PICTURES), size, steps)
    for how, theirs in {"workers": by_workers, "the loop": in_loop}.items():
        name = f"pictures, DataLoader, made in {how}"
        yield batches(name, theirs, ours=False, needs="torch")
        yield batches(f"pictures, FeedLoader, beside {how}", ahead, of=name, needs="torch")
    by_many = partial(data_loader, Decoded, size, MANY_WORKERS)
    decoded = partial(feed_loader, Jpegs, size, _decoding)
    yield batches("JPEGs, DataLoader, 16 workers", by_many, ours=False, needs="torchvision")
    yield batches("JPEGs, FeedLoader", decoded, of="JPEGs, DataLoader, 16 workers",
                  needs="torchvision")  # fmt: skip
