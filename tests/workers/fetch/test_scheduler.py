"""Which call is made next, and how much may be buffered: rules without threads."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import numpy as np
import pytest

from feeder.workers.errors import FeedError
from feeder.workers.fetch.scheduler import BufferBudget, End, ListLimits, Partition, Scheduler
from feeder.workers.stream.position import Partitions
from feeder.workers.tuning import TUNING


def make_scheduler(
    num_partitions: int, *, pure: bool, arrival: bool = False, epochs: int = 3
) -> Scheduler:
    partitions = Partitions(num_partitions=num_partitions, pure=pure, arrival=arrival)
    return Scheduler(partitions, partitions.spread(partitions.origin()), epochs)


LIMITS = ListLimits(1, 1, 1, 0.0)


def pick(scheduler: Scheduler, now: float = 0.0) -> Partition | None:
    """The partition whose turn it is, of all."""
    scheduler.end_pauses(now)
    return next(scheduler.in_turn(scheduler.ready), None)


def hold(scheduler: Scheduler, partition: Partition) -> None:
    scheduler.hold([partition], 1, LIMITS, 0.0)


def give_back(
    scheduler: Scheduler,
    partition: Partition,
    ending: End | FeedError | None = None,
    ready_at: float = 0.0,
) -> bool:
    return scheduler.give_back(partition, ending, ready_at, True, False)


class Fetchers:
    """Plays fetchers that hold partitions for a random time; `ends` says how many calls of a
    partition (of all partitions together: pure) give a chunk in each epoch."""

    def __init__(
        self, scheduler: Scheduler, partitions: Partitions, ends: list[list[int]], seed: int
    ) -> None:
        self.scheduler, self.partitions, self.ends = scheduler, partitions, ends
        self.chance = random.Random(seed)
        self.made: dict[tuple[int, int], list[int]] = defaultdict(list)
        """The calls of each epoch and partition, in the order in which they were made."""
        self.before: dict[tuple[int, int], int] = defaultdict(int)

    def play(self) -> None:
        held = []
        while not self.scheduler.finished or held:
            partition = pick(self.scheduler) if len(held) < 3 else None
            if partition is not None and (not held or self.chance.random() < 0.6):
                assert not partition.running
                hold(self.scheduler, partition)
                held.append(partition)
                continue
            assert held, "no partition may be called, none is held, and the stream is not over"
            partition = held.pop(self.chance.randrange(len(held)))
            give_back(self.scheduler, partition, End(None) if self._call(partition) else None)
            self.scheduler.take_all()

    def _call(self, partition: Partition) -> bool:
        """Make a call; returns whether that ends the epoch."""
        number, epoch = partition.number, partition.epoch
        self.made[epoch, number].append(partition.next)
        if self.partitions.pure:
            over = self.partitions.number(number, partition.next) >= self.ends[0][epoch]
        else:
            over = len(self.made[epoch, number]) > self.ends[number][epoch]
        if not over:
            partition.chunks.append((np.zeros(1),))
        return over


@pytest.mark.parametrize("num_partitions", [1, 2, 5])
@pytest.mark.parametrize("seed", range(10))
def test_every_worker_is_called_in_order_until_it_ends(num_partitions: int, seed: int) -> None:
    chance = random.Random(seed)
    partitions = Partitions(num_partitions=num_partitions, pure=False, arrival=False)
    ends = [[chance.randint(0, 6) for _ in range(3)] for _ in range(num_partitions)]
    fetchers = Fetchers(make_scheduler(num_partitions, pure=False), partitions, ends, seed)
    fetchers.play()
    for partition in range(num_partitions):
        first = 0
        for epoch in range(3):
            num = ends[partition][epoch]
            assert fetchers.made[epoch, partition] == list(range(first, first + num + 1))
            first += num


@pytest.mark.parametrize("num_partitions", [1, 2, 5])
@pytest.mark.parametrize("seed", range(10))
def test_every_index_below_the_end_is_called_once(num_partitions: int, seed: int) -> None:
    chance = random.Random(seed)
    partitions = Partitions(num_partitions=num_partitions, pure=True, arrival=False)
    ends = [[chance.randint(0, 12) for _ in range(3)]]
    fetchers = Fetchers(make_scheduler(num_partitions, pure=True), partitions, ends, seed)
    fetchers.play()
    for epoch, end in enumerate(ends[0]):
        called = sorted(partitions.number(partition, call) for partition in range(num_partitions)
                        for call in fetchers.made[epoch, partition])  # fmt: skip
        assert called[: end + 1] == list(range(end + 1))
        assert len(called) == len(set(called)) <= end + 1 + 3 * num_partitions


def test_partitions_are_called_in_turn() -> None:
    scheduler = make_scheduler(3, pure=False)
    first, second, third = scheduler.partitions
    hold(scheduler, first)
    give_back(scheduler, first)
    assert pick(scheduler) is second
    hold(scheduler, second)
    assert pick(scheduler) is third
    hold(scheduler, third)
    assert pick(scheduler) is first
    give_back(scheduler, second)
    give_back(scheduler, third, FeedError())
    assert list(scheduler.in_turn(scheduler.ready)) == [first, second]
    assert list(scheduler.in_turn(scheduler.ready, 1)) == [second, first]


def test_a_partition_that_is_put_off_is_called_when_its_time_has_come() -> None:
    scheduler = make_scheduler(2, pure=False)
    for partition, ready_at in zip(scheduler.partitions, (7.5, 7.0), strict=True):
        hold(scheduler, partition)
        give_back(scheduler, partition, ready_at=ready_at)
    assert pick(scheduler, 6.5) is None
    assert scheduler.pause_ends == 7.0
    assert pick(scheduler, 7.0) is scheduler.partitions[1]
    assert scheduler.pause_ends == 7.5
    assert pick(scheduler, 7.5) is scheduler.partitions[0]
    assert scheduler.pause_ends == math.inf


def test_a_partition_that_was_not_called_is_called_as_before() -> None:
    scheduler = make_scheduler(2, pure=False)
    for partition in scheduler.partitions:
        hold(scheduler, partition)
    assert (pick(scheduler), scheduler.running, scheduler.begun_rows) == (None, 3, 2)
    scheduler.let_go(scheduler.partitions[1])
    assert pick(scheduler) is scheduler.partitions[1]
    assert (scheduler.partitions[1].running, scheduler.running, scheduler.begun_rows) == (
        False, 1, 1,
    )  # fmt: skip


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


def test_the_calls_that_were_collected_are_those_before_the_chunk_lists_at_hand() -> None:
    scheduler = make_scheduler(1, pure=False)
    (partition,) = scheduler.partitions
    for num_collected in (0, 0, 4):
        hold(scheduler, partition)
        partition.chunks += [(np.zeros(1),)] * 2
        give_back(scheduler, partition)
        assert partition.num_collected() == num_collected
        if partition.made == 4:
            scheduler.take_all()
            assert partition.num_collected() == 4


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


def test_what_the_merge_wants_is_marked_until_it_wants_something_else() -> None:
    scheduler = make_scheduler(2, pure=False)
    first, second = scheduler.partitions
    scheduler.want([first], 3.0)
    assert (first.wanted_since, second.wanted_since) == (3.0, None)
    scheduler.want([second], 4.0)
    assert (first.wanted_since, second.wanted_since) == (None, 4.0)
    scheduler.want(())
    assert (second.wanted_since, scheduler.wanted, scheduler.wanted_bits) == (None, (), 0)
    scheduler.want([first, second])
    assert scheduler.wanted_bits == 0b11


def test_a_chunk_list_numbers_its_calls_and_waits_for_the_marks() -> None:
    (partition,) = make_scheduler(1, pure=False).partitions
    assert partition.take_open(None, marked=True) is None
    partition.chunks += ["a", "b", "c"]
    partition.marks += [b"1", b"2"]  # the fetcher has not yet written the third
    chunk_list = partition.take_open(None, marked=True)
    assert chunk_list is not None
    assert (chunk_list.first, chunk_list.chunks, chunk_list.marks) == (0, ["a", "b"], [b"1", b"2"])
    assert (partition.next, partition.chunks, partition.marks) == (2, ["c"], [])
    partition.marks.append(b"3")
    end = End(b"4")
    chunk_list = partition.take_open(end, marked=True)
    assert chunk_list is not None
    assert (chunk_list.first, chunk_list.chunks, chunk_list.marks, chunk_list.ending) == (
        2,
        ["c"],
        [b"3"],
        end,
    )
    chunk_list = partition.take_open(end, marked=True)
    assert chunk_list is not None
    assert (chunk_list.first, chunk_list.chunks) == (3, [])


def test_no_epoch_begins_before_all_workers_have_ended_the_one_before() -> None:
    scheduler = make_scheduler(2, pure=False, epochs=2)
    first, second = scheduler.partitions
    hold(scheduler, first)
    assert not give_back(scheduler, first, End(None))
    assert (first.epoch, second.epoch) == (0, 0)
    assert pick(scheduler) is second
    hold(scheduler, second)
    assert give_back(scheduler, second, End(None))
    assert (first.epoch, second.epoch, first.ended) == (1, 1, False)
    for partition in scheduler.partitions:
        hold(scheduler, partition)
    assert not give_back(scheduler, first, End(None))
    assert (first.epoch, scheduler.finished) == (1, False)  # The other is being called.
    give_back(scheduler, second, End(None))
    assert scheduler.finished
    assert pick(scheduler) is None


def test_a_pure_stream_ends_when_nobody_calls_an_index_any_more() -> None:
    scheduler = make_scheduler(2, pure=True, epochs=2)
    first, second = scheduler.partitions
    for partition in scheduler.partitions:
        hold(scheduler, partition)
    assert not give_back(scheduler, first, End(None))
    # The index of the other is beyond the end; its call is still under way.
    assert first.epoch == 0
    assert give_back(scheduler, second)
    assert (first.epoch, second.epoch, second.next) == (1, 1, 0)


def test_a_list_that_is_being_filled_is_cut_short_where_the_epoch_ends() -> None:
    """Calls beyond the end may give rows, and the next epoch waits for the list."""
    scheduler = make_scheduler(3, pure=True, epochs=2)
    first, second, third = scheduler.partitions
    scheduler.want([third], 5.0)
    for partition in scheduler.partitions:
        hold(scheduler, partition)
    give_back(scheduler, first, End(None))
    assert (second.wanted_since, third.wanted_since) == (0.0, 5.0)
    give_back(scheduler, second)
    give_back(scheduler, third)
    # In the next epoch only the merge is waited for.
    assert [one.wanted_since for one in scheduler.partitions] == [None, None, 5.0]


def test_the_epoch_ends_for_a_partition_that_was_not_called_too() -> None:
    scheduler = make_scheduler(2, pure=True, epochs=2)
    first, second = scheduler.partitions
    scheduler.hold([first, second], 1, LIMITS, 0.0)
    assert not give_back(scheduler, first, End(None))
    assert scheduler.let_go(second)
    assert (first.epoch, second.epoch, scheduler.ready) == (1, 1, 0b11)


# ---- what is buffered


def end_turn(budget: BufferBudget, calls: int, rows: int, num_bytes: int) -> None:
    budget.end_turn()
    budget.add_calls(calls, rows, num_bytes, num_bytes)


def test_the_bound_is_on_rows_and_on_bytes() -> None:
    budget = BufferBudget(10, 100, 1)
    assert budget.below_bound
    budget.add(9, 50)
    assert budget.below_bound
    budget.add(1, 0)
    assert not budget.below_bound
    budget.add(-5, 50)
    assert (budget.rows, budget.bytes, budget.below_bound) == (5, 100, False)
    budget.add(0, -1)
    assert budget.below_bound
    unbounded = BufferBudget(10, 10**12, 1)
    unbounded.add(9, 10**12 - 1)
    assert unbounded.below_bound


@pytest.mark.parametrize(
    ("row_bytes", "rows"), [(8, 128), (102, 10), (103, 10), (10**6, 10), (0, 1024)]
)
def test_below_some_bytes_the_bound_on_rows_is_as_many_as_have_them(
    row_bytes: int, rows: int
) -> None:
    budget = BufferBudget(10, 10**12, 1, least_bytes=1024)
    budget.learn(row_bytes)
    assert budget.room_rows() == rows
    budget.add(rows - 1, 0)
    assert budget.below_bound and budget.may_call()
    budget.add(1, 0)
    assert not budget.below_bound and not budget.may_call()


def test_the_bound_on_bytes_stands_below_them_too() -> None:
    budget = BufferBudget(10, 100, 1, least_bytes=1024)
    budget.learn(10)
    budget.add(9, 90)
    assert budget.below_bound
    budget.add(1, 10)
    assert not budget.below_bound


def test_the_most_that_was_ever_buffered_is_kept() -> None:
    budget = BufferBudget(10, 10**12, 1)
    for rows, num_bytes in ((4, 40), (8, 10), (-12, -50), (3, 3)):
        budget.add(rows, num_bytes)
    assert (budget.rows, budget.bytes, budget.peak_rows, budget.peak_bytes) == (3, 3, 12, 50)


def test_a_device_without_a_batch_starves_whichever_it_is() -> None:
    budget = BufferBudget(1, 10**12, 2)
    assert budget.starving
    for waiting, starving in (([0, 2], True), ([2, 0], True), ([1, 2], False)):
        budget.waiting = waiting
        assert budget.starving is starving


def test_rows_kept_beside_their_copies_count_in_the_bound() -> None:
    budget = BufferBudget(10, 100, 1)
    budget.add(4, 40, 5)
    assert budget.below_bound
    budget.learn(12)
    assert not budget.below_bound
    budget.add(0, 0, -1)
    assert budget.below_bound
    budget.learn(0)
    budget.add(0, 0, 2)
    assert not budget.below_bound
    assert (budget.rows, budget.bytes, budget.kept_rows) == (4, 40, 6)


def test_calls_under_way_count_as_much_as_the_last_gave() -> None:
    budget = BufferBudget(10, 100, 1)
    budget.num_calling = 64
    assert budget.may_call(), "nothing is known of their size"
    end_turn(budget, 1, 0, 40)
    budget.add(0, -40)
    may_call = []
    for num_calling in range(4):
        budget.num_calling = num_calling
        may_call.append(budget.may_call())
    assert may_call == [True, True, True, False]
    budget.num_calling = 2
    budget.add(1, 20)
    assert not budget.may_call()
    assert budget.below_bound
    budget.add(-1, -20)
    end_turn(budget, 0, 0, 0)
    assert budget.list_bytes == 40, "a chunk list without a chunk says nothing of their size"
    budget.num_calling, budget.list_bytes = 0, 1000
    assert budget.may_call(), "one call is always made"


def test_calls_are_taken_for_as_large_as_the_largest_of_late() -> None:
    """Of 64 calls that give 10 MB and 8 kB in turns half are going to give 10 MB, also where the
    last gave 8 kB."""
    budget = BufferBudget(10, 100, 1, 100)
    end_turn(budget, 1, 1, 1)
    assert budget.list_bytes == 1, "what was guessed before the first is forgotten"
    for _ in range(8):
        end_turn(budget, 1, 1, 40)
        end_turn(budget, 1, 1, 1)
        assert 35 <= budget.list_bytes <= 40
    for _ in range(100):
        end_turn(budget, 1, 1, 1)
    assert budget.list_bytes == 1


def test_small_lists_of_partitions_that_are_behind_do_not_make_a_large_one_forgotten() -> None:
    """Of 64 partitions whose chunks become large one is ahead: no more than the bound has room for
    may begin beside it, however many small ones the others hand over before they come to theirs."""
    num, large, small = 64, 10_000_000, 8_000
    budget = BufferBudget(10**6, 2 * large, 1, small, num)
    end_turn(budget, 1, 1, large)
    budget.add(-1, -large)
    for _ in range(3 * num):
        end_turn(budget, 1, 1, small)
        budget.add(-1, -small)
    budget.num_calling = 0
    while budget.may_call():
        budget.begin_turn()
    assert budget.num_calling == 3
    for _ in range(16 * num * 10):
        end_turn(budget, 1, 1, small)
        budget.add(-1, -small)
    assert budget.list_bytes == small, "in the end it is"


def test_only_calls_of_batches_that_have_a_slot_are_made() -> None:
    """Of two partitions the calls 0, 2, 4 and 1, 3, 5: those before call 3 of epoch 0 may be made,
    and all of another epoch."""
    layout = Partitions(num_partitions=2, pure=True, arrival=False)
    scheduler = Scheduler(layout, layout.spread(layout.origin()), 2)
    one, other = scheduler.partitions
    assert not scheduler.has_places
    scheduler.allow((0, 3))
    assert scheduler.has_places
    assert [scheduler.num_allowed(partition) for partition in (one, other)] == [2, 1]
    scheduler.hold([one, other], 1, ListLimits(100, 100, 100, 0.0), 0.0)
    assert [partition.limits.calls for partition in (one, other)] == [2, 1]
    for partition, calls in ((one, 2), (other, 1)):
        partition.chunks.extend([()] * calls)
        scheduler.give_back(partition, None, 0.0, True, False)
    assert list(scheduler.in_turn(scheduler.ready)) == []
    scheduler.allow((0, 4))
    assert list(scheduler.in_turn(scheduler.ready)) == [other]
    scheduler.allow((1, 0))
    assert set(scheduler.in_turn(scheduler.ready)) == {one, other}
    scheduler.allow(None)
    assert set(scheduler.in_turn(scheduler.ready)) == {one, other}
