"""Actors of a world: the real ledger of tickets, and actors that are slow and die; and the feed
whose calls they make.

`Fleet` stands for `feeder.executors.pool.Pool` and what it talks to. `FleetPipeline` gives
what the actors answer to the real merge, in the order in which it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from itertools import count
from typing import Any, NamedTuple

from feeder.executors.ledger import Ledger, Ticket
from feeder.workers.errors import ClosedError
from feeder.workers.fetch.tickets import IndexTickets
from feeder.workers.fetch.tickets import Ticket as CallTicket
from feeder.workers.stream.batch import Call
from feeder.workers.stream.merge import Came, End, EpochEnd, Merge
from feeder.workers.stream.spec import RunSpec, StreamSpec
from simulation.stream import WAITS, Pipeline, Slots
from simulation.world import World

TICK_S = 0.25
"""As `actors._TICK_S`."""
MINUTE_S = 60.0


class Workers(NamedTuple):
    """Actors, and what goes wrong with them."""

    num: int
    call_s: float = 10.0
    """Seconds that a call takes, give or take a tenth."""
    start_s: float = 1.2
    """Seconds that a new actor takes to come."""
    slow_share: float = 0.0
    slow_times: int = 50
    """Of the calls such a share takes so many times longer."""
    killed_share: float = 0.0
    """Such a share of the actors is killed each minute."""
    killed_until_s: float = 3600.0
    """For so many seconds."""
    ahead: int = 16
    """For each actor so many calls may be ahead of the merge. The slowest of those under way, which
    is issued two or three times, takes as long as eleven."""


class Fleet:
    """Actors that make calls in virtual time. Owner: the world's one thread.

    `answer` is called with the payload of each ticket, once; `turn_of` has something happen in the
    driver's process.
    """

    def __init__(
        self,
        workers: Workers,
        name: str,
        answer: Callable[[Any], None],
        turn_of: Callable[[Callable[[], None]], None] = lambda do: do(),
    ) -> None:
        self._workers = workers
        self._answer, self._turn_of = answer, turn_of
        self._world = World.current
        self._draws = self._world.draws(f"{name} actors")
        self._ledger = Ledger(moves=True, quick_s=0.02)
        self._generations = count(1)
        # What each actor has to do, one after the other: numbers of tickets, and seconds.
        self._queues: dict[int, deque[tuple[int, float]]] = {}
        self._is_closed = False
        self.num_answered = 0
        """Tickets that were answered."""
        self.answered_by: list[int] = []
        """The same after each minute."""
        self.num_killed = 0
        """Actors that were killed, or given up."""
        self.num_slow = 0
        """Calls that were slow."""
        self.num_late = 0
        """Answers that came after another one to the same ticket."""

    def start(self) -> None:
        """Start all actors."""
        for _ in range(self._workers.num):
            self._after(self._workers.start_s * self._draws.random(), self._come)
        self._after(TICK_S, self._tick)
        self._after(MINUTE_S, self._pass_minute)

    def close(self) -> None:
        """End all actors."""
        self._is_closed = True
        self._queues.clear()

    def ask(self, payload: Any, turn: tuple[int, ...]) -> None:
        """Have a call made by any actor."""
        self._ledger.open(Ticket(payload, None, turn, is_repeatable=True))
        self._issue()

    def _after(self, seconds: float, do: Callable[..., None], *args: Any) -> None:
        self._world.after(seconds, self._happen, do, args)

    def _happen(self, do: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self._is_closed:
            self._turn_of(lambda: self._is_closed or do(*args))

    def _issue(self) -> None:
        self._ledger.issue(self._world.now, self._send)

    def _send(self, ticket: Ticket, generation: int, number: int) -> None:
        workers = self._workers
        took = workers.call_s * self._draws.uniform(0.9, 1.1)
        if self._draws.random() < workers.slow_share:
            self.num_slow += 1
            took *= workers.slow_times
        queue = self._queues[generation]
        queue.append((number, took))
        if len(queue) == 1:
            self._after(took, self._finish, generation)

    def _come(self) -> None:
        generation = next(self._generations)
        self._queues[generation] = deque()
        self._ledger.add(generation)
        self._issue()

    def _finish(self, generation: int) -> None:
        queue = self._queues.get(generation)
        if queue is None:
            return  # It was killed.
        number, _ = queue.popleft()
        if queue:
            self._after(queue[0][1], self._finish, generation)
        found = self._ledger.came(generation, number, self._world.now)
        assert found is not None
        ticket, is_first = found
        if is_first:
            self.num_answered += 1
            self._answer(ticket.payload)
        else:
            self.num_late += 1
        self._issue()

    def _kill(self, generation: int) -> None:
        self.num_killed += 1
        del self._queues[generation]
        for ticket, *_ in self._ledger.remove(generation):
            # Its fetcher asks again.
            self._ledger.open(Ticket(ticket.payload, None, ticket.turn, is_repeatable=True))
        self._after(self._workers.start_s, self._come)

    def _tick(self) -> None:
        for generation in self._ledger.stuck(self._world.now, self._workers.start_s):
            self._kill(generation)
        self._ledger.late(self._world.now)
        self._issue()
        self._after(TICK_S, self._tick)

    def _pass_minute(self) -> None:
        self.answered_by.append(self.num_answered)
        alive, workers = list(self._queues), self._workers
        share = workers.killed_share * (self._world.lasts_s < workers.killed_until_s)
        for generation in self._draws.sample(alive, int(len(alive) * share)):
            self._kill(generation)
        self._issue()
        self._after(MINUTE_S, self._pass_minute)


class FleetPipeline(Pipeline):
    """Makes the batches of a stream whose calls actors make.

    What may be called is the choice of the real tickets, up to a bound on calls that are ahead of
    the merge, which stands for the bound on rows. The order of the chunks is the real merge's.
    """

    def __init__(
        self, spec: StreamSpec, run: RunSpec, name: str, queues: Any, slots: Slots, **rest: Any
    ) -> None:
        self._num = run.num_threads
        super().__init__(spec, run, name, queues, slots, **rest)
        start = self._begin.position
        self._merge = Merge(
            self._partitions, self.schema, start, spec,
            prints=None, first_partition=self._begin.first_partition,
        )  # fmt: skip
        self._tickets = IndexTickets(start, self._num)
        self._came_by_now: list[Came] = []
        server = slots.server
        workers = self._workers = server.plan.workers
        self.fleet = Fleet(workers, self.name, self._came, server.turn_of)
        server.fleets.append(self.fleet)
        self._waits = False

    def start(self) -> None:
        super().start()
        self.fleet.start()
        self._call()

    def join(self, deadline_s: float) -> None:
        super().join(deadline_s)
        self.fleet.close()

    # ---- the fetchers

    def _call(self) -> None:
        """Have all calls made that may be, one in each thread."""
        tickets, place = self._tickets, self._merge.position
        most = place.calls[0] + self._workers.ahead * self._workers.num
        while tickets.epoch != self._spec.epochs:
            for ticket in tickets.draw(1):
                if ticket.epoch == place.epoch and ticket.first >= most:
                    tickets.put_back(ticket)
                    return
                self.fleet.ask(ticket, (ticket.epoch, ticket.first))
                break
            else:
                return

    def _came(self, ticket: CallTicket) -> None:
        """A call was answered."""
        if self._is_over:
            return
        spec, tickets, number = self._spec, self._tickets, ticket.first
        ending = None
        try:
            ticket.chunks.append(spec.fetch(Call(number, ticket.epoch, 0, spec.rows_asked, 0)))
        except StopIteration:
            ending = End(None)
        came = (0, ticket.epoch, *ticket.take(marked=False), ending)
        self._came_by_now.append(came)
        if ending is None:
            tickets.put_back(ticket)
        else:
            tickets.close(ticket, ended=True)
        tickets.begin_epoch()
        self._call()
        if self._waits and (0, number) == self._merge.wanted:
            self._waits = False
            self._soon()

    # ---- the enqueuer

    def _make(self) -> Generator[int | None, None, None]:
        """What `Enqueuer.run` does; gives the device for whose slots it waits, None to go on later,
        or `WAITS` if it waits for chunks."""
        leftover = self._begin.leftover_chunks(self.schema, self.queue)
        if leftover is not None:
            yield from self._take(leftover)
        merge, router = self._merge, self._router
        while not merge.finished:
            if self.queue.closed:
                raise ClosedError("the feed is stopped")
            merged = merge.next()
            if isinstance(merged, EpochEnd):
                yield from self._end_epoch(merged.position)
            elif merged is not None:
                yield from self._take(merged)
                continue
            router.flush()
            self._call()
            if merged is None and not merge.finished:
                while not (came := self._collect()):
                    yield WAITS
                merge.push(came)
            yield None
        router.finish(self._assembler.start_of(merge.position))

    def _collect(self) -> list[Came]:
        """All that came, once there is what is waited for."""
        came, wanted = self._came_by_now, self._merge.wanted
        self._waits = not any((0, one[2]) == wanted for one in came)
        if self._waits:
            return []
        self._came_by_now = []
        return came
