"""Every message in every state of both tables, and the two tables against each other."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest

from feeder.errors import ProtocolError
from feeder.service.protocol.messages import FROM_CONSUMER, FROM_SERVER
from feeder.service.protocol.session import CONSUMER, SERVER, Receipts, Session, Table

LOCAL = {"connect", "connected", "disconnected", "expired", "renewed", "taken_over", "close"}
EVENTS = sorted({*FROM_CONSUMER, *FROM_SERVER, *LOCAL})
TABLES = {"server": SERVER, "consumer": CONSUMER}


# How a lease goes when nothing is wrong, and the ways in which it ends otherwise.
PATHS = {
    "server": [
        "new Open opening Waiting opening Opened opened Spec opened Arena opened Attached "
        "streaming Batches streaming Used streaming Snapshot streaming "
        "State streaming End ended Used ended Bye gone disconnected gone",
        "new Open opening Fault refused disconnected gone",
        "streaming expired hung Used streaming Batches streaming",
        "streaming expired hung renewed streaming",
        "streaming expired hung taken_over fenced Fault fenced Used fenced disconnected gone",
        "streaming taken_over fenced",
        "streaming Fault ended Used ended taken_over fenced",
        "streaming Farewell draining Used draining disconnected gone",
        "new expired gone",
        "opening expired gone",
        "streaming disconnected gone",
        "hung disconnected gone",
        "new Look watched Seen watched Look watched Seen watched disconnected gone",
        "new Edit watched Edited watched Look watched Seen watched Edit watched Fault refused",
    ],
    "consumer": [
        "idle connect connecting connected connecting Open opening Waiting opening Opened "
        "attaching Arena attaching Attached streaming Batches streaming Used "
        "streaming End ended Used ended Bye closed",
        "streaming disconnected lost connect connecting Open opening connected opening Opened "
        "attaching Attached streaming",
        "streaming Farewell lost connect connecting",
        "streaming expired lost expired refused close closed",
        "streaming Fault failed Used failed connect connecting",
        "connecting expired refused",
        "opening Fault refused close closed",
        "ended disconnected ended Farewell ended close closed",
        "lost close closed close closed",
        "idle connect connecting Look looking connected looking Seen looking Look looking "
        "disconnected lost connect connecting",
        "connecting Edit looking Edited looking Edit looking Fault refused close closed",
    ],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_move_is_as_the_table_says_or_an_error(name: str) -> None:
    for (state, moves), event in product(TABLES[name].items(), EVENTS):
        session = Session(TABLES[name], state)
        if event in moves:
            assert session.on(event) == session.state == moves[event]
            continue
        with pytest.raises(ProtocolError, match=f"^{event!r} in state {state!r}, expected one of "):
            session.on(event)
        assert session.state == state


@pytest.mark.parametrize(("name", "first"), [("server", "new"), ("consumer", "idle")])
def test_a_lease_goes_its_way(name: str, first: str) -> None:
    assert Session(TABLES[name]).state == first
    for path in PATHS[name]:
        state, *steps = path.split()
        session = Session(TABLES[name], state)
        for event, expected in zip(steps[::2], steps[1::2], strict=True):
            assert session.on(event) == expected, path
        with pytest.raises(ProtocolError) as caught:
            session.on("nonsense")
        assert str(caught.value).endswith(f"events before it: {', '.join(steps[::2][-8:])}")


@pytest.mark.parametrize(("table", "last"), [(SERVER, "gone"), (CONSUMER, "closed")])
def test_every_state_is_reached_and_reaches_the_last(table: Table, last: str) -> None:
    reached = {state: {state, *moves.values()} for state, moves in table.items()}
    for _ in table:
        reached = {
            at: set().union(*(reached[one] for one in found)) for at, found in reached.items()
        }
    assert reached[next(iter(table))] == set(table)
    assert all(last in found for found in reached.values())


def test_a_question_is_answered_once_the_answer_before_it_was_read() -> None:
    receipts, receipt = Receipts(), b""
    for drawn in (b"first", b"second"):
        receipts.check(receipt)
        receipts.check(receipt)  # Nobody has answered it.
        before, receipt = receipt, receipts.make(drawn)
        assert receipt == drawn
        for wrong in (before, b"other"):
            with pytest.raises(ProtocolError, match="before the answer to the last one was read"):
                receipts.check(wrong)
    receipts.check(receipt)


IN_FLIGHT = 2
Pair = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def moves_of(pair: Pair, server_table: Table, consumer_table: Table) -> list[Pair]:
    """Where a server and a consumer with messages under way may go next.

    Raises `ProtocolError` where one is received that is not legal.
    """
    server, consumer, to_server, to_consumer = pair
    found: list[Pair] = []
    if to_server:
        state = Session(server_table, server).on(to_server[0])
        found.append((state, consumer, to_server[1:], to_consumer))
    if to_consumer and consumer not in ("lost", "closed", "idle"):
        state = Session(consumer_table, consumer).on(to_consumer[0])
        found.append((server, state, to_server, to_consumer[1:]))
    for event, state in server_table[server].items():
        if event in FROM_SERVER and len(to_consumer) < IN_FLIGHT:
            found.append((state, consumer, to_server, (*to_consumer, event)))
        elif event in ("expired", "taken_over", "renewed"):
            found.append((state, consumer, to_server, to_consumer))
    for event, state in consumer_table[consumer].items():
        if event in FROM_CONSUMER and len(to_server) < IN_FLIGHT:
            found.append((server, state, (*to_server, event), to_consumer))
        elif event == "expired" and state != consumer:
            found.append((server, "lost", to_server, to_consumer))
    # One that has left hears nothing more; what it has sent still arrives.
    return [(s, c, () if s == "gone" else a, b) for s, c, a, b in found]


def explore(server_table: Table, consumer_table: Table) -> set[Pair]:
    first: Pair = ("new", "connecting", (), ())
    seen, todo = {first}, deque([first])
    while todo:
        for pair in moves_of(todo.popleft(), server_table, consumer_table):
            if pair not in seen:
                seen.add(pair)
                todo.append(pair)
    return seen


def test_messages_that_cross_on_the_way_are_legal_where_they_arrive() -> None:
    seen = explore(SERVER, CONSUMER)
    together = {pair[:2] for pair in seen}
    assert {("streaming", "streaming"), ("ended", "streaming"), ("hung", "streaming")} <= together
