"""The rules of tickets: no thread, no socket, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from feeder.executors.ledger import Ledger, Ticket

pytestmark = pytest.mark.process


class Desk:
    """A ledger, and what it has sent."""

    def __init__(self, *generations: int, moves: bool = True) -> None:
        self.ledger = Ledger(moves=moves, quick_s=0.02)
        self.sent: list[tuple[Any, int, int]] = []
        for generation in generations:
            self.ledger.add(generation)

    def ask(
        self, name: str, *turn: int, home: Any = None, now: float = 0.0, most_deaths: int = 3
    ) -> Ticket:
        ticket = Ticket(name, home, turn, is_repeatable=home is None, most_deaths=most_deaths)
        self.ledger.open(ticket)
        self.issue(now)
        return ticket

    def issue(self, now: float = 0.0) -> None:
        ledger = self.ledger
        ledger.issue(now, lambda ticket, *to: self.sent.append((ticket.payload, *to)))
        assert ledger.num_busy == sum(not ledger.is_idle(each) for each in ledger.generations)

    def late(self, now: float) -> None:
        """What is late by now is issued again."""
        self.ledger.late(now)
        self.issue(now)

    def answer(self, generation: int, number: int, now: float = 0.0) -> Any:
        found = self.ledger.came(generation, number, now)
        self.issue(now)
        return None if found is None else (found[0].payload, found[1])


def lost(desk: Desk, generation: int) -> list[Any]:
    """An actor is gone; what nobody else has."""
    return [loss.ticket.payload for loss in desk.ledger.remove(generation)]


def test_each_gets_one_and_the_smallest_turn_goes_first() -> None:
    desk = Desk(1, 2)
    for name, turn in (("a", 0), ("b", 1), ("d", 3), ("c", 2)):
        desk.ask(name, turn)
    assert desk.sent == [("a", 1, 1), ("b", 2, 1)]
    # A slow one has its next ticket when it has answered; the earliest call comes first.
    assert desk.answer(2, 1, now=1.0) == ("b", True)
    assert desk.sent[2:] == [("c", 2, 2)]


def test_a_quick_one_gets_its_next_ticket_ahead() -> None:
    desk = Desk(1)
    desk.ask("a", 0)
    desk.answer(1, 1, now=0.001)
    desk.ask("b", 1)
    desk.ask("c", 2)
    desk.ask("d", 3)
    assert desk.sent[1:] == [("b", 1, 2), ("c", 1, 3)]


def test_one_more_is_wanted_for_a_ticket_that_nobody_can_take() -> None:
    desk = Desk(1, 2)
    wanted = []
    for name in ("a", "b", "c"):
        wanted.append(desk.ledger.is_short)
        desk.ask(name, 0)
    assert [*wanted, desk.ledger.is_short] == [False, False, False, True]
    desk.answer(1, 1, now=1.0)
    assert not desk.ledger.is_short


def test_one_more_is_wanted_for_a_worker_without_a_process() -> None:
    desk = Desk()
    desk.ask("a", home=0)
    assert desk.ledger.is_short
    desk.ledger.add(1)
    desk.issue()
    assert desk.sent == [("a", 1, 1)] and not desk.ledger.is_short


def test_a_fenced_one_is_not_heard() -> None:
    desk = Desk(1, 2)
    ticket = desk.ask("a", 0)
    assert desk.ledger.remove(1) == [(ticket, 0, 0)]
    assert desk.answer(1, 1) is None
    desk.ledger.add(3)
    # Nor is an answer that nobody has asked for.
    assert desk.answer(3, 1) is None and desk.answer(2, 7) is None
    assert desk.ledger.remove(1) == []


def slow_desk() -> Desk:
    """Two actors, of which the first is slow with its ticket, and some answers of others."""
    desk = Desk(1, 2)
    desk.ask("slow", 0)
    for i in range(1, 31):
        desk.ask(f"{i}", i, now=i * 1.0)
        assert desk.answer(2, i, now=i + 0.5) == (f"{i}", True)
    return desk


def test_late_is_issued_again_and_the_first_answer_wins() -> None:
    desk = slow_desk()
    late_s = desk.ledger.late_s
    assert late_s == 1.5
    desk.late(1.4)
    assert desk.sent[-1] == ("30", 2, 30)
    desk.ledger.late(1.5)
    desk.issue(31.0)
    assert desk.sent[-1] == ("slow", 2, 31)
    assert desk.ledger.num_again == 1
    # The one other actor has it: there is no third.
    desk.late(60.0)
    assert len(desk.sent) == 32
    assert desk.answer(2, 31, now=61.0) == ("slow", True)
    assert desk.answer(1, 1, now=62.0) == ("slow", False)


def test_who_hangs_in_what_another_one_has_made_is_told() -> None:
    desk = slow_desk()
    desk.late(31.0)
    assert desk.ledger.stuck(31.0, 0.0) == []
    desk.answer(2, 31, now=32.0)
    assert desk.ledger.stuck(32.0, 0.0) == [1]
    # To start another one takes longer than it has hung.
    assert desk.ledger.stuck(32.0, 33.0) == []


def test_who_loads_its_function_does_not_hang() -> None:
    """A new actor that takes seconds for its first ticket would be ended again and again."""
    desk = Desk(1)
    desk.ask("first", 0)
    desk.answer(1, 1, now=5.0)
    for i in range(1, 31):
        desk.ask(f"{i}", i, now=5.0 + i)
        desk.answer(1, i + 1, now=5.1 + i)
    assert desk.ledger.late_s is not None and desk.ledger.late_s < 1.0
    desk.ledger.add(2)
    desk.ask("a", 40, now=40.0)
    desk.ask("b", 41, now=40.0)
    (mine,) = [name for name, generation, _ in desk.sent if generation == 2]
    other = desk.sent[-1] if desk.sent[-1][1] == 1 else desk.sent[-2]
    desk.answer(*other[1:], now=40.1)
    desk.late(41.0)
    assert desk.sent[-1][:2] == (mine, 1)
    assert desk.answer(*desk.sent[-1][1:], now=41.1) == (mine, True)
    # The first one took 5 s for its first.
    assert desk.ledger.stuck(50.0, 1.2) == []
    assert desk.ledger.stuck(55.1, 1.2) == [2]


def test_who_takes_over_may_be_late_too() -> None:
    desk = slow_desk()
    desk.late(31.0)
    desk.ledger.add(3)
    desk.late(32.4)
    assert desk.sent[-1] == ("slow", 2, 31)
    # The second one has had it for as long as the first had.
    desk.late(32.5)
    assert desk.sent[-1] == ("slow", 3, 1)
    # Three are enough: it may be slow everywhere.
    desk.ledger.add(4)
    desk.late(60.0)
    assert desk.sent[-1] == ("slow", 3, 1)
    assert desk.answer(3, 1, now=63.0) == ("slow", True)
    assert desk.answer(1, 1, now=64.0) == ("slow", False)


def late_again(desk: Desk, now: float) -> tuple[int, int]:
    """A ticket is late once more and is issued again; who had it first, and who has it then."""
    desk.ask("late", 40, now=now)
    desk.ask("other", 41, now=now)
    first, second = (generation for _, generation, _ in desk.sent[-2:])
    assert desk.answer(*desk.sent[-1][1:], now=now + 0.5) == ("other", True)
    desk.ledger.late(now + 2.0)
    # It waits for somebody else: until then the one that has it goes on.
    assert desk.ledger.stuck(now + 2.0, 0.0) == []
    desk.issue(now + 2.0)
    assert desk.sent[-1][:2] == ("late", second)
    return first, second


def test_who_is_late_where_others_are_not_is_told_before_they_answer() -> None:
    desk = slow_desk()
    desk.late(31.0)
    # It may be the call that is slow: nothing is known of that yet.
    assert desk.ledger.stuck(31.0, 0.0) == []
    desk.answer(2, 31, now=31.5)
    desk.answer(1, 1, now=31.6)
    first, second = late_again(desk, 40.0)
    assert desk.ledger.stuck(42.0, 0.0) == [first]
    # A new actor would not have come yet.
    assert desk.ledger.stuck(42.0, 2.5) == []
    # Nobody else has it, once it has ended.
    desk.ledger.remove(first)
    assert lost(desk, second) == ["late"]


def dies(desk: Desk, generation: int, num_begun: int = 1) -> list[tuple[Any, int, int]]:
    """An actor ends in one of its oldest ticket's calls; what is told of tickets."""
    found = desk.ledger.remove(generation, lambda ticket, number, place: num_begun * (not place))
    return [(ticket.payload, *rest) for ticket, *rest in found]


