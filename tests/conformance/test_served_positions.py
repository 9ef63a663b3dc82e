"""Positions of a served feed are those of one in process, byte by byte, and either takes both."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.served import reading, served, serving
from feeder import ResumeError
from feeds import Record, assert_same, expected, make, note, running
from fetches import BATCH_SIZE, FORMS, make_fetch

pytestmark = pytest.mark.served

EPOCHS = 2


def stream_of(form: str, pattern: str = "ragged", **settings: Any) -> list[Record]:
    """Return a stream whose epochs end in a part of a batch, so that no cut depends on whether
    the end of the epoch was known when it was made."""
    stream = expected(make_fetch(form, pattern), pure=form == "pure", epochs=EPOCHS, **settings)
    ends = [one for one, two in zip(stream, [*stream[1:], None], strict=True)
            if two is None or two[0] != one[0]]  # fmt: skip
    assert len(ends) == EPOCHS and all(end[3] < BATCH_SIZE for end in ends)
    return stream


def position_in(feed: Any, coordinator: Any) -> tuple[Any, ...]:
    """Return all forms of where a feed stands."""
    batch = next(feed)
    cut = batch.cut
    place = cut.epoch, cut.index, cut.step, cut.finished, cut.token()
    return note(batch), place, coordinator.state_dict(), bytes(coordinator.snapshot())


@pytest.mark.parametrize(
    ("transport", "form", "pattern", "repeatable"),
    [
        ("shared", "replay", "ragged", True),
        ("shared", "seek", "small", True),
        ("shared", "seek", "ragged", False),
        ("shared", "pure", "small", False),
        ("ipc", "pure", "ragged", True),
        ("tcp", "pure", "small", True),
    ],
)
def test_positions_are_those_of_the_feed_in_process(
    transport: str, form: str, pattern: str, repeatable: bool
) -> None:
    settings = {"epochs": EPOCHS, "repeatable": repeatable}
    num = len(stream_of(form, pattern))
    with running(make_fetch(form, pattern), **settings) as (coordinator, feed):
        before = coordinator.state_dict()
        wanted = [position_in(feed, coordinator) for _ in range(num)]
        assert next(feed, None) is None
        after = coordinator.state_dict()
    with served(transport, make(make_fetch(form, pattern), **settings)) as seen:
        assert seen.state_dict() == before
        got = [position_in(seen, seen) for _ in range(num)]
        assert next(seen, None) is None
        assert seen.state_dict() == after
    for i, (mine, its) in enumerate(zip(got, wanted, strict=True)):
        assert mine == its, i


@pytest.mark.parametrize("form", FORMS)
def test_state_is_loaded_into_a_fresh_consumer_alone(form: str) -> None:
    stream = stream_of(form)
    with running(make_fetch(form, "ragged"), epochs=EPOCHS) as (coordinator, feed):
        for _ in range(5):
            next(feed)
        state = coordinator.state_dict()
    with (
        serving(lambda: make(make_fetch(form, "ragged"), epochs=EPOCHS)) as server,
        reading(server) as consumer,
    ):
        consumer.load_state_dict(state)
        assert consumer.state_dict() == state
        assert_same([note(next(consumer))], stream[5:6])
        with pytest.raises(ResumeError, match="handed out already"):
            consumer.load_state_dict(state)
        assert_same([note(batch) for batch in consumer], stream[6:])
