"""The debug switch: FEEDER_DEBUG=1 finds a fetch function that changes what it has returned, or
does not depend on its call alone."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest

import feeder
from small import WAIT_S, Counted, Pure, chunk, ids, make

CHANGED = (
    "the fetch function changed the arrays after it returned them; return new arrays, or copies"
)


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


def test_a_change_after_the_return_is_an_error_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FEEDER_DEBUG", "1")
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


@pytest.mark.parametrize("make_fetch", [counting, drawing, running_dry])
def test_a_pure_function_that_is_none_is_an_error(
    make_fetch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEEDER_DEBUG", "1")
    with (
        make(make_fetch(), num_worker_threads=1) as coordinator,
        pytest.raises(feeder.ChunkError) as caught,
    ):
        next(coordinator["train"])
    told = "worker 0, call 0: the fetch function gave other rows when the same call was made again"
    assert str(caught.value).startswith(told)


def test_what_cannot_be_told_is_let_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEEDER_DEBUG", "1")
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
