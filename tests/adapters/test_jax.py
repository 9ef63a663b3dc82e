"""JAX: arrays over a sharding, and positions of the batch that was used."""

from __future__ import annotations

import collections
from pathlib import Path
from random import Random
from typing import Any

import pytest

from needs import needs_framework

needs_framework("jax")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as orbax

import feeder
from adapters.campaigns import count
from adapters.examples import check_goes_on, printed
from adapters.jax_programs import differences, draw
from adapters.job_data import DATA
from feeder.adapters.jax import FeedLoader, global_batches

NUM, SIZE = 23, 4


class Numbers:
    def __init__(self, num: int = NUM) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Any:
        return {"i": i, "x": jnp.full(3, i, jnp.bfloat16), "t": f"{i}"}


def sharding() -> Any:
    return NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))


def loader(**settings: Any) -> FeedLoader:
    return FeedLoader(Numbers(), SIZE, shuffle=True, **settings)


def test_batches_are_arrays_over_the_sharding() -> None:
    batches = global_batches(loader(epochs=1), sharding())
    batch = next(batches)
    assert isinstance(batch["x"], jax.Array)
    assert batch["x"].sharding == sharding()
    assert batch["x"].dtype == jnp.bfloat16
    assert batch["x"][:, 0].tolist() == batch["i"].tolist()
    assert batch["t"] == [str(i) for i in batch["i"].tolist()]
    assert len(list(batches)) == NUM // SIZE - 1


@pytest.fixture(scope="module", autouse=True)
def warm_orbax(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Orbax keeps pipes open from its first use on."""
    path, data = tmp_path_factory.mktemp("warm") / "job", global_batches(loader(), sharding())
    orbax.save_checkpointables(path, {"weights": {"w": jnp.ones(1)}, "data": data})
    orbax.load_checkpointables(path, {"weights": {"w": jnp.ones(1)}, "data": data})


class Odd(collections.UserDict[str, Any]):
    """No pytree."""


def placed(*arguments: Any, **settings: Any) -> Any:
    return next(global_batches(loader(), *arguments, **settings))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FeedLoader(iter(range(3)), 2, shuffle=True), "True: an iterable is its own order"),
        (lambda: FeedLoader(Numbers(), 0), "batch_size is 0, expected a whole number"),
        (lambda: FeedLoader(Numbers(), 4.0), "batch_size is 4.0, expected a whole number"),
        (lambda: FeedLoader(Numbers(), 4, prefetch_factor=0), "prefetch_factor is 0, expected"),
        (lambda: FeedLoader(Numbers(), 4, num_workers=-1), "num_workers is -1, expected"),
        (lambda: FeedLoader(Numbers(), 4, epochs=0), "epochs is 0, expected"),
        (lambda: FeedLoader(Numbers(), NUM + 1), "an epoch has 0 whole batches"),
        (lambda: placed(sharding(), ahead=-1), "ahead is -1, expected a whole number"),
        (lambda: global_batches([1], sharding()), "loader is a list, expected a FeedLoader"),  # type: ignore[arg-type]
        (
            lambda: next(global_batches(FeedLoader([Odd(x=1)], 1), sharding())),
            "a batch has a Odd, which is no pytree to JAX",
        ),
        (lambda: placed(PartitionSpec()), "expected a jax.sharding.Sharding such as"),
        (lambda: placed({"i": sharding()}), "sharding has another structure than the batch"),
        (
            lambda: next(global_batches(FeedLoader([2**31, 0], 2), sharding())),
            "has int64 from 0 to 2147483648, of which JAX would keep int32",
        ),
    ],
)
def test_what_cannot_be_is_refused(make: Any, said: str) -> None:
    with pytest.raises(feeder.ConfigError, match=said):
        make()


def test_arrays_without_rows_stay_where_they_are() -> None:
    def collate(samples: list[Any]) -> Any:
        return {"i": np.array([s["i"] for s in samples]), "weight": np.float32(0.5)}

    batch = next(global_batches(loader(collate_fn=collate), sharding()))
    assert isinstance(batch["i"], jax.Array)
    assert batch["weight"] == np.float32(0.5)


@pytest.mark.timeout(120)
def test_rows_that_do_not_divide_are_named() -> None:
    code = """
import jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from feeder.adapters.jax import FeedLoader, global_batches
rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
with FeedLoader(list(range(10)), 3) as loader:
    try:
        next(global_batches(loader, rows))
    except ValueError as error:
        print(*error.__notes__)
"""
    flags = "--xla_force_host_platform_device_count=2"
    told = printed("-c", code, limit_s=100.0, XLA_FLAGS=flags, JAX_PLATFORMS="cpu")
    assert "while 3 rows of this process were put over" in told


def test_states_of_others_are_refused() -> None:
    ours = global_batches(loader(), sharding())
    for state in ({}, None, "x", {"feeder": "no base64!"}, {"feeder": ""}, {"feeder": 3}):
        with pytest.raises(feeder.ResumeError):
            ours.set_state(state)  # type: ignore[arg-type]
    state = global_batches(loader(), sharding()).get_state()
    with pytest.raises(feeder.ResumeError, match=r"source\.batch_size: 4 then, 5 now"):
        global_batches(FeedLoader(Numbers(), 5, shuffle=True), sharding()).set_state(state)


# ---- kills


@pytest.mark.timeout(120)
def test_random_jobs_go_on_as_if_nobody_had_killed_them() -> None:
    kinds = {draw(Random(f"7 {number}")).data.kind: number for number in range(120)}
    assert kinds.keys() == set(DATA)
    kills, wrong = count(draw, differences, 7, kinds.values())
    assert kills > len(kinds)
    assert not wrong


@pytest.mark.timeout(240)
def test_the_example_goes_on_where_it_stopped(tmp_path: Path) -> None:
    devices = "--xla_force_host_platform_device_count=4"
    env = {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"}
    check_goes_on("jax_sharded/train.py", 57, tmp_path, **env)
