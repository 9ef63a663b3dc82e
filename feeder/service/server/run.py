"""A served feed: how its stream is made, stopped, and made again at another position.

`FeedFactory` makes the settings, `StreamIncarnation` is one stream from one position on, an
`Outbox` for each queue hands its batches to the I/O thread, and `ServedFeed` ends one incarnation
and makes the next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from feeder.checkpoint.resuming import Found, find_position
from feeder.checkpoint.store import CheckpointStore
from feeder.config import FeedConfig, deal_to, run_on
from feeder.errors import ConfigError, FeedError, RemoteError, ResumeError, StuckWorkerError
from feeder.feeds.coordinator import Coordinator
from feeder.service.faults import point
from feeder.service.memory.arena import ArenaSlots, slot_of
from feeder.service.protocol.fields import HEADER_BYTES, MAX_ITEMS, MAX_NAME
from feeder.service.ratelimited_log import RateLimitedLog
from feeder.service.server.stats import FeedStats
from feeder.state.positions import Positions, recall
from feeder.state.snapshot import Snapshot, StreamState
from feeder.state.state_dict import unpack_position
from feeder.workers.errors import ClosedError, in_words
from feeder.workers.fetch.bound import Held
from feeder.workers.fetch.resuming import Resume
from feeder.workers.pipeline import Pipeline
from feeder.workers.stats import Stopwatch, StreamStats, num_partitions
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import Cut, LazyPosition, Partitions
from feeder.workers.stream.rounds import Counting

# ---- Making a feed again, when it has to go back


class FeedFactory:
    """Makes the settings of one feed, each time with a fetch function that nobody has called yet.

    Given the user's factory it calls that each time. Given a coordinator it has one fetch function
    only, which can be used again where it can be put back: `fetch(call)`, or a function with cursor
    and seek. `make` is called by the feed's own thread. Everything else is fixed before the server
    listens, so any thread may read it.
    """

    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        factory: Callable[[], Any] | None,
        queues: int | None,
        replicas: int = 1,
        executor: Any = None,
    ) -> None:
        self.name = name
        self._executor = executor
        self.replicas = replicas
        """How many consumers are given the batches of each queue."""
        self._user_factory = factory
        self._queues = queues
        # Made already and not used yet: a factory is slow to call twice for one start.
        self._next: Coordinator | None = coordinator
        self._is_older = False
        self.positions = Positions(self._config(coordinator), 0)
        """Finds and encodes the feed's positions; those of an earlier format of its source once it
        went on from one."""
        self.origin: Resume | None = None
        """Where consumers without a position begin; None for the start of the feed."""
        _check_names(name, self.config.stream.names)
        if self.num_seats > MAX_ITEMS:
            num, shared = len(self.config.devices), f" with {replicas} replicas" * (replicas > 1)
            raise ConfigError(
                f"feed {name!r} has {num} queues{shared}, expected at most {MAX_ITEMS}"
            )
        if self.config.stream.order == "arrival" and len(self.config.devices) > 1:
            raise ConfigError(
                f"feed {name!r} has order='arrival' and {len(self.config.devices)} queues: what "
                "each is dealt could not be repeated; serve it with one queue"
            )
        if coordinator[name].streams[0].started:
            self._take_over(coordinator)

    def _take_over(self, coordinator: Coordinator) -> None:
        """Stop a feed that runs in this process already, to serve it from where its user stands."""
        stream, spec = coordinator[self.name].streams[0], self.config.stream
        if not (spec.pure or spec.seekable):
            raise ConfigError(
                f"feed {self.name!r} is started already, and its fetch function cannot be put "
                "back; serve it before it is started, or serve a factory"
            )
        position = Snapshot((stream.state(with_rows=True),))
        if not coordinator.stop(self.name):
            raise ConfigError(f"feed {self.name!r} is started already, and does not stop")
        # Its fetch function has been called, so `make` has to put it back like any other time.
        self._next = None
        self.begin_at(position)

    @property
    def config(self) -> FeedConfig:
        """The feed's settings."""
        return self.positions.config

    @property
    def num_seats(self) -> int:
        """How many consumers it has: one for each replica of each queue."""
        return len(self.config.devices) * self.replicas

    @property
    def goes_back(self) -> bool:
        """Whether the feed can be made again at an earlier position."""
        stream = self.config.stream
        # New processes begin with the function as it was given.
        is_renewed = self._user_factory is not None or self.config.run.executor is not None
        return is_renewed or stream.pure or stream.seekable

    def _config(self, coordinator: Coordinator) -> FeedConfig:
        streams = coordinator[self.name].streams
        if len(streams) != 1:
            raise ConfigError(
                f"feed {self.name!r} was made by {len(streams)} calls, one per device; a served "
                "feed is one stream, dealt out: make it with devices=N, or serve it with queues=N"
            )
        config = streams[0].config
        num = len(config.devices) if self._queues is None else self._queues
        config = deal_to(config, tuple(f"queue:{i}" for i in range(num)))
        return run_on(config, self._executor)

    def begin_at(self, position: Snapshot | bytes | None, skip: int = 0) -> None:
        """Let consumers without a position begin so many rounds after it, or after the start of the
        feed. Raises `ResumeError`."""
        at = self._start() if position is None else self._find_in(position)
        if at.cut.dealing is None and position is not None:
            self.positions.check_round(at.cut)
        self.origin = self.positions.deal(at, skip=skip)

    def find(self, token: bytes | None, *, rejoins: bool, skip: int = 0) -> Resume | None:
        """Where a consumer begins, given its position or None, and how many rounds later. Raises
        `ResumeError`.

        The stored position is for all who start together. A consumer that comes back alone without
        a position was lost before it had saved one: its model has seen nothing, so it begins at the
        start.
        """
        if token is not None:
            position = unpack_position(token, most_header_bytes=HEADER_BYTES)
            found = self._find_in(position)
            self.positions.tell_of_dealing(found.cut)
            return self.positions.deal(found, skip=skip)
        found_at = None if rejoins else self.origin
        if not skip:
            return found_at
        return self.positions.deal(found_at or self._start(), skip=skip)

    def _find_in(self, position: Snapshot | bytes) -> Resume:
        found = self.positions.find_in(position)
        if found.is_older and self.positions.older is not None:
            self._is_older, self.positions = True, self.positions.older
        return found

    def _start(self) -> Resume:
        return Resume(cut=self.start_cut(), rows=(), columns=None)

    @property
    def counting(self) -> Counting:
        """How rounds are counted from the origin on."""
        return self.positions.counting(None if self.origin is None else self.origin.cut)

    def start_state(self) -> StreamState:
        """Where consumers without a position begin, with leftover rows where these are known."""
        return self.state(self.origin)

    def state(self, resume: Resume | None, *, with_rows: bool = True) -> StreamState:
        """The state at a position that a consumer came with, or at the start of the stream."""
        at = resume or self._start()
        return self.positions.state(at.cut, at.rows, at.columns, with_rows=with_rows)

    def start_cut(self) -> Cut:
        """The start of the feed's stream."""
        stream = self.config.stream
        arrival = stream.order == "arrival"
        partitions = Partitions.of(stream.num_workers, pure=stream.pure, arrival=arrival)
        return Cut(
            epoch=0, index=0, step=0, finished=False, position=partitions.origin(), leftover=None,
            encode=self.positions.id.encode,
        )  # fmt: skip

    def token(self, resume: Resume | None) -> bytes:
        """The same as bytes for messages: a token, or a snapshot where leftover rows go with it."""
        state = self.state(resume, with_rows=False)
        return state.token if state.rows is None else bytes(Snapshot((state,)))

    def make(self, resume: Resume | None) -> FeedConfig:
        """The settings, with a fetch function that stands where `resume` needs it. Raises
        `ResumeError` where there is none, and what the factory or `init_fun` raises."""
        coordinator, self._next = self._next, None
        # The stages from cheap to dear: what is at hand, the user's factory, the same function.
        if coordinator is None and self._user_factory is not None:
            coordinator = make_coordinator(self._user_factory)
        if coordinator is None:
            if not self.goes_back:
                raise ResumeError(
                    f"feed {self.name!r} has to go back, and its fetch function can only be put "
                    "back by a new one: serve a factory (MODULE:FUNCTION) instead of a "
                    "coordinator, give the function cursor(worker_id) and seek(worker_id, "
                    "cursor), or use fetch(call)"
                )
            return self.config
        try:
            config = self._config(coordinator)
            if self._is_older:
                config = config.as_it_was() or config
            if config.init_fun is not None:
                config.init_fun(coordinator[self.name], coordinator)
        except BaseException:
            # Nobody has called the fetch function, so it is still good for the next attempt.
            self._next = coordinator
            raise
        return config


