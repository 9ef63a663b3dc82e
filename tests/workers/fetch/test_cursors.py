"""Cursors that no position can hold are refused before rows are lost by them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import feeder
from feeder.workers.fetch.calls import MAX_BYTES
from small import make


class Place(NamedTuple):
    file: str
    line: int


class Cursors:
    """A fetch function whose workers have made so many calls; `cursor_of` makes cursors of that."""

    def __init__(self, cursor_of: Any) -> None:
        self.cursor_of = cursor_of
        self.calls = [0, 0]

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        self.calls[worker_id] += 1
        return [np.full(3, self.calls[worker_id])]

    def cursor(self, worker_id: int) -> Any:
        return self.cursor_of(self.calls[worker_id])

    def seek(self, worker_id: int, cursor: Any) -> None:
        raise AssertionError("nobody resumes")


OVERLAPPING = np.dtype(
    {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2], "itemsize": 4}
)


@pytest.mark.parametrize(
    "cursor", [Place("a", 1), np.zeros(2, OVERLAPPING)], ids=["tuple", "array"]
)
def test_a_cursor_that_would_not_come_back_is_refused_before_the_first_call(cursor: Any) -> None:
    """What other values these are is in `tests/feeder/state/test_codec.py`."""
    fetch = Cursors(lambda calls: {"at": cursor})
    with (
        make(fetch, num_worker_threads=1) as coordinator,
        pytest.raises(feeder.ConfigError, match=r"^no position can hold the cursor of worker 0: "),
    ):
        next(coordinator["train"])
    assert fetch.calls == [0, 0]


def test_or_at_the_call_after_which_it_comes_first() -> None:
    fetch = Cursors(lambda calls: Place("a", calls) if calls else 0)
    with (
        make(fetch, num_worker_threads=1) as coordinator,
        pytest.raises(feeder.FetchError, match=r"call 0: .* cursor of worker 0: cannot save Place"),
    ):
        next(coordinator["train"])


@pytest.mark.parametrize("workers", [1, 2])
def test_cursors_too_large_for_a_token_are_refused_before_the_first_row(workers: int) -> None:
    """A token holds one of each worker, and of the one whose rows are left over one more."""
    most = MAX_BYTES // (workers + 1)
    with make(Cursors(lambda calls: bytes(most - 8)), num_worker_threads=workers) as coordinator:
        sizes = [len(next(coordinator["train"]).cut.token()) for _ in range(6)]
        assert MAX_BYTES - 100 < max(sizes) < 64 * 1024
    fetch = Cursors(lambda calls: bytes(most + 1))
    with (
        make(fetch, num_worker_threads=workers, num_threads=1) as coordinator,
        pytest.raises(
            feeder.ConfigError, match=rf"all {workers} workers' have at most {MAX_BYTES}"
        ),
    ):
        next(coordinator["train"])


def test_a_cursor_that_grows_too_large_is_an_error_of_its_call() -> None:
    fetch = Cursors(lambda calls: bytes(calls * MAX_BYTES // 10))
    with make(fetch, num_worker_threads=1, batch_size=3) as coordinator:
        feed = coordinator["train"]
        for _ in range(4):
            next(feed).cut.token()
        with pytest.raises(feeder.FetchError, match=r"call 4: .* should name a place"):
            next(feed)


@pytest.mark.parametrize("cursor", ["here", 5, (1, 2)])
def test_a_cursor_of_a_pure_function_is_bytes(cursor: Any) -> None:
    class Pure:
        def __call__(self, call: feeder.Call) -> Any:
            return [np.full(4, call.index)]

        def cursor(self, call: feeder.Call) -> Any:
            return cursor

        def seek(self, call: feeder.Call, cursor: bytes) -> None:
            raise AssertionError("nobody resumes")

    with make(Pure(), num_worker_threads=1) as coordinator:
        batch = next(coordinator["train"])
        with pytest.raises(feeder.ConfigError, match=f"gave {type(cursor).__name__}, expected by"):
            batch.cut.token()


class Sought:
    """A pure function with cursors, which names the call that its cursor stands before."""

    def __init__(self) -> None:
        self.sought: list[tuple[feeder.Call, bytes]] = []

    def __call__(self, call: feeder.Call) -> Any:
        return [np.full(4, call.index)]

    def cursor(self, call: feeder.Call) -> bytes:
        return b"before %d" % (call.index + 1)

    def seek(self, call: feeder.Call, cursor: bytes) -> None:
        self.sought.append((call, cursor))


@pytest.mark.parametrize("carrier", (feeder.Coordinator.snapshot, feeder.Coordinator.state_dict))
def test_a_place_that_was_resumed_and_not_used_keeps_cursor_and_call_together(carrier: Any) -> None:
    with make(Sought(), epochs=None) as coordinator:
        token = next(coordinator["train"]).cut.token()
    with make(Sought(), epochs=None, resume=token) as coordinator:
        unused = carrier(coordinator)
    fetch = Sought()
    with make(fetch, epochs=None, resume=unused) as coordinator:
        assert next(coordinator["train"])["id"][0] == 1
    ((call, cursor),) = fetch.sought
    assert cursor == b"before %d" % call.index
