"""Fetch functions in processes: the executor of a feed, and the calls of a stream that it runs.

A fetcher thread asks for as many calls as its chunk list has room for. They are made in one
process, in order, and come back together; the thread then takes them one by one, as if each had
been made when it was asked for. A process that ends is replaced, and what it was asked is asked
again, from where the last chunk came.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from feeder.executors import pickles, plain
from feeder.executors.forking import Forking
from feeder.executors.options import Processes, RayActors
from feeder.executors.pool import Lost, Member, Pool
from feeder.executors.wire import END, ERROR, NOTHING, Ask, Calls, Load
from feeder.state import codec
from feeder.workers.errors import CallLost, ClosedError, ConfigError
from feeder.workers.fetch.calls import IndexCalls, PartitionCalls, WorkerCalls, has_cursor
from feeder.workers.fetch.tickets import Ticket
from feeder.workers.stats import ExecutorCounts, StreamStats
from feeder.workers.stream.batch import Call
from feeder.workers.stream.position import Position
from feeder.workers.stream.spec import RunSpec, StreamSpec

_LEAST_DEATHS = 2
"""A call whose process ends is made again so often at least. Memory may have been short for a
moment; a call that ends each process it is made in would do so for ever."""

_MOST_BYTES = 4 * 1024 * 1024
"""Chunks of so many bytes are sent before more calls are made."""


class ProcessExecutor:
    """Runs the fetch function of one feed in processes, new ones for each of its streams. Frozen.

    Raises `ConfigError` where the function cannot be sent to a process.
    """

    def __init__(self, options: Processes | RayActors, fetch: Any) -> None:
        self._parcel = pickles.pack_function(fetch)
        self.options = options
        """What was asked for."""

    def begin(self, spec: StreamSpec, run: RunSpec) -> ProcessExecution:
        """A stream begins."""
        return ProcessExecution(self, spec, run)

    def of(self, fetch: Any) -> ProcessExecutor:
        """The same for another fetch function."""
        return type(self)(self.options, fetch)

    def load_of(
        self, spec: StreamSpec, rows_per_call: int | None, begins: list[Any] | None, *,
        is_far: bool,
    ) -> Load:  # fmt: skip
        """What a new process is told first."""
        parcel, options = self._parcel, self.options
        return Load(
            function=parcel.data,
            is_path=parcel.is_path,
            sizes=parcel.sizes,
            names=list(spec.names),
            axes=list(spec.axes),
            rows_per_call=rows_per_call,
            pure=spec.pure,
            seekable=spec.seekable,
            seed_globals=options.seed_globals,
            first_worker_id=spec.first_worker_id,
            num_workers=spec.num_workers,
            seed=spec.seed,
            log_level=logging.getLogger().getEffectiveLevel(),
            is_far=is_far,
            begins=begins,
        )

    def place_buffers(self) -> int:
        """The descriptor that comes along; the caller closes it."""
        return pickles.place_buffers(self._parcel.buffers)


class ProcessExecution:
    """The fetch function of one stream, in processes. Fetcher threads call it."""

    is_far = False
    """Whether processes may be on other hosts: then neither end unpickles what they say."""

    def __init__(self, executor: ProcessExecutor, spec: StreamSpec, run: RunSpec) -> None:
        self._executor = executor
        self._given = spec
        self.run = run
        self._pool = self._make_pool()
        self._begins: list[Any] | None = None
        # The large arrays of the function: all processes share one copy.
        self._buffers = -1
        self._workers = {worker_id: _Worker() for worker_id in spec.worker_ids}
        self.spec = spec._replace(
            fetch=_PureFunction(self) if spec.pure else _WorkerFunction(self),
            cursor=self._ask_cursor if spec.seekable else None,
            seek=self._seek if spec.seekable else None,
        )

    def _make_pool(self) -> Pool:
        options = self._executor.options
        assert isinstance(options, Processes)
        # There are always as many, so a worker stays while its process lives.
        return Pool(Forking(options), moves=False)

    # ---- life

    def start(self) -> None:
        """Start the processes, in the background."""
        self._buffers = self._executor.place_buffers()
        self._pool.start(most_of(self._given, self._executor.options), self._load)

    def watch(self, stats: StreamStats) -> None:
        """What the stream counts says how many actors it needs."""
        self._pool.launcher.watch(stats)

    def _load(self) -> tuple[Load, int]:
        return (
            self._executor.load_of(
                self._given, self.run.rows_per_call, self._begins, is_far=self.is_far
            ),
            self._buffers,
        )

    def interrupt(self) -> None:
        """End what is waited for."""
        self._pool.interrupt()

    def close(self) -> None:
        """End all processes."""
        self._pool.close()
        if self._buffers >= 0:
            os.close(self._buffers)
            self._buffers = -1

    def stack(self, ident: int | None) -> str:
        """The Python stacks of the process that a thread waits for."""
        return self._pool.stack(ident)

    def counts(self) -> ExecutorCounts:
        """The processes, those of the stream."""
        return self._pool.counts()

    def make_calls(self, start: Position, *, resumed: bool) -> Sequence[PartitionCalls]:
        """The calls of each partition."""
        if self._given.seekable:
            # Otherwise all calls are made again, from the first one on.
            for worker, num_calls in zip(self._workers.values(), start.calls, strict=True):
                worker.num_chunks = num_calls
        if self.spec.pure:
            return [_RemoteIndexCalls(self)]
        sizes = [0] * self.spec.num_workers
        return [
            _RemoteWorkerCalls(self, start, number, resumed, sizes)
            for number in range(self.spec.num_workers)
        ]

    # ---- round trips

    def call_index(
        self, first: int, epoch: int, size: int, num: int, most_deaths: int, *, counts: bool = True
    ) -> Any:
        """Make so many calls of a pure function at most; returns a `Made`. Raises `CallLost`, and
        `Lost` if the process ended in these calls, or `most_deaths` did. `counts`: what these
        leave out was not left out before."""
        ticket = Calls(first, epoch, 0, size, num, _MOST_BYTES, None, [])
        made = self._pool.ask(ticket, None, _as_it_is, most_deaths)
        # Counted where the user looks: at the source that the processes have copies of.
        fetch: Any = self._given.fetch
        if made.stores:
            fetch._count_stores(made.stores)
        if made.skipped and counts:
            fetch.count_skipped(made.skipped, made.left_out)
        return made

    def call_again(self, call: Call, *, counts: bool = False) -> Any:
        """The chunk of a call of a pure function that was made before, or is made now if it
        `counts`."""
        return self.only(
            lambda most_deaths: self.call_index(
                call.index, call.epoch, call.batch_size, 1, most_deaths, counts=counts
            )
        )

    def call_worker(self, worker_id: int, size: int, num: int) -> Any:
        """Make so many calls of one worker at most, in its own process."""
        worker = self._workers[worker_id]
        ticket = Calls(worker.num_chunks, 0, worker_id, size, num, _MOST_BYTES, None, [])
        made = self._pool.ask(
            ticket, worker_id, lambda process: worker.prepare(process, ticket, size)
        )
        worker.num_chunks += len(made.chunks)
        worker.num_ends += made.outcome == END
        if self._given.seekable and made.cursors:
            worker.cursor = made.cursors[-1]
        return made

    def only(self, ask: Callable[[int], Any]) -> Any:
        """The chunk of one call, or what it raised."""
        deaths = _Deaths(self.run)
        while True:
            try:
                made = ask(deaths.num_left)
                break
            except Lost as lost:
                deaths.count(lost)
        if made.chunks:
            return made.chunks[0]
        if made.outcome == END:
            raise StopIteration
        if made.outcome == ERROR:
            raise self.error_of(made.error)
        return None

    def error_of(self, written: bytes) -> BaseException:
        """What a call raised, as a process has written it."""
        error = plain.read_error(written, imports=not self.is_far)
        if isinstance(error, plain.CursorError):
            return ConfigError(f"no position can hold the cursor of a worker: {error}")
        return error

    def cursor_after(self, call: Call) -> Any:
        """The cursor of a pure function after a call."""
        fetch: Any = self._given.fetch
        if self._given.ignores_worker_ids:
            # A source tells it from numbers alone.
            return fetch.cursor(call)
        try:
            return self._answer(Ask(0, None, list(call), None, []), None, _as_it_is)
        except ClosedError:
            return None  # Nobody is there to be asked. Where it is missed, a resume takes longer.

    def begin_with(self, call: Call, cursor: Any) -> None:
        """Give a pure function the cursor before its first call; each new process gets it."""
        fetch: Any = self._given.fetch
        if self._given.ignores_worker_ids:
            fetch.seek(call, cursor)
        self._begins = [list(call), cursor]

    def _ask_cursor(self, worker_id: int) -> Any:
        worker = self._workers[worker_id]
        ticket = Ask(worker_id, None, None, None, [])
        return self._answer(ticket, worker_id, lambda to: worker.prepare(to, ticket, 0))

    def _seek(self, worker_id: int, cursor: Any) -> None:
        worker = self._workers[worker_id]
        worker.cursor = packed = codec.pack(cursor)
        self._answer(Ask(worker_id, packed, None, None, []), worker_id, worker.is_in)

    def _answer(self, ticket: Ask, home: int | None, prepare: Callable[[Member], None]) -> Any:
        answered = self._pool.ask(ticket, home, prepare)
        if answered.error:
            raise self.error_of(answered.error)
        return codec.unpack(answered.cursor) if answered.cursor else None


def most_of(spec: StreamSpec, options: Processes | RayActors) -> int:
    """How many processes a stream has use for."""
    most = options.num if isinstance(options, Processes) else options.most * options.per_actor
    if has_cursor(spec) and not spec.ignores_worker_ids:
        # Its cursor is what it has come to by its own calls.
        return 1
    return most if spec.pure else min(most, spec.num_workers)


def _as_it_is(process: Member) -> None:
    """Any process will do."""


class _Worker:
    """One worker of `fetch(worker_id, batch_size)`. Owner: the fetcher that holds its partition."""

    def __init__(self) -> None:
        self.num_chunks = 0
        """Chunks that came since the start of the stream."""
        self.num_ends = 0
        """Ends of epochs that came."""
        self.cursor: bytes | None = None
        """After the last chunk that came, or where it was put since."""
        self._process = 0

    def is_in(self, process: Member) -> None:
        """Its state is in this process from now on."""
        self._process = process.generation

    def prepare(self, process: Member, ticket: Calls | Ask, size: int) -> None:
        """Have it put back in a process that has not made its last call."""
        is_new, self._process = process.generation != self._process, process.generation
        ticket.restore = None
        if not is_new:
            return
        if self.cursor is not None:
            ticket.restore = self.cursor
        elif self.num_chunks or self.num_ends:
            ticket.restore = [size, self.num_chunks, self.num_ends]


class _PureFunction:
    """Stands for a pure fetch function: each call is a round trip. What a source tells of itself
    without a call it tells here. Never changes; fetcher threads call it."""

    def __init__(self, execution: ProcessExecution) -> None:
        self._execution = execution

    def __call__(self, call: Call) -> Any:
        return self._execution.call_again(call, counts=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self._execution._given.fetch, name)
        if name == "cursor":
            return self._execution.cursor_after
        return self._execution.begin_with if name == "seek" else found


class _WorkerFunction:
    """Stands for a fetch function of workers. Never changes; fetcher threads call it."""

    def __init__(self, execution: ProcessExecution) -> None:
        self._execution = execution

    def __call__(self, worker_id: int, batch_size: int) -> Any:
        execution = self._execution
        return execution.only(lambda _: execution.call_worker(worker_id, batch_size, 1))


class _Deaths:
    """Processes that have ended in one call. Owner: the fetcher that makes it."""

    def __init__(self, run: RunSpec) -> None:
        self._most = max(_LEAST_DEATHS, run.retries)
        self._num = 0

    @property
    def num_left(self) -> int:
        """How many more it takes for an error."""
        return self._most + 1 - self._num

    def count(self, lost: Lost) -> None:
        """Some more have. Raises `CallLost` where these are too many."""
        self._num += lost.num_deaths
        if self._num > self._most:
            raise CallLost(f"its process ended {self._num} times, the last time {lost}") from None

    def forget(self) -> None:
        """The next call begins."""
        self._num = 0


class _Bundle:
    """Chunks that came together, of one ticket. Owner: the fetcher that has it."""

    def __init__(self, execution: ProcessExecution) -> None:
        self._execution = execution
        self._chunks: deque[Any] = deque()
        self._cursors: deque[bytes] = deque()
        self._outcome = 0
        self._error = b""
        self._deaths = _Deaths(execution.run)
        self.cursor: bytes | None = None
        """The worker's after the chunk that was taken last, or after the end."""

    def __bool__(self) -> bool:
        """Whether the next call has been made already."""
        return bool(self._chunks or self._outcome)

    @classmethod
    def of(cls, ticket: Ticket, execution: ProcessExecution) -> _Bundle:
        """The bundle of a ticket."""
        if ticket.bundle is None:
            ticket.bundle = cls(execution)
        return ticket.bundle  # type: ignore[no-any-return]

    def take(self, num: int, ask: Callable[[int, int], Any]) -> Any:
        """The next chunk, None, or what was raised; if none is left so many are asked for, by
        ``ask(num, most_deaths)``."""
        while not self._chunks:
            if self._outcome:
                return self._finish()
            try:
                made = ask(num, self._deaths.num_left)
            except Lost as lost:
                # First the calls before the one in which it ended, and then that one alone.
                before = lost.num_begun - 1
                num = max(1, before)
                if not before:
                    self._deaths.count(lost)
                continue
            self._deaths.forget()
            self._chunks.extend(made.chunks)
            self._cursors.extend(made.cursors)
            self._outcome, self._error = made.outcome, made.error
        if self._cursors:
            self.cursor = self._cursors.popleft()
        return self._chunks.popleft()

    def _finish(self) -> None:
        outcome, self._outcome = self._outcome, 0
        if outcome == NOTHING:
            return
        if outcome == END:
            if self._cursors:
                self.cursor = self._cursors.popleft()
            raise StopIteration
        raise self._execution.error_of(self._error)


