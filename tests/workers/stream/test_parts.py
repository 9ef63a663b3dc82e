"""Runs that make the batches of some queues alone: together they give what one run gives."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import feeder
from feeder.feeds import stream as streams
from feeder.workers.fetch.bound import Bound
from feeder.workers.pipeline import Pipeline
from feeder.workers.stream.spec import Part
from parts import examples
from small import WAIT_S, make


class Numbered:
    """`fetch(call)` that says how many rows an epoch has, and notes which calls were made."""

    def __init__(self, rows: list[int], per_call: int) -> None:
        self._rows, self._per_call = rows, per_call
        self.gives = self._per_call
        self.calls: Counter[tuple[int, int]] = Counter()

    def rows(self, epoch: int, batch_size: int) -> int:
        return self._rows[epoch]

    def __call__(self, call: feeder.Call) -> Any:
        self.calls[call.epoch, call.index] += 1
        first = call.index * self._per_call
        num = min(self.gives, self._rows[call.epoch] - first)
        if num <= 0:
            raise StopIteration
        return (np.arange(first, first + num) + 10_000 * (call.epoch + 1),)


class Program(NamedTuple):
    """A feed and its queues, and those at which it is dealt among servers."""

    rows: list[int]
    per_call: int
    calls_per_batch: int
    last_batch: str
    rounds: str
    last_round: str
    queues: int
    cuts: list[int]
    threads: int

    @property
    def parts(self) -> list[Part | None]:
        bounds = [0, *self.cuts, self.queues]
        if not self.cuts:
            return [None]
        return [Part(*pair, self.queues) for pair in pairwise(bounds)]

    def fetch(self) -> Numbered:
        return Numbered(self.rows, self.per_call)

    def make(self, fetch: Numbered, **more: Any) -> feeder.Coordinator:
        return make(
            fetch, batch_size=self.per_call * self.calls_per_batch, rows_per_call=self.per_call,
            epochs=len(self.rows), last_batch=self.last_batch, rounds=self.rounds,
            last_round=self.last_round, num_threads=self.threads, devices=self.queues, **more,
        )  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> Program:
    queues = draw(st.integers(1, 6))
    per_call, calls = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    most = 12 * per_call * calls
    return Program(
        rows=draw(st.lists(st.integers(1, most), min_size=1, max_size=3)),
        per_call=per_call,
        calls_per_batch=calls,
        last_batch=draw(st.sampled_from(["keep", "drop", "pad"])),
        rounds=draw(st.sampled_from(["stream", "epoch"])),
        last_round=draw(st.sampled_from(["uneven", "drop"])),
        queues=queues,
        cuts=sorted(draw(st.sets(st.integers(1, queues - 1)))) if queues > 1 else [],
        threads=draw(st.sampled_from([1, 3])),
    )


Told = dict[int, list[tuple[Any, ...]]]
"""By queue what was handed out, or the error that came instead."""


def told(batch: Any) -> tuple[Any, ...]:
    if isinstance(batch, tuple):
        return batch
    real = batch["id"][: batch.rows]
    return batch.step, batch.epoch, batch.index, batch.rows, real.tolist(), batch.cut.token()


def dealt(coordinator: feeder.Coordinator, queues: range) -> Told:
    """What these queues are handed, in turns, and where each stands at its end."""
    found: dict[int, list[Any]] = {queue: [] for queue in queues}
    devices = {queue: coordinator["train"].on(queue) for queue in queues}
    while devices:
        for queue, device in list(devices.items()):
            try:
                found[queue].append(next(device))
            except StopIteration:
                del devices[queue]
            except feeder.FeedError as error:
                found[queue].append((type(error).__name__,))
                del devices[queue]
    # Only now: the position of an epoch's last batch has another name once that is known to end it.
    return {queue: [told(one) for one in batches] for queue, batches in found.items()}


def run(program: Program, part: Part | None, **more: Any) -> tuple[Told, Numbered]:
    """What a run gives that makes the batches of a part."""

    def pipeline(spec: Any, run: Any, *rest: Any, **named: Any) -> Pipeline:
        return Pipeline(spec, run._replace(part=part), *rest, **named)

    fetch = program.fetch()
    own = range(program.queues) if part is None else range(part.first, part.stop)
    with patch.object(streams, "Pipeline", pipeline), program.make(fetch, **more) as coordinator:
        return dealt(coordinator, own), fetch


@settings(max_examples=examples(200), deadline=None)
@given(program=programs(), at=st.integers(0, 40), to=st.integers(1, 6))
def test_parts_give_together_what_one_run_gives(program: Program, at: int, to: int) -> None:
    """Also from any place on, with another number of queues than the place is of."""
    whole, _ = run(program, None)
    parts = [run(program, part)[0] for part in program.parts]
    assert {queue: one[queue] for one in parts for queue in one} == whole
    rounds, queue = divmod(at, program.queues)
    batches = whole[queue]
    if rounds < len(batches) and len(batches[rounds]) > 1:
        again = program._replace(queues=to, cuts=[i for i in program.cuts if i < to])
        resume = batches[rounds][-1]
        whole, _ = run(again, None, resume=resume)
        parts = [run(again, part, resume=resume)[0] for part in again.parts]
        assert {queue: one[queue] for one in parts for queue in one} == whole


@settings(max_examples=examples(80), deadline=None)
@given(program=programs())
def test_each_call_is_made_by_one_part(program: Program) -> None:
    """But for those that end epochs, for the first one, which is made again to be compared, and for
    the batches that nobody is given."""
    program = program._replace(last_round="uneven")
    calls: Counter[tuple[int, int]] = Counter()
    for part in program.parts:
        fetch = run(program, part)[1]
        calls += Counter({call: 1 for call in fetch.calls})
    for epoch, rows in enumerate(program.rows):
        num = -(-rows // program.per_call)
        if program.last_batch == "drop":
            size = program.per_call * program.calls_per_batch
            num = rows // size * program.calls_per_batch
        made = {call for call in calls if call[0] == epoch}
        if None not in program.parts:
            assert {(epoch, call) for call in range(num)} <= made
            assert all(calls[epoch, call] == 1 for call in range(num))


WRONG = Program([24], 2, 2, "keep", "stream", "uneven", 2, [1], 1)


@pytest.mark.parametrize("gives", [1, 3])
def test_a_call_that_gives_another_number_of_rows_is_an_error(gives: int) -> None:
    fetch = WRONG.fetch()
    fetch.gives = gives
    with pytest.raises(feeder.ChunkError, match=rf"chunk has {gives} rows, expected 2"):
        _read(fetch)


@pytest.mark.parametrize(("tells", "what"), [(40, "the epoch ended, expected 2 rows"),
                                             (16, "chunk has 2 rows, expected 0")])  # fmt: skip
def test_an_epoch_of_another_length_than_was_told_is_an_error(tells: int, what: str) -> None:
    fetch = WRONG.fetch()
    fetch.rows = lambda epoch, batch_size: tells  # type: ignore[method-assign]
    with pytest.raises(feeder.ChunkError, match=what):
        _read(fetch)


def test_an_epoch_of_which_nobody_knows_the_length_is_an_error_in_its_place() -> None:
    fetch = Numbered([24, 24], 2)

    def rows(epoch: int, batch_size: int) -> int:
        if epoch:
            raise OSError("no index")
        return 24

    fetch.rows = rows  # type: ignore[method-assign]
    found = []
    with pytest.raises(feeder.FetchError, match=r"epoch 1 is not known.*no index"):
        for batch in _batches(fetch, WRONG._replace(rows=[24, 24])):
            found.append(batch.step)
    assert found == [1, 3, 5]


def test_a_batch_that_others_follow_does_not_wait_for_the_next_one_here() -> None:
    """Of its epoch it is known not to be the last."""
    may_go_on = threading.Event()

    class Waiting(Numbered):
        def __call__(self, call: feeder.Call) -> Any:
            assert call.index < 4 or may_go_on.wait(WAIT_S)
            return super().__call__(call)

    batches = _batches(Waiting([24], 2), WRONG._replace(rounds="epoch"), queue=0)
    assert next(batches).step == 0
    may_go_on.set()
    assert [batch.step for batch in batches] == [2, 4]


def test_queues_that_are_elsewhere_starve_not() -> None:
    """Otherwise a call might always be made above the bound."""
    bound = Bound(8, 1000, 4, 0, 1, Part(1, 3, 4))
    assert bound.starving
    bound.waiting[1] = bound.waiting[2] = 1
    assert not bound.starving


def _read(fetch: Numbered) -> None:
    for _ in _batches(fetch, WRONG):
        pass


def _batches(fetch: Numbered, program: Program, queue: int = 1) -> Iterator[feeder.Batch]:
    """The batches of one of two queues, where the other is elsewhere."""

    def pipeline(spec: Any, run: Any, *rest: Any, **named: Any) -> Pipeline:
        return Pipeline(spec, run._replace(part=Part(queue, queue + 1, 2)), *rest, **named)

    with patch.object(streams, "Pipeline", pipeline), program.make(fetch) as coordinator:
        yield from coordinator["train"].on(queue)