def test_deaths_in_a_call_count_while_others_have_it() -> None:
    desk = slow_desk()
    desk.late(31.0)
    assert dies(desk, 1) == []
    for generation in (3, 4):
        desk.ledger.add(generation)
    desk.late(33.0)
    assert dies(desk, 2) == []
    desk.late(35.0)
    assert desk.sent[-1][:2] == ("slow", 4)
    # Another one has it: it would end that one too.
    assert dies(desk, 3) == [("slow", 1, 3)]


def test_deaths_for_which_no_call_is_to_blame_do_not_count() -> None:
    desk = slow_desk()
    desk.late(31.0)
    assert dies(desk, 1) == []
    # Its host has ended: one death is known of the call.
    assert dies(desk, 2, 0) == [("slow", 1, 1)]


def test_a_worker_is_not_issued_twice() -> None:
    desk = slow_desk()
    desk.ask("of worker 0", home=0, now=40.0)
    sent = list(desk.sent)
    desk.late(1000.0)
    assert [one for one in desk.sent if one not in sent] == [("slow", 2, 31)]


def test_workers_stay_and_are_shared_out() -> None:
    desk = Desk(1, 2)
    for worker in range(4):
        desk.ask(f"{worker}", home=worker)
    assert [to for _, to, _ in desk.sent] == [1, 2, 1, 2]
    for worker, (generation, number) in enumerate(((1, 1), (2, 1), (1, 2), (2, 2))):
        desk.answer(generation, number)
        desk.ask(f"{worker}", home=worker)
    assert [to for _, to, _ in desk.sent[4:]] == [1, 2, 1, 2]


def test_workers_move_to_new_ones_only_where_they_may() -> None:
    for moves in (True, False):
        desk = Desk(1, moves=moves)
        for worker in range(4):
            desk.ask(f"{worker}", home=worker)
            desk.answer(1, worker + 1)
        desk.ledger.add(2)
        for worker in range(4):
            desk.ask(f"{worker}", home=worker)
        moved = [to for _, to, _ in desk.sent[4:]]
        assert moved.count(2) == (2 if moves else 0)
        assert desk.ledger.has_homes(2) == moves


def test_a_retired_one_gets_no_more() -> None:
    desk = Desk(1, 2)
    desk.ask("a", 0)
    desk.ledger.retire(1)
    assert not desk.ledger.is_idle(1)
    desk.ask("b", 1)
    desk.ask("c", 2)
    assert desk.answer(1, 1, now=1.0) == ("a", True)
    assert desk.ledger.is_idle(1)
    assert [to for _, to, _ in desk.sent] == [1, 2]