class _RemoteIndexCalls(IndexCalls):
    """Calls of `fetch(call)`, several in one round trip. Never changes; fetcher threads use it."""

    def __init__(self, execution: ProcessExecution) -> None:
        super().__init__(execution.spec)
        self._execution = execution

    def begin(self, ticket: Ticket) -> Callable[[int], Any]:
        execution, bundle = self._execution, _Bundle.of(ticket, self._execution)
        epoch, rows = ticket.epoch, self._rows_asked

        def make(index: int) -> Any:
            return bundle.take(
                ticket.stop - index,
                lambda num, most_deaths: execution.call_index(index, epoch, rows, num, most_deaths),
            )

        return make


class _RemoteWorkerCalls(WorkerCalls):
    """Calls of `fetch(worker_id, batch_size)`, several in one round trip. One fetcher thread at a
    time."""

    def __init__(
        self,
        execution: ProcessExecution,
        start: Position,
        number: int,
        resumed: bool,
        sizes: list[int],
    ) -> None:
        super().__init__(execution.spec, execution.run, start, number, resumed, sizes)
        self._execution = execution
        self._bundle: _Bundle | None = None

    def begin(self, ticket: Ticket) -> Callable[[int], Any]:
        execution = self._execution
        bundle = self._bundle = _Bundle.of(ticket, execution)

        def ask(num: int, most_deaths: int) -> Any:
            return execution.call_worker(self._worker_id, self._spec.rows_asked, num)

        return lambda number: bundle.take(ticket.stop - number, ask)

    def mark(self) -> bytes:
        mark = None if self._bundle is None else self._bundle.cursor
        if mark is None:
            return super().mark()
        self._check_size(len(mark))
        self._last_mark = mark
        return mark
