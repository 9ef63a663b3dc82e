"""Random jobs of JAX, undisturbed, and killed at every step and resumed: batches, errors, weights.

A configuration is drawn by a seed. What the undisturbed run has to give is known from a model of
its own, and each resumed run has to equal it: with another `ahead` and other threads, by the state
as JSON, and at one step by Orbax. A kill is a run that is left there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import tempfile
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
from feeder.adapters.jax import FeedLoader, global_batches

MOST_STEPS = 26
DATA = ("map", "iterable", "length", "longer", "shorter", "state", "source", "feed", "served")


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What a job is."""

    data: str
    num: int
    size: int
    epochs: int | None
    shuffle: bool
    drop_last: bool
    world: int
    rank: int
    devices: int
    sharding: str
    ahead: int
    threads: int
    fails_at: int | None
    seed: int


def draw(seed: int, number: int) -> Configuration:
    """The configuration of this number."""
    dice = random.Random(f"{seed} {number}")
    data = dice.choice(("map", "map", *DATA))
    is_own = data in ("feed", "served")
    world = 1 if is_own else dice.choice((1, 1, 2, 3))
    size = dice.choice((1, 2, 3, 4))
    devices = dice.choice([n for n in (1, 2, 4) if size % n == 0 and n <= jax.device_count()])
    return Configuration(
        data=data, num=dice.randint(size * world, 14 + size * world), size=size,
        epochs=dice.choice((1, 2, 3)) if is_own else dice.choice((None, 1, 2, 3)),
        shuffle=data == "map" and dice.random() < 0.5,
        drop_last=devices > 1 or dice.random() < 0.6, world=world, rank=dice.randrange(world),
        devices=devices, sharding=dice.choice(("one", "tree", "upper")),
        ahead=dice.choice((0, 1, 1, 2, 3, 9, 400)), threads=dice.choice((0, 0, 2)),
        fails_at=dice.choice((None, None, None, 0, 5, 9)) if not is_own else None, seed=seed,
    )  # fmt: skip


# ---- data


class Samples:
    """Sample i is i; one of them cannot be read."""

    def __init__(self, num: int, fails_at: int | None, is_flat: bool = False) -> None:
        self.num, self.fails_at, self.is_flat = num, fails_at, is_flat

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Any:
        if i == self.fails_at:
            raise ValueError(f"no {i}")
        x = np.full(2, i / 7, np.float32)
        return {"x": x, "y": i} if self.is_flat else {"x": x, "in": {"y": i, "t": f"t{i}"}}


class Iterated:
    """The same as an iterable."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return (self.samples[i] for i in range(self.samples.num))


class Sized(Iterated):
    """With a length, which may be wrong."""

    def __init__(self, samples: Samples, more: int) -> None:
        super().__init__(samples)
        self.more = more

    def __len__(self) -> int:
        return self.samples.num + self.more


class Stated(Iterated):
    """With a state."""

    at = begins = 0

    def __iter__(self) -> Iterator[Any]:
        begins, self.begins = self.begins, 0
        for i in range(begins, self.samples.num):
            self.at = i + 1
            yield self.samples[i]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = self.begins = state["at"]


def make_feed(c: Configuration) -> feeder.Coordinator:
    """The feed, not started."""
    last = "drop" if c.drop_last else "keep"
    return feeder.init_data_input_workers(
        ["x", "y"], feeder.sources.arrays(np.arange(c.num, dtype=np.float32), np.arange(c.num)),
        c.size, epochs=c.epochs, last_batch=last, coordinator=feeder.Coordinator(),
    )  # fmt: skip


class Job:
    """A job's loader and weights. `server` is the address of its feed, where it is served."""

    def __init__(self, c: Configuration, server: str, **changed: int) -> None:
        self.feed: Any = None
        c = self.configuration = dataclasses.replace(c, **changed)  # type: ignore[arg-type]
        samples = Samples(c.num, c.fails_at, self.is_flat)
        settings: Any = {
            "shuffle": c.shuffle, "seed": c.seed, "epochs": c.epochs, "drop_last": c.drop_last,
            "rank": c.rank, "world_size": c.world,
            "executor": feeder.Threads(c.threads) if c.threads else None,
        }  # fmt: skip
        match c.data:
            case "served":
                self.loader = FeedLoader.connect(server, queue=0)
            case "feed":
                self.feed = make_feed(c)
                self.loader = FeedLoader(self.feed["train"])
            case _:
                data: Any = {
                    "map": samples, "iterable": Iterated(samples), "length": Sized(samples, 0),
                    "longer": Sized(samples, 7), "shorter": Sized(samples, -min(3, c.num - 1)),
                    "state": Stated(samples),
                }.get(c.data)  # fmt: skip
                if data is None:
                    data = feeder.sources.records(samples)
                self.loader = FeedLoader(data, c.size, **settings)
        self.batches = global_batches(self.loader, self._sharding(), ahead=c.ahead)
        self.weights = jnp.zeros(2)

    def _sharding(self) -> Any:
        c = self.configuration
        mesh = Mesh(np.array(jax.devices()[: c.devices]), ("rows",))
        one = NamedSharding(mesh, PartitionSpec("rows"))
        if self.is_flat or c.sharding == "one":
            return one
        return {"x": one, "in": one if c.sharding == "upper" else {"y": one, "t": None}}

    @property
    def is_flat(self) -> bool:
        """Whether its batches are columns."""
        return self.configuration.data in ("feed", "served", "source")

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


