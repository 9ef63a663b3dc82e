"""A fetch function that gives other rows each time it is called is told so, once. Under the debug
switch, FEEDER_DEBUG=1, that is an error, and so is one that changes what it has returned."""

from __future__ import annotations

import itertools
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from small import WAIT_S, Counted, Pure, chunk, ids, make

WORDS = "gave other rows when the call was made again"


class Records:
    """A dataset: numbers, with something added to each."""

    def __init__(self, add: Callable[[], float]) -> None:
        self._add = add

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> Any:
        return np.array([i + self._add()])


def none() -> float:
    return 0.0


def drawn_by_call(call: feeder.Call) -> Any:
    if call.index == 10:
        raise StopIteration
    return [call.rng.random((4, 2))]


def drawn_from_numpy(call: feeder.Call) -> Any:
    if call.index == 10:
        raise StopIteration
    return [np.random.random((4, 2))]


def drawn_large(call: feeder.Call) -> Any:
    """Most of the bytes are the same each time, and are not all looked at."""
    if call.index == 10:
        raise StopIteration
    return [np.concatenate([np.zeros(10**6), np.random.random(10**6)]).reshape(4, -1)]


OTHERS: dict[str, Any] = {
    "records, random": lambda: sources.records(Records(random.random)),
    "records, numpy.random": lambda: sources.records(Records(np.random.random)),
    "pure": lambda: drawn_from_numpy,
    "large": lambda: drawn_large,
}
ALIKE: dict[str, Any] = {
    "records": lambda: sources.records(Records(none)),
    "arrays": lambda: sources.arrays(np.arange(40.0), random_shuffle=True),
    "call.rng": lambda: drawn_by_call,
}


