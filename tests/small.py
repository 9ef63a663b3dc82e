"""Small feeds for unit tests: fetch functions that say what they are, and coordinators of one feed.

Row ids are unique and never zero, so that a row that was lost, doubled or left blank shows.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import feeder

WAIT_S = 10.0
"""How long a test waits for what has to happen; it never takes that long."""

Arrays = tuple[NDArray[Any], ...]


def make(
    fetch: Callable[..., Any],
    names: Iterable[str] = ("id",),
    batch_size: int = 4,
    **settings: Any,
) -> feeder.Coordinator:
    """Return a coordinator of the test's own with one feed, 'train' by default."""
    settings.setdefault("coordinator", feeder.Coordinator())
    settings.setdefault("timeout", WAIT_S)
    return feeder.init_data_input_workers(list(names), fetch, batch_size, **settings)


def ids(batches: Iterable[feeder.Batch], name: str = "id") -> list[int]:
    """Return the values of a column of batches, one after another."""
    return [int(value) for batch in batches for value in batch[name]]


def chunk(worker_id: int, call: int, rows: int) -> Arrays:
    """Return rows with unique ids: worker 1's fourth call starts at 10301."""
    return (np.arange(rows) + 10_000 * worker_id + 100 * call + 1,)


class Calls:
    """`fetch(call)`: what a function makes of so many calls, and then the end of the epoch."""

    def __init__(self, num_calls: int, make: Callable[[feeder.Call], Any]) -> None:
        self.num_calls, self.make = num_calls, make

    def __call__(self, call: feeder.Call) -> Any:
        if call.index >= self.num_calls:
            raise StopIteration
        return self.make(call)


class Pure:
    """`fetch(call)`: `num_calls` chunks of `rows` rows in each epoch."""

    def __init__(self, num_calls: int = 5, rows: int = 3) -> None:
        self.num_calls = num_calls
        self.rows = rows

    def __call__(self, call: feeder.Call) -> Arrays:
        if call.index >= self.num_calls:
            raise StopIteration
        return (chunk(0, call.index, self.rows)[0] + 100_000 * call.epoch,)


class Counted:
    """`fetch(worker_id, batch_size)`: `num_calls` chunks from each worker, then the end."""

    def __init__(self, num_calls: int = 5, rows: int = 3) -> None:
        self.num_calls = num_calls
        self.rows = rows
        self.calls: dict[int, int] = defaultdict(int)

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        call = self.calls[worker_id]
        if call == self.num_calls:
            self.calls[worker_id] = 0
            raise StopIteration
        self.calls[worker_id] += 1
        return chunk(worker_id, call, self.rows)


class Seekable(Counted):
    """The same with `cursor` and `seek`."""

    def cursor(self, worker_id: int) -> int:
        return self.calls[worker_id]

    def seek(self, worker_id: int, cursor: int) -> None:
        self.calls[worker_id] = cursor


class Walk:
    """An iterator that says where it stands, over what `item` makes of the numbers below `num`."""

    def __init__(self, num: int, item: Callable[[int], Any] = int) -> None:
        self.num, self.item = num, item
        self.at = 0

    def __iter__(self) -> Walk:
        return self

    def __next__(self) -> Any:
        if self.at >= self.num:
            raise StopIteration
        self.at += 1
        return self.item(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Held:
    """`fetch(worker_id, batch_size)` that blocks until the test releases it.

    `entered` is set once a call blocks; after `release` every call ends the epoch.
    """

    def __init__(self, chunks_before: int = 0) -> None:
        self.entered = threading.Event()
        self._released = threading.Event()
        self._left = chunks_before

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        if self._left:
            self._left -= 1
            return chunk(worker_id, self._left, batch_size)
        self.entered.set()
        self._released.wait(WAIT_S)
        raise StopIteration

    def release(self) -> None:
        self._released.set()


class Aside:
    """A function run in a thread of its own, whose result or error is asked for later."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        """Wait for the function and return what it did, or raise what it did."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "the function has not returned"
        if self._error is not None:
            raise self._error
        return self._result
