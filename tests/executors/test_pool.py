"""A pool over processes that the test plays: who reads, who is asked again, and who is ended."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from feeder.errors import ClosedError
from feeder.executors.lines import Mapped
from feeder.executors.pool import Launcher, Lost, Member, Pool, State
from feeder.executors.wire import FULL, Calls, HungUp, Load, Made, Said, Wire
from feeder.workers.errors import CallLost
from lineage import WAIT_S

LOAD = Load(
    function=b"remote:plain", is_path=True, sizes=[], names=["x"], axes=[0], rows_per_call=None,
    pure=True, seekable=False, seed_globals=False, first_worker_id=0, num_workers=1, seed=0,
    log_level=0, is_far=False, begins=None,
)  # fmt: skip


class Played:
    """A process that the test plays: its end of the socket, and the page of its progress."""

    def __init__(self, wire: Wire) -> None:
        wire.sock.settimeout(WAIT_S)
        self.wire = wire
        _, descriptors = wire.receive()
        self._page = descriptors[1]
        os.close(descriptors[0])

    def begin(self, number: int, call: int) -> None:
        """Note that it has begun a call of a ticket."""
        os.pwrite(self._page, np.array([number, call], np.uint64).tobytes(), 0)

    def asked(self) -> Calls:
        """The next ticket."""
        ticket, _ = self.wire.receive()
        assert isinstance(ticket, Calls)
        return ticket

    def answer(self, ticket: Calls, *chunks: bytes) -> None:
        """Answer it; the chunks are pickles."""
        self.wire.send(Made(list(chunks), [], FULL, b"", [], [], [], [], number=ticket.number))

    def close(self) -> None:
        """It ends."""
        self.wire.close()
        os.close(self._page)


class Stage(Launcher):
    """Starts processes that the test plays."""

    quick_s = WAIT_S
    askers_read = True

    def __init__(self, most: int) -> None:
        self._most = most
        self.played: list[Played] = []
        """In the order of their generations."""
        self.ended: list[int] = []
        """Generations of those that were ended."""

    def start_one(self) -> bool:
        if self.pool.num_ready >= self._most:
            return False
        here, there = socket.socketpair()
        member = Member(self.pool.next_generation())
        member.pid = member.generation
        assert self.pool.load is not None
        self.pool.join(member, Mapped(Wire(here), *self.pool.load()))
        self.played.append(Played(Wire(there)))
        return True

    def end(self, member: Member) -> str:
        self.ended.append(member.generation)
        member.line.close()
        return "was ended"

    def look(self, member: Member) -> str:
        return f"stack of {member.name}"


class Desk:
    """A pool, and who asks it."""

    def __init__(self, most: int) -> None:
        self.stage = Stage(most)
        self.pool = Pool(self.stage, moves=False)
        self._function = os.memfd_create("feeder-function")
        self._threads: list[threading.Thread] = []
        self.pool.start(most, lambda: (LOAD, self._function))

    def ask(self, first: int, home: int | None = None) -> Future[Any]:
        """Have a thread ask for a call; it is sent when this returns, if there is room."""
        prepared, found = threading.Event(), Future[Any]()

        def run() -> None:
            try:
                ticket = Calls(first, 0, 0, 1, 8, 1, None, [])
                found.set_result(self.pool.ask(ticket, home, lambda member: prepared.set()))
            except BaseException as error:
                found.set_exception(error)

        self._threads.append(threading.Thread(target=run))
        self._threads[-1].start()
        assert prepared.wait(WAIT_S)
        return found

    def close(self) -> None:
        """End it."""
        self.pool.close()
        for thread in self._threads:
            thread.join(WAIT_S)
        for played in self.stage.played:
            with suppress(OSError):
                played.close()
        os.close(self._function)


@pytest.fixture
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    made = Desk(getattr(request, "param", 1))
    try:
        yield made
    finally:
        made.close()


def test_each_asker_has_its_own_answer_and_hands_the_turn_on(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [desk.ask(first, home=first) for first in range(3)]
    (process,) = desk.stage.played
    tickets = [process.asked() for _ in found]
    for ticket, future in zip(tickets, found, strict=True):
        process.wire.send(Said(False, f"call {ticket.first}\n"))
        process.answer(ticket)
        assert future.result(WAIT_S).number == ticket.number
    assert capsys.readouterr().out == "call 0\ncall 1\ncall 2\n"
    assert (desk.pool.counts().processes, desk.pool.counts().busy) == (1, 0)


def test_what_had_not_begun_is_asked_again_by_nobody(desk: Desk) -> None:
    """The thread that waits does not notice."""
    found = [desk.ask(first, home=first) for first in range(2)]
    first = desk.stage.played[0]
    ticket = first.asked()
    first.begin(ticket.number, 3)
    first.close()
    with pytest.raises(Lost, match="process 1 was ended") as lost:
        found[0].result(WAIT_S)
    assert (lost.value.num_begun, lost.value.num_deaths) == (3, 1)
    second = desk.stage.played[1]
    ticket = second.asked()
    assert ticket.first == 1
    second.answer(ticket)
    found[1].result(WAIT_S)
    assert (desk.stage.ended, desk.pool.counts().restarts) == ([1], 1)


def test_what_cannot_be_read_ends_the_process_and_its_oldest_call(desk: Desk) -> None:
    found = [desk.ask(first, home=first) for first in range(2)]
    desk.stage.played[0].wire.sock.sendall(b"\4\0\0\0\0\0\0\0what")
    with pytest.raises(CallLost, match="the answer of process 1 cannot be read: "):
        found[0].result(WAIT_S)
    second = desk.stage.played[1]
    second.answer(second.asked())
    found[1].result(WAIT_S)


def test_who_gives_a_class_that_is_not_here_is_ended(desk: Desk) -> None:
    """Its worker has gone on there: another process begins where the last chunk came."""
    found = desk.ask(0, home=0)
    (process,) = desk.stage.played
    process.answer(process.asked(), b"cno_such_module\nname\n.")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        found.result(WAIT_S)
    assert desk.stage.ended == [1]
    assert desk.ask(0, home=0) and len(desk.stage.played) == 2


def test_an_asker_that_is_interrupted_ends_the_process(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the answer would be taken for the next one's."""

    def interrupt(member: Member) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(desk.pool, "hear", interrupt)
        with pytest.raises(KeyboardInterrupt):
            desk.ask(0, home=0).result(WAIT_S)
    assert desk.stage.ended == [1]
    found = desk.ask(0, home=0)
    second = desk.stage.played[1]
    second.answer(second.asked())
    found.result(WAIT_S)
    # Nobody has died.
    assert desk.pool.counts().restarts == 0