def _check_names(feed: str, columns: Sequence[str]) -> None:
    """Check that messages can hold these names. Raises `ConfigError`."""
    if len(columns) > MAX_ITEMS:
        raise ConfigError(
            f"feed {feed!r} has {len(columns)} columns, expected at most {MAX_ITEMS}; a served "
            "batch holds no more: stack them"
        )
    for kind, name in [("feed", feed), *(("column", column) for column in columns)]:
        # Surrogates stand for bytes that are no text, as in names of files; UTF-8 has none.
        if len(name) > MAX_NAME or name != name.encode(errors="ignore").decode():
            raise ConfigError(
                f"{kind} name {name[:50]!r} has {len(name)} characters, expected at most "
                f"{MAX_NAME}, all of which UTF-8 has; what is served is told of by name"
            )


def make_feed_factories(
    coordinator: Coordinator, factory: Callable[[], Any] | None, queues: int | None,
    replicas: int = 1, executor: Any = None,
) -> list[FeedFactory]:  # fmt: skip
    """A `FeedFactory` for each feed of a coordinator. Raises `ConfigError`."""
    names = list(coordinator)
    if not names:
        raise ConfigError("the coordinator has no feed to serve; add one first")
    return [FeedFactory(name, coordinator, factory, queues, replicas, executor) for name in names]


