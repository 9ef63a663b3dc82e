"""A fetch function that gives other rows each time it is called is told so, once."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from small import WAIT_S, make

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
