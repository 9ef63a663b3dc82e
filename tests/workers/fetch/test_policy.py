"""How many calls run at once, how large chunk lists are and who merges them: rules, a clock in
hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from feeder.workers.fetch.policy import CallKind, CallsReport, ConcurrencyPolicy, Merger
from feeder.workers.fetch.scheduler import BufferBudget, ListLimits, Partition, Scheduler
from feeder.workers.stream.position import Partitions
from feeder.workers.tuning import Tuning

NUM_PARTITIONS, BATCH = 4, 4
TUNING = Tuning(max_computing=1)
LIMITS = ListLimits(1, 1, 1, 0.0)

QUICK = CallsReport(100, 10, 800, 0.0002, 0.0)
COMPUTES = CallsReport(1, 1, 8, 0.004, 0.0)
WAITS = CallsReport(1, 1, 8, 0.004, 0.0035)


class Stage:
    """A policy, its clock, and fetchers and a merge that do what a test says."""

    def __init__(self, tuning: Tuning = TUNING, num_partitions: int = NUM_PARTITIONS) -> None:
        partitions = Partitions(num_partitions=num_partitions, pure=False, arrival=False)
        self.tuning, self.now = tuning, 1000.0
        self.budget = BufferBudget(1000, 10**12, 1)
        self.scheduler = Scheduler(partitions, partitions.origin(), 1, tuning)
        self.policy = ConcurrencyPolicy(self.scheduler, self.budget, BATCH, tuning)
        self.partitions = self.scheduler.partitions

    def pick(self) -> Partition | None:
        """A fetcher asks for a partition, and holds it."""
        partition = self.policy.pick(self.now)
        if partition is not None:
            self.budget.begin_list()
            partition.hold(1, self.policy.limits_of(partition), self.now)
            partition.begin_calls(self.now)
        return partition

    def give_back(self, partition: Partition, report: CallsReport = COMPUTES) -> Merger:
        """It gives the partition back after some calls."""
        partition.chunks.append((np.zeros(1),))
        self.budget.end_list(report.calls, report.rows, report.num_bytes)
        self.scheduler.give_back(partition, None, ready_at=0.0, gave_rows=True, marked=False)
        return self.policy.list_came(partition, report, self.now)

    def call(self, report: CallsReport) -> Merger:
        """Both of them."""
        partition = self.pick()
        assert partition is not None
        return self.give_back(partition, report)

    def make_all(self, report: CallsReport, kind: CallKind) -> None:
        """Teach the policy what the calls of all partitions are like; the merge has all chunk
        lists."""
        for partition in self.partitions:
            for _ in range(2):
                partition.hold(1, LIMITS, self.now)
                self.budget.begin_list()
                self.give_back(partition, report)
        assert {self.policy.kind_of(partition) for partition in self.partitions} == {kind}
        self.collect(0)

    def collect(self, number: int) -> bool:
        """The merge asks for a partition, and takes everything or waits for it."""
        wanted = self.scheduler.partitions_of(number)
        if self.policy.merge_collects(wanted):
            self.policy.merge_resumes()
            self.scheduler.take_all()
            self.budget.collect()
            self.budget.add(-self.budget.rows, -self.budget.bytes)
            return True
        self.policy.batcher_waits()
        self.policy.merge_waits(wanted, self.now)
        return False


# ---- how many compute


def test_before_the_merge_has_anything_all_may_compute() -> None:
    stage = Stage()
    held = [stage.pick() for _ in range(NUM_PARTITIONS)]
    assert {partition.number for partition in held if partition} == set(range(NUM_PARTITIONS))
    assert stage.pick() is None


@pytest.mark.parametrize("most", [1, 2, 3])
def test_beside_a_busy_merge_some_compute(most: int) -> None:
    stage = Stage(replace(TUNING, max_computing=most))
    stage.make_all(COMPUTES, CallKind.COMPUTES)
    assert [stage.pick() is not None for _ in range(NUM_PARTITIONS)].count(True) == most
    # A merge that has to wait lets all of them go on.
    assert not stage.collect(0)
    assert [stage.pick() is not None for _ in range(NUM_PARTITIONS)].count(True) == 4 - most


def test_beside_a_busy_merge_any_number_wait() -> None:
    stage = Stage()
    stage.make_all(WAITS, CallKind.WAITS)
    assert all(stage.pick() for _ in range(NUM_PARTITIONS))


def test_a_partition_with_something_to_collect_is_called_below_8_mib_or_for_a_waiting_merge() -> (
    None
):
    stage = Stage(replace(TUNING, max_computing=NUM_PARTITIONS))
    stage.make_all(COMPUTES, CallKind.COMPUTES)
    for _ in range(NUM_PARTITIONS):
        stage.call(COMPUTES)
    stage.budget.ahead_bytes = TUNING.ahead_bytes - 1
    assert stage.policy.pick(stage.now) is not None
    stage.budget.ahead_bytes = TUNING.ahead_bytes
    assert stage.policy.pick(stage.now) is None
    stage.scheduler.want(stage.scheduler.partitions_of(0), stage.now)
    assert stage.policy.pick(stage.now) is not None


def test_what_the_merge_waits_for_goes_before_what_has_been_called_least() -> None:
    stage = Stage()
    stage.make_all(COMPUTES, CallKind.COMPUTES)
    stage.partitions[3].made = 9
    assert not stage.collect(3)
    assert stage.pick() is stage.partitions[3]
    assert stage.pick() is stage.partitions[0]


def test_at_the_bound_the_call_whose_turn_it_is_starts_alone_and_while_a_device_starves() -> None:
    stage = Stage()
    stage.budget.add(1000, 0)
    assert not stage.collect(2)
    stage.budget.queue(0, 1)
    assert stage.pick() is None
    stage.budget.queue(0, -1)
    assert stage.pick() is stage.partitions[2]
    assert stage.pick() is None


def test_where_bytes_are_short_one_of_several_that_are_wanted_is_enough() -> None:
    stage = Stage()
    stage.budget.max_bytes, stage.budget.list_bytes = 100, 100
    stage.policy.merge_collects(stage.partitions)
    stage.policy.merge_waits(stage.partitions, stage.now)
    assert stage.pick() is not None
    assert stage.pick() is None


# ---- quick calls


def test_quick_calls_are_made_by_one_thread_which_then_merges() -> None:
    stage = Stage()
    stage.make_all(QUICK, CallKind.QUICK)
    assert stage.pick() is None  # The merge is busy.
    assert not stage.collect(0)
    told = []
    for _ in range(NUM_PARTITIONS):
        partition = stage.pick()
        assert partition is not None and stage.pick() is None
        told.append(stage.give_back(partition, QUICK))
    assert told == [Merger.NOBODY] * 3 + [Merger.FETCHER]
    stage.policy.inline_begins()
    assert stage.pick() is None
    stage.policy.inline_ends()
    stage.policy.merge_waits(stage.scheduler.partitions_of(0), stage.now)
    assert stage.pick() is not None


def test_a_quick_call_that_does_not_return_holds_nobody_up() -> None:
    stage = Stage()
    stage.make_all(QUICK, CallKind.QUICK)
    assert not stage.collect(0)
    first = stage.pick()
    assert first is not None and stage.pick() is None
    look = stage.policy.batcher_looks(stage.now + TUNING.grace_s)
    assert look.is_overdue and look.partitions == (first,)
    assert stage.policy.kind_of(first) is CallKind.COMPUTES
    # Another begins; nobody looks soon whether it is quick, so it holds nobody up either.
    assert stage.pick() is not None and stage.pick() is not None


def test_quick_chunk_lists_of_the_grace_wait_for_each_other_and_later_ones_do_not() -> None:
    stage = Stage()
    stage.make_all(QUICK, CallKind.QUICK)
    assert not stage.collect(0)
    assert stage.call(QUICK) is Merger.NOBODY
    stage.now += 1.1 * TUNING.grace_s
    assert stage.call(QUICK) is Merger.FETCHER


def test_chunks_whose_copy_is_long_are_merged_by_the_batcher_thread() -> None:
    stage = Stage()
    num_bytes = 10 * TUNING.drop_gil_bytes
    large = CallsReport(10, 10, num_bytes, 2 * num_bytes / TUNING.memory_bytes_per_s, 0.0)
    stage.make_all(large, CallKind.COMPUTES)
    small = large._replace(num_bytes=num_bytes - 1)
    stage.give_back(stage.pick() or stage.partitions[0], small)
    assert stage.policy.kind_of(stage.partitions[0]) is CallKind.QUICK


# ---- arrays that are passed on


@pytest.mark.parametrize(
    ("report", "kind"),
    [
        (COMPUTES, CallKind.PASSED),
        (COMPUTES._replace(took=2 * TUNING.passed_call_s), CallKind.COMPUTES),
        (WAITS, CallKind.WAITS),
        # As fast as memory can be filled: it waits for a core or the interpreter.
        (WAITS._replace(num_bytes=10**9), CallKind.PASSED),
        (COMPUTES._replace(calls=2, took=1.5 * TUNING.passed_call_s), CallKind.PASSED),
    ],
)
def test_calls_that_compute_and_are_passed_on_are_merged_inline(
    report: CallsReport, kind: CallKind
) -> None:
    stage = Stage()
    stage.policy.batches_made(copied=0, passed=4)
    stage.make_all(report, kind)
    assert not stage.collect(0)
    stage.now += 2 * TUNING.grace_s
    merger = Merger.FETCHER if kind is CallKind.PASSED else Merger.BATCHER
    assert stage.call(report) is merger
    # Nothing passed on any more: the batcher thread copies beside the fetcher.
    stage.policy.batches_made(copied=1, passed=3)
    stage.collect(0)
    assert not stage.collect(0)
    stage.now += 2 * TUNING.grace_s
    assert stage.call(report) is Merger.BATCHER


# ---- when the merge is woken


def test_within_the_grace_the_batcher_thread_looks_by_itself() -> None:
    stage = Stage()
    assert not stage.collect(0)
    first, second = stage.pick(), stage.pick()
    assert first is not None and second is not None
    assert stage.give_back(first) is Merger.NOBODY
    stage.budget.ahead_bytes = TUNING.ahead_bytes // 2  # Unless much has come.
    assert stage.give_back(second) is Merger.BATCHER


@pytest.mark.parametrize("why", ["grace", "looks late", "bound"])
def test_after_the_grace_it_is_woken_once(why: str) -> None:
    stage = Stage()
    assert not stage.collect(0)
    first, second = stage.pick(), stage.pick()
    assert first is not None and second is not None
    if why == "grace":
        stage.now += 1.1 * TUNING.grace_s
    elif why == "looks late":
        stage.policy.look_in(TUNING.slow_look_s)
    else:
        stage.budget.add(2000, 0)
    assert stage.give_back(first) is Merger.BATCHER
    # The mark is cleared by who notifies: the next does not notify again.
    assert first.wanted_since is None
    assert stage.give_back(second) is Merger.NOBODY


def test_what_nobody_waits_for_wakes_nobody() -> None:
    stage = Stage()
    assert stage.call(COMPUTES) is Merger.NOBODY
    stage.collect(3)
    first = stage.pick()
    assert first is stage.partitions[3]
    stage.now += 1
    assert stage.call(COMPUTES) is Merger.NOBODY


# ---- what the batcher thread looks at


def test_beside_inline_merges_it_looks_at_calls_that_have_become_slow() -> None:
    stage = Stage()
    stage.make_all(QUICK, CallKind.QUICK)
    stage.collect(0)
    first, second, third, _ = stage.partitions
    for partition in (first, second, third):
        partition.hold(1, LIMITS, stage.now)
    stage.policy._kinds[second.number] = stage.policy._kinds[third.number] = CallKind.COMPUTES
    for partition in (first, second):
        partition.begin_calls(stage.now)
    stage.policy.inline_begins()
    later = stage.now + 1.1 * TUNING.look_s
    third.begin_calls(later)
    # What has begun since the last look is not slow.
    assert stage.policy.batcher_looks(later) == ([second], False)
    assert stage.policy.looks_in == TUNING.look_s and not stage.policy.looks_late()
    # It looks rarely once nothing is merged.
    assert stage.policy.batcher_looks(later) == ((), False)
    assert stage.policy.looks_in == TUNING.slow_look_s and stage.policy.looks_late()


# ---- how large a chunk list is


@pytest.mark.parametrize("num_partitions", [1, 2, 4])
@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("row_bytes", [1024, 2**16, 2**18])
@pytest.mark.parametrize(
    ("max_batches", "max_mib"), [(20, None), (1000, 16), (1000, 32), (1000, 64), (1000, 1)]
)
def test_chunk_lists_together_stay_within_the_bound_and_half_of_its_bytes(
    num_partitions: int, quick: bool, row_bytes: int, max_batches: int, max_mib: int | None
) -> None:
    """Or are a batch each, if that is more."""
    stage = Stage(num_partitions=num_partitions)
    if quick:
        stage.make_all(QUICK, CallKind.QUICK)
    budget = stage.budget
    budget.max_rows, budget.rows, budget.bytes = max_batches * BATCH, 0, 0
    budget.max_bytes = 10**12 if max_mib is None else max_mib * 2**20
    budget.learn(row_bytes)
    budget.list_bytes = 0
    total = 0
    for partition in stage.partitions:
        budget.begin_list()
        limits = stage.policy.limits_of(partition)
        partition.hold(1, limits, stage.now)
        assert limits.rows >= BATCH and limits.rows * row_bytes <= TUNING.list_bytes
        assert limits.calls == min(limits.rows, TUNING.list_calls)
        total += limits.rows
    assert total <= max(BATCH * num_partitions, max_batches * BATCH)
    if max_mib is not None:
        assert total * row_bytes <= max(BATCH * num_partitions * row_bytes, max_mib * 2**19)


def test_the_first_chunk_list_is_a_batch_and_that_above_the_bound_a_row() -> None:
    stage = Stage()
    assert (first := stage.pick()) is not None and first.limits.rows == BATCH
    stage.budget.max_bytes = stage.budget.list_bytes = 100
    assert stage.policy.limits_of(stage.partitions[1]).rows == BATCH
    stage.budget.bytes = 100
    assert stage.policy.limits_of(stage.partitions[1]).rows == 1


def test_of_large_batches_a_chunk_list_is_a_part() -> None:
    stage = Stage()
    stage.budget.learn(2**20)
    assert stage.policy.limits_of(stage.partitions[0]).rows > BATCH
    stage.budget.learn(2**20 + 1)
    assert stage.policy.limits_of(stage.partitions[0]).rows == BATCH - 1
