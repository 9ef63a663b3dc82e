"""One stream, wired together: fetchers, merge, assembler, enqueuer, and the threads they run in.

All wiring is here so that the parts know as little as they can of each other: the rules (merge,
assembler) know no thread, the fetchers only the queue, and the enqueuer only rules and queues. A
stream is never started again, so no part has to clean up after itself for a next time: whoever
resumes makes a new pipeline at a cut, and lets go of the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

from feeder.workers.enqueuer import DeviceQueue, Enqueuer, RoundRobinRouter, run_enqueuer
from feeder.workers.fetch.bound import Bound
from feeder.workers.fetch.calls import (
    PartitionCalls,
    add_cursor,
    begin_anew,
    make_calls,
    seek,
)
from feeder.workers.fetch.fetcher import Fetcher
from feeder.workers.fetch.queue import Queue
from feeder.workers.fetch.resuming import Resume, StreamStart
from feeder.workers.fetch.threads import ThreadGroup, stack
from feeder.workers.fetch.tickets import IndexTickets, Tickets, WorkerTickets
from feeder.workers.inline import Inline
from feeder.workers.stats import ExecutorCounts, StreamStats
from feeder.workers.stream.assembler import Assembler
from feeder.workers.stream.batch import Call
from feeder.workers.stream.buffers import OpenSlots, Slots
from feeder.workers.stream.chunks import Schema
from feeder.workers.stream.memory import keep_freed_memory
from feeder.workers.stream.merge import Merge
from feeder.workers.stream.parts import PartCalls
from feeder.workers.stream.placement import Placement
from feeder.workers.stream.position import Cut, Frame, LazyPosition, Partitions, Position, Span
from feeder.workers.stream.rounds import Dealing, Turns
from feeder.workers.stream.spec import CallNames, RunSpec, StreamSpec


class Execution(Protocol):
    """The fetch function of one stream, run elsewhere than on fetcher threads: each call is a round
    trip.

    The thread that makes the pipeline makes, starts and closes it; fetcher threads call it.
    """

    spec: StreamSpec
    """What the stream is, with functions that are called over there."""

    def make_calls(self, start: Position, *, resumed: bool) -> Sequence[PartitionCalls]:
        """The calls of each partition of a stream that begins at `start`."""

    def call_again(self, call: Call) -> Any:
        """The chunk of a call of a pure function that was made before."""

    def watch(self, stats: StreamStats) -> None:
        """What is counted of the stream; before it starts. What runs may follow it."""

    def start(self) -> None:
        """Have ready what the calls need; before the first of them."""

    def interrupt(self) -> None:
        """End every call that is waited for, by an error; harmless when said again."""

    def close(self) -> None:
        """End all that runs, when no thread calls any more."""

    def stack(self, ident: int | None) -> str:
        """The Python stacks of what a thread's call runs in; empty where there are none."""

    def counts(self) -> ExecutorCounts:
        """What runs now; any thread may ask."""


