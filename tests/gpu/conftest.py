"""What the tests on GPUs have in common: they are left out, and counted apart, without one."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator

import numpy as np
import pytest

from feeder.devices.cuda import driver as drivers
from gpu.copying import Poisoning, open_poisoning
from needs import needs_gpus, why_no_gpus


@pytest.fixture(autouse=True, scope="session")
def descriptors_of_the_driver() -> None:
    """Each framework opens some with its first work on a GPU, and keeps them as long as the process
    lives: no test has left them behind."""
    if why_no_gpus():
        return
    driver = drivers.open_driver("cuda:0")
    driver.bind()
    stream, event = driver.make_stream(), driver.make_event()
    target, source = driver.alloc_device(64), driver.alloc_pinned(64)
    driver.copy_in(target.address, source.address, 64, stream)
    driver.record(event, stream)
    driver.synchronize(event)
    if importlib.util.find_spec("torch"):
        torch = importlib.import_module("torch")
        (torch.ones(3, pin_memory=True).to("cuda:0", non_blocking=True) * 2).cpu()
        torch.from_dlpack(torch.ones(3, device="cuda:0"))
    if importlib.util.find_spec("jax"):
        jax = importlib.import_module("jax")
        jax.block_until_ready(jax.device_put(np.ones(3)) * 2)


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
