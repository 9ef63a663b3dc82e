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
from conformance.served import serving
from feeder.adapters.torch import FeedLoader
from feeder.adapters.torch import feed_loader as adapter
from feeder.devices.cuda import driver as drivers
from feeder.devices.cuda.runtime import Named
from feeder.devices.cuda.torchdriver import TorchDriver
from feeder.devices.layout import Form, lay_out
from standin.gpu import Machine, StandinDriver, assert_sound, bytes_at
from standin.making import factors_of

NUM = 57


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """GPUs whose arrays are tensors of what lies there when the user's stream comes to it."""
    made, arrays = Machine(seed=3), StandinDriver.arrays

    def tensors(driver: StandinDriver, *args: Any) -> Any:
        return tuple(torch.from_numpy(array.get()) for array in arrays(driver, *args))

    find, arrays_like = StandinDriver.find, StandinDriver.arrays_like

    def find_tensor(driver: StandinDriver, value: Any) -> Any:
        """Where a tensor lies once it is on the device: in memory of the pool."""
        if not isinstance(value, torch.Tensor):
            return None
        if not value.is_contiguous(memory_format=torch.channels_last):
            value = value.contiguous()
        size = value.numel() * value.element_size()
        raw = torch.as_strided(value, (value.numel(),), (1,)).view(torch.uint8).numpy().copy()
        found = find(driver, driver.compute(lambda: raw))
        assert found is not None
        form = Form(tuple(value.shape), value.dtype, value.stride(), size)
        return found._replace(form=form)

    def tensors_like(driver: StandinDriver, at: int, size: int, root: Any, forms: Any) -> Any:
        flat = [
            Form((f.num_bytes,), np.dtype(np.uint8), (1,), f.num_bytes, f.offset) for f in forms
        ]
        raws = [array.get() for array in arrays_like(driver, at, size, root, flat)]
        return tuple(
            torch.zeros(form.shape, dtype=form.dtype)
            if not form.num_bytes
            else torch.from_numpy(raw).view(form.dtype).as_strided(form.shape, form.strides)
            for raw, form in zip(raws, forms, strict=True)
        )

    monkeypatch.setattr(StandinDriver, "arrays", tensors)
    monkeypatch.setattr(StandinDriver, "find", find_tensor)
    monkeypatch.setattr(StandinDriver, "arrays_like", tensors_like)
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


def make(batch: Any, rng: np.random.Generator) -> Any:
    """Other names, dtypes and axes, a text, and draws."""
    drawn = torch.from_numpy(rng.random(len(batch["number"])))
    pictures = batch["half"].float()[:, :, :, None].expand(-1, -1, -1, 5)
    return {
        "drawn": (drawn * batch["number"], drawn.sum()),
        "pictures": pictures.to(memory_format=torch.channels_last),
        "texts": batch["pair"][1],
        "lam": 0.25,
        "none": batch["none"].to(torch.int16),
    }


def note_made(batch: Any) -> Any:
    (drawn, total), pictures = batch["drawn"], batch["pictures"]
    assert pictures.is_contiguous(memory_format=torch.channels_last) and pictures.shape[1:] == (
        3, 2, 5
    )  # fmt: skip
    assert (batch["none"].dtype, batch["none"].shape[1:]) == (torch.int16, (0, 2))
    return drawn.tolist(), total.tolist(), pictures.tolist(), batch["texts"], batch["lam"]


def test_what_a_function_makes_on_the_gpu_is_what_it_makes_on_the_host(machine: Machine) -> None:
    """In an epoch, in the next one, and from a state in the middle, with rounds of two ranks."""
    settings: Any = {"shuffle": True, "seed": 5, "on_device": make}
    with FeedLoader(Items(), 4, **settings) as loader:
        wanted = [[note_made(batch) for batch in loader] for _ in range(2)]
    with FeedLoader(Items(), 4, device="cuda:0", **settings) as loader:
        assert [[note_made(batch) for batch in loader] for _ in range(2)] == wanted
    with FeedLoader(Items(), 4, device="cuda:0", **settings) as loader:
        for _, _ in zip(range(6), loader, strict=False):
            pass
        state = loader.state_dict()
    with FeedLoader(Items(), 4, device="cuda:0", **settings) as loader:
        loader.load_state_dict(state)
        assert [note_made(batch) for batch in loader] == wanted[0][6:]
    assert machine.num_copies > 0


