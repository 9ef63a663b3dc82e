"""Which calls count as quick."""

from __future__ import annotations

from collections.abc import Iterable

from feeder.workers.fetch.policy import Pace, Trials
from feeder.workers.tuning import TUNING

QUICK_CALL_S, QUICK_LIST_S = TUNING.quick_call_s, TUNING.quick_list_s
QUICK_WAIT_S = TUNING.quick_wait_s


def quick_share(chunk_lists: Iterable[tuple[int, float]], *, waited: bool = False) -> float:
    """The share of chunk lists, each of so many calls that took so long, and waited or computed,
    before which calls counted as quick."""
    pace, now, told = Pace(Trials(TUNING), TUNING), 1000.0, [False]
    for num_calls, took in chunk_lists:
        now += took
        told.append(pace.note(num_calls, took, took * waited, now))
    return sum(told[:-1]) / (len(told) - 1)


def test_calls_that_take_next_to_no_time_are_quick_from_the_second_chunk_list_on() -> None:
    assert quick_share([(100, 0.0002)] * 1000) == 0.999


def test_calls_that_take_longer_are_tried_now_and_then() -> None:
    assert quick_share([(1, 2 * QUICK_CALL_S)] * 100_000) < 0.01
    assert quick_share([(500, 1.5 * QUICK_LIST_S)] * 10_000) < 0.01


def test_what_computes_may_take_longer_than_what_waits() -> None:
    """Rows that are made one by one take some milliseconds a chunk list; who waits as long for a
    file holds up others that could be waiting at the same time."""
    chunk_lists = [(500, 0.5 * (QUICK_WAIT_S + QUICK_LIST_S))] * 10_000
    assert quick_share(chunk_lists) > 0.99
    assert quick_share(chunk_lists, waited=True) < 0.01


def test_a_wait_that_says_nothing_of_the_calls_does_not_count() -> None:
    pace = Pace(Trials(TUNING), TUNING)
    long = 2 * QUICK_LIST_S
    assert all(pace.note(100, long, long - 0.0002, 1000.0 + i, 0.0) for i in range(100))
    pace.note(100, long, long - 0.0002, 2000.0, QUICK_WAIT_S)
    assert not pace.note(100, long, long - 0.0002, 2000.0, QUICK_WAIT_S)


def test_calls_of_a_millisecond_are_not_tried() -> None:
    """While one is made in the belief that it is quick, other workers wait for it."""
    assert quick_share([(1, 1.1 * QUICK_WAIT_S)] * 10_000) == 0.0
    assert quick_share([(20, 25 * QUICK_WAIT_S)] * 10_000) == 0.0


def test_a_wait_in_between_does_not_count_and_a_long_call_does() -> None:
    assert quick_share([*[(50, 0.0001)] * 99, (1, 0.0001)] * 100) > 0.99
    # A file of 3,000 rows is read, and its rows are given one by one.
    assert quick_share([*[(500, 0.0002)] * 5, (500, 0.003)] * 2000) < 0.05


def test_what_was_slow_once_is_quick_again() -> None:
    slow, quick = [(10, 0.01)] * 1000, [(100, 0.0002)] * 100_000
    assert quick_share([*slow, *quick]) > 0.8


def test_a_chunk_list_without_a_call_says_nothing() -> None:
    assert quick_share([(0, 0.00001)] * 1000) == 0.999


def test_partitions_are_tried_again_at_the_same_time() -> None:
    """One that is quick waits for the interpreter beside one that is not, so that each by itself
    would fail for ever."""
    trials, now = Trials(TUNING), 1000.0
    paces = [Pace(trials, TUNING) for _ in range(3)]
    for pace in paces:
        assert pace.note(100, 0.0002, 0.0, now)
        assert pace.note(100, 0.0002, 0.0, now)
    for i, pace in enumerate(paces):
        pace.note(100, 0.004, 0.003, now + 0.03 * i)
        assert not pace.note(100, 0.004, 0.003, now + 0.03 * i)
    again = trials.next
    assert now < again < now + 0.2
    for pace in paces:
        assert not pace.note(100, 0.0002, 0.0, again - 0.001)
        assert pace.note(100, 0.0002, 0.0, again)


def test_the_pause_grows_by_one_failure_of_many_partitions() -> None:
    trials, now, pauses = Trials(TUNING), 1000.0, []
    for _ in range(9):
        trials.begin(now)
        for _ in range(64):
            trials.fail(now)
        pauses.append(round(trials.next - now, 3))
        now = trials.next + 100
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 3.2, 3.2, 3.2]


def test_the_pause_is_short_again_after_calls_that_were_quick_for_long() -> None:
    """However long ago they were tried, and not by how long nobody fetched."""
    trials, now = Trials(TUNING), 1000.0
    for _ in range(5):
        trials.begin(now)
        trials.fail(now)
        now = trials.next
    trials.begin(now)
    trials.begin(now + 90)
    trials.fail(now + 100)
    assert round(trials.next - now - 100, 3) == 0.1
