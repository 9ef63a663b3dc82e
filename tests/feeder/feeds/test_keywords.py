"""Every keyword of `init_data_input_workers` does something: what is seen with it is what it says,
and is not what is seen without it. How far each goes is tested where its feature is."""

from __future__ import annotations

import inspect
import os
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

import feeder
from small import WAIT_S, Counted, Held, Pure, chunk, ids
from standin.gpu import Machine, installed

SIGNATURE = inspect.signature(feeder.init_data_input_workers)
ORIGINALS = [
    "input_blob_names", "fetch_fun", "batch_size", "num_worker_threads", "input_source_name",
    "max_buffered_batches", "init_fun", "external_loggers", "dont_rebatch", "batch_columns",
    "timeout",
]  # fmt: skip
"""Those of the original, in its order, without its net."""


def own(fetch: Callable[..., Any] | None = None, **settings: Any) -> feeder.Coordinator:
    """Return a new coordinator with one feed of four rows per batch."""
    usual = {
        "input_blob_names": ["id"], "fetch_fun": fetch or Pure(3), "batch_size": 4,
        "coordinator": feeder.Coordinator(), "timeout": WAIT_S,
    }  # fmt: skip
    return feeder.init_data_input_workers(**(usual | settings))


def batches(fetch: Callable[..., Any] | None = None, **settings: Any) -> list[feeder.Batch]:
    """Return the first batches of such a feed."""
    with own(fetch, **settings) as coordinator:
        return list(islice(coordinator["train"], 41))


def rows(fetch: Callable[..., Any] | None = None, **settings: Any) -> list[list[int]]:
    return [ids([batch]) for batch in batches(fetch, **settings)]


def error_of(made: Callable[[], Any]) -> str:
    """Return what is raised, with its kind; nothing, where nothing is."""
    try:
        made()
    except feeder.FeedError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- what is seen. A keyword that is given as True stands for an object that is made here.


def is_bounded(rows: Callable[[int], Any], **bound: Any) -> bool:
    """Return whether a feed that nobody takes from stops fetching after 16 rows; all come in the
    end."""
    exceeded = threading.Event()
    num_rows = 0

    def fetch(worker_id: int, batch_size: int) -> Any:
        nonlocal num_rows
        if num_rows >= 40 * 4:
            raise StopIteration
        num_rows += 4
        if num_rows > 16:
            exceeded.set()
        return rows(num_rows)

    with own(fetch, num_worker_threads=1, **bound) as coordinator:
        until = time.monotonic() + WAIT_S
        while not (exceeded.wait(0.001) or coordinator["train"].stats()["fetchers_wait_s"]):
            assert time.monotonic() < until
        is_bounded = not exceeded.is_set()
        assert sum(len(batch["id"]) for batch in coordinator["train"]) == 160
    return is_bounded


def begun(init_fun: bool = False) -> bool:
    """Return whether a function was called once with feed and coordinator, before any fetch."""
    calls: list[Any] = []

    def fetch(worker_id: int, batch_size: int) -> Any:
        calls.append("fetch")
        raise StopIteration

    given = {"init_fun": lambda *args: calls.append(args)} if init_fun else {}
    with own(fetch, **given) as coordinator:
        assert list(coordinator["train"]) == []
        return calls == [(coordinator["train"], coordinator), "fetch", "fetch"]


class Log(list[dict[str, Any]]):
    log = list.append


def logged(external_loggers: bool = False) -> list[int]:
    logs = [Log(), Log()]
    batches(Pure(4), **({"external_loggers": logs} if external_loggers else {}))
    return [line[name] for log in logs for line in log for name in ("fetch_rows", "batches")]


def stalled(**given: Any) -> str:
    left = iter([None] * (12 if given else 2))
    return error_of(
        lambda: batches(lambda w, b: next(left, chunk(0, 0, 4)), num_worker_threads=1, epochs=None,
                        **given)
    ).partition("; ")[0]  # fmt: skip


