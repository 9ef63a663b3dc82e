"""Seeds of the generators that belong to a whole process: those that transforms draw from.

A fetch function that draws from them is pure then: its call gives the same rows in each run, in
each process and after each resume. In threads that cannot be had, since the trainer draws from them
too.
"""

from __future__ import annotations

import importlib.util
import random
import struct
import sys
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
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


def follow_imports() -> None:
    """Seed PyTorch at the end of its import, too. Without that a call that is the first to import
    it would draw numbers of the process, and not its own."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _SeedsWhenImported())


def _seed(family: int, seed: int, epoch: int, item: int) -> None:
    digest = xxhash.xxh3_64_intdigest(_FIELDS.pack(family, seed, epoch, item))
    random.seed(digest)
    np.random.seed(digest & 0xFFFFFFFF)
    _TORCH.newest = digest >> 1
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        _TORCH.seed(torch, _TORCH.newest)


class _TorchSeeds:
    """What `torch.manual_seed` does, without the stack of the caller that it formats anew for each
    kind of device that is not in use yet: that took 90 µs of 100 for a sample (2026-11-25). Owner:
    the thread that seeds."""

    def __init__(self) -> None:
        self.newest = 0
        """The seed that was asked for last, also where PyTorch was not there."""
        # None until PyTorch is seen.
        self._devices: list[Any] | None = None

    def seed(self, torch: Any, seed: int) -> None:
        """Seed the generators of all devices."""
        self.newest = seed
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
            device.default_generators[number].manual_seed(self.newest)


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


class _SeedsWhenImported(MetaPathFinder):
    """Finds PyTorch as the other finders do, and has it seeded at the end of its import. Owner: the
    thread that imports PyTorch, which holds the lock of this import."""

    def __init__(self) -> None:
        self._asks_others = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "torch" or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks_others = False
        loader: Any = spec and spec.loader
        if loader is not None:
            load = loader.exec_module

            def load_and_seed(module: Any) -> None:
                # Its loader is seen by others, who may look for what a loader of its kind has.
                del loader.exec_module
                load(module)
                _TORCH.seed(module, _TORCH.newest)

            loader.exec_module = load_and_seed
        return spec
