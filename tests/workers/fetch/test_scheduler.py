"""Which call is made next: rules without threads."""

from __future__ import annotations

import numpy as np

from feeder.workers.fetch.scheduler import End, ListLimits, Partition, Scheduler
from feeder.workers.stream.position import Partitions
from feeder.workers.tuning import TUNING


def make_scheduler(num_partitions: int, *, pure: bool) -> Scheduler:
    partitions = Partitions(num_partitions=num_partitions, pure=pure, arrival=False)
    return Scheduler(partitions, partitions.spread(partitions.origin()), 2)


def pick(scheduler: Scheduler) -> Partition | None:
    """The partition whose turn it is, of all."""
    return next(scheduler.in_turn(scheduler.ready), None)


def hold(scheduler: Scheduler, partition: Partition) -> None:
    scheduler.hold([partition], 1, ListLimits(1, 1, 1, 0.0), 0.0)


def give_back(scheduler: Scheduler, partition: Partition, ending: End | None = None) -> bool:
    return scheduler.give_back(partition, ending, 0.0, True, False)


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
