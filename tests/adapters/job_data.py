"""The data of random jobs: what a framework's loader takes, and the batches that have to come."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import feeder

DATA = ("map", "iterable", "length", "longer", "shorter", "state", "source", "feed", "served")


@dataclasses.dataclass(frozen=True)
class Data:
    """What a job reads."""

    kind: str
    num: int
    size: int
    epochs: int | None
    shuffle: bool
    drop_last: bool
    world: int = 1
    rank: int = 0
    fails_at: int | None = None

    @property
    def is_own(self) -> bool:
        """Whether the loader reads a feed that others have made."""
        return self.kind in ("feed", "served")

    def make(self, item: Callable[[int], Any]) -> Any:
        """The data set."""
        samples = Samples(self.num, self.fails_at, item)
        match self.kind:
            case "map":
                return samples
            case "source":
                return feeder.sources.records(samples)
            case "iterable":
                return Iterated(samples)
            case "state":
                return Stated(samples)
        more = {"length": 0, "longer": 7, "shorter": -min(3, self.num - self.size * self.world)}
        return Sized(samples, more[self.kind])

    def make_feed(self) -> feeder.Coordinator:
        """The feed, not started."""
        numbers = np.arange(self.num)
        return feeder.init_data_input_workers(
            ["x", "y"], feeder.sources.arrays(numbers.astype(np.float32)[:, None] / 7, numbers),
            self.size, epochs=self.epochs, last_batch="drop" if self.drop_last else "keep",
            coordinator=feeder.Coordinator(),
        )  # fmt: skip

    @contextmanager
    def served(self, folder: Path) -> Iterator[str]:
        """The address of a server of the feed; none if the loader reads no served one."""
        if self.kind != "served":
            yield ""
            return
        with feeder.serve(self.make_feed, f"ipc://{folder}/s", queues=1) as server:
            yield server.addresses[0]

    def open(
        self, cls: Any, item: Callable[[int], Any], address: str, **settings: Any
    ) -> tuple[Any, Any]:
        """A loader of a framework, and the feed that it reads, if that is one of this process."""
        if self.kind == "served":
            return cls.connect(address, queue=0), None
        if self.kind == "feed":
            feed = self.make_feed()
            return cls(feed["train"]), feed
        settings |= {"epochs": self.epochs, "drop_last": self.drop_last, "shuffle": self.shuffle}
        return cls(self.make(item), self.size, **settings), None

    def expected(self) -> list[Any]:
        """The rows of each step of an epoch without a shuffle, by the promise alone."""
        size, num, world = self.size, self.num, self.world
        batches = [list(range(i, min(i + size, num))) for i in range(0, num, size)]
        if self.drop_last and len(batches[-1]) < size:
            batches.pop()
        rounds = len(batches) // world if self.drop_last else -(-len(batches) // world)
        # A rank that has none in the last round is given its last batch.
        mine = [batches[min(n * world + self.rank, len(batches) - 1)] for n in range(rounds)]
        if self.fails_at is not None:
            # An iterable's ranks read all of it, also what is dropped: who cannot read a batch of
            # any rank ends there.
            is_read = self.kind in ("map", "source")
            for n, rows in enumerate([*mine, []]):
                if self.fails_at in (rows if is_read else range(min((n + 1) * world * size, num))):
                    return [*mine[:n], "error"]
        return mine

    def check(self, rows: list[Any]) -> None:
        """Whether an undisturbed run gave what it had to: as much as it ran."""
        epoch = self.expected()
        if not self.shuffle:
            want = epoch * (self.epochs or len(rows))
            if "error" in epoch:
                want = epoch + ["error"] * len(rows)
            assert rows == [*want, "end"][: len(rows)], (rows, want)
        elif self.fails_at is None and self.world == 1:
            for begins in range(0, len(rows) - len(epoch), len(epoch)):
                came = [row for batch in rows[begins : begins + len(epoch)] for row in batch]
                assert len(set(came)) == len(came) == sum(map(len, epoch)), rows


class Samples:
    """Samples, one of which cannot be read."""

    def __init__(self, num: int, fails_at: int | None, item: Callable[[int], Any]) -> None:
        self.num, self.fails_at, self.item = num, fails_at, item

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Any:
        if i == self.fails_at:
            raise ValueError(f"no {i}")
        return self.item(i)


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
