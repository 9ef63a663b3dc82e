"""Tickets and the queue, with no thread but those that a test needs: which calls are drawn, and
what becomes of those that came back."""

from __future__ import annotations

import threading
from random import Random

import numpy as np
import pytest

from feeder.workers.fetch.bound import Bound, Held
from feeder.workers.fetch.queue import Queue
from feeder.workers.fetch.tickets import IndexTickets, Ticket, Tickets, WorkerTickets
from feeder.workers.stats import StreamStats
from feeder.workers.stream.merge import End
from feeder.workers.stream.position import Partitions, Position
from feeder.workers.stream.spec import CallNames, StreamSpec
from small import WAIT_S
from watching import CallsOf

EPOCHS, THREADS = 3, 3


def start(num: int, done: tuple[int, ...] = ()) -> Position:
    return Position(0, 0, (True,) * num, (0,) * num, (0,) * num, (None,) * num, done)


class Threads:
    """What threads do with tickets, drawn at random; every call is noted, and made once."""

    def __init__(self, tickets: Tickets, ends: list[list[int]], chance: Random) -> None:
        self.tickets, self.ends, self.chance = tickets, ends, chance
        self.has: list[Ticket] = []
        self.made: set[tuple[int, int, int]] = set()
        self.late: set[tuple[int, int, int]] = set()
        self.now, self.firsts = 0.0, [0] * len(ends)

    def step(self) -> None:
        if len(self.has) < THREADS and self.chance.random() < 0.5:
            self.now += 1.0
            self.tickets.end_pauses(self.now)
            self.has += self.tickets.draw(self.chance.randint(1, 5))
            assert len({id(one) for one in self.has}) == len(self.has)
        elif self.has:
            self.make(self.chance.choice(self.has))
            if self.chance.random() < 0.2:
                self.tickets.cut_short()

    def make(self, ticket: Ticket) -> None:
        """The next call of a ticket is made, or gives nothing."""
        assert ticket.epoch == self.tickets.epoch
        number = ticket.first + len(ticket.chunks)
        assert number < ticket.stop
        at = ticket.partition, ticket.epoch, number
        if number - self.firsts[ticket.partition] >= self.ends[ticket.partition][ticket.epoch]:
            self.give_back(ticket)
            if at not in self.late and self.chance.random() < 0.3:
                self.late.add(at)
                self.tickets.put_back(ticket, self.now + self.chance.randint(1, 3))
            else:
                self.tickets.close(ticket, ended=True)
            if self.tickets.begin_epoch() and isinstance(self.tickets, WorkerTickets):
                self.firsts = [one.first for one in self.tickets._all]
        elif self.chance.random() < 0.8:
            assert at not in self.made
            self.made.add(at)
            ticket.chunks.append(())
            if ticket.first + len(ticket.chunks) == ticket.stop:
                self.give_back(ticket)
                self.tickets.put_back(ticket)
                self.tickets.begin_epoch()
        else:
            self.give_back(ticket)
            self.tickets.put_back(ticket, self.now + self.chance.randint(1, 3))
            self.tickets.begin_epoch()

    def give_back(self, ticket: Ticket) -> None:
        ticket.take(marked=False)
        self.has.remove(ticket)


@pytest.mark.parametrize("seed", range(50))
def test_each_index_below_the_end_is_called_once_in_its_epoch(seed: int) -> None:
    chance = Random(seed)
    ends = [chance.randint(0, 6) for _ in range(EPOCHS)]
    done = tuple(i for i in range(ends[0]) if chance.random() < 0.3)
    tickets = IndexTickets(start(1, done), THREADS)
    threads = Threads(tickets, [ends], chance)
    threads.made.update((0, 0, i) for i in done)
    while tickets.epoch < EPOCHS:
        threads.step()
        assert len(tickets.running) <= THREADS
    below = {(0, epoch, i) for epoch in range(EPOCHS) for i in range(ends[epoch])}
    assert below == threads.made


@pytest.mark.parametrize("seed", range(50))
def test_each_workers_calls_are_made_in_order_and_no_epoch_early(seed: int) -> None:
    chance = Random(seed)
    num = chance.randint(1, 4)
    ends = [[chance.randint(0, 4) for _ in range(EPOCHS)] for _ in range(num)]
    tickets = WorkerTickets(start(num), THREADS, arrival=chance.random() < 0.5)
    threads = Threads(tickets, ends, chance)
    while tickets.epoch < EPOCHS:
        threads.step()
        assert len({one.partition for one in threads.has}) == len(threads.has)
    for worker in range(num):
        numbers = sorted(number for partition, _, number in threads.made if partition == worker)
        assert numbers == list(range(sum(ends[worker])))


