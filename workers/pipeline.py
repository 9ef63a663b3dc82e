"""One stream, wired together: fetchers, merge, assembler, enqueuer, and the threads they run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from feeder.workers.fetch.calls import add_cursor, begin_anew, make_calls, seek
from feeder.workers.fetch.channel import Channel
from feeder.workers.fetch.fetcher import Fetcher
from feeder.workers.fetch.scheduler import BufferBudget, Scheduler
from feeder.workers.fetch.threads import ThreadGroup
from feeder.workers.spec import CallNames, RunSpec, StreamSpec
from feeder.workers.stats import StreamStats, num_partitions
from feeder.workers.stream.assembler import Assembler
from feeder.workers.stream.batcher import Batcher, DeviceQueue, RoundRobinRouter, run_enqueuer
from feeder.workers.stream.buffers import Slots
from feeder.workers.stream.memory import keep_freed_memory
from feeder.workers.stream.merge import Merge
from feeder.workers.stream.position import Cut, Frame, LazyPosition, Partitions, Position, Span
from feeder.workers.stream.resuming import Beginning, Resume
from feeder.workers.tuning import TUNING


class Pipeline:
    """A running stream. `start` once, `stop` once; a stopped pipeline is not started again."""

    def __init__(
        self,
        spec: StreamSpec,
        run: RunSpec,
        name: str,
        queues: Sequence[DeviceQueue],
        slots: Slots,
        encode: Callable[[Cut], bytes],
        resume: Resume | None,
        report: Callable[[], None],
        stats: StreamStats | None = None,
    ) -> None:
        self._partitions = partitions = Partitions(
            num_partitions=num_partitions(spec, run),
            pure=spec.pure,
            arrival=spec.order == "arrival",
        )
        self._spec, self._run, self._name = spec, run, name
        self._scope = ThreadGroup()
        self._resumed = resume is not None
        self.stats = stats or StreamStats.of(spec, run, len(queues))
        """What is counted; where it is given, from where it stands."""
        self._names = CallNames(spec, partitions)
        begin = Beginning(spec, run, partitions, resume, self.stats.fetch)
        if resume is not None:
            seek(spec, resume.cut)
        frame = Frame(partitions, add_cursor(spec, encode), spec.epochs)
        origin = LazyPosition(frame, Span(begin.position, (), (), [], ()), 0, 0, None, 0)
        self.start_cut = origin.cut() if resume is None else resume.cut
        """Where the stream begins."""
        self.schema = begin.schema
        self._queues = queues
        self._make_fetching(begin.position)
        assembler = Assembler(
            spec, frame, self.schema, slots, num_devices=len(queues), epoch=begin.epoch,
            index=begin.index, step=begin.step, expected=begin.expected,
        )  # fmt: skip
        self._dealer = RoundRobinRouter(
            queues, self.channel, assembler, spec, run, self.stats.made, report,
            needs_room=not slots.reserved,
        )  # fmt: skip
        self._batcher = Batcher(
            spec, self.channel, self._make_merge(begin), assembler, self._dealer, begin
        )

    def _make_fetching(self, start: Position) -> None:
        spec, run, partitions = self._spec, self._run, self._partitions
        self.ledger = BufferBudget(run.max_rows, run.max_bytes, len(self._queues), run.guess_bytes)
        self.channel = Channel(
            Scheduler(partitions, start, spec.epochs, TUNING),
            self.ledger,
            self.stats,
            self._names,
            self._queues,
            timeout_s=run.timeout_s,
            tuning=TUNING,
        )
        calls = make_calls(spec, run, partitions, start, resumed=self._resumed)
        self._fetcher = Fetcher(self._names, run, self.channel, calls, self.stats.fetch, TUNING)

    def _make_merge(self, begin: Beginning) -> Merge:
        return Merge(
            self._partitions,
            self.schema,
            begin.position,
            self._spec.epochs,
            chained=not (self._spec.pure or self._spec.seekable),
            names=self._names,
            first_partition=begin.first_partition,
        )

    def start(self) -> None:
        """Start the threads."""
        keep_freed_memory()
        if not self._resumed:
            begin_anew(self._spec.fetch, self._spec.cursor, self._spec.worker_ids)
        for i in range(self._run.num_threads):
            self._scope.start(f"feeder {self._name} fetcher {i}", self._run_fetcher)
        self._scope.start(
            f"feeder {self._name} enqueuer", run_enqueuer, self._batcher, self._dealer
        )

    def _run_fetcher(self) -> None:
        """Thread body: hold one partition after the other until no call is left."""
        channel, fetcher, batcher = self.channel, self._fetcher, self._batcher
        while (partition := channel.acquire()) is not None:
            if fetcher.fill(partition):
                batcher.merge_inline()
            # Not before: what came may be all that somebody waits for.
            fetcher.repeat_first()

    def flush(self) -> None:
        """Hand over what has been made so far; for slots whose `take` is about to wait, in the
        thread that makes batches."""
        self._dealer.flush()

    def close(self) -> None:
        """Wake all threads, so that they end. The device queues are closed by their owner."""
        self.channel.close()

    def join(self, deadline_s: float) -> None:
        """Wait for the threads; raises `StuckWorkerError` where one does not end."""
        self._scope.close(deadline_s)

    def forget(self) -> None:
        """Let go of what was made and not handed over, and of its slots; when all has ended."""
        self._dealer.forget()

    def numbers(self, now: float) -> dict[str, Any]:
        """Plain numbers of what the stream has done so far."""
        ledger = self.ledger
        return {
            **self.stats.numbers(now),
            "buffered_rows": ledger.rows,
            "buffered_bytes": ledger.bytes,
            "kept_rows": ledger.kept_rows,
            "peak_buffered_rows": ledger.peak_rows,
            "peak_buffered_bytes": ledger.peak_bytes,
        }
