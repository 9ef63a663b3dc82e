"""Where all positions are of one round only if an epoch has ended there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from feeder.errors import ResumeError
from feeder.service.protocol.events import Void
from feeder.service.protocol.membership import Asks, Membership, Refuse, Start
from feeder.service.server.position_check import PositionCheck, Stand
from feeder.workers.stream.rounds import Counting
from feeder.workers.stream.shares import Place

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
        with pytest.raises(ResumeError, match=rf"some are of batch {at[1] // 2 * 2} of epoch 0"):
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