class Pipeline:
    """A running stream: started once, closed once, and never started again.

    The owner's thread makes, starts, closes and joins it. What it wires together belongs to other
    threads: the queue to its lock, merge, assembler and router to the thread that makes batches.
    `encode` is the codec of cuts, `report` is called by that thread after each hand-over. Without
    `turns` it deals from the start of the stream on: the batch of number `step` has turn `step`.
    """

    def __init__(
        self,
        spec: StreamSpec,
        run: RunSpec,
        name: str,
        queues: Sequence[DeviceQueue],
        slots: Slots,
        *,
        encode: Callable[[Cut], bytes],
        resume: Resume | None = None,
        report: Callable[[], None] | None = None,
        stats: StreamStats | None = None,
        turns: Turns | None = None,
    ) -> None:
        self._partitions = partitions = Partitions.of(
            spec.num_workers, pure=spec.pure, arrival=spec.order == "arrival"
        )
        epoch, index, step = (
            (0, 0, 0) if resume is None else (resume.cut.epoch, resume.cut.index, resume.cut.step)
        )
        turns, given = turns or Turns(step), spec

        def part() -> PartCalls | None:
            # Of the functions as they were given: over there nobody says how many rows there are.
            return None if run.part is None else PartCalls(given, run, turns, epoch, index)

        if run.part is not None and callable(make_part := getattr(spec.fetch, "make_part", None)):
            make_part(part())
        self._execution: Execution | None = None
        if run.executor is not None:
            self._execution = run.executor.begin(spec, run)
            # The functions of the spec are called over there from now on.
            spec = self._execution.spec
        self._spec, self._run, self._name = spec, run, name
        self._threads = ThreadGroup()
        self._resumed = resume is not None
        self.stats = stats or StreamStats.of(spec, run, len(queues))
        self.stats.source = spec.fetch
        """What is counted; where it is given, from there on."""
        if self._execution is not None:
            self._execution.watch(self.stats)
        begin = self._begin = StreamStart(spec, run, partitions, resume, self.stats.fetch)
        if resume is not None:
            # Before any thread runs: the fetch function is put back once, by the thread that
            # resumes.
            seek(spec, resume.cut)
        frame = self._frame(encode, turns.dealing)
        self.origin = LazyPosition(frame, Span(begin.position, (), (), [], ()), 0, 0, None, 0)
        self.start_cut = self.origin.cut() if resume is None else resume.cut
        """Where the stream begins."""
        self.schema = Schema(
            spec.names, spec.axes, ragged=spec.dont_rebatch, known=begin.columns
        )  # fmt: skip
        self._queues = queues
        # A batch of another run's size may be larger than all that is buffered otherwise.
        self._most_rows = turns.older_size if turns.older else 0
        self._places = self._make_places(slots, self.start_cut, turns)
        self._make_fetcher(begin.position, part())
        assembler = Assembler(
            spec, frame, self.schema, slots, num_devices=len(queues), epoch=begin.epoch,
            index=begin.index, step=begin.step, turns=turns, expected=begin.expected,
            places=self._places,
        )  # fmt: skip
        self._router = RoundRobinRouter(
            queues, self.queue, assembler, spec, run, made=self.stats.made, report=report,
            slots=slots,
        )  # fmt: skip
        self._enqueuer = Enqueuer(
            spec, self.queue, self._make_merge(begin, part()), assembler, self._router,
            begin, self._places, is_inline=not run.num_threads,
        )  # fmt: skip
        self._inline: Inline | None = None
        if not run.num_threads:
            self._inline = Inline(
                name, spec.batch_size, self.bound, self._fetcher, self._enqueuer, self._router
            )  # fmt: skip

    def _make_places(self, slots: Slots, cut: Cut, turns: Turns) -> Placement | None:
        """Where calls may write their rows; None where nobody knows before they return."""
        rows = self._run.rows_per_call
        # Processes write to memory of their own, which is copied to the slot.
        if rows is None or not slots.opens or self._execution is not None:
            return None
        if self._run.part is not None:
            return None  # It takes slots for all batches in turn.
        places = Placement(
            self.schema, cast("OpenSlots", slots), rows_per_call=rows,
            batch_size=self._spec.batch_size, num_devices=len(self._queues),
        )  # fmt: skip
        # The rest of another run's round has batches of its own size. Where the next batch does not
        # begin with a call, no place is known before the next epoch.
        first_call, within = divmod(turns.older * turns.older_size, rows)
        if cut.leftover is None and not within:
            first_call += cut.position.calls[0]
            places.begin(places.plan(cut.position.epoch, first_call, turns.first + turns.older))
        return places

    def _frame(self, encode: Callable[[Cut], bytes], dealing: Dealing | None) -> Frame:
        spec = self._spec
        is_checked = spec.pure and spec.repeatable and not self._run.writable
        axes = spec.axes if is_checked else None
        return Frame(self._partitions, add_cursor(spec, encode), spec.epochs, axes, dealing)

    def _make_fetcher(self, start: Position, part: PartCalls | None) -> None:
        spec, run, partitions = self._spec, self._run, self._partitions
        self.bound = Bound(
            max(run.max_rows, self._most_rows), run.max_bytes, len(self._queues), run.guess_bytes,
            partitions.num_partitions, run.part,
        )  # fmt: skip
        names = CallNames(spec, partitions)
        tickets: Tickets = (
            IndexTickets(start, run.num_threads, part)
            if spec.pure
            else WorkerTickets(
                start, run.num_threads, arrival=partitions.arrival,
                remote=self._execution is not None,
            )
        )  # fmt: skip
        self.queue = Queue(
            tickets,
            self.bound,
            self.stats,
            names,
            [self._queues[device] for device in self.bound.waiting],
            num_threads=run.num_threads,
            timeout_s=run.timeout_s,
            epochs=spec.epochs,
            waits=self._execution is not None,
            stack_of=stack if self._execution is None else self._execution.stack,
        )
        if self._places is not None:
            self.queue.allow(self._places.allowed(start.calls[0]))
        calls = (
            make_calls(spec, run, start, resumed=self._resumed, places=self._places)
            if self._execution is None
            else self._execution.make_calls(start, resumed=self._resumed)
        )
        again = spec.fetch if self._execution is None else self._execution.call_again
        self._fetcher = Fetcher(names, run, self.queue, calls, self.stats.fetch, again)

    def _make_merge(self, begin: StreamStart, part: PartCalls | None) -> Merge:
        return Merge(
            self._partitions,
            self.schema,
            begin.position,
            self._spec,
            prints=self._fetcher.prints if self._run.debug else None,
            first_partition=begin.first_partition,
            rows_per_call=self._run.rows_per_call,
            part=part,
        )

    def start(self) -> None:
        """Start the threads."""
        if self._execution is not None:
            self._execution.start()
        # Before the first chunk is allocated: what malloc learns counts from then on.
        keep_freed_memory()
        # A function that was used before stands somewhere else; a stream from the origin starts
        # where it did.
        if not self._resumed:
            begin_anew(self._spec.fetch, self._spec.cursor, self._spec.worker_ids)
        if self._inline is not None:
            return
        for i in range(self._run.num_threads):
            self._threads.start(f"feeder {self._name} fetcher {i}", self._run_fetcher, i)
        # The thread keeps the name that users know from logs, stacks and the status page.
        self._maker = self._threads.start(
            f"feeder {self._name} enqueuer", run_enqueuer, self._enqueuer, self._router
        )

    @property
    def is_orphaned(self) -> bool:
        """Whether the thread that makes batches has ended without a word. Any thread may ask, after
        the start of a run with threads."""
        # CPython 3.11 ends a thread that begins while another is given a tracer, as by coverage. In
        # this order: the thread says that it is done before it ends.
        return not (self._maker.is_alive() or self._router.is_over or self.queue.closed)

    def advance(self) -> None:
        """Do some of the work for the next batch in this thread, which waits for it. For a run
        without threads; harmless once the stream has ended."""
        assert self._inline is not None
        self._inline.advance()

    def _run_fetcher(self, number: int) -> None:
        """Thread body: make calls until none is left."""
        if number == 0:
            self._begin.call_apart(self.queue)
        self._fetcher.run(number)

    def close(self) -> None:
        """Wake all threads, so that they end. The device queues are closed by their owner."""
        # Only this: fetchers and the enqueuer wait in the queue, or find it closed when they come
        # back.
        self.queue.close()
        if self._execution is not None:
            self._execution.interrupt()

    def join(self, deadline_s: float) -> None:
        """Wait for the threads; raises `StuckWorkerError` where one does not end."""
        try:
            self._threads.close(deadline_s)
        finally:
            if self._execution is not None:
                self._execution.close()

    def forget(self) -> None:
        """Let go of what was made and not handed over, and of its slots; when all has ended."""
        self._router.forget()

    def executor_counts(self) -> ExecutorCounts | None:
        """The processes that fetch; None where the fetcher threads do."""
        return None if self._execution is None else self._execution.counts()

    def numbers(self, now: float) -> dict[str, Any]:
        """Plain numbers of what the stream has done so far."""
        bound = self.bound
        return {
            **self.stats.numbers(now),
            "buffered_rows": bound.rows,
            "buffered_bytes": bound.bytes,
            "kept_rows": bound.kept_rows,
            "peak_buffered_rows": bound.peak_rows,
            "peak_buffered_bytes": bound.peak_bytes,
        }
