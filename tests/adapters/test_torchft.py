"""torchft: a replica that joins a running job goes on in step, from the state of another one."""

from __future__ import annotations

import json

import pytest

from needs import needs_framework

needs_framework("torch", "torchft")

from adapters.examples import printed
from adapters.torchft_child import JOINS_AT, NUM, SIZE, STEPS
from feeder.adapters.torch import FeedLoader

LARGEST = 512


@pytest.mark.timeout(120)
def test_a_replica_that_joins_goes_on_in_step() -> None:
    told = printed("-W", "ignore", "-m", "adapters.torchft_child", limit_s=100.0)
    (first, sizes), (second, other_sizes) = map(json.loads, told.splitlines())
    with FeedLoader(list(range(NUM)), SIZE, shuffle=True) as loader:
        whole = [batch.tolist() for _ in range(4) for batch in loader]
    assert [int(step) for step in first] == list(range(STEPS))
    # It takes part from one of the next steps on.
    begin = min(map(int, second))
    assert JOINS_AT < begin < STEPS - 2
    assert [int(step) for step in second] == list(range(begin, STEPS))
    for rank, seen in enumerate((first, second)):
        assert {int(step): batch for step, batch in seen.items()} == {
            int(step): whole[2 * int(step) + rank] for step in seen
        }
    # It is saved in every step.
    assert max(sizes + other_sizes) <= LARGEST


@pytest.mark.parametrize("num", [10, 10_000_000])
def test_a_state_is_small_in_every_step(num: int) -> None:
    with FeedLoader(range(num), 3, shuffle=True) as loader:
        for _ in range(3):
            for step, _ in enumerate(loader):
                assert len(loader.state_dict()["feeder"]) <= LARGEST
                if step == 4:
                    break