def test_each_chunk_is_taken_with_its_own_cursor() -> None:
    ticket = Ticket(0, 0, 5, 9)
    ticket.chunks.extend([(1,), (2,), (3,)])
    ticket.marks.extend([b"a", b"b"])  # The third call's cursor is not there yet.
    assert ticket.take(marked=True) == (5, [(1,), (2,)], [b"a", b"b"])
    ticket.marks.append(b"c")
    assert ticket.take(marked=True) == (7, [(3,)], [b"c"])


@pytest.mark.parametrize("is_looked_at", [False, True])
def test_a_call_that_has_nothing_yet_keeps_its_thread_from_the_next_ones(
    is_looked_at: bool,
) -> None:
    tickets = IndexTickets(start(1), 1)
    (ticket,) = tickets.draw(4)
    if is_looked_at:
        tickets.cut_short()
    tickets.put_back(ticket, 1.0)
    assert (tickets.draw(4), tickets.is_ready, tickets.due) == ([], False, 1.0)
    tickets.end_pauses(1.0)
    assert tickets.draw(4) == [ticket]


def test_a_worker_is_called_ahead_of_the_merge_by_its_share_of_the_bound() -> None:
    tickets = WorkerTickets(start(2), 1, arrival=False)
    tickets.come_to(0, 0, 3)
    drawn = tickets.draw(100)
    assert [(one.partition, one.first, one.stop) for one in drawn] == [(0, 0, 3), (1, 0, 3)]
    for one in drawn:
        one.chunks.extend([()] * 3)
        one.take(marked=False)
        tickets.put_back(one)
    assert (tickets.draw(100), tickets.is_ready) == ([], False)
    tickets.come_to(1, 1, 3)
    assert [(one.partition, one.stop) for one in tickets.draw(100)] == [(0, 4), (1, 4)]


def test_what_is_beyond_a_call_that_failed_is_not_drawn() -> None:
    tickets = IndexTickets(start(1), 2)
    (early,), (late,) = tickets.draw(2), tickets.draw(2)
    tickets.close(late, ended=False)
    assert tickets.draw(2) == []
    tickets.put_back(early)
    assert [(one.first, one.stop) for one in tickets.draw(9)] == [(0, 2)]


# ---- the queue


def make_queue(num_threads: int = 2, max_rows: int = 100, num_workers: int = 0) -> Queue:
    """The queue of a pure function, or of so many workers."""
    num, pure = max(1, num_workers), not num_workers
    spec = StreamSpec(
        fetch=print, pure=pure, cursor=None, seek=None, names=("id",), axes=(0,), batch_size=5,
        num_workers=num, first_worker_id=0, seed=0, epochs=1, last_batch="keep",
        last_round="uneven", order="ticket", dont_rebatch=False, repeatable=True,
    )  # fmt: skip
    partitions = Partitions(num_partitions=num, pure=pure, arrival=False)
    tickets = WorkerTickets(start(num), num_threads, arrival=False)
    return Queue(
        IndexTickets(start(1), num_threads) if pure else tickets,
        Bound(max_rows, 2**30, 1, 0, num), StreamStats(num + num_threads, 1),
        CallNames(spec, partitions), (),
        num_threads=num_threads, timeout_s=WAIT_S, epochs=1,
    )  # fmt: skip


def draw(queue: Queue, most: int) -> list[Ticket]:
    """What a thread draws, and has begun."""
    drawn = queue.draw(most)
    return [] if drawn is None else [drawn.popleft() for _ in range(len(drawn))]


def give(queue: Queue, ticket: Ticket, rows: int = 1) -> None:
    num = ticket.stop - ticket.first - len(ticket.chunks)
    ticket.chunks.extend([(np.zeros(rows),)] * num)
    queue.give_back(ticket, rows * num, 8 * rows * num)


@pytest.mark.parametrize("way", ["is put off", "is given back before it is begun"])
def test_an_epoch_ends_whatever_becomes_of_a_call_beyond_its_end(way: str) -> None:
    queue = make_queue()
    (last,) = draw(queue, 1)
    drawn = queue.draw(1)
    assert drawn is not None
    (beyond,) = drawn
    queue.give_back(last, ending=End(None))
    if way == "is put off":
        queue.give_back(beyond, put_off_s=4 * WAIT_S)
    else:
        with queue._lock:
            queue._look()
    assert queue._tickets.epoch == 1 and queue.draw(1) is None


