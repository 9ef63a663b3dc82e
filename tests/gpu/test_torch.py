"""PyTorch's tensors on a real GPU without CuPy; needs a GPU, PyTorch and NVIDIA's bindings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeder.devices.cuda.torchdriver import TorchDriver
from feeds import make, running
from gpu.copying import assert_vectors
from needs import needs
from standin.numbered import settings

NUM_BATCHES = 2000
POISON = 0xA5
pytestmark = [pytest.mark.usefixtures("gpu"), pytest.mark.timeout(300)]


@contextmanager
def poisoning() -> Iterator[list[int]]:
    """Memory of the device is poisoned before each copy into it; yields the copies' sizes."""
    sizes: list[int] = []

    def poisons(copy: Any) -> Any:
        def poison(driver: Any, target: int, source: int, num_bytes: int, stream: Any) -> None:
            sizes.append(num_bytes)
            memset = driver._runtime._raising(driver._runtime._bindings.cudaMemsetAsync)
            memset(target, POISON, num_bytes, stream.ptr)
            copy(driver, target, source, num_bytes, stream)

        return poison

    with pytest.MonkeyPatch.context() as patch:
        for name in ("copy_in", "copy_within"):
            patch.setattr(TorchDriver, name, poisons(getattr(TorchDriver, name)))
        yield sizes


@pytest.fixture
def torch() -> Any:
    needs("torch")
    import torch

    return torch


@pytest.fixture
def poisoned(torch: Any) -> Iterator[list[int]]:
    """Memory of the device is poisoned before each copy into it; yields the copies' sizes."""
    with poisoning() as sizes:
        yield sizes
    assert sizes


@pytest.mark.parametrize("side", (False, True), ids=["default stream", "stream of its own"])
@pytest.mark.parametrize("depth", (1, 3))
def test_tensors_are_what_was_fetched(
    torch: Any, poisoned: list[int], side: bool, depth: int
) -> None:
    """Read late, behind other work, when the batch has been let go of."""
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    busy = torch.ones(2048, 2048, device="cuda:0")
    found = []
    with (
        torch.cuda.stream(stream),
        running(**settings(NUM_BATCHES, devices=("torch:0",), depth=depth)) as (_, feed),
    ):
        for batch in feed:
            assert isinstance(batch["vector"], torch.Tensor)
            busy @ busy
            found.append(batch["vector"] * 1)
            del batch
        stream.synchronize()
        assert_vectors([one.cpu().numpy() for one in found], NUM_BATCHES)


@pytest.mark.parametrize("plane", ("shared", "frames"))
def test_a_consumers_tensors_are_what_was_sent(torch: Any, poisoned: list[int], plane: Any) -> None:
    found = []
    with (
        serving(lambda: make(**settings(NUM_BATCHES))) as server,
        reading(server, device="torch:0", credit=3, plane=plane) as consumer,
    ):
        for batch in consumer:
            found.append(batch["vector"] * 1)
            del batch
        torch.cuda.synchronize()
        assert_vectors([one.cpu().numpy() for one in found], NUM_BATCHES)
        assert consumer.path == ("registered memory" if plane == "shared" else "pinned slots")


def test_every_dtype_comes_as_it_is(torch: Any, poisoned: list[int]) -> None:
    numbers = np.arange(35).reshape(5, 7)
    columns = {code: (numbers % 2 if code == "?" else numbers).astype(code) for code in
               "?bhilqBHILQefdFD"}  # fmt: skip

    def fetch(call: feeder.Call) -> Any:
        if call.index == 3:
            raise StopIteration
        return {name: values.copy() for name, values in columns.items()}

    with running(fetch, input_blob_names=list(columns), batch_size=5, devices=("torch:0",)) as (
        _,
        feed,
    ):
        for batch in feed:
            for name, values in columns.items():
                assert batch[name].dtype == getattr(torch, values.dtype.name)
                got = batch[name].cpu().numpy()
                assert np.array_equal(got, values) and got.dtype == values.dtype


def test_views_of_any_kind_keep_the_slot(torch: Any, poisoned: list[int]) -> None:
    with running(**settings(200, devices=("torch:0",), depth=1)) as (_, feed):
        batches = feed.on(0)
        first = next(batches)["vector"]
        kept = [first[1:], first.view(-1), first.T, first.detach(), first[:, :1], first.float()[0]]
        kept = [one for one in kept if one.numel()]
        del first
        before = [one.cpu().numpy() for one in kept]
        for batch in islice(batches, 50):
            del batch
        assert all(
            np.array_equal(one.cpu().numpy(), was) for one, was in zip(kept, before, strict=True)
        )
