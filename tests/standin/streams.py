"""Streams and events of a device that is not there: work is done late and out of step.

What a stream is given is put off. Which of the streams goes on, and how far, is drawn from a seed
at every call to the device; but a stream never passes an event that it has to wait for, and a host
that waits gets exactly the work that it waits for, and no more.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


class Deadlock(AssertionError):
    """What is waited for can never come."""


@dataclass(eq=False)
class Event:
    """How often it was recorded, and how many of those have come."""

    num_recorded: int = 0
    num_come: int = 0
    stream: Stream | None = None
    """Where it was recorded last."""


@dataclass
class Wait:
    """What comes after it in a stream comes after the event, as that was last recorded."""

    event: Event
    number: int

    @property
    def is_over(self) -> bool:
        return self.event.num_come >= self.number


@dataclass
class Record:
    """The event comes when the stream comes here."""

    event: Event


Work = Wait | Record | Callable[[], None]


@dataclass(eq=False)
class Stream:
    """A queue of work."""

    name: str
    ptr: int
    eagerness: float = 0.5
    """How likely it is to be the one that goes on."""
    work: deque[Work] = field(default_factory=deque)

    @property
    def is_held(self) -> bool:
        """Whether it has nothing to do, or must wait."""
        return not self.work or (isinstance(self.work[0], Wait) and not self.work[0].is_over)

    def advance(self) -> None:
        """Do the next piece of work."""
        work = self.work.popleft()
        if isinstance(work, Record):
            work.event.num_come += 1
        elif not isinstance(work, Wait):
            work()


class Clockwork:
    """All streams of a machine, and the schedule by which they go on."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.streams: list[Stream] = []

    def make(self, name: str, ptr: int | None = None) -> Stream:
        """Return a new stream, which is eager or lazy for good."""
        with self.lock:
            eagerness = self.random.choice((0.02, 0.3, 0.95))
            stream = Stream(name, len(self.streams) + 16 if ptr is None else ptr, eagerness)
            self.streams.append(stream)
            return stream

    def give(self, stream: Stream, *work: Work) -> None:
        """Put work at the end of a stream."""
        with self.lock:
            for one in work:
                if isinstance(one, Record):
                    one.event.num_recorded += 1
                    one.event.stream = stream
                stream.work.append(one)
            self.tick()

    def tick(self) -> None:
        """Let some streams go on a little, or none."""
        with self.lock:
            for stream in self.random.sample(self.streams, len(self.streams)):
                while not stream.is_held and self.random.random() < stream.eagerness:
                    stream.advance()

    def until(self, wait: Wait) -> None:
        """Do what has to be done for an event to come, and nothing else."""
        with self.lock:
            while not wait.is_over:
                self._advance_to(wait.event, set())

    def _advance_to(self, event: Event, asked: set[int]) -> None:
        """Take the stream that an event was recorded on one step further."""
        stream = event.stream
        if stream is None or not stream.work or id(stream) in asked:
            raise Deadlock(f"an event is waited for that never comes: {sorted(self._told())}")
        if stream.is_held:
            assert isinstance(stream.work[0], Wait)
            self._advance_to(stream.work[0].event, asked | {id(stream)})
        else:
            stream.advance()

    def _told(self) -> Iterator[str]:
        for stream in self.streams:
            yield f"{stream.name}: {len(stream.work)} pieces of work"

    def drain(self, stream: Stream) -> None:
        """Do all that a stream was given."""
        with self.lock:
            event = Event()
            self.give(stream, Record(event))
            self.until(Wait(event, 1))

    def drain_all(self) -> None:
        """Do everything."""
        with self.lock:
            for stream in list(self.streams):
                self.drain(stream)