@pytest.mark.timeout(4 * WAIT_S)
def test_a_fetcher_is_woken_for_each_that_finds_a_call() -> None:
    queue, drawn, is_full = make_queue(4, max_rows=1), list[Ticket](), threading.Semaphore(0)

    def fetch() -> None:
        drawn.extend(draw(queue, 1))
        is_full.release()

    (first,) = draw(queue, 1)
    queue.queue(0, 1)
    give(queue, first, rows=1)
    threads = [threading.Thread(target=fetch) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not is_full.acquire(timeout=0.05)  # At the bound, and nobody starves.
    queue.hand_out(0, Held(1, 1, 8, 0))
    for thread in threads:
        thread.join(WAIT_S)
    assert sorted(one.first for one in drawn) == [1, 2, 3]


def test_what_comes_within_the_grace_is_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, told = make_queue(3), list[int]()
    monkeypatch.setattr(queue._arrived, "notify", lambda: told.append(len(queue._came)))
    tickets = [draw(queue, 1)[0] for _ in range(3)]
    queue._wanted, queue._is_awaited = (0, 0), True
    give(queue, tickets[0])
    give(queue, tickets[1])
    assert queue._is_there and not told
    give(queue, tickets[2])
    assert told == [3]
    # It has looked: whatever comes from here on is late.
    late = [draw(queue, 1)[0] for _ in range(2)]
    queue.cuts_short = True
    give(queue, late[0])
    assert told == [3, 4]
    # At the bound nothing else comes.
    queue, _ = make_queue(3, max_rows=4), told.clear()
    monkeypatch.setattr(queue._arrived, "notify", lambda: told.append(len(queue._came)))
    tickets = [draw(queue, 1)[0] for _ in range(3)]
    queue._wanted, queue._is_awaited = (0, 0), True
    give(queue, tickets[0])
    assert queue._is_there and not told
    give(queue, tickets[1], rows=3)
    assert told == [2]


def test_what_came_within_the_grace_is_taken_without_a_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look would cut the tickets of others short."""
    queue = make_queue()

    def wait(seconds: float) -> bool:
        queue._is_there = True
        return False

    monkeypatch.setattr(queue._arrived, "wait", wait)
    monkeypatch.setattr(queue, "_look", lambda: pytest.fail("the enqueuer has looked"))
    assert queue.collect((0, 0), 0) == []


def test_a_call_that_does_not_return_holds_no_other_of_its_ticket() -> None:
    queue = make_queue()
    (ticket,) = draw(queue, 4)
    ticket.chunks.append((np.zeros(2),))  # Its next call does not return.
    ((_, _, first, chunks, _, ending),) = queue.collect((0, 0), 0)
    assert (first, len(chunks), ending) == (0, 1, None)
    assert (queue._bound.rows, queue._bound.bytes) == (2, 16)  # Its user may have had them.
    assert [(one.first, one.stop) for one in (ticket, *draw(queue, 4))] == [(1, 2), (2, 4)]
    ticket.chunks.append((np.zeros(2),))
    queue.give_back(ticket, 4, 32)
    assert (queue._bound.rows, queue._bound.bytes) == (4, 32)


def test_who_draws_while_somebody_waits_draws_one_call() -> None:
    """And what was drawn before and not begun is anybody's."""
    queue = make_queue()
    drawn, queue._is_awaited = queue.draw(4), True
    assert not queue._look() and not drawn
    assert [(one.first, one.stop) for one in draw(queue, 4)] == [(0, 1)]
    assert [(one.first, one.stop) for one in draw(queue, 4)] == [(1, 2)]


def test_what_comes_while_a_look_counts_is_not_taken_uncounted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue = make_queue()
    (ticket,) = draw(queue, 4)
    ticket.chunks.append((np.zeros(2),))

    def count_rows(chunk: tuple[np.ndarray, ...]) -> int:
        ticket.chunks.append((np.zeros(3),))  # The fetcher's thread is not held up.
        return len(chunk[0])

    monkeypatch.setattr(queue, "_count_rows", count_rows)
    queue._look()
    ((_, _, _, chunks, _, _),) = queue._came
    assert queue._bound.rows == sum(len(rows) for (rows,) in chunks) == 2


def test_what_is_behind_a_call_that_does_not_return_goes_to_other_threads() -> None:
    queue = make_queue(num_workers=4)
    drawn = queue.draw(8)
    assert drawn is not None
    slow = drawn.popleft()
    since = slow.since
    assert [one.partition for one in (slow, *drawn)] == [0, 1, 2, 3]
    queue._look()
    assert not drawn
    # Of these one by one: there is no other look soon.
    for worker in (1, 2, 3):
        assert [(one.partition, one.first) for one in draw(queue, 8)] == [(worker, 0)]
    assert (slow.since, slow.stop) == (since, 1)


def test_so_many_workers_are_called_at_once_as_there_is_room_for() -> None:
    queue = make_queue(num_workers=8, max_rows=5)
    give(queue, *draw(queue, 1), rows=2)
    assert len(draw(queue, 8)) == 1
    # What comes is larger than what came before: the tickets behind it go back.
    queue = make_queue(num_workers=8)
    drawn = queue.draw(8)
    assert drawn is not None and len(drawn) == 8
    give(queue, drawn.popleft(), rows=100)
    assert not drawn


def test_only_calls_of_batches_that_have_a_slot_are_made() -> None:
    queue = make_queue()
    queue.allow((0, 3))
    (ticket,) = draw(queue, 9)
    assert ticket.stop == 3
    give(queue, ticket)
    queue.allow(None)
    assert draw(queue, 1)[0].first == 3


def test_above_the_bound_the_call_that_is_waited_for_is_made_alone() -> None:
    queue = make_queue(max_rows=1)
    early, late = draw(queue, 1)[0], draw(queue, 1)[0]
    give(queue, late, rows=5)
    queue.collect((0, 0), 0)
    queue._wanted, queue._is_awaited = (0, 0), True
    assert not queue._tickets.draw_call(0, 0)  # It is being made.
    queue.give_back(early, put_off_s=1e-9)
    assert draw(queue, 8) == [early]
    queue.give_back(early, ending=End(None))
    assert draw(queue, 1) == []


def test_no_call_is_made_ahead_of_a_busy_enqueuer_once_much_came() -> None:
    queue = make_queue(max_rows=2**30)
    (ticket,) = draw(queue, 1)
    ticket.chunks.append((np.zeros(2**20),))
    queue.give_back(ticket, 2**20, 2**23)
    assert not queue._has_room
    queue.collect((0, 0), 0)
    assert queue._has_room


def test_one_thread_makes_quick_calls() -> None:
    queue, woken = make_queue(), list[int]()
    queue._num_idle, queue._wakes.wake = 1, lambda: woken.append(1)  # type: ignore[method-assign]
    draw(queue, 8)
    assert not woken
    queue._look()
    assert woken


def test_one_thread_that_makes_quick_calls_has_all_room_and_fills_it() -> None:
    queue = make_queue(max_rows=100)
    give(queue, *draw(queue, 1), rows=10)
    (ticket,) = draw(queue, 9)
    assert ticket.num_left == 9
    assert not queue._has_room
    give(queue, ticket, rows=9)
    # Of the 9 rows that are left another call of 10 may be made, by each thread.
    assert queue._has_room


def test_of_threads_that_make_one_call_each_the_rows_come_on_top() -> None:
    bound = Bound(100, 2**20, 1, 0, 1)
    bound.add_chunks(9, 90, 720)
    assert bound.left(3, 3) == (10, 2**20 - 720 - 240)
    assert bound.left(2, 3) == (-20, 2**20 - 720 - 240)
    assert bound.has_room(3, 3) and not bound.has_room(2, 3)


def test_who_has_waited_is_given_as_many_calls_as_it_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    queue, drawn = make_queue(1, max_rows=80), list[Ticket]()
    calls = CallsOf(monkeypatch, (queue._wakes, "wait"))
    queue.queue(0, 1)

    def fetch() -> None:
        give(queue, *draw(queue, 8), rows=10)
        drawn.extend(draw(queue, 8))

    thread = threading.Thread(target=fetch)
    thread.start()
    calls.wait_until(lambda: queue._num_idle == 1)
    queue.hand_out(0, Held(1, 80, 640, 0))
    thread.join(WAIT_S)
    assert [(one.first, one.stop) for one in drawn] == [(8, 16)]


def test_rows_kept_beside_their_copies_count_in_the_bound() -> None:
    bound = Bound(10, 2**20, 1, 0, 1)
    bound.add(6, 48)
    assert bound.has_room()
    bound.add(0, 0, 4)
    assert not bound.has_room()
    held = Held(0, 2, 16, 4)
    bound.hand_out(0, held)
    bound.hand_out(0, held)  # Said again, as after an interrupt.
    assert (bound.has_room(), bound.kept_rows) == (True, 0)
    bound.add(1, 8)
    assert (bound.rows, bound.peak_rows, bound.bytes, bound.peak_bytes) == (5, 6, 40, 48)
