"""A world in one thread: a virtual clock, a queue of events, and a history of what happened.

The method is that of FoundationDB's simulation (https://apple.github.io/foundationdb/testing.html),
of TigerBeetle's VOPR (https://docs.tigerbeetle.com/about/vopr) and of dask's worker state machine
(`distributed/worker_state_machine.py`): the code that decides runs unchanged, and all that it has
of the world (sockets, threads, clocks, random numbers) is put in from outside. As in the VOPR a run
has two phases: first faults come, then none come any more, and everybody has to come to an end.

Each process and each connection draws from a generator of its own, named after it. So a fault that
is left out changes nothing for those that it does not concern, and a failing run can be shrunk.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import Any

BEGIN = 1000.0
"""The time at which a world begins. Not 0, which is falsy."""


MOST_EVENTS = 100_000
"""More events than any run has in which nobody spins."""


class Violation(BaseException):
    """An invariant does not hold. A `BaseException`: the code that is run catches others."""


class WouldWaitError(BaseException):
    """The user's thread would wait here. To the code it is an interrupt, after which it goes on."""


class World:
    """The virtual time and what comes when. One is `current` at a time."""

    current: World

    def __init__(
        self, seed: object, *, records: bool = False, most_events: int = MOST_EVENTS
    ) -> None:
        World.current = self
        self._most_events = most_events
        self.seed = seed
        self.now = BEGIN
        self.num_events = 0
        self.history: list[tuple[float, str, str]] | None = [] if records else None
        self._coming: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num = 0
        self._bytes = self.draws("bytes")
        self.servers: dict[str, Any] = {}
        """The servers that listen, by address."""
        self.unix: dict[str, Any] = {}
        """The same, by the path of the unix socket for descriptors."""
        self.breaks: Callable[[int, int], None] = lambda epoch, index: None
        """Is told of each call of a fetch function before it is made, and may raise an `OSError` in
        its place."""
        self.numbers = iter(range(10, 2**31))
        """Numbers for descriptors."""

    @property
    def lasts_s(self) -> float:
        """Seconds since it began."""
        return self.now - BEGIN

    def draws(self, name: str) -> random.Random:
        """The generator of that name."""
        return random.Random(f"{self.seed} {name}")

    def urandom(self, num: int) -> bytes:
        """Stands for `os.urandom`."""
        return self._bytes.randbytes(num)

    def at(self, when: float, do: Callable[..., None], *args: Any) -> None:
        """Have something happen at that time; what comes at the same time comes in this order."""
        self._num += 1
        heappush(self._coming, (when, self._num, do, args))

    def after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        """Have something happen in so many seconds."""
        self.at(self.now + seconds, do, *args)

    def note(self, who: str, what: str) -> None:
        """Write down what happens; call it where `history` is not None."""
        if self.history is not None:
            self.history.append((self.now, who, what))

    def run(self, is_over: Callable[[], bool], until: float) -> bool:
        """Let events happen; returns whether it was over before the time came."""
        coming = self._coming
        while coming and not is_over():
            if coming[0][0] > until:
                return False
            self.step()
        return is_over()

    @property
    def next_at(self) -> float:
        """When the next event comes; infinity where none does."""
        return self._coming[0][0] if self._coming else math.inf

    def step(self) -> None:
        """Let the next event happen."""
        when, _, do, args = heappop(self._coming)
        self.now = max(self.now, when)
        self.num_events += 1
        if self.num_events > self._most_events:
            raise Violation(f"waits: {self._most_events} events, and no end: somebody never sleeps")
        do(*args)


_REAL = time.monotonic, os.urandom, random.random


@contextmanager
def virtual_time() -> Iterator[None]:
    """The clock and the random numbers of the process are those of the current world."""
    time.monotonic = lambda: World.current.now  # type: ignore[assignment]
    os.urandom = lambda num: World.current.urandom(num)
    random.random = lambda: World.current._bytes.random()
    try:
        yield
    finally:
        time.monotonic, os.urandom, random.random = _REAL  # type: ignore[assignment]


@contextmanager
def real_time() -> Iterator[None]:
    """Within `virtual_time`: they are real ones again."""
    virtual = time.monotonic, os.urandom, random.random
    time.monotonic, os.urandom, random.random = _REAL  # type: ignore[assignment]
    try:
        yield
    finally:
        time.monotonic, os.urandom, random.random = virtual  # type: ignore[assignment]