def begin_at(
    factories: list[FeedFactory], resume: Any, store: CheckpointStore | None, skip: int
) -> None:
    """Let consumers without a position begin so many rounds after the position that `resume` names.
    Raises `ResumeError` where it does not fit, and `CheckpointError`."""
    found = Found(None, "") if resume is None else find_position(resume, store)
    with found.named():
        for factory in factories:
            rounds = skip + factory.config.skip
            if found.position is not None or rounds:
                factory.begin_at(found.position, rounds)


def make_coordinator(factory: Callable[[], Any]) -> Coordinator:
    """The coordinator that a user's factory makes; raises `ConfigError` where it makes none."""
    made = factory()
    if not isinstance(made, Coordinator):
        raise ConfigError(
            f"{getattr(factory, '__name__', factory)!r} returned {type(made).__name__}, expected "
            "a Coordinator, as init_data_input_workers returns it"
        )
    if made.is_default:
        # It would find the feed of its last call there, at the second connection.
        made.stop()
        raise ConfigError(
            f"{getattr(factory, '__name__', factory)!r} adds its feeds to the coordinator of the "
            "process, and is called again when a feed goes back: give init_data_input_workers "
            "coordinator=feeder.Coordinator()"
        )
    return made


# ---- The queue between the thread that merges and the I/O thread: a device queue to the former


CheckBatches = Callable[[list[Batch]], None]
"""Checks batches before they are queued (`PositionCheck.check`); what it raises ends the run."""


def _check_nothing(batches: list[Batch]) -> None:
    """Another outbox has checked these batches."""


