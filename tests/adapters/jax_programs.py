"""Random jobs of JAX, undisturbed, and killed at every step and resumed: batches, errors, weights.

A configuration is drawn by a seed. What the undisturbed run has to give is known from a model of
its own, and each resumed run has to equal it: with another `ahead` and other threads, by the state
as JSON, and at one step by Orbax. A kill is a run that is left there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as orbax

import feeder
from adapters.campaigns import campaign
from adapters.job_data import DATA, Data
from feeder.adapters.jax import FeedLoader, global_batches

MOST_STEPS = 26


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What a job is."""

    data: Data
    devices: int
    sharding: str
    ahead: int
    threads: int
    seed: int


def draw(dice: random.Random) -> Configuration:
    """A random one."""
    kind = dice.choice(("map", "map", *DATA))
    is_own = kind in ("feed", "served")
    world = 1 if is_own else dice.choice((1, 1, 2, 3))
    size = dice.choice((1, 2, 3, 4))
    devices = dice.choice([n for n in (1, 2, 4) if size % n == 0 and n <= jax.device_count()])
    data = Data(
        kind=kind, num=dice.randint(size * world, 14 + size * world), size=size,
        epochs=dice.choice((1, 2, 3)) if is_own else dice.choice((None, 1, 2, 3)),
        shuffle=kind == "map" and dice.random() < 0.5,
        drop_last=devices > 1 or dice.random() < 0.6, world=world, rank=dice.randrange(world),
        fails_at=dice.choice((None, None, None, 0, 5, 9)) if not is_own else None,
    )  # fmt: skip
    return Configuration(
        data=data, devices=devices, sharding=dice.choice(("one", "tree", "upper")),
        ahead=dice.choice((0, 1, 1, 2, 3, 9, 400)), threads=dice.choice((0, 0, 2)),
        seed=dice.randrange(99),
    )  # fmt: skip


def nested(i: int) -> Any:
    """A sample with texts in it."""
    return {"x": np.full(1, i / 7, np.float32), "in": {"y": i, "t": f"t{i}"}}


def flat(i: int) -> Any:
    """The same as columns."""
    return {"x": np.full(1, i / 7, np.float32), "y": i}


class Job:
    """A job's loader and weights. `server` is the address of its feed, where it is served."""

    def __init__(self, c: Configuration, server: str, **changed: int) -> None:
        c = self.configuration = dataclasses.replace(c, **changed)  # type: ignore[arg-type]
        data = c.data
        self.is_flat = data.is_own or data.kind == "source"
        self.loader, self.feed = data.open(
            FeedLoader, flat if self.is_flat else nested, server, seed=c.seed, rank=data.rank,
            world_size=data.world, executor=feeder.Threads(c.threads) if c.threads else None,
        )  # fmt: skip
        self.batches = global_batches(self.loader, self._sharding(), ahead=c.ahead)
        self.weights = jnp.zeros(2)

    def _sharding(self) -> Any:
        c = self.configuration
        mesh = Mesh(np.array(jax.devices()[: c.devices]), ("rows",))
        one = NamedSharding(mesh, PartitionSpec("rows"))
        if self.is_flat or c.sharding == "one":
            return one
        return {"x": one, "in": one if c.sharding == "upper" else {"y": one, "t": None}}

    def run(self) -> Iterator[Any]:
        """Train, and give what there is to see of each step."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.loader.close)
            if self.feed is not None:
                stack.enter_context(self.feed)
            for _ in range(MOST_STEPS):
                try:
                    batch = next(self.batches)
                except StopIteration:
                    yield "end"
                    return
                except feeder.FeedError:
                    yield "error"
                    continue
                y = batch["y"] if self.is_flat else batch["in"]["y"]
                assert len(y.sharding.device_set) == self.configuration.devices
                self.weights = train(self.weights, batch["x"], y)
                yield y.tolist(), self.weights.tolist()

    def save(self) -> Any:
        """What a checkpoint has."""
        return json.dumps(self.batches.get_state()), self.weights

    def load(self, saved: Any) -> None:
        """Go on from it."""
        self.batches.set_state(json.loads(saved[0]))
        self.weights = saved[1]


@jax.jit
def train(weights: Any, x: Any, y: Any) -> Any:
    """Weights that tell the order of all that they have seen."""
    return weights * 0.75 + x.mean() + jnp.array([0.0, 1.0]) * y.sum()


def differences(c: Configuration, folder: Path) -> tuple[int, list[str]]:
    """Run it, kill it at every step and resume it; the number of kills. Raises where it differs."""
    with c.data.served(folder) as server, warnings.catch_warnings():
        warnings.simplefilter("ignore", feeder.ReplayWarning)
        job = Job(c, server)
        log, saved = [], [job.save()]
        for step in job.run():
            log.append(step)
            saved.append(job.save())
        c.data.check([step if isinstance(step, str) else step[0] for step in log])
        by_orbax = random.Random(str(c)).randrange(len(saved))
        for at, state in enumerate(saved[:-1] if log[-1] == "end" else saved):
            job = Job(c, server, ahead=(c.ahead + at) % 5, threads=(c.threads, 3, 0)[at % 3])
            if at == by_orbax:
                path = folder / f"o{random.getrandbits(40)}"
                job.load(state)
                orbax.save_checkpointables(path, {"data": job.batches})
                job.loader.close()
                job = Job(c, server)
                orbax.load_checkpointables(path, {"data": job.batches})
                job.weights = state[1]
            else:
                job.load(state)
            left = MOST_STEPS - at
            rest = [step for _, step in zip(range(left), job.run(), strict=False)]
            assert rest == log[at:], f"resumed at {at}: {rest[:4]}, expected {log[at : at + 4]}"
        return len(saved), []


if __name__ == "__main__":
    campaign(draw, differences, __doc__)
