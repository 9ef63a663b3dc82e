"""What a fetch function runs on, where it is not the fetcher threads themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from feeder.workers.fetch.calls import PartitionCalls
from feeder.workers.spec import StreamSpec
from feeder.workers.stats import ExecutorCounts, StreamStats
from feeder.workers.stream.batch import Call
from feeder.workers.stream.position import Position


class Execution(Protocol):
    """The fetch function of one stream, run elsewhere: a fetcher thread's call is a round trip.

    The thread that makes the pipeline makes, starts and closes it; fetcher threads call it.
    """

    spec: StreamSpec
    """What the stream is, with functions that are called over there."""

    def make_calls(self, start: Position, *, resumed: bool) -> Sequence[PartitionCalls]:
        """The calls of each partition of a stream that begins at `start`."""

    def call_again(self, call: Call) -> Any:
        """The chunk of a call of a pure function that was made before."""

    def watch(self, stats: StreamStats) -> None:
        """What is counted of the stream; before it starts. What runs may follow it."""

    def start(self) -> None:
        """Have ready what the calls need; before the first of them."""

    def interrupt(self) -> None:
        """End every call that is waited for, by an error; harmless when said again."""

    def close(self) -> None:
        """End all that runs, when no thread calls any more."""

    def stack(self, ident: int | None) -> str:
        """The Python stacks of what a thread's call runs in; empty where there are none."""

    def counts(self) -> ExecutorCounts:
        """What runs now; any thread may ask."""