class Outbox:
    """Batches for one seat that are not sent yet. It never waits, since slots bound their number.

    `put` and `finish` are the enqueuer's; `pop_batches`, `ending` and `starve` the I/O thread's;
    `close` may be anybody's. The lock guards `_batches`, `_ending`, `_closed` and the stopwatch,
    for moments only. `is_urgent` is written by the I/O thread and read without the lock.
    """

    def __init__(
        self,
        first_step: float,
        check: CheckBatches,
        discard: Callable[[Batch], None],
        starved: Stopwatch,
        number: Callable[[Batch], int] = attrgetter("step"),
    ) -> None:
        self._first_step = first_step
        self._number = number
        self._check = check
        self._discard = discard
        self._batches: deque[Batch] = deque()
        self._ending: LazyPosition | FeedError | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.wake: Callable[[], None] = lambda: None
        """Wakes the I/O thread: there is something to send."""
        self._starved = starved
        self.is_urgent = True
        """Whether a batch is worth a wake-up of the I/O thread, which costs more than to send one.

        Not while the consumer has more than half of its credit under way: its next `Used` comes
        before that runs out, and wakes the I/O thread anyway.
        """

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def waited_since(self) -> float | None:
        """Since when the consumer has had nothing left to use; None while it has something."""
        return self._starved.since

    def put(self, batches: list[Batch]) -> None:
        """Add batches in order, and discard those that the consumer has had before. Raises
        `ClosedError` where the queue is closed, and what the check of all batches raises."""
        # Discarded batches are checked too: positions of others may lie among them.
        self._check(batches)
        wanted = batches
        if self._number(batches[0]) < self._first_step:
            wanted = [batch for batch in batches if self._number(batch) >= self._first_step]
            for batch in batches[: len(batches) - len(wanted)]:
                self._discard(batch)
        with self._lock:
            if self._closed:
                raise ClosedError("the feed is stopped")
            point("server.put")
            self._batches.extend(wanted)
            if wanted:
                self._starved.stop(time.monotonic())
        # Read after the batches are in: the I/O thread sets it and then looks for batches once
        # more, so that one of the two threads sees what the other has done.
        if self.is_urgent:
            self.wake()

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """Note what comes after all batches: the end of the stream, or an error."""
        with self._lock:
            # The first one counts, whatever the enqueuer says of other queues afterwards.
            if self._ending is None:
                self._ending = ending
            if not self._closed:
                self._starved.stop(time.monotonic())
        self.wake()

    def pop_batches(self, most: int) -> list[Batch]:
        """Take out the next batches, `most` of them or fewer, perhaps none."""
        with self._lock:
            batches = self._batches
            return [batches.popleft() for _ in range(min(most, len(batches)))]

    @property
    def first_bytes(self) -> int:
        """Bytes of the first batch; there must be one. Only the I/O thread takes batches out."""
        return self._batches[0].held_bytes

    @property
    def result(self) -> LazyPosition | FeedError | None:
        """What will come after all batches; None where that is not known yet."""
        return self._ending

    @property
    def ending(self) -> LazyPosition | FeedError | None:
        """What comes next where no batches are left; None where there are batches or more may come.

        A closed outbox has none: the batches that it dropped come again, from another run.
        """
        with self._lock:
            return None if self._batches or self._closed else self._ending

    def starve(self) -> None:
        """Note that the consumer has used all that it was sent."""
        with self._lock:
            if not self._batches and self._ending is None and self.waited_since is None:
                self._starved.start(time.monotonic())

    def close(self) -> None:
        """Take no more batches, and drop the ones that are here."""
        with self._lock:
            self._closed = True
            self._batches.clear()


class SharedQueue:
    """The outboxes of one shared queue, as one device queue: each replica gets every batch.

    The batches are the same objects, so their memory is there once. The enqueuer's thread puts
    batches in. The object never changes, and each outbox has a lock of its own.
    """

    def __init__(self, outboxes: Sequence[Outbox]) -> None:
        self._outboxes = outboxes

    @property
    def waited_since(self) -> float | None:
        """Since when a replica has had nothing left to use; None while all have something."""
        waits = [outbox.waited_since for outbox in self._outboxes]
        return min((since for since in waits if since is not None), default=None)

    def put(self, batches: list[Batch]) -> None:
        """Add batches in order, as `Outbox.put` does."""
        for outbox in self._outboxes:
            outbox.put(batches)

    def finish(self, ending: LazyPosition | FeedError) -> None:
        """Note what comes after all batches: the end of the stream, or an error."""
        for outbox in self._outboxes:
            outbox.finish(ending)