@pytest.mark.parametrize("desk", [2], indirect=True)
def test_each_worker_has_a_process_while_there_are_enough(desk: Desk) -> None:
    for first in range(4):
        desk.ask(first, home=first)
    asked = [[process.asked().first for _ in range(2)] for process in desk.stage.played]
    assert asked == [[0, 2], [1, 3]]


def test_a_process_that_has_made_its_calls_ends_when_it_has_answered(desk: Desk) -> None:
    desk.stage.most_calls = 3
    tickets = []
    for _ in range(3):
        found = desk.ask(0, home=0)
        process = desk.stage.played[-1]
        tickets.append(process.asked())
        assert not desk.stage.ended
        process.answer(tickets[-1], b"I0\n.")
        found.result(WAIT_S)
        assert [ticket.most_calls for ticket in tickets] == [1] * len(tickets)
    assert desk.stage.ended == [1] and desk.pool.counts().restarts == 0


def test_who_waits_is_told_of_a_stop(desk: Desk) -> None:
    found = desk.ask(0)
    desk.pool.interrupt()
    with pytest.raises(ClosedError, match="the feed is stopped"):
        found.result(WAIT_S)
    (process,) = desk.stage.played
    assert process.asked().first == 0
    with pytest.raises(HungUp):
        process.asked()


def test_the_call_that_a_process_is_at_is_told(desk: Desk) -> None:
    assert desk.pool.stack(None) == ""
    found = desk.ask(5, home=0)
    ident = desk._threads[0].ident
    assert desk.pool.stack(ident) == "process 1:\nstack of process 1"
    (process,) = desk.stage.played
    ticket = process.asked()
    process.begin(ticket.number, 3)
    assert desk.pool.stack(ident) == "process 1, call 7:\nstack of process 1"
    process.answer(ticket)
    found.result(WAIT_S)


def test_who_is_gone_comes_not_back(desk: Desk) -> None:
    desk.ask(0)
    member = desk.pool.members[1]
    with desk.pool.lock:
        desk.pool.let_go(member)
        for state in State:
            with pytest.raises(AssertionError):
                desk.pool.move(member, state)
