"""Servers that come back, or are found at another address, with another number of queues or
replicas, while trainers go on."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest

import feeder
from served import reading, serving, wait_until
from small import Pure, make

pytestmark = pytest.mark.usefixtures("world")

FIRST, SECOND = "ipc:///virtual/first", "ipc:///virtual/second"


def factory() -> feeder.Coordinator:
    return make(Pure(24))


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("has_had", [0, 1])
@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((1, 1), (2, 1), "queues: 1 then, 2 now"),
        ((2, 1), (3, 1), "queues: 2 then, 3 now"),
        ((2, 1), (1, 1), "queues: 2 then, 1 now"),
        ((4, 1), (2, 1), "queues: 4 then, 2 now"),
        ((1, 1), (1, 2), "replicas: 1 then, 2 now"),
        ((2, 1), (3, 2), "queues: 2 then, 3 now; replicas: 1 then, 2 now"),
    ],
)
def test_each_trainer_is_told_and_the_position_fits_the_new_number(
    before: tuple[int, int], after: tuple[int, int], told: str, has_had: int, moves: bool
) -> None:
    """At the same address or at the next one, also who has had no batch yet."""
    num, replicas = before
    seats = [(queue, replica) for queue in range(num) for replica in range(replicas)]
    with ExitStack() as stack:
        with serving(factory, FIRST, queues=num, replicas=replicas):
            trainers = [
                stack.enter_context(reading(FIRST, SECOND, queue=queue, replica=replica, credit=1))
                for queue, replica in seats
            ]
            steps = [[next(trainer).step for _ in range(has_had)] for trainer in trainers]
        with serving(factory, SECOND if moves else FIRST, queues=after[0], replicas=after[1]):
            for trainer, (queue, _), had in zip(trainers, seats, steps, strict=True):
                with pytest.raises(feeder.ResumeError, match=re.escape(f"trainers ({told})")):
                    had += [batch.step for batch in trainer]
                # What had come before is its own.
                assert had == [*range(queue, num * len(had), num)]
            state = trainers[0].state_dict()
            stack.close()
            with reading(FIRST, SECOND, queue=after[0] - 1, resume=state):
                pass


def test_who_has_had_everything_is_told_nothing() -> None:
    """It comes with the end, which is the same however the feed is dealt."""
    with serving(factory, FIRST) as server:
        trainer = feeder.connect(FIRST, credit=64)
        first = next(trainer).step
        wait_until(lambda: trainer._loop._session.has_ended)
        server.kill()
    with trainer, serving(factory, FIRST, queues=2, replicas=2):
        wait_until(lambda: trainer._loop.inbox.num_opened == 2)
        assert [first, *(batch.step for batch in trainer)] == [*range(18)]
