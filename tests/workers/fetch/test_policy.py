"""Which call is made next, how far calls run ahead of the merge, how large chunk lists are: rules,
a clock in hand."""

from __future__ import annotations

import numpy as np
import pytest

from feeder.workers.fetch.policy import ConcurrencyPolicy
from feeder.workers.fetch.scheduler import (
    BufferBudget,
    Called,
    CallsReport,
    End,
    ListLimits,
    Partition,
    Scheduler,
)
from feeder.workers.stream.position import Partitions
from feeder.workers.tuning import Tuning

NUM_PARTITIONS, BATCH = 4, 4
TUNING = Tuning(max_computing=1)

COMPUTES = CallsReport(1, 1, 8, 0.004, 0.0)


class Stage:
    """A policy, its clock, and fetchers and a merge that do what a test says."""

    def __init__(self, tuning: Tuning = TUNING, num_partitions: int = NUM_PARTITIONS) -> None:
        partitions = Partitions(num_partitions=num_partitions, pure=False, arrival=False)
        self.now = 1000.0
        self.budget = BufferBudget(1000, 10**12, 1)
        self.scheduler = Scheduler(partitions, partitions.origin(), 1, tuning)
        self.policy = ConcurrencyPolicy(self.scheduler, self.budget, BATCH, tuning)
        self.partitions = self.scheduler.partitions

    def pick(self) -> Partition | None:
        """A fetcher asks for a partition, and holds it."""
        found = self.policy.pick(1)
        assert self.policy.has_work() is bool(found)
        for partition in found:
            self.hold(partition)
        return found[0] if found else None

    def hold(self, partition: Partition) -> ListLimits:
        """A fetcher calls a partition."""
        limits = self.policy.list_limits()
        self.budget.begin_calls(1)
        self.scheduler.hold(partition, 1, limits, self.now)
        partition.begin_calls(self.now)
        return limits

    def give_back(self, partition: Partition, report: CallsReport, put_off_s: float = 0.0) -> bool:
        """It gives the partition back after some calls; whether the merge is woken."""
        partition.chunks.append((np.zeros(1),))
        self.scheduler.give_back(Called(partition, report, None, put_off_s), self.now, False)
        self.policy.note_calls(partition, report)
        self.budget.end_calls(report)
        return self.policy.lists_came(self.now)

    def make_all(self, report: CallsReport) -> None:
        """The calls of all partitions came to this; the merge has all chunk lists."""
        for partition in self.partitions:
            for _ in range(2):
                self.hold(partition)
                self.give_back(partition, report)
        self.collect(0)

    def collect(self, number: int) -> None:
        """The merge asks for a partition, and takes everything or waits for it."""
        wanted = self.scheduler.partitions_of(number)
        if self.policy.merge_collects(wanted):
            self.policy.merge_resumes()
            self.scheduler.take_all()
            self.budget.collect()
            self.budget.add(-self.budget.rows, -self.budget.bytes)
        else:
            self.policy.enqueuer_waits()
            self.policy.merge_waits(wanted, self.now)


@pytest.mark.parametrize(("rows", "ahead"), [(1, 251), (50, 6), (500, 2)])
def test_a_partition_is_called_ahead_of_the_merge_by_its_share_of_the_bound(
    rows: int, ahead: int
) -> None:
    """Else a few would take all room, while those whose turn comes before are slow."""
    stage = Stage(TUNING.replace(max_computing=NUM_PARTITIONS))
    report = COMPUTES._replace(rows=rows)
    stage.make_all(report)
    stage.collect(1)
    first, second, third, fourth = stage.partitions
    assert (second.made, stage.pick()) == (2, second)
    first.made, third.made, fourth.made = 1 + ahead, 2 + ahead, 3 + ahead
    assert stage.pick() is first
    assert stage.pick() is None
    # In order of arrival the merge takes what comes.
    stage.policy.merge_collects(stage.partitions)
    assert stage.pick() is third