def read(fetch: Any, **settings: Any) -> int:
    with make(fetch, ["x"], **settings) as coordinator:
        return sum(batch.rows for batch in coordinator["train"])


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("kind", OTHERS)
def test_what_draws_from_a_shared_state_is_told_once(
    kind: str, num_threads: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(OTHERS[kind](), num_threads=num_threads, epochs=2) == 80
    (line,) = [record for record in caplog.records if WORDS in record.getMessage()]
    assert line.levelno == logging.WARNING
    for cure in ("call.rng", "info.rng", "processes", "repeatable=False"):
        assert cure in line.getMessage()


@pytest.mark.parametrize("kind", ALIKE)
def test_what_repeats_itself_is_told_nothing(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read(ALIKE[kind]()) == 40
    assert WORDS not in caplog.text


def test_who_says_so_is_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert read(drawn_from_numpy, repeatable=False) == 40
    assert WORDS not in caplog.text


class Counting:
    """Counts its calls, and does something in the second call of the first index."""

    def __init__(self, again: Callable[[], Any] = lambda: None) -> None:
        self.calls: list[int] = []
        self._again = again

    def __call__(self, call: feeder.Call) -> Any:
        self.calls.append(call.index)
        if call.index == 0 and self.calls.count(0) == 2:
            self._again()
        if call.index == 10:
            raise StopIteration
        return [np.full((4, 1), call.index)]


def test_one_call_is_made_twice_and_is_not_counted() -> None:
    fetch = Counting()
    with make(fetch, ["x"], num_threads=1) as coordinator:
        assert sum(batch.rows for batch in coordinator["train"]) == 40
        told = coordinator["train"].stats()
    assert sorted(fetch.calls) == [0, *range(11)]
    assert (told["fetch_calls"], told["fetch_errors"]) == (10, 0)


def test_the_first_batch_does_not_wait_for_the_second_call() -> None:
    go_on = threading.Event()
    fetch = Counting(lambda: go_on.wait(WAIT_S))
    with make(fetch, ["x"], num_threads=1) as coordinator:
        assert next(coordinator["train"]).step == 0
        assert not go_on.is_set()
        go_on.set()
        assert sum(batch.rows for batch in coordinator["train"]) == 36


@pytest.mark.parametrize("error", [OSError("no disk"), KeyboardInterrupt(), StopIteration()])
def test_an_error_of_the_second_call_harms_nothing(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def again() -> None:
        raise error

    assert read(Counting(again), num_threads=1) == 40
    assert (WORDS in caplog.text) == isinstance(error, StopIteration)


# ---- the debug switch


CHANGED = (
    "the fetch function changed the arrays after it returned them; return new arrays, or copies"
)


@pytest.fixture
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDER_DEBUG", "1")


class Reusing:
    """Worker 1 returns an array that the test changes while worker 0, whose turn comes first,
    holds the stream up."""

    def __init__(self) -> None:
        self.buffer = chunk(1, 0, 4)[0]
        self._num_returned = 0
        self._handed_over = threading.Event()
        self._go_on = threading.Event()

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        if worker_id == 0:
            self._go_on.wait(WAIT_S)
            return chunk(0, 0, 4)
        self._num_returned += 1
        if self._num_returned == 1:
            return (self.buffer,)
        self._handed_over.set()
        raise StopIteration

    def change(self) -> None:
        assert self._handed_over.wait(WAIT_S)
        self.buffer[:] = 7
        self._go_on.set()


@pytest.mark.usefixtures("debug")
def test_a_change_after_the_return_is_an_error_in_its_place() -> None:
    fetch = Reusing()
    with make(fetch) as coordinator:
        fetch.change()
        feed = coordinator["train"]
        assert ids([next(feed)]) == [1, 2, 3, 4]
        with pytest.raises(feeder.ChunkError) as caught:
            next(feed)
    assert str(caught.value) == f"worker 1, call 0: {CHANGED}"
    assert (caught.value.worker_id, caught.value.call) == (1, 0)


def counting() -> Any:
    numbers = itertools.count()
    return lambda call: chunk(0, next(numbers), 4)


def drawing() -> Any:
    chance = np.random.default_rng()
    return lambda call: [chance.random(4)]


def running_dry() -> Any:
    chunks = iter([chunk(0, 0, 4)])
    return lambda call: next(chunks)


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("make_fetch", [counting, drawing, running_dry])
def test_a_pure_function_that_is_none_is_an_error(make_fetch: Any) -> None:
    told = "^worker 0, call 0: the fetch function gave other rows when the same call was made again"
    with (
        make(make_fetch(), num_worker_threads=1) as coordinator,
        pytest.raises(feeder.ChunkError, match=told),
    ):
        next(coordinator["train"])


@pytest.mark.usefixtures("debug")
def test_what_cannot_be_told_is_let_pass() -> None:
    called: Counter[int] = Counter()

    def fetch(call: feeder.Call) -> Any:
        called[call.index] += 1
        if called[call.index] % 2 == 0:
            if call.index == 1:
                return None
            if call.index == 2:
                raise OSError("the disk is away")
        return chunk(0, call.index, 4)

    with make(fetch, num_threads=1) as coordinator:
        assert [ids([next(coordinator["train"])])[0] for _ in range(4)] == [1, 101, 201, 301]
    assert called[0] >= 2

    # Nobody promised that it repeats itself.
    with make(counting(), repeatable=False, num_threads=1) as coordinator:
        next(coordinator["train"])


@pytest.mark.parametrize("switch", ["0", "", None])
def test_without_the_switch_nobody_looks(
    switch: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEEDER_DEBUG", raising=False)
    if switch is not None:
        monkeypatch.setenv("FEEDER_DEBUG", switch)
    fetch = Reusing()
    with make(fetch) as coordinator:
        fetch.change()
        feed = coordinator["train"]
        assert ids([next(feed), next(feed)]) == [1, 2, 3, 4, 7, 7, 7, 7]


@pytest.mark.parametrize("fetch", [Pure(7), Counted(7)], ids=["fetch(call)", "fetch(worker_id)"])
def test_a_sound_fetch_function_passes_under_the_switch(
    fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(fetch, epochs=2) as plain:
        wanted = ids(plain["train"])
    monkeypatch.setenv("FEEDER_DEBUG", "1")
    with make(fetch, epochs=2) as looked_at:
        assert ids(looked_at["train"]) == wanted