class Laggard:
    """How many batches of a run the last replica of a queue is past: what all are past is counted
    out once. Any thread; the lock guards the counts."""

    def __init__(self, replicas: int) -> None:
        self._past = [0] * replicas
        self._lock = threading.Lock()

    def advance(self, replica: int, num: int) -> int:
        """A replica is past `num` more batches; returns how many of these, the first ones, all are
        past now."""
        past = self._past
        if len(past) == 1:
            return num
        with self._lock:
            mine, past[replica] = past[replica], past[replica] + num
            # None of these was counted before, since this replica was not past it.
            return max(0, min(past) - mine)


logger = logging.getLogger("feeder")

# A run can end only when the user's fetch function returns. While serving that may take its time,
# since others wait for the feed all the same; a close has 5 s in all.
_JOIN_S, _CLOSE_S = 60.0, 3.5
# A token bucket: each rewind costs calls whose batches are discarded, and any peer may cause one.
# Eight in a row are a whole node's trainers that start together; then two a second. Nobody waits
# for longer than one interval, however many came before.
_REWINDS = 8
_REWIND_INTERVAL_S = 0.5


class StreamIncarnation:
    """The stream of a feed from one position on, with an outbox for each seat. Immutable, but for
    the counts of `sent` and `used`."""

    def __init__(
        self, pipeline: Pipeline, outboxes: list[Outbox], sent: list[Laggard], used: list[Laggard]
    ) -> None:
        self.pipeline = pipeline
        self.outboxes = outboxes
        """One for each seat."""
        self.sent = sent
        """Of each queue, how many of its batches have been sent."""
        self.used = used
        """And how many have been used."""

    @property
    def failure(self) -> FeedError | None:
        """The error that it ended with; None without one."""
        result = self.outboxes[0].result  # An error goes to all outboxes, to this one first.
        return result if isinstance(result, FeedError) else None

    def close(self) -> None:
        """Tell its threads to end, and wake those that wait."""
        self.pipeline.close()
        for outbox in self.outboxes:
            outbox.close()

    def join(self, deadline_s: float) -> None:
        """Wait for the threads, then let go of the slots, so that no garbage cycle keeps an arena.
        Raises `StuckWorkerError`."""
        self.pipeline.join(deadline_s)
        self.pipeline.forget()