@pytest.mark.parametrize("num_partitions", [1, 2, 4])
@pytest.mark.parametrize("row_bytes", [1024, 2**16, 2**18])
@pytest.mark.parametrize(
    ("max_batches", "max_mib"), [(20, None), (1000, 16), (1000, 32), (1000, 64), (1000, 1)]
)
def test_chunk_lists_together_stay_within_the_bound_and_half_of_its_bytes(
    num_partitions: int, row_bytes: int, max_batches: int, max_mib: int | None
) -> None:
    """Or are a batch each, if that is more."""
    stage = Stage(num_partitions=num_partitions)
    budget = stage.budget
    budget.max_rows, budget.rows, budget.bytes = max_batches * BATCH, 0, 0
    budget.max_bytes = 10**12 if max_mib is None else max_mib * 2**20
    budget.learn(row_bytes)
    budget.list_bytes = 0
    total = 0
    for partition in stage.partitions:
        limits = stage.hold(partition)
        assert limits.rows >= BATCH and limits.rows * row_bytes <= TUNING.list_bytes
        assert limits.calls == min(limits.rows, TUNING.list_calls)
        total += limits.rows
    assert total <= max(BATCH * num_partitions, max_batches * BATCH)
    if max_mib is not None:
        assert total * row_bytes <= max(BATCH * num_partitions * row_bytes, max_mib * 2**19)


def test_slots_are_taken_for_what_fetchers_fill_at_a_time_and_fit_into_the_bound() -> None:
    stage = Stage()
    ahead = stage.policy.batches_ahead
    stage.budget.learn(1_000_000)  # 4 MB a batch, four of which are a chunk list.
    assert (ahead(1), ahead(3), ahead(10)) == (1 + 4 + 4, 1 + 2 + 4, 1 + 1 + 4)
    stage.budget.queue(0, 247)
    assert ahead(1) == 3
    stage.budget.queue(0, 100)
    assert ahead(1) == 1, "the next batch always gets a slot"


def test_a_partition_with_something_to_collect_is_called_below_8_mib_or_for_a_waiting_merge() -> (
    None
):
    stage = Stage(TUNING.replace(max_computing=NUM_PARTITIONS))
    stage.make_all(COMPUTES)
    for partition in stage.partitions:
        assert stage.pick() is partition
        stage.give_back(partition, COMPUTES)
    stage.budget.ahead_bytes = TUNING.ahead_bytes - 1
    assert stage.policy.pick(1)
    stage.budget.ahead_bytes = TUNING.ahead_bytes
    assert not stage.policy.pick(1)
    stage.scheduler.want(stage.scheduler.partitions_of(0), stage.now)
    assert stage.policy.pick(1)


@pytest.mark.parametrize("why", ["grace", "looks late", "bound"])
def test_after_the_grace_the_merge_is_woken_once(why: str) -> None:
    stage = Stage()
    stage.collect(0)
    first, second = stage.pick(), stage.pick()
    assert first is not None and second is not None
    if why == "grace":
        stage.now += 1.1 * TUNING.grace_s
    elif why == "looks late":
        stage.policy.look_in(TUNING.slow_look_s)
    else:
        stage.budget.add(2000, 0)
    assert stage.give_back(first, COMPUTES)
    # The mark is cleared by who notifies: the next does not notify again.
    assert first.wanted_since is None
    assert not stage.give_back(second, COMPUTES)


def test_partitions_are_called_in_turn_and_those_that_are_put_off_when_their_time_has_come() -> (
    None
):
    stage = Stage(num_partitions=2)
    scheduler, (first, second) = stage.scheduler, stage.partitions
    for partition, put_off_s in ((first, 7.5), (second, 7.0)):
        assert stage.pick() is partition
        stage.give_back(partition, COMPUTES, put_off_s)
    for put_off_s, partition in ((7.0, second), (7.5, first)):
        ready_at = stage.now + put_off_s
        assert scheduler.pause_ends == ready_at and stage.pick() is None
        scheduler.end_pauses(ready_at)
        assert stage.pick() is partition


def test_rows_kept_beside_their_copies_count_in_the_bound() -> None:
    budget = BufferBudget(10, 100, 1)
    budget.add(4, 40, 5)
    assert budget.below_bound
    budget.learn(12)
    assert not budget.below_bound
    budget.learn(0)
    budget.add(0, 0, 1)
    assert not budget.below_bound


