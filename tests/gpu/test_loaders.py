"""Loaders that put their batches on a real GPU; needs a GPU, and each its framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from needs import needs

NUM, SIZE = 4099, 16
pytestmark = [pytest.mark.usefixtures("gpu"), pytest.mark.timeout(300)]


class Samples:
    """Sample i is a text of i, a row of numbers from i on, and i."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, i: int) -> Any:
        return {"row": np.arange(i, i + 257, dtype=np.float32), "label": (i, str(i))}


def note(batch: Any) -> Any:
    numbers, texts = batch["label"]
    return batch["row"].cpu().numpy().tobytes(), numbers.tolist(), list(texts)


@pytest.mark.parametrize("pins", (False, True), ids=["pageable", "pinned"])
def test_torch_tensors_are_those_of_the_host(pins: bool) -> None:
    needs("torch")
    from feeder.adapters.torch import FeedLoader

    def load(**more: Any) -> Any:
        return FeedLoader(Samples(), SIZE, shuffle=True, seed=3, **more)

    with load() as loader:
        wanted = [note(batch) for batch in loader]
    with load(device="cuda:0", pin_memory=pins) as loader:
        kept = []
        for batch in loader:
            assert batch["row"].device.type == batch["label"][0].device.type == "cuda"
            # Copied late: what memory held meanwhile must not have been written again.
            kept.append(batch)
            if len(kept) == 100:
                state = loader.state_dict()
        assert [note(batch) for batch in kept] == wanted
    with load(device="cuda:0", pin_memory=pins) as loader:
        loader.load_state_dict(state)
        assert [note(batch) for batch in loader] == wanted[100:]


def test_torch_tensors_lie_in_pinned_memory() -> None:
    needs("torch")
    from feeder.adapters.torch import FeedLoader

    with FeedLoader(Samples(), SIZE, pin_memory=True) as loader:
        batch = next(iter(loader))
        assert batch["row"].is_pinned() and batch["label"][0].is_pinned()


def test_jax_arrays_are_those_of_the_host() -> None:
    needs("jax")
    import jax

    from feeder.adapters.jax import FeedLoader, global_batches

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with FeedLoader(np.arange(NUM, dtype=np.int32), SIZE, shuffle=True, epochs=1) as loader:
        wanted = [batch.tolist() for batch in loader]
    with FeedLoader(np.arange(NUM, dtype=np.int32), SIZE, shuffle=True, epochs=1) as loader:
        batches = list(global_batches(loader, sharding, ahead=3))
    assert {batch.device.platform for batch in batches} == {"gpu"}
    assert [batch.tolist() for batch in batches] == wanted
