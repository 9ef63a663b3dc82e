"""The data sets that all loaders read beside each other: as one writes them for PyTorch.

Samples are tuples whose last item is the sample's number. A data set whose samples are augmented
draws from the process's own generators, as most do. With `draws=False` it leaves that out, so that
every loader has to give the same bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance

from process_loads import NUMBERS, WORDS

SIDE = 224
TOKENS = 1024
TEXT_WORDS = 128
TOKEN_FILE = "tokens.bin"


class Pictures:
    """JPEGs, decoded, cropped, resized, flipped and brightened by Pillow."""

    def __init__(self, folder: Path, samples: int, *, draws: bool) -> None:
        self._files = sorted(folder.glob("class/*.jpg"))
        self._samples, self._draws = samples, draws

    def __len__(self) -> int:
        return self._samples

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


class Text:
    """Lines of words, masked and made numbers, by Python alone."""

    def __init__(self, folder: Path, samples: int, *, draws: bool) -> None:
        self._samples, self._draws = samples, draws

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        line = " ".join(WORDS[(i * 13 + k * 31) % len(WORDS)] for k in range(TEXT_WORDS))
        words = line.lower().split()
        if self._draws:
            words = [word if random.random() > 0.15 else "[mask]" for word in words]
        return torch.tensor([NUMBERS.get(word, 0) for word in words]), i


class Tokens:
    """Rows of a file of tokens, and the same rows one token later."""

    def __init__(self, folder: Path, samples: int, *, draws: bool) -> None:
        self._samples, self._file = samples, folder / TOKEN_FILE
        self._tokens: Any = None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        if self._tokens is None:
            self._tokens = np.memmap(self._file, np.uint16, mode="r")
        first = (i * TOKENS) % (len(self._tokens) - TOKENS - 1)
        row = torch.from_numpy(self._tokens[first : first + TOKENS + 1].astype(np.int64))
        return row[:-1], row[1:], i


class Tiny:
    """Sixteen numbers and a label, out of tensors in memory."""

    def __init__(self, folder: Path, samples: int, *, draws: bool) -> None:
        made = torch.Generator().manual_seed(0)
        self._x = torch.rand((samples, 16), generator=made)
        self._y = torch.randint(10, (samples,), generator=made)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        return self._x[i], self._y[i], i


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A data set, and how it is read."""

    title: str
    make: Callable[..., Any]
    batch_size: int
    samples: int
    """Of an epoch that is timed in full."""


WORKS: Mapping[str, Work] = {
    "jpeg": Work(title="JPEGs of 480 × 480 pixels, decoded and augmented by Pillow, in batches of "
                 "32", make=Pictures, batch_size=32, samples=768),
    "text": Work(title=f"lines of {TEXT_WORDS} words, masked and tokenised by Python, in batches "
                 "of 64", make=Text, batch_size=64, samples=19_200),
    "tokens": Work(title=f"rows of {TOKENS} tokens out of a file, in batches of 16", make=Tokens,
                   batch_size=16, samples=24_000),
    "tiny": Work(title="16 numbers and a label out of memory, in batches of 64", make=Tiny,
                 batch_size=64, samples=96_000),
}  # fmt: skip


def write_tokens(folder: Path) -> None:
    """The file of tokens, of 16 MB."""
    tokens = np.random.default_rng(0).integers(0, 50_000, 8_000_000, dtype=np.uint16)
    tokens.tofile(folder / TOKEN_FILE)
