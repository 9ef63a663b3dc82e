"""Tests of adapters run with the frameworks themselves, in an environment of their own."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from feeder.adapters.loop import EpochLoader

# Before a framework is imported: tests share two cores, and each library would take them all.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def loaders_end_with_their_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each has threads, which would be found."""
    made: list[EpochLoader] = []
    init = EpochLoader.__init__

    @functools.wraps(init)
    def noted(self: EpochLoader, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        made.append(self)

    monkeypatch.setattr(EpochLoader, "__init__", noted)
    yield
    for loader in made:
        loader.close()
