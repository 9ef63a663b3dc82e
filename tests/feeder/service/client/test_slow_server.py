"""Servers that answer late, and what crosses on the way: on virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import feeder
from feeder.errors import ConnectTimeout, FetchError
from served import here, reading, serving, wait_until
from small import Pure, make

pytestmark = pytest.mark.usefixtures("world")

NOBODY = "ipc:///virtual/nobody"


def five() -> feeder.Coordinator:
    return make(Pure(5, rows=4))


def be_far() -> None:
    """From now on a message takes up to a second, longer than a silent address is tried."""
    here().plan = replace(here().plan, delay_s=1.0)


def test_the_first_of_two_addresses_may_answer_late() -> None:
    be_far()
    with serving(five) as server, reading(server, NOBODY, timeout=60) as consumer:
        assert [batch.step for batch in consumer] == list(range(5))


def test_an_error_of_the_lease_before_is_none_of_the_next() -> None:
    """It is on its way while the consumer starts elsewhere."""

    def fetch(call: feeder.Call) -> Any:
        raise ValueError("this is raised")

    be_far()
    with serving(lambda: make(fetch)) as server, reading(server, timeout=60) as consumer:
        state = consumer.state_dict()
        wait_until(lambda: server.feed.ended_with is not None)
        consumer.load_state_dict(state)
        with pytest.raises(FetchError, match="this is raised"):
            next(consumer)


def test_a_state_may_be_loaded_more_often_than_a_connection_is_good_for() -> None:
    with serving(five) as server, reading(server) as consumer:
        state = consumer.state_dict()
        for _ in range(40):
            consumer.load_state_dict(state)
        assert [batch.step for batch in consumer] == list(range(5))


def test_a_server_that_is_gone_is_told_of_with_the_time_that_it_had() -> None:
    with serving(five) as server:
        consumer = feeder.connect(server.address, timeout=7.5, reconnect=600.0)
    with consumer, pytest.raises(ConnectTimeout, match=r"within 7\.5 s"):
        consumer.load_state_dict(consumer.state_dict())


def test_what_an_interrupted_loop_had_taken_is_not_handed_out_after_a_state_was_loaded() -> None:
    with serving(five) as server:
        with reading(server) as consumer:
            assert [next(consumer).step for _ in range(2)] == [0, 1]
            state = consumer.state_dict()
        with reading(server) as consumer:
            consumer._refill()
            consumer.load_state_dict(state)
            assert [batch.step for batch in consumer] == [2, 3, 4]
            assert consumer.stats()["rows"] == 12
