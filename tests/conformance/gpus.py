"""How the tests of feeds on the host are run on GPUs: over stand-ins that work late and out of
step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

import feeds
from feeder import Coordinator
from standin.gpu import Machine, assert_sound, installed

DEPTH = 2
"""Few slots, so that each is written again and again."""


def on_gpus(devices: Any) -> tuple[str, ...]:
    """Return GPUs in the place of host queues: by number; every second one of several stays on the
    host where there are three."""
    if not isinstance(devices, int):
        return tuple(devices)
    names = [f"cuda:{i}" for i in range(devices)]
    return tuple(names if devices < 3 else ["cpu:9", *names[1:]])


def making(machine: Machine) -> Callable[..., Coordinator]:
    """Return `feeds.make` on the GPUs of a machine."""
    make = feeds.make

    def make_there(fetch: Callable[..., Any], **settings: Any) -> Coordinator:
        devices = on_gpus(settings.pop("devices", 1))
        depth = DEPTH if any(name.startswith("cuda") for name in devices) else 0
        return make(fetch, devices=devices, **{"depth": depth} | settings)

    return make_there


@contextmanager
def gpus(seed: int, *modules: ModuleType) -> Iterator[Machine]:
    """Let modules make their feeds on GPUs for as long as the context lasts."""
    machine = Machine(num_gpus=4, seed=seed)
    make = making(machine)
    with installed(machine), pytest.MonkeyPatch.context() as patch:
        for module in (feeds, *modules):
            if "make" in vars(module):
                patch.setattr(module, "make", make)
        yield machine
    assert_sound(machine)
