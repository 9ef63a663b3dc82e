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
class Mark:
    """A place in a stream's work."""

    stream: Stream | None = None
    """None for a place that was never marked: it is as if passed."""
    is_passed: bool = True


@dataclass(eq=False)
class Event:
    """A mark that may be put elsewhere: who waits for it waits for where it was just then."""

    mark: Mark = field(default_factory=Mark)

    @property
    def has_come(self) -> bool:
        return self.mark.is_passed


@dataclass
class Wait:
    """What comes after it in a stream comes after the mark."""

    mark: Mark


@dataclass
class Pass:
    """The stream has come to the mark."""

    mark: Mark


Work = Wait | Pass | Callable[[], None]


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
        return not self.work or (isinstance(self.work[0], Wait) and not self.work[0].mark.is_passed)

    def advance(self) -> None:
        """Do the next piece of work."""
        work = self.work.popleft()
        if isinstance(work, Pass):
            work.mark.is_passed = True
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
            stream.work.extend(work)
            self.tick()

    def record(self, event: Event, stream: Stream) -> None:
        """Put an event at the end of a stream's work."""
        event.mark = Mark(stream, is_passed=False)
        self.give(stream, Pass(event.mark))

    def wait(self, stream: Stream, event: Event) -> None:
        """Let a stream wait for an event, where that is now."""
        self.give(stream, Wait(event.mark))

    def tick(self) -> None:
        """Let some streams go on a little, or none."""
        with self.lock:
            for stream in self.random.sample(self.streams, len(self.streams)):
                while not stream.is_held and self.random.random() < stream.eagerness:
                    stream.advance()

    def until(self, event: Event) -> None:
        """Do what has to be done for an event to come, and nothing else."""
        mark = event.mark
        with self.lock:
            while not mark.is_passed:
                self._advance_to(mark, set())

    def _advance_to(self, mark: Mark, asked: set[int]) -> None:
        """Take the stream of a mark one step further, or the one that it waits for."""
        stream = mark.stream
        if stream is None or id(stream) in asked:
            raise Deadlock(f"streams wait for each other: {sorted(self._told())}")
        if stream.is_held:
            assert isinstance(stream.work[0], Wait)
            self._advance_to(stream.work[0].mark, asked | {id(stream)})
        else:
            stream.advance()

    def _told(self) -> Iterator[str]:
        for stream in self.streams:
            yield f"{stream.name}: {len(stream.work)} pieces of work"

    def drain(self, stream: Stream) -> None:
        """Do all that a stream was given."""
        with self.lock:
            event = Event()
            self.record(event, stream)
            self.until(event)

    def drain_all(self) -> None:
        """Do everything."""
        with self.lock:
            for stream in list(self.streams):
                self.drain(stream)
