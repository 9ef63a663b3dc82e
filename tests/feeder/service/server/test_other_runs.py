"""Positions of another run, brought to a server: whole, of the same settings, and of other rows."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash

import feeder
from feeder.service.protocol.events import Void
from feeder.service.protocol.membership import Asks, Membership, Refuse, Start
from feeder.service.server.position_check import PositionCheck, Stand
from feeder.workers.stream.rounds import Counting
from feeder.workers.stream.shares import Place
from served import Aside, outside, reading, serving
from small import Calls, Pure, ids, make

pytestmark = pytest.mark.usefixtures("world")

NUM = 100
"""Batches of each of two queues."""
NOT_ONE = (
    r"the positions of queue \d \(.*\) and queue \d \(.*\) are not of one stream: from"
    r"|fetch function is not deterministic: worker \d, call \d+: "
)
"""Told of positions that disagree, or of the chunk that a position ended with."""


class Chunks(Calls):
    """The same rows in chunks of another size."""

    def __init__(self, rows: int) -> None:
        super().__init__(
            2 * NUM * 4 // rows, lambda call: (np.arange(rows) + rows * call.index + 1,)
        )


def whole() -> feeder.Coordinator:
    return make(Chunks(4), devices=2)


def token_after(fetch: Any, batches: int) -> bytes:
    """The position of another run."""
    with outside(), make(fetch, devices=2) as coordinator:
        for i in range(batches):
            cut = next(coordinator["train"].on(i % 2)).cut
        return cut.token()


def changed(token: bytes, at: int, value: Any) -> bytes:
    fields = msgpack.unpackb(token[11:])
    fields[at] = value
    body = msgpack.packb(fields)
    return token[:3] + xxhash.xxh3_64_digest(body) + body


def rows_of(queue: int) -> list[int]:
    return [4 * step + i + 1 for step in range(queue, 2 * NUM, 2) for i in range(4)]


@pytest.mark.parametrize(
    "token",
    [
        pytest.param(lambda: token_after(Chunks(2), 6), id="other chunks"),
        pytest.param(lambda: token_after(Chunks(2), 60), id="other chunks, ahead"),
        pytest.param(lambda: changed(token_after(Chunks(4), 8), 5, 2), id="another step"),
        pytest.param(lambda: changed(token_after(Chunks(4), 8), 4, 6), id="another index"),
    ],
)
def test_who_brings_a_position_of_another_run_is_told_so_alone(token: Any) -> None:
    """And the other queue's trainer is given the rows that come next, whoever comes and goes."""
    with serving(whole) as server, reading(server, queue=1, credit=2) as innocent:
        with reading(server, queue=0) as first:
            pairs = [(next(first), next(innocent)) for _ in range(20)]
            got, seen = ids(pair[0] for pair in pairs), ids(pair[1] for pair in pairs)
            state = first.state_dict()
        with reading(server, queue=0, resume=token(), rejoin=True, credit=2) as foreign:
            rest = Aside(lambda: ids(innocent))
            with pytest.raises(feeder.ResumeError, match=NOT_ONE):
                list(foreign)
        with reading(server, queue=0, resume=state, rejoin=True) as again:
            assert got + ids(again) == rows_of(0)
        assert seen + rest.result() == rows_of(1)
        assert innocent.stats()["reconnects"] == 0


def test_a_server_that_knows_neither_refuses_both() -> None:
    """It cannot tell which of them is wrong, and hands out no row of either."""
    tokens = token_after(Chunks(2), 5), token_after(Chunks(4), 10)
    with serving(whole) as server, ExitStack() as stack:
        pair = [
            stack.enter_context(reading(server, queue=i, resume=token, rejoin=True, credit=1))
            for i, token in enumerate(tokens)
        ]
        told = [Aside(lambda one=one: list(one)) for one in pair]
        for one in told:
            with pytest.raises(feeder.ResumeError, match=NOT_ONE):
                one.result()


def test_the_end_of_an_epoch_may_have_names_that_lie_further_apart() -> None:
    """Where epochs after it give no batch, as with `last_batch="drop"`."""
    with outside(), make(Pure(3), last_batch="drop", epochs=None) as coordinator:
        cut = next(coordinator["train"]).cut
        stream = coordinator["train"].streams[0].config.stream
    first, late = replace(cut, epoch=0, index=3, step=3), replace(cut, epoch=2, index=0, step=3)
    for one, other in ((first, late), (late, first)):
        check = PositionCheck([Stand(0, "", one), Stand(1, "", other)], stream)
        batch: Any = SimpleNamespace(step=3, index=0, place=late)
        check.check([batch])
        assert check.news() == (1,)
        assert check.news() == ()
    check = PositionCheck([Stand(0, "", first), Stand(1, "", late)], stream)
    batch = SimpleNamespace(step=3, index=3, place=late)
    for error in (feeder.ResumeError, feeder.ClosedError):  # It is told once.
        with pytest.raises(error):
            check.check([batch])


# ---- where all positions are of one round only if an epoch has ended there

COUNTING = Counting(2, per_epoch=True)
NEXT = COUNTING.number(Place(1, 0, 0))
VOID = Void(2, NEXT, (4, 3))
"""Some stand before batch 2 of epoch 0, of which queue 0 has had its own; others at epoch 1."""


@pytest.mark.parametrize(
    ("last_round", "at", "fits"),
    [
        ("uneven", (0, 2), True),  # That of queue 0, which wants batch 4 of it next.
        ("uneven", (0, 3), False),
        ("uneven", (0, 4), False),
        ("uneven", (1, 0), True),
        ("uneven", (1, 3), True),
        ("pad", (0, 2), False),
        ("pad", (0, 1), True),
        ("pad", (1, 0), True),
    ],
)
def test_no_batch_may_come_that_somebody_of_them_lacks(
    last_round: str, at: tuple[int, int], fits: bool
) -> None:
    stream: Any = SimpleNamespace(repeatable=True, last_round=last_round, rounds="epoch")
    cut: Any = SimpleNamespace(step=0)
    check = PositionCheck([Stand(0, "queue 0", cut)], stream, COUNTING, VOID)
    batch: Any = SimpleNamespace(epoch=at[0], index=at[1], step=7, rows=4, place=None)
    if fits:
        check.check([batch])
        assert check.error is None
    else:
        with pytest.raises(
            feeder.ResumeError, match=rf"some are of batch {at[1] // 2 * 2} of epoch 0"
        ):
            check.check([batch])


def test_once_the_next_epoch_has_come_nothing_is_looked_for() -> None:
    stream: Any = SimpleNamespace(repeatable=True, last_round="pad", rounds="epoch")
    cut: Any = SimpleNamespace(step=0)
    check = PositionCheck([Stand(0, "queue 0", cut)], stream, COUNTING, VOID)
    for epoch, index in ((1, 0), (0, 2)):
        check.check([SimpleNamespace(epoch=epoch, index=index, step=7, rows=4, place=None)])  # type: ignore[list-item]
    assert check.error is None


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("epoch", "fits"), [(1, True), (2, False)])
def test_the_end_of_an_epoch_fits_the_start_of_the_next_alone(
    order: tuple[int, int], epoch: int, fits: bool
) -> None:
    """Its last round may be of fewer batches, which a position cannot know."""
    feed = Membership(2, 30.0, counting=COUNTING)
    starts = Start(5, epoch=0, index=5), Start(5, epoch=epoch, index=0)
    done = [
        one for queue in order
        for one in feed.handle(Asks(queue, "somebody", start=starts[queue]), 0.0)
    ]  # fmt: skip
    assert any(isinstance(one, Refuse) for one in done) == (not fits)
