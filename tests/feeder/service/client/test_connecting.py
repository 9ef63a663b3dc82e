"""Which address is tried, and for how long."""

from __future__ import annotations

import math

import pytest

from feeder.errors import AuthError
from feeder.service.client.io_loop import Failover, Patience


def test_a_single_address_is_tried_without_an_end() -> None:
    tries = Failover(("a",))
    assert tries.begins_at == -math.inf
    assert tries.begin(5.0) == "a"
    tries.reach(6.0)
    assert tries.ends_at == math.inf


def test_several_are_tried_in_turn_for_longer_in_each_of_two_rounds() -> None:
    tries, now, turns = Failover(("a", "b")), 100.0, list[tuple[str, float]]()
    for _ in range(8):
        address = tries.begin(now)
        turns.append((address, tries.ends_at - now))
        now = tries.ends_at
    assert turns == [*zip("abababab", [0.25, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0], strict=True)]


def test_who_listens_has_time_to_answer() -> None:
    tries = Failover(("a", "b"))
    tries.begin(100.0)
    tries.reach(None)
    assert tries.ends_at == 100.25
    for _ in range(2):
        tries.reach(100.125)
        assert tries.ends_at == 101.125


def test_after_a_queue_was_given_the_next_address_is_tried_for_a_short_turn() -> None:
    tries = Failover(("a", "b", "c"))
    assert [tries.begin(0.0) for _ in range(5)] == ["a", "b", "c", "a", "b"]
    tries.end()
    assert tries.ends_at == math.inf
    assert (tries.begin(7.0), tries.ends_at) == ("c", 7.25)


@pytest.mark.parametrize("addresses", [("a",), ("a", "b")])
def test_what_is_no_server_is_let_alone_for_a_moment(addresses: tuple[str, ...]) -> None:
    tries = Failover(addresses)
    tries.begin(10.0)
    tries.fail(11.0)
    assert tries.begins_at == 11.1


def test_a_client_is_refused_once_every_address_has_said_so() -> None:
    tries, errors = Failover(("a", "b")), [AuthError("a refuses"), AuthError("b refuses")]
    assert tries.refusal is None
    for error, all_have in [(errors[0], False), (None, False), (errors[0], False),
                            (errors[1], True)]:  # fmt: skip
        tries.begin(0.0)
        if error is not None:
            assert tries.refuse(error) == all_have
    assert tries.refusal is errors[1]


def test_what_was_refused_before_a_queue_was_given_is_forgotten() -> None:
    tries = Failover(("a", "b"))
    tries.begin(0.0)
    assert not tries.refuse(AuthError("a refuses"))
    tries.begin(0.0)
    tries.end()
    assert tries.refusal is None
    assert not tries.refuse(AuthError("b refuses"))
    assert Failover(("a",)).begin(0.0) == "a"


def test_patience_is_counted_from_the_last_batch_on() -> None:
    patience = Patience(2)
    assert [patience.ends(received) for received in (0, 0, 5, 5, 5)] == [
        False, False, False, False, True,
    ]  # fmt: skip