def expected(c: Configuration) -> list[Any]:
    """The rows of each step of an epoch without a shuffle, by the promise alone."""
    batches = [list(range(i, min(i + c.size, c.num))) for i in range(0, c.num, c.size)]
    if c.drop_last and len(batches[-1]) < c.size:
        batches.pop()
    rounds = len(batches) // c.world if c.drop_last else -(-len(batches) // c.world)
    # A rank that has none in the last round is given its last batch.
    mine = [batches[min(n * c.world + c.rank, len(batches) - 1)] for n in range(rounds)]
    if c.fails_at is not None:
        # An iterable's ranks read all of it: who cannot read a batch of any rank ends there.
        is_read = c.data in ("map", "source")
        for n, rows in enumerate(mine):
            upto = min((n + 1) * c.world * c.size, c.num)
            if c.fails_at in (rows if is_read else range(upto)):
                return [*mine[:n], "error"]
    return mine


def check(c: Configuration, log: list[Any]) -> None:
    """Whether the undisturbed run gave what it had to."""
    rows = [step if isinstance(step, str) else step[0] for step in log]
    epoch = expected(c)
    if not c.shuffle:
        want: list[Any] = []
        for _ in range(c.epochs or MOST_STEPS):
            want += epoch
            if "error" in epoch:
                want += ["error"] * MOST_STEPS
        assert rows == [*want, "end"][:MOST_STEPS], (rows, want)
    elif c.fails_at is None and c.world == 1:
        for begins in range(0, len(rows) - len(epoch), len(epoch)):
            rows_of = [row for batch in rows[begins : begins + len(epoch)] for row in batch]
            assert len(set(rows_of)) == len(rows_of) == sum(map(len, epoch)), rows


def compare(c: Configuration, folder: Path) -> int:
    """Run it, kill it at every step and resume it; the number of kills."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", feeder.ReplayWarning)
        server = ""
        if c.data == "served":
            address = f"ipc://{folder}/s{random.getrandbits(40)}"
            running = stack.enter_context(feeder.serve(lambda: make_feed(c), address, queues=1))
            server = running.addresses[0]
        job = Job(c, server)
        log, saved = [], [job.save()]
        for step in job.run():
            log.append(step)
            saved.append(job.save())
        check(c, log)
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
        return len(saved)


def main() -> None:
    """The command of the campaign: draw configurations, and count what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--configurations", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="to run one again")
    told = parser.parse_args()
    kills = differences = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(told.first, told.first + told.configurations):
            c = draw(told.seed, number)
            try:
                kills += compare(c, Path(folder))
            except (AssertionError, feeder.FeedError, ValueError) as error:
                differences += 1
                print(f"configuration {number}, {c}: {type(error).__name__}: {str(error)[:600]}")
    print(f"jax, seed {told.seed}: {told.configurations} configurations, {kills} kills, "
          f"{differences} differences")  # fmt: skip
    raise SystemExit(differences > 0)


if __name__ == "__main__":
    main()