def held_ahead(**given: Any) -> int:
    """Return how many batches more than with a depth of two a GPU holds."""
    with installed(Machine()) as machine:
        used = []
        for settings in ({"depth": 2}, given):
            with own(Pure(8, 4), devices=("cuda:0",), **settings) as coordinator:
                next(coordinator["train"])
                used.append(machine.used("device", "cuda:0") // 64)
    return used[1] - used[0]


def by_arrival(**given: Any) -> list[int]:
    """Return the first rows where worker 0 gives none."""
    held, rest = Held(), Counted(3, 4)

    def fetch(worker_id: int, batch_size: int) -> Any:
        return (rest if worker_id else held)(worker_id, batch_size)

    with own(fetch, timeout=WAIT_S if given else 0.1, **given) as coordinator:
        try:
            return ids([next(coordinator["train"])])
        except feeder.FetchTimeout:
            return []
        finally:
            held.release()


def meets(**given: Any) -> bool:
    """Return whether three calls of one worker are under way at a time."""
    all_there, there = threading.Event(), set()

    def meet(call: feeder.Call) -> Any:
        if call.index >= 3:
            raise StopIteration
        there.add(call.index)
        if len(there) == 3:
            all_there.set()
        assert all_there.wait(WAIT_S if given else 0.05)
        return chunk(0, call.index, 4)

    return not error_of(lambda: batches(meet, num_worker_threads=1, **given))


def pid_of_call(call: feeder.Call) -> Any:
    """A function that processes can import."""
    if call.index == 3:
        raise StopIteration
    return [np.full(4, os.getpid())]


def is_written_in_place(**given: Any) -> bool:
    places = []

    def fetch(call: feeder.Call) -> Any:
        places.append(call.out is not None)
        return Pure(20, 2)(call)

    batches(fetch, **given)
    return any(places)


class Unsteady(Pure):
    """Raises twice before it returns its third chunk."""

    def __init__(self) -> None:
        super().__init__(3)
        self.times: list[float] = []

    def __call__(self, call: feeder.Call) -> Any:
        if call.index == 2:
            self.times.append(time.monotonic())
            if len(self.times) <= 2:
                raise OSError("the disk is away")
        return super().__call__(call)


def waits(retry_backoff_s: float = 0.001) -> bool:
    """Return whether a retry waits for 50 ms, and the next one twice as long."""
    fetch = Unsteady()
    batches(fetch, retries=2, retry_backoff_s=retry_backoff_s)
    first, second, third = fetch.times
    return second - first >= 0.05 and third - second >= 0.1


def resumed_from_token(**given: Any) -> str:
    with own(**given) as coordinator:
        token = next(coordinator["train"]).cut.token()
    told = error_of(lambda: own(resume=token, **given))
    return told.partition(":")[0]


def fits_without(**given: Any) -> bool:
    with own(**given) as coordinator:
        snapshot = coordinator.snapshot()
    own(resume=snapshot, **given)
    return not error_of(lambda: own(resume=snapshot))


def is_mine(coordinator: bool = False) -> bool:
    mine = feeder.Coordinator()
    return own(**({"coordinator": mine} if coordinator else {})) is mine


DRAWN = {
    "input_blob_names", "fetch_fun", "batch_size", "num_worker_threads", "dont_rebatch",
    "batch_columns", "devices", "seed", "epochs", "last_batch", "last_round", "rounds",
    "global_batch_size", "skip", "retries", "writable", "resume",
}  # fmt: skip
"""Those that drawn programs (`tests/property`) have: with each of their values the batches of the
naive stream are others, or cannot be had."""

CASES: list[tuple[str, Callable[..., Any], Any, Any]] = [
    ("input_source_name", lambda **s: [n for n in own(**s)], "val", ["val"]),
    ("max_buffered_batches", lambda **s: is_bounded(lambda n: (np.arange(4) + n,), **s), 2, True),
    ("max_buffered_bytes", lambda **s: is_bounded(lambda n: (np.zeros((4, 100_000), "u1"),), **s),
     800_000, True),
    ("init_fun", begun, True, True),
    ("external_loggers", logged, True, [12, 3, 12, 3]),
    ("timeout", stalled, 0.02, "FetchTimeout: worker 0, call 0: no chunk for 0.02 s"),
    ("depth", held_ahead, 7, 5),
    ("order", by_arrival, "arrival", [10_001, 10_002, 10_003, 10_004]),
    ("num_threads", meets, 3, True),
    ("executor", lambda **s: ids(batches(pid_of_call, **s))[0] == os.getpid(), feeder.Processes(1),
     False),
    ("rows_per_call", is_written_in_place, 2, True),
    ("retry_backoff_s", waits, 0.05, True),
    ("repeatable", resumed_from_token, False, "ResumeError"),
    ("version", fits_without, "1", False),
    ("coordinator", is_mine, True, True),
]  # fmt: skip
"""The keyword, what is seen, a value, and what is seen with it."""


def params() -> list[Any]:
    process = {"executor": [pytest.mark.process]}
    return [pytest.param(*case, id=case[0], marks=process.get(case[0], [])) for case in CASES]


@pytest.mark.usefixtures("exact_bound")
@pytest.mark.parametrize(("keyword", "see", "value", "told"), params())
def test_a_keyword_does_what_it_says(
    keyword: str, see: Callable[..., Any], value: Any, told: Any
) -> None:
    assert see(**{keyword: value}) == told
    assert see() != told, "it is seen without the keyword, too"


def test_every_keyword_has_its_case() -> None:
    assert sorted([*DRAWN, *(name for name, *_ in CASES)]) == sorted(SIGNATURE.parameters)


def test_the_originals_come_first_in_their_order() -> None:
    assert list(SIGNATURE.parameters)[: len(ORIGINALS)] == ORIGINALS
    kinds = [parameter.kind for parameter in SIGNATURE.parameters.values()]
    assert set(kinds[: len(ORIGINALS)]) == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    assert set(kinds[len(ORIGINALS) :]) == {inspect.Parameter.KEYWORD_ONLY}
