"""What the tests on GPUs have in common: they are left out, and counted apart, without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from feeder.devices.cuda import driver as drivers
from gpu.copying import Poisoning, open_poisoning
from needs import needs_gpus


@pytest.fixture
def gpu() -> None:
    """A GPU, or the test is left out."""
    needs_gpus(1)


@pytest.fixture
def gpus() -> None:
    """Two GPUs, or the test is left out."""
    needs_gpus(2)


@pytest.fixture
def poisoned(gpu: None) -> Iterator[list[Poisoning]]:
    """Memory of the device is poisoned before each copy into it; yields the drivers."""
    with pytest.MonkeyPatch.context() as patch:
        made: list[Poisoning] = []
        patch.setitem(drivers.OPENERS, "cuda", lambda *args: open_poisoning(made, *args))
        yield made
