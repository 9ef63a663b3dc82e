"""Batches on a real GPU in the hands of other frameworks; needs a GPU, and each its framework."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
import pytest

from conformance.served import reading, serving
from feeds import make, running
from gpu.copying import Poisoning, assert_vectors
from needs import needs
from standin.numbered import settings

NUM_BATCHES = 2000
pytestmark = [pytest.mark.usefixtures("gpu"), pytest.mark.timeout(300)]


def framework(name: str) -> Any:
    needs(name)
    return importlib.import_module(name)


@pytest.mark.parametrize("side", (False, True), ids=["default stream", "stream of its own"])
@pytest.mark.parametrize("how", ("dlpack", "cuda_array_interface"))
def test_torch_reads_what_was_fetched(poisoned: list[Poisoning], side: bool, how: str) -> None:
    torch = framework("torch")
    stream = torch.cuda.Stream() if side else torch.cuda.default_stream()
    found = []
    with running(**settings(NUM_BATCHES, devices=("cuda:0",), depth=2)) as (_, feed):
        for batch in feed.on(0, stream=stream):
            with torch.cuda.stream(stream):
                if how == "dlpack":
                    tensor = torch.from_dlpack(batch["vector"])
                else:
                    tensor = torch.as_tensor(batch["vector"], device="cuda")
                found.append(tensor * 1)
            del batch, tensor
        torch.cuda.synchronize()
        assert_vectors([one.cpu().numpy() for one in found], NUM_BATCHES)


def test_jax_reads_what_was_fetched(poisoned: list[Poisoning]) -> None:
    jax = framework("jax")
    found = []
    with running(**settings(NUM_BATCHES, devices=("cuda:0",), depth=2)) as (_, feed):
        for batch in feed:
            array = jax.dlpack.from_dlpack(batch["vector"])
            found.append(jax.block_until_ready(array * 1))
            del batch, array
        assert_vectors([np.asarray(one) for one in found], NUM_BATCHES)


def test_what_torch_copies_from_a_consumer_on_the_host_is_what_was_sent() -> None:
    """Its slots are not pinned: an asynchronous copy has read them when it returns."""
    torch = framework("torch")
    found = []
    with (
        serving(lambda: make(**settings(NUM_BATCHES))) as server,
        reading(server, credit=2, plane="shared") as consumer,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        for batch in consumer:
            found.append(torch.from_numpy(batch["vector"]).to("cuda:0", non_blocking=True))
            # Its slot goes back, and is written again.
            del batch
        torch.cuda.synchronize()
    assert_vectors([one.cpu().numpy() for one in found], NUM_BATCHES)