class ServedFeed:
    """One feed: the I/O thread asks for runs, and a thread of the feed's own, the maker, makes
    them, because to stop and to make one takes as long as the user's functions take.

    `start_run`, `stop_run` and `make_use_of_room` are the I/O thread's; `run_maker` is the body of
    the maker; `close` may be called by any thread. The condition `_changed` guards what both use:
    `_asked`, `_number`, `_old`, `_closed`, `_has_spare`, `run` and `failure`. The I/O thread reads
    `run` and `failure` without it: both are replaced as a whole.
    """

    def __init__(self, factory: FeedFactory, slots: ArenaSlots, wake: Callable[[], None]) -> None:
        self.factory = factory
        self.slots = slots
        slots.on_spare = self._let_go
        self._wake = wake
        self._asked: tuple[Resume | None, list[float], CheckBatches, Counting] | None = None
        self._closed = self._has_spare = False
        self._changed = threading.Condition()
        # A run that was told to end and is still to be joined.
        self._old: StreamIncarnation | None = None
        # Counts the requests: a run that was made for an older one is thrown away.
        self._number = 0
        self._tokens, self._refilled_at = float(_REWINDS), time.monotonic()
        self._log = RateLimitedLog()
        config = factory.config
        self.counted = StreamStats.of(config.stream, config.run, len(config.devices))
        """Counters of its streams, one after the other: they go on when the feed is begun again."""
        self.stats = FeedStats(factory.num_seats)
        """Counters of its consumers. (Written by the I/O thread.)"""
        self.started_at: float | None = None
        """When it was begun for the first time."""
        self.run: StreamIncarnation | None = None
        """The run whose batches are sent; None while there is none."""
        self.failure: FeedError | None = None
        """Why there is no run, where making one failed."""
        self.reported: FeedError | None = None
        """The error that consumers were last sent, since the feed was last begun."""
        self.stuck: StuckWorkerError | None = None
        """Set where a fetch function did not return when a run was stopped."""

    @property
    def ended_with(self) -> FeedError | None:
        """The error that its run ended with, or for which none could be made; None without one."""
        run = self.run
        return self.failure if run is None else run.failure

    @property
    def name(self) -> str:
        """The feed's name."""
        return self.factory.name

    def start_run(
        self, resume: Resume | None, first_steps: list[float], check: CheckBatches,
        counting: Counting | None = None,
    ) -> None:  # fmt: skip
        """Ask for a run from another position on, which deals as `counting` says; of each seat the
        batches before its first number are discarded. `check` is called with all batches, in order,
        before anything else."""
        self.stop_run()
        self.stats.begun += 1
        self.started_at = self.started_at or time.monotonic()
        with self._changed:
            if not self._closed:
                self._asked = resume, first_steps, check, counting or self.factory.counting
            self._changed.notify_all()

    def stop_run(self) -> None:
        """Stop the run, if there is one, or if one is being made."""
        with self._changed:
            self._number += 1
            run, self.run, self._asked = self.run, None, None
            self.failure = self.reported = None
            if run is not None:
                self._old = run
            self._changed.notify_all()
        # Outside the condition: these take the locks of the stream and of the slots.
        if run is not None:
            run.close()
            self.slots.close()

    def make_use_of_room(self) -> None:
        """Wake the enqueuer where it waits for slots, if consumers have given enough back, or if
        one of them has nothing to come."""
        run = self.run
        self.slots.wake(hungry=run is None or not all(map(len, run.outboxes)))

    def close(self) -> None:
        """Stop the run, and make no more."""
        with self._changed:
            self._closed = True
            self.stop_run()

    def _let_go(self) -> None:
        # Called under the lock of the slots, so it only notes that there is memory to give back: to
        # give 24 MiB back takes the system milliseconds.
        with self._changed:
            self._has_spare = True
            self._changed.notify_all()

    def run_maker(self) -> None:
        """Thread body: make the runs that are asked for, and give back memory that no arena
        needs."""
        is_over = False
        while not is_over:
            with self._changed:
                self._changed.wait_for(lambda: self.has_work)
            is_over = self.make_next()

    @property
    def has_work(self) -> bool:
        """Whether there is something for `make_next` to do."""
        return self._asked is not None or self._closed or self._has_spare

    def make_next(self) -> bool:
        """Do what has been asked for; returns whether no run will be made any more. The maker's."""
        with self._changed:
            old, self._old = self._old, None
            asked, self._asked = self._asked, None
            number, is_over = self._number, self._closed
        try:
            # First: two runs at once would call one fetch function twice at a time.
            if old is not None:
                old.join(_CLOSE_S if self._closed else _JOIN_S)
            if asked is not None:
                if self._may_rewind(number):
                    self._make(number, *asked)
            elif is_over:
                self.slots.drop()
                return True
            else:
                self._has_spare = False
                self.slots.let_go()
        except StuckWorkerError as error:
            self.stuck = error
            if self._closed:
                # As text: a record keeps what a traceback holds.
                logger.error("%s", str(error))
                # The stuck threads may still hold slots: only what nobody has is let go of.
                self.slots.forget()
                return True
            # A call that has not returned may still write to its slot.
            for queue in range(len(self.factory.config.devices)):
                self.slots.retire(queue)
            self._fail(number, error)
        except FeedError as error:
            self._fail(number, error)
        except Exception as error:
            failed = RemoteError(f"feed {self.name!r} could not be made: {in_words(error)}")
            failed.__cause__ = error
            self._fail(number, failed)
        return False

    def _may_rewind(self, number: int) -> bool:
        """Wait until the bucket allows another run; False where this one is wanted no more.

        A request that was overtaken takes no token. So a consumer that comes after many that came
        and went within a moment waits for one interval, and pays no debt of theirs.
        """
        with self._changed:
            while number == self._number:
                wait_s = self.rewinds_in(time.monotonic())
                if not wait_s:
                    self._tokens -= 1.0
                    return True
                self._log.warn("feed %r is begun again too often; it waits", self.name)
                self._changed.wait_for(lambda: number != self._number, wait_s)
            return False

    def rewinds_in(self, now: float) -> float:
        """In how many seconds the bucket allows another run; 0 where it does now. The maker's."""
        passed, self._refilled_at = now - self._refilled_at, now
        self._tokens = min(_REWINDS, self._tokens + passed / _REWIND_INTERVAL_S)
        return max(0.0, (1.0 - self._tokens) * _REWIND_INTERVAL_S)

    def _fail(self, number: int, error: FeedError) -> None:
        with self._changed:
            if number == self._number:
                self.failure = error
        self._wake()

    def _make(
        self, number: int, resume: Resume | None, first_steps: list[float], check: CheckBatches,
        counting: Counting,
    ) -> None:  # fmt: skip
        point("server.rewind")
        config = self.factory.make(resume)
        # Never None: without a position a pipeline does not seek, and this function may have been
        # called before.
        resume = resume or Resume(cut=self.factory.start_cut())
        recall(config.stream.fetch, resume)

        num, replicas = len(config.devices), self.factory.replicas
        sent, used = ([Laggard(replicas) for _ in range(num)] for _ in range(2))

        def discard(seat: int, batch: Batch) -> None:
            # As if it had been sent and used: its slot is free, and its rows are buffered no more.
            queue, replica = divmod(seat, replicas)
            self.slots.free(queue, slot_of(batch))
            is_sent, is_used = (counts[queue].advance(replica, 1) for counts in (sent, used))
            held = Held(
                is_sent, is_sent * batch.rows, is_sent * batch.held_bytes, is_used * batch.kept_rows
            )
            pipeline.queue.hand_out(queue, held)

        outboxes = [
            # One outbox of each queue checks its batches, which are those of all its replicas.
            Outbox(
                step, check if seat % replicas == 0 else _check_nothing, partial(discard, seat),
                self.stats.queues[seat].starved, counting.number,
            )
            for seat, step in enumerate(first_steps)
        ]  # fmt: skip
        shared = [outboxes[at : at + replicas] for at in range(0, len(outboxes), replicas)]
        queues = [SharedQueue(of_queue) for of_queue in shared] if replicas > 1 else outboxes
        if len(self.counted.partitions) != num_partitions(config.stream, config.run):
            # A factory may give another number of threads each time, and then counters cannot go
            # on.
            self.counted = StreamStats.of(config.stream, config.run, num)
        self.slots.reopen()
        positions = self.factory.positions
        pipeline = Pipeline(
            config.stream, config.run, self.name, queues, self.slots,
            encode=positions.id.encode, resume=resume, stats=self.counted,
            turns=positions.begin_within(resume.cut, counting),
        )  # fmt: skip
        run = StreamIncarnation(pipeline, outboxes, sent, used)
        for outbox in outboxes:
            outbox.wake = self._wake
        # Threads first, `self.run` after: the I/O thread takes what it finds there as a run that
        # lives.
        try:
            pipeline.start()
        except BaseException:  # as where the system has no more threads
            self._drop(run)
            raise
        point("server.started")
        with self._changed:
            is_wanted = number == self._number
            if is_wanted:
                self.run = run
        if not is_wanted:
            self._drop(run)
        self._wake()

    def _drop(self, run: StreamIncarnation) -> None:
        """End a run that nobody has seen; the maker joins it like one that was stopped."""
        with self._changed:
            self._old = run
        run.close()
        self.slots.close()