def test_a_turn_has_as_many_partitions_as_there_is_room_for() -> None:
    stage = Stage(TUNING.replace(max_computing=NUM_PARTITIONS))
    first, second, *_ = stage.partitions
    first.made = 1
    assert stage.policy.pick(1) == [second]
    # From the one on that was called least.
    assert stage.policy.pick(9) == [*stage.partitions[1:], first]
    assert stage.policy.pick(2) == [*stage.partitions[1:3]]
    stage.budget.max_rows, stage.budget.rows = 2 * BATCH, 0
    assert len(stage.policy.pick(9)) == 2
    stage.budget.max_rows, stage.budget.max_bytes, stage.budget.list_bytes = 1000, 100, 30
    assert len(stage.policy.pick(9)) == 3
    stage.budget.bytes = 100
    assert not stage.policy.pick(9)


def test_a_turn_has_one_partition_while_nobody_looks_soon() -> None:
    stage = Stage(TUNING.replace(max_computing=NUM_PARTITIONS))
    stage.collect(0)
    assert len(stage.policy.pick(9)) == NUM_PARTITIONS
    assert [*stage.policy.enqueuer_looks()] == [stage.partitions[0]]
    assert stage.policy.pick(9) == [stage.partitions[0]]


# ---- which call is made next


def make_scheduler(num_partitions: int, *, pure: bool) -> Scheduler:
    partitions = Partitions(num_partitions=num_partitions, pure=pure, arrival=False)
    return Scheduler(partitions, partitions.spread(partitions.origin()), 2)


def pick(scheduler: Scheduler) -> Partition | None:
    """The partition whose turn it is, of all."""
    return next(scheduler.in_turn(scheduler.ready), None)


def hold(scheduler: Scheduler, partition: Partition) -> None:
    scheduler.hold(partition, 1, ListLimits(1, 1, 1, 0.0), 0.0)


def give_back(scheduler: Scheduler, partition: Partition, ending: End | None = None) -> bool:
    return scheduler.give_back(Called(partition, CallsReport(1, 1), ending), 0.0, False)


def test_what_was_handed_over_is_known_until_it_is_collected() -> None:
    scheduler = make_scheduler(3, pure=False)
    for partition in scheduler.partitions[1:]:
        hold(scheduler, partition)
        partition.chunks.append((np.zeros(1),))
    give_back(scheduler, scheduler.partitions[2])
    assert scheduler.handed == 0b100
    assert scheduler.take_open(scheduler.partitions, marked=False) == [scheduler.partitions[1]]
    assert scheduler.handed == 0b110
    assert [chunk_list.partition for chunk_list in scheduler.take_all()] == [1, 2]
    assert (scheduler.handed, scheduler.running) == (0, 0b010)


def test_chunk_lists_without_rows_are_bounded_by_their_number() -> None:
    scheduler = make_scheduler(1, pure=False)
    (partition,) = scheduler.partitions
    for _ in range(TUNING.max_lists):
        assert pick(scheduler) is partition
        hold(scheduler, partition)
        partition.chunks.append((np.zeros(0),))
        give_back(scheduler, partition)
    assert pick(scheduler) is None
    assert len(scheduler.take_all()) == TUNING.max_lists
    assert pick(scheduler) is partition


def test_only_calls_of_batches_that_have_a_slot_are_made() -> None:
    """Of two partitions the calls 0, 2, 4 and 1, 3, 5: those before call 3 of epoch 0 may be made,
    and all of another epoch."""
    scheduler = make_scheduler(2, pure=True)
    one, other = scheduler.partitions
    assert not scheduler.has_places
    scheduler.allow((0, 3))
    assert scheduler.has_places
    assert [scheduler.num_allowed(partition) for partition in (one, other)] == [2, 1]
    for partition in (one, other):
        scheduler.hold(partition, 1, ListLimits(100, 100, 100, 0.0), 0.0)
    assert [partition.limits.calls for partition in (one, other)] == [2, 1]
    for partition, calls in ((one, 2), (other, 1)):
        partition.chunks.extend([()] * calls)
        give_back(scheduler, partition)
    assert list(scheduler.in_turn(scheduler.ready)) == []
    scheduler.allow((0, 4))
    assert list(scheduler.in_turn(scheduler.ready)) == [other]
    scheduler.allow((1, 0))
    assert set(scheduler.in_turn(scheduler.ready)) == {one, other}
    scheduler.allow(None)
    assert set(scheduler.in_turn(scheduler.ready)) == {one, other}
