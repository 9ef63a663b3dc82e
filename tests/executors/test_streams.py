"""Whatever a feed is like, whatever it was run on before, and whichever of its processes end: not
one byte is another. On processes that are threads of this one (`executors.loopback`); what only
real ones can show is in the other files."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import feeder
import parts
import remote
from executors.loopback import Deaths, die
from executors.writing import BAD, WAYS, Even, into_out, plain
from feeder import Call, Processes, Threads
from feeds import CARRIERS, Record, assert_same, drain, expected, make, note, running
from fetches import FORMS, NEED_TWO_WORKERS, PATTERNS, make_fetch
from parts import few
from remote import Flaky, GivesAgain, GivesTwice, Small

pytestmark = [pytest.mark.usefixtures("in_threads"), pytest.mark.served]

EXAMPLES = 400 if parts.is_full else 60
ONCE: dict[str, Any] = {
    # A case in which a feed hangs takes its whole timeout each time: it is not made smaller.
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),
    # The fixture is the same for all.
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}  # fmt: skip
LAST_BATCH = ("keep", "drop", "pad", "carry")

on_processes = st.builds(
    Processes, st.integers(1, 5), max_calls=st.sampled_from((None, None, 1, 2, 5)),
    seed_globals=st.just(False),
)  # fmt: skip
buffers = st.sampled_from(
    ({}, {"max_buffered_batches": 1}, {"max_buffered_batches": 3}, {"max_buffered_bytes": 1})
)
deaths = st.lists(st.integers(0, 40), max_size=2)
"""Calls whose processes end. A third one might fall on the same call, which is an error."""


def patterns_for(*executors: Any) -> st.SearchStrategy[str]:
    """A function that gives None counts in its own process how often it did: with a new process
    for every few calls it would do so for ever."""
    is_short = any(getattr(one, "max_calls", None) for one in executors)
    return st.sampled_from([name for name in PATTERNS if not (is_short and name == "gaps")])


@settings(max_examples=EXAMPLES, **ONCE)
@given(
    data=st.data(), form=st.sampled_from(tuple(FORMS)), executor=on_processes, deaths=deaths,
    workers=st.integers(1, 6), devices=st.integers(1, 3), buffers=buffers,
    last_batch=st.sampled_from(LAST_BATCH), epochs=st.integers(1, 3),
    batch_size=st.sampled_from((1, 7, 8, 64)),
)  # fmt: skip
def test_the_stream_is_the_naive_one(
    data: Any, form: str, executor: Processes, deaths: list[int], workers: int, devices: int,
    buffers: dict[str, int], **what: Any,
) -> None:  # fmt: skip
    Deaths.begin()
    pattern = data.draw(patterns_for(executor), "pattern")
    if workers == 1 and form != "pure" and pattern in NEED_TWO_WORKERS:
        workers = 4
    wanted = expected(
        make_fetch(form, pattern), pure=form == "pure", num_workers=workers, num_devices=devices,
        **what,
    )  # fmt: skip
    got = drain(
        make_fetch(form, pattern, Deaths(deaths)), num_worker_threads=workers, devices=devices,
        executor=executor, **buffers, **what,
    )  # fmt: skip
    assert_same(got, wanted)


@settings(max_examples=EXAMPLES // 2, **ONCE)
@given(
    data=st.data(), form=st.sampled_from(tuple(FORMS)), last_batch=st.sampled_from(LAST_BATCH),
    deaths=deaths,
    legs=st.lists(
        st.tuples(
            st.integers(1, 4), st.one_of(on_processes, on_processes, st.just(Threads(2))),
            st.sampled_from(tuple(CARRIERS)),
        ), min_size=2, max_size=6,
    ),
)  # fmt: skip
def test_it_goes_on_after_any_batch_on_anything(
    data: Any, form: str, last_batch: str, deaths: list[int], legs: list[tuple[int, Any, str]]
) -> None:
    Deaths.begin()
    legs.append((1000, Processes(2, seed_globals=False), "token"))
    pattern = data.draw(patterns_for(*[executor for _, executor, _ in legs]), "pattern")
    what: dict[str, Any] = {"epochs": 2, "last_batch": last_batch}
    wanted = expected(make_fetch(form, pattern), pure=form == "pure", **what)
    got: list[Record] = []
    position = None
    for most, executor, carrier in legs:
        fetch = make_fetch(form, pattern, Deaths(deaths if type(executor) is Processes else ()))
        with running(fetch, resume=position, executor=executor, **what) as (coordinator, feed):
            batches = list(islice(feed, most))
            got += map(note, batches)
            if len(batches) < most:
                break
            position = CARRIERS[carrier](coordinator, batches[-1])
    assert_same(got, wanted)


def test_calls_that_raise_are_made_again(tmp_path: Path) -> None:
    whole = expected(make_fetch("seek", "ragged"), pure=False, epochs=2)
    got = drain(
        Flaky(make_fetch("seek", "ragged"), tmp_path), epochs=2, retries=1, retry_backoff_s=0.0,
        executor=Processes(2),
    )  # fmt: skip
    assert_same(got, whole)
    assert len(list(tmp_path.iterdir())) > 3


def test_a_pure_function_may_have_cursors(tmp_path: Path) -> None:
    whole = drain(remote.plain, epochs=2)
    unstarted = make(remote.Cursors(tmp_path), epochs=2, executor=Processes(2))
    taken = [bytes(unstarted.snapshot())]
    with running(remote.Cursors(tmp_path), epochs=2, executor=Processes(2)) as (coordinator, feed):
        batches = [note(next(feed)) for _ in range(4)]
        taken.append(bytes(coordinator.snapshot()))
    # What it had come to went with its processes.
    taken.append(bytes(coordinator.snapshot()))
    assert_same(batches, whole[:4])
    for at, position in zip((0, 4, 4), taken, strict=True):
        [path.unlink() for path in tmp_path.iterdir()]
        rest = drain(remote.Cursors(tmp_path), resume=position, epochs=2, executor=Processes(3))
        assert_same(rest, whole[at:], at)
        assert any(tmp_path.iterdir()) == (position is taken[1])


# ---- `rows_per_call`


@pytest.mark.parametrize("way", WAYS)
def test_with_rows_per_call_the_stream_is_the_same(way: str) -> None:
    axes = (2, 4, 8), (1, 2, 3), (1, 3), ("keep", "drop", "pad")
    for rows, num, devices, last_batch in few((way,), *axes):
        what: dict[str, Any] = {"epochs": 3, "last_batch": last_batch, "devices": devices}
        got = drain(
            Even(WAYS[way], rows), rows_per_call=rows, executor=Processes(num),
            batch_columns=[0, 1, 0], **what,
        )  # fmt: skip
        assert_same(got, plain(rows, **what), rows, num, devices, last_batch)


class DiesHalfWay(Even):
    """Its processes end in three calls, when half of a call's rows are written."""

    def __init__(self, rows: int, marks: Path, die: Callable[[], None] = die) -> None:
        super().__init__(into_out, rows)
        self.marks, self.die = marks, die

    def __call__(self, call: Call) -> Any:
        # The first call of a process has no place yet. Made again, perhaps in a process that has
        # had others, a call is answered: one that ends three processes is an error.
        mark = self.marks / f"{call.epoch}-{call.index}"
        if call.out is not None and len(list(self.marks.iterdir())) < 3 and not mark.exists():
            for array in call.out.values():
                array[: len(array) // 2 + 1] = BAD
            mark.touch()
            self.die()
        return super().__call__(call)


@pytest.mark.parametrize(("rows", "num"), ((2, 1), (8, 3)))
def test_no_row_is_of_a_process_that_died_half_way(rows: int, num: int, tmp_path: Path) -> None:
    got = drain(
        DiesHalfWay(rows, tmp_path), rows_per_call=rows, executor=Processes(num), epochs=3,
        batch_columns=[0, 1, 0],
    )  # fmt: skip
    assert_same(got, plain(rows, epochs=3), rows, num)
    assert len(list(tmp_path.iterdir())) >= 3, "nobody has died"


# ---- odd chunks

BAD_CHUNKS: tuple[Callable[[], Any], ...] = (
    remote.objects, remote.no_array, remote.no_tuple, remote.scalar, remote.uneven, remote.masked,
    remote.transposed, remote.read_only, remote.strided, remote.empty, remote.structured,
)  # fmt: skip


@pytest.mark.parametrize("give", BAD_CHUNKS)
@pytest.mark.parametrize("at", (0, 3))
def test_what_is_odd_is_told_as_in_threads(give: Callable[[], Any], at: int) -> None:
    results = []
    for executor in (None, Processes(2)):
        got: list[Any] = []
        with running(remote.Gives(give, at), executor=executor, batch_size=2) as (_, feed):
            try:
                got.extend(note(batch) for batch in feed)
            except feeder.FeedError as error:
                got += [type(error), str(error)]
        results.append(got)
    assert results[0] == results[1]


# ---- arrays of which somebody keeps hold

ONE = {"input_blob_names": ["x"], "batch_size": remote.ROWS}
TWO = {"input_blob_names": ["x", "y"]}


@pytest.mark.parametrize("how", ("the same", "overlap", "halves"))
def test_an_array_that_is_given_twice(how: str) -> None:
    what: dict[str, Any] = {**TWO, "batch_size": remote.ROWS, "writable": True}
    whole = drain(GivesTwice(how), **what)
    with running(GivesTwice(how), executor=Processes(2), **what) as (_, feed):
        got = []
        for batch in feed:
            got.append(note(batch))
            before = batch["y"].tobytes()
            batch["x"][:] = 255
            assert batch["y"].tobytes() == before
    assert_same(got, whole)


@pytest.mark.parametrize("rows_per_call", (None, remote.ROWS))
def test_an_array_that_the_function_keeps_is_not_written_by_the_trainer(
    rows_per_call: int | None,
) -> None:
    whole = drain(GivesAgain(), num_worker_threads=1, **ONE)
    what = {**ONE, "rows_per_call": rows_per_call, "writable": True}
    with running(GivesAgain(), executor=Processes(2), **what) as (_, feed):
        got = []
        for batch in feed:
            got.append(note(batch))
            batch["x"][:] = 255
    assert_same(got, whole)


def test_small_chunks_need_a_bounded_number_of_bytes() -> None:
    most, rows = 0, 0
    with running(
        Small(3000), input_blob_names=["x"], batch_size=64, executor=Processes(2),
        max_buffered_bytes=2**22,
    ) as (coordinator, feed):  # fmt: skip
        for batch in feed:
            rows += batch.rows
            if batch.index % 20 == 0:
                (figures,) = coordinator.figures().feeds
                most = max(most, figures.executor.bytes)
    assert rows == 8 * 3000
    assert most < 48 * 2**20