def test_an_error_of_a_function_on_the_gpu_comes_in_order(machine: Machine) -> None:
    def fail(batch: Any) -> Any:
        if 20 in batch["number"]:
            raise ValueError("twenty")
        return batch

    with FeedLoader(Items(), 4, device="cuda:0", on_device=fail) as loader:
        batches = iter(loader)
        assert [note(next(batches))[4][0] for _ in range(5)] == [0, 4, 8, 12, 16]
        told = r"on_device at step 5 \(batch 5 of epoch 0\): it raised ValueError: twenty"
        with pytest.raises(feeder.DeviceError, match=told):
            next(batches)
        assert loader.step == 5


def test_a_connected_loaders_function_runs_on_the_gpu(machine: Machine) -> None:
    def serve() -> feeder.Coordinator:
        return feeder.init_data_input_workers(
            ["x"], feeder.sources.arrays({"x": np.arange(24.0)}), 4, seed=6,
            coordinator=feeder.Coordinator(),
        )  # fmt: skip

    def scale(batch: Any, rng: np.random.Generator) -> Any:
        return batch["x"] * torch.from_numpy(rng.random(4, np.float32)), "a text"

    with (
        serving(serve) as server,
        FeedLoader.connect(server.addresses[0], device="cuda:0", on_device=scale) as loader,
    ):
        found = [(values.tolist(), text) for values, text in loader]
    assert found == [
        (((np.arange(4.0) + 4 * index) * factors_of(6, 0, index)).tolist(), "a text")
        for index in range(6)
    ]
    assert machine.num_copies > 0


# ---- the driver's own way with tensors, on the host


class OnHost:
    """PyTorch, which takes memory of the host for a GPU's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def as_tensor(self, lent: Any, device: Any) -> torch.Tensor:
        told = lent.__cuda_array_interface__
        return torch.from_numpy(bytes_at(told["data"][0], *told["shape"]))


def driver_on_host() -> Any:
    driver = TorchDriver.__new__(TorchDriver)
    driver._torch, driver._device, driver.name = OnHost(), torch.device("cpu"), "torch:0"
    return driver


def test_every_tensor_comes_out_of_a_slot_as_it_was_made() -> None:
    numbers = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)
    tensors = [
        numbers, numbers.to(torch.bfloat16), numbers > 7, numbers.permute(0, 3, 1, 2),
        numbers[:, 1:], numbers.to(memory_format=torch.channels_last), numbers[0, 0, 0, 0],
        numbers[:, :0],
        numbers[:, :1].expand(-1, 6, -1, -1), numbers[..., ::2].to(torch.int64), numbers.double(),
        torch.complex(numbers, numbers + 1).conj(), numbers.clone().requires_grad_(),
    ]  # fmt: skip
    driver = driver_on_host()
    found = [driver.find(tensor) for tensor in tensors]
    forms, num_bytes = lay_out(one.form for one in found)
    slot = np.full(num_bytes, 0xA5, np.uint8)
    for one, form in zip(found, forms, strict=True):
        if form.num_bytes:
            target = slot[form.offset : form.offset + form.num_bytes]
            target[:] = bytes_at(one.address, form.num_bytes)
    made = driver.arrays_like(slot.ctypes.data, num_bytes, slot, forms)
    for tensor, one in zip(tensors, made, strict=True):
        assert one.dtype == tensor.dtype and one.shape == tensor.shape
        assert torch.equal(one, tensor) and not one.requires_grad
    assert made[5].is_contiguous(memory_format=torch.channels_last)
    # Of no size the two formats are not told apart; otherwise it has no gaps.
    assert all(one.is_contiguous() for i, one in enumerate(made) if i not in (3, 5))


def test_a_tensor_that_lies_elsewhere_or_is_not_dense_is_told() -> None:
    driver = driver_on_host()
    assert driver.find(np.zeros(3)) is None
    with pytest.raises(
        ValueError, match=r"^a tensor on meta of layout torch.strided, expected a d"
    ):
        driver.find(torch.zeros(3, device="meta"))
    with pytest.raises(ValueError, match=r"^a tensor on cpu of layout torch.sparse_coo, expected"):
        driver.find(torch.eye(3).to_sparse())


def test_the_function_works_on_a_stream_without_gradients() -> None:
    driver, stream = driver_on_host(), Named(7, None)
    with driver.working_on(stream):
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
