"""`FeedLoader` with a GPU, over a stand-in for one: batches go there through the device's queue.

A real GPU's are in `tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from needs import needs_framework

needs_framework("torch")

import torch

import feeder
from feeder.adapters.torch import FeedLoader
from feeder.adapters.torch import feed_loader as adapter
from feeder.devices.cuda import driver as drivers
from standin.gpu import Machine, StandinDriver, assert_sound

NUM = 57


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """GPUs whose arrays are tensors of what lies there when the user's stream comes to it."""
    made, arrays = Machine(seed=3), StandinDriver.arrays

    def tensors(driver: StandinDriver, *args: Any) -> Any:
        return tuple(torch.from_numpy(array.get()) for array in arrays(driver, *args))

    monkeypatch.setattr(StandinDriver, "arrays", tensors)
    monkeypatch.setitem(drivers.OPENERS, "torch", made.open)
    monkeypatch.setattr(adapter, "_gpu", lambda device: device and f"torch:{device[5:]}")
    yield made
    assert_sound(made)


class Items:
    """Item i: a dict of tensors of several dtypes, a text, and a number."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> Any:
        return {
            "half": torch.full((3, 2), i, dtype=torch.bfloat16),
            "is_odd": torch.tensor(bool(i % 2)),
            "pair": (np.arange(i, i + 5, dtype=np.uint8), f"item {i}"),
            "number": i,
            "none": np.zeros((0, 2), np.float32),
        }


def note(batch: Any) -> Any:
    left, texts = batch["pair"]
    assert (batch["half"].dtype, batch["is_odd"].dtype) == (torch.bfloat16, torch.bool)
    assert tuple(batch["none"].shape[1:]) == (0, 2)
    return (
        batch["half"].float().tolist(), batch["is_odd"].tolist(), left.tolist(), list(texts),
        batch["number"].tolist(),
    )  # fmt: skip


@pytest.mark.parametrize("num_workers", (0, 2))
def test_batches_are_those_of_the_host(machine: Machine, num_workers: int) -> None:
    """In an epoch, in the next one, and from a state in the middle."""
    with FeedLoader(Items(), 4, shuffle=True, seed=5) as loader:
        wanted = [[note(batch) for batch in loader] for _ in range(2)]
    settings: Any = {"shuffle": True, "seed": 5, "num_workers": num_workers, "device": "cuda:1"}
    with FeedLoader(Items(), 4, **settings) as loader:
        assert [[note(batch) for batch in loader] for _ in range(2)] == wanted
    with FeedLoader(Items(), 4, **settings) as loader:
        for _, _ in zip(range(6), loader, strict=False):
            pass
        state = loader.state_dict()
    with FeedLoader(Items(), 4, **settings) as loader:
        loader.load_state_dict(state)
        assert [note(batch) for batch in loader] == wanted[0][6:]
    assert machine.num_copies > 0


def test_a_batch_is_copied_as_one(machine: Machine) -> None:
    with FeedLoader(Items(), 4, device="cuda:0", epochs=1) as loader:
        batches = [note(batch) for batch in loader]
    assert len(batches) == 15
    assert machine.num_copies <= 15


def test_the_batches_of_a_fetch_function_are_tensors_on_the_gpu(machine: Machine) -> None:
    def fetch(call: feeder.Call) -> Any:
        if call.index == 5:
            raise StopIteration
        return {"x": np.full((4, 3), call.index, np.float32), "y": np.arange(4)}

    with FeedLoader(fetch, 4, device="cuda:0", epochs=1) as loader:
        found = [(batch["x"].tolist(), batch["y"].tolist()) for batch in loader]
    assert found == [([[float(i)] * 3] * 4, [0, 1, 2, 3]) for i in range(5)]
    assert machine.num_copies > 0
