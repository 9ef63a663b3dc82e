"""Who has had everything is not waited for, however its connection ends; and where others stand."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from feeder.errors import FeedError
from feeder.service.protocol import membership as ms
from feeder.service.protocol.seats import seat_names

LEASE_S = 30.0


class At(NamedTuple):
    """A position."""

    step: int
    epoch: int = 0
    index: int = 0


def come(feed: ms.Membership, queue: int, number: int, **how: Any) -> list[Any]:
    """A consumer comes for a queue and can take batches."""
    feed.handle(ms.Asks(queue, f"trainer {queue}", bytes([queue, number]), number, **how), 0.0)
    return feed.handle(ms.Attaches(queue), 0.0)


def three() -> ms.Membership:
    """Three consumers, of which the one of queue 0 has had everything."""
    feed = ms.Membership(3, LEASE_S)
    for queue in range(3):
        come(feed, queue, 0)
    feed.members[0].note_sent(1, At(1))
    feed.members[0].ending = "end"
    feed.handle(ms.Used(0, 1, 0, At(1), begun=True), 1.0)
    assert feed.missing() == []
    return feed


def dies_and_comes_back(feed: ms.Membership, queue: int) -> list[Any]:
    """A trainer dies; one that comes back has the feed begin again."""
    feed.handle(ms.Died(queue), 2.0)
    return come(feed, queue, 1, start=ms.Start(queue), rejoins=True)


def begins(done: list[Any]) -> bool:
    return any(isinstance(one, ms.StartRun) for one in done)


@pytest.mark.parametrize("could_take_batches", [False, True])
def test_who_had_everything_and_was_cut_off_as_it_came_back_is_not_waited_for(
    could_take_batches: bool,
) -> None:
    feed = three()
    start = ms.Start(3, finished=True)
    if could_take_batches:
        come(feed, 0, 1, start=start, rejoins=True, takes_over=True)
    else:
        feed.handle(ms.Asks(0, "trainer 0", bytes([0, 0]), 1, start, rejoins=True), 1.0)
    feed.handle(ms.Died(0), 1.0)
    assert feed.missing() == []
    assert begins(dies_and_comes_back(feed, 1))


def test_who_had_everything_and_is_silent_is_not_waited_for() -> None:
    feed = three()
    for queue in (1, 2):
        feed.handle(ms.Used(queue), LEASE_S)
    feed.handle(ms.Ticked(), LEASE_S + 2.0)
    assert feed.members[0].hangs
    assert feed.missing() == []
    assert begins(dies_and_comes_back(feed, 1))


@pytest.mark.parametrize(
    ("known", "passed", "differs", "doubted"),
    [
        ([], (), 2, [0, 2]),
        # Two of three agree, and it is not known with what.
        ([], (1,), 2, [2]),
        ([], (1, 2), None, []),
        ([1], (1,), 2, [2]),
        ([1], (1,), None, []),
        ([2], (1,), None, [0, 1]),
        ([2], (), None, [0, 1]),
    ],
)
def test_who_agrees_with_one_that_is_known_to_stand_right_is_not_doubted(
    known: list[int], passed: tuple[int, ...], differs: int | None, doubted: list[int]
) -> None:
    run = ms.RunMembers(ms.Membership(3, LEASE_S).members, 2)
    for seat in known:
        run.members[seat].agrees = True
    run.settle(passed)
    failed = ms.Failed(FeedError("it broke"), differs, at_start=True)
    assert [member.seat for member in run.doubted(failed)] == doubted


def test_an_undecided_one_that_is_gone_is_not_waited_for() -> None:
    feed = three()
    feed.handle(ms.Left(0), 1.0)
    # The others are known to have gone on: whoever is undecided may be about to load a state.
    feed.handle(ms.Used(1, 1, 0, At(8)), 1.0)
    feed.handle(ms.Asks(0, "another", bytes([9, 0]), 0, None, False, True), 1.0)
    feed.handle(ms.Died(0), 1.0)
    assert feed.missing() == []
    assert begins(dies_and_comes_back(feed, 2))


def test_who_comes_back_does_not_wait_for_one_that_has_not_asked_and_is_part_of_the_run() -> None:
    feed = ms.Membership(2, LEASE_S)
    come(feed, 0, 0, undecided=True)
    assert begins(come(feed, 1, 0, undecided=True))
    for queue in range(2):
        feed.members[queue].note_sent(1, At(queue + 1))
    feed.handle(ms.Used(1, 1, 0, At(2), begun=True), 1.0)
    feed.handle(ms.Died(1), 2.0)
    assert begins(come(feed, 1, 1, start=ms.Start(6), rejoins=True))


def test_who_starts_where_a_state_says_waits_until_the_others_have_loaded_theirs() -> None:
    feed = ms.Membership(2, LEASE_S)
    for queue in range(2):
        come(feed, queue, 0, undecided=True)
    feed.handle(ms.Left(1), 1.0)
    assert not begins(come(feed, 1, 1, start=ms.Start(6)))
    assert feed.missing() == [0]
    feed.handle(ms.Left(0), 1.0)
    assert begins(come(feed, 0, 1, start=ms.Start(6)))


def test_the_rounds_of_queues_that_had_everything() -> None:
    feed = ms.Membership(3, LEASE_S)
    feed.handle(ms.Asks(0, "first", start=ms.Start(7, finished=True)), 0.0)
    for queue, step in ((1, 7), (2, 8), (1, 6), (2, 9)):
        asked = ms.Asks(queue, "other", start=ms.Start(step))
        assert not any(isinstance(one, ms.Refuse) for one in feed.handle(asked, 0.0))
        feed.handle(ms.Left(queue), 0.0)
    for queue, step in ((1, 2), (2, 12)):
        (refused,) = feed.handle(ms.Asks(queue, "other", start=ms.Start(step)), 0.0)
        assert "queue 0's checkpoint is of step 6 (round 2)" in str(refused.error)


def test_a_queue_whose_consumer_lives_has_not_ended_whatever_others_say() -> None:
    feed = ms.Membership(2, LEASE_S)
    feed.handle(ms.Asks(0, "one that lives", start=ms.Start(6), rejoins=True, ended=(0, 1)), 0.0)
    assert [member.ended for member in feed.members] == [ms.Ended.NO, ms.Ended.HEARSAY]


@pytest.mark.parametrize(
    ("num", "replicas", "words"),
    (
        (2, 1, "queue 0, 1"),
        (10, 1, "queue 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"),
        (4096, 1, "queue 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, and 4086 more"),
        (2, 2, "queue 0, replica 0; queue 0, replica 1"),
    ),
)
def test_seats_in_words(num: int, replicas: int, words: str) -> None:
    assert seat_names(range(num), replicas) == words


def test_what_is_known_of_an_end_is_not_made_hearsay() -> None:
    feed = three()
    feed.handle(ms.Left(0), 1.0)
    feed.handle(ms.Died(1), 2.0)
    done = come(feed, 1, 1, start=ms.Start(1), rejoins=True, ended=(0,))
    assert begins(done) and feed.members[0].ended is ms.Ended.YES


@pytest.mark.parametrize(
    ("consumer", "fences"), [(bytes(2), False), (b"another", True)], ids=["the same", "another"]
)
def test_who_takes_a_queue_over_fences_any_other_consumer(consumer: bytes, fences: bool) -> None:
    """And not the one that has lost its own connection."""
    feed = ms.Membership(1, LEASE_S)
    come(feed, 0, 0)
    gone, *_ = feed.handle(ms.Asks(0, "trainer 0", consumer, 1, takes_over=True), 1.0)
    assert (type(gone), gone.fences) == (ms.SendAway, fences)


def test_time_is_told_when_hearsay_counts_no_more() -> None:
    feed = ms.Membership(2, LEASE_S)
    feed.handle(ms.Asks(0, "one that lives", rejoins=True, ended=(1,)), 5.0)
    feed.members[0].expires = 100.0
    feed.handle(ms.Ticked(), 6.0)
    assert feed.look_at == 5.0 + LEASE_S


def test_who_comes_back_again_waits_for_others_anew() -> None:
    feed = ms.Membership(2, LEASE_S)
    for now in (0.0, 40.0):
        feed.handle(ms.Asks(0, "trainer 0", bytes([0, int(now)]), rejoins=True), now)
        assert feed.handle(ms.Attaches(0), now) == [ms.StopRun()]
        assert feed.handle(ms.Ticked(), now + ms.RETURN_S - 0.1) == []
        assert begins(feed.handle(ms.Ticked(), now + ms.RETURN_S))
        feed.handle(ms.Died(0), now + ms.RETURN_S + 1.0)


def test_who_may_not_start_is_refused_a_lease_after_that_came_to_be() -> None:
    feed = ms.Membership(2, LEASE_S)
    come(feed, 0, 0, start=ms.Start(6))
    feed.members[0].ending = "end"
    come(feed, 1, 0, undecided=True)
    asks = ms.Used(1, begun=True)
    assert feed.handle(asks, 1.0) == [], "who is sent the end leaves by itself"
    feed.handle(ms.Left(0), 20.0)
    feed.handle(ms.Asks(0, "another", b"another", 0, ms.Start(6)), 20.0)
    refused = [feed.handle(asks, now) for now in (21.0, 50.9, 51.0)]
    assert [[type(one) for one in done] for done in refused] == [[], [], [ms.SendAway, ms.StopRun]]
