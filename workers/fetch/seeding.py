"""Seeds of the generators that belong to a whole process: those that transforms draw from.

A fetch function that draws from them is pure then: its call gives the same rows in each run, in
each process and after each resume. In threads that cannot be had, since the trainer draws from them
too.
"""

from __future__ import annotations

import random
import struct
import sys
from functools import partial
from typing import Any

import numpy as np
import xxhash

from feeder.workers.stream.batch import Call

# Draws of a call and of a record never have the same seed.
_CALL, _RECORD = 1, 2
_FIELDS = struct.Struct("<QQqq")


def seed_for_call(seed: int, epoch: int, index: int) -> None:
    """Seed `random`, `numpy.random`, and `torch` where it is imported, for a call."""
    _seed(_CALL, seed, epoch, index)


class RecordSeeds:
    """Whether sources seed the same generators before each record. Owner: the one thread of a
    process that fetches; elsewhere nobody writes it."""

    def __init__(self) -> None:
        self.are_on = False
        """Set once, before the first call."""

    def seed(self, call: Call, record: int) -> None:
        """Have a record's draws belong to the record, whichever call reads it."""
        if self.are_on:
            _seed(_RECORD, call.seed, call.epoch, record)


RECORD_SEEDS = RecordSeeds()
"""The process's: its generators are the process's too."""


def _seed(family: int, seed: int, epoch: int, item: int) -> None:
    digest = xxhash.xxh3_64_intdigest(_FIELDS.pack(family, seed, epoch, item))
    random.seed(digest)
    np.random.seed(digest & 0xFFFFFFFF)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        _TORCH.seed(torch, digest >> 1)


class _TorchSeeds:
    """What `torch.manual_seed` does, without the stack of the caller that it formats anew for each
    kind of device that is not in use yet: that took 90 µs of 100 for a sample (2026-11-25). Owner:
    the thread that seeds."""

    def __init__(self) -> None:
        self._newest = 0
        # None until PyTorch is seen.
        self._devices: list[Any] | None = None

    def seed(self, torch: Any, seed: int) -> None:
        """Seed the generators of all devices."""
        self._newest = seed
        if self._devices is None:
            self._devices = [torch.cuda, torch.xpu] if _has_only_known(torch) else []
            for device in self._devices:
                # A device that is put to use begins with the seed that is the newest then.
                device._lazy_call(partial(self._seed_device, device), seed_all=True)
        if not self._devices:
            torch.manual_seed(seed)
            return
        torch.default_generator.manual_seed(seed)
        for device in self._devices:
            if device.is_initialized():
                device.manual_seed_all(seed)

    def _seed_device(self, device: Any) -> None:
        # Called while the device is being put to use: it gets no seed by `manual_seed_all` yet.
        for number in range(device.device_count()):
            device.default_generators[number].manual_seed(self._newest)


def _has_only_known(torch: Any) -> bool:
    """Whether the devices of this PyTorch are those that are seeded one by one here."""
    others = getattr(torch, torch._C._get_privateuse1_backend_name(), None)
    mtia = getattr(torch, "mtia", None)
    return (
        others is None
        and not (mtia and mtia.is_available())
        and not torch.backends.mps.is_available()
        and all(hasattr(device, "_lazy_call") for device in (torch.cuda, getattr(torch, "xpu", 0)))
    )


_TORCH = _TorchSeeds()
