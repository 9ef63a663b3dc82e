"""Which address is tried, and for how long."""

from __future__ import annotations

import math

import pytest

from feeder.errors import AuthError
from feeder.service.client.failover import Failover


def test_a_single_address_is_tried_without_an_end() -> None:
    failover = Failover(("a",))
    assert failover.try_at == -math.inf
    assert failover.next_address(5.0) == "a"
    failover.note_reached(6.0)
    assert failover.turn_ends_at == math.inf


def test_several_are_tried_in_turn_for_longer_in_each_of_two_rounds() -> None:
    failover, now, turns = Failover(("a", "b")), 100.0, list[tuple[str, float]]()
    for _ in range(8):
        address = failover.next_address(now)
        turns.append((address, failover.turn_ends_at - now))
        now = failover.turn_ends_at
    assert turns == [*zip("abababab", [0.25, 0.25, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0], strict=True)]


def test_who_listens_has_time_to_answer() -> None:
    failover = Failover(("a", "b"))
    failover.next_address(100.0)
    failover.note_reached(None)
    assert failover.turn_ends_at == 100.25
    for _ in range(2):
        failover.note_reached(100.125)
        assert failover.turn_ends_at == 101.125


def test_after_a_queue_was_given_the_next_address_is_tried_for_a_short_turn() -> None:
    failover = Failover(("a", "b", "c"))
    assert [failover.next_address(0.0) for _ in range(5)] == ["a", "b", "c", "a", "b"]
    failover.reset()
    assert failover.turn_ends_at == math.inf
    assert (failover.next_address(7.0), failover.turn_ends_at) == ("c", 7.25)


@pytest.mark.parametrize("addresses", [("a",), ("a", "b")])
def test_what_is_no_server_is_let_alone_for_a_moment(addresses: tuple[str, ...]) -> None:
    failover = Failover(addresses)
    failover.next_address(10.0)
    failover.pause(11.0)
    assert failover.try_at == 11.1


def test_a_client_is_refused_once_every_address_has_said_so() -> None:
    failover, errors = Failover(("a", "b")), [AuthError("a refuses"), AuthError("b refuses")]
    assert failover.refusal is None
    for error, all_have in [(errors[0], False), (None, False), (errors[0], False),
                            (errors[1], True)]:  # fmt: skip
        failover.next_address(0.0)
        if error is not None:
            assert failover.note_refusal(error) == all_have
    assert failover.refusal is errors[1]


def test_what_was_refused_before_a_queue_was_given_is_forgotten() -> None:
    failover = Failover(("a", "b"))
    failover.next_address(0.0)
    assert not failover.note_refusal(AuthError("a refuses"))
    failover.next_address(0.0)
    failover.reset()
    assert failover.refusal is None
    assert not failover.note_refusal(AuthError("b refuses"))
    assert Failover(("a",)).next_address(0.0) == "a"


def test_how_long_a_server_is_waited_with() -> None:
    assert Failover(("a",)).patience_s(10.0) == float("inf")
    several = Failover(("a", "b", "c"))
    places = []
    for _ in range(4):
        places.append(several.next_address(0.0))
        least = 40.0 if places[-1] == "a" else 10.0
        found = {several.patience_s(10.0) for _ in range(50)}
        assert all(least <= patience <= 2 * least for patience in found)
        assert len(found) > 40, "several consumers leave at several times"
        several.move_on()
    assert places == ["a", "b", "a", "b"]
