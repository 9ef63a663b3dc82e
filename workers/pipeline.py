"""One stream, wired together: fetchers, merge, assembler, enqueuer, and the threads they run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from feeder.workers.errors import ChunkError
from feeder.workers.fetch.calls import add_cursor, begin_anew, make_calls, seek
from feeder.workers.fetch.channel import Channel
from feeder.workers.fetch.fetcher import OTHER_ROWS, Fetcher, run_fetcher
from feeder.workers.fetch.scheduler import BufferBudget, ChunkList, Scheduler
from feeder.workers.fetch.threads import ThreadGroup
from feeder.workers.spec import RunSpec, StreamSpec
from feeder.workers.stats import StreamStats, num_partitions
from feeder.workers.stream.assembler import Assembler
from feeder.workers.stream.batcher import Batcher, DeviceQueue, RoundRobinRouter, run_enqueuer
from feeder.workers.stream.buffers import Slots
from feeder.workers.stream.chunks import Schema
from feeder.workers.stream.digests import hash_chunk
from feeder.workers.stream.memory import keep_freed_memory
from feeder.workers.stream.merge import Merge
from feeder.workers.stream.position import Cut, Frame, LazyPosition, Partitions, Position, Span
from feeder.workers.stream.resuming import Beginning, Resume


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
        begin = Beginning(spec, partitions, resume)
        if resume is not None:
            seek(spec, resume.cut)
        is_checked = spec.pure and spec.repeatable and not run.writable
        frame = Frame(
            partitions, add_cursor(spec, encode), spec.epochs, spec.axes if is_checked else None
        )
        origin = LazyPosition(frame, Span(begin.position, (), (), [], ()), 0, 0, None, 0)
        self.start_cut = origin.cut() if resume is None else resume.cut
        """Where the stream begins."""
        self.schema = Schema(
            spec.names, spec.axes, ragged=spec.dont_rebatch, known=begin.columns
        )  # fmt: skip
        self._queues = queues
        self.stats = stats or StreamStats.of(spec, run, len(queues))
        """What is counted; where it is given, from where it stands."""
        self._make_fetching(begin.position)
        assembler = Assembler(
            spec, frame, self.schema, slots, num_devices=len(queues), epoch=begin.epoch,
            index=begin.index, step=begin.step, expected=begin.expected,
        )  # fmt: skip
        self._dealer = RoundRobinRouter(
            queues, self.channel, assembler, spec, run, self.stats.made, report,
            needs_room=not slots.reserved,
        )  # fmt: skip
        self._enqueuing = Batcher(
            spec, self.channel, self._make_merge(begin), assembler, self._dealer,
            self._fetching,
            lambda: begin.make_run(self.schema, self.channel, run, self.stats.fetch),
            begins_epoch=begin.begins_epoch,
        )  # fmt: skip

    def _make_fetching(self, start: Position) -> None:
        spec, run, partitions = self._spec, self._run, self._partitions
        self.ledger = BufferBudget(run.max_rows, run.max_bytes, len(self._queues), run.guess_bytes)
        self.channel = Channel(
            Scheduler(partitions, start, spec.epochs),
            self.ledger,
            self.stats,
            timeout_s=run.timeout_s,
            marked=spec.seekable,
            axis=spec.axes[0],
            describe=self._describe,
            waited_since=self._waited_since,
        )
        calls = make_calls(spec, run, partitions, start, resumed=self._resumed)
        self._fetching = Fetcher(spec, run, self.channel, self.ledger, calls, self.stats.fetch)

    def _make_merge(self, begin: Beginning) -> Merge:
        return Merge(
            self._partitions,
            self.schema,
            begin.position,
            self._spec.epochs,
            chained=not (self._spec.pure or self._spec.seekable),
            describe=self.channel.describe,
            first_name=self._first_name,
            check=self._check if self._run.debug else None,
            first_partition=begin.first_partition,
        )

    def start(self) -> None:
        """Start the threads."""
        keep_freed_memory()
        if not self._resumed:
            begin_anew(self._spec.fetch, self._spec.cursor, self._spec.worker_ids)
        for i in range(self._run.num_threads):
            self._scope.start(
                f"feeder {self._name} fetcher {i}", run_fetcher, self.channel,
                self._fetching.fill, self._enqueuing.lead, self._fetching.repeat_first,
            )  # fmt: skip
        self._scope.start(
            f"feeder {self._name} enqueuer", run_enqueuer, self._enqueuing, self._dealer
        )

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

    def _describe(self, partition: int, call: int) -> tuple[int, int]:
        """Worker id and call number, as a user knows them, of a partition's call."""
        number = self._partitions.number(partition, call)
        return self._spec.worker_id(partition, number), number

    def _first_name(self, epoch: int, index: int) -> str | None:
        """What the fetch function calls the record that a call begins with, as sources can say."""
        first_name = getattr(self._spec.fetch, "first_name", None)
        if not self._spec.pure or not callable(first_name):
            return None
        return str(first_name(self._spec.call(epoch, index)))

    def _waited_since(self) -> float | None:
        """Since when a user has been waiting for a batch."""
        since = [queue.waited_since for queue in self._queues]
        return min((start for start in since if start is not None), default=None)

    def _check(self, bundle: ChunkList) -> ChunkError | None:
        """Whether the chunks are still what the fetch function returned, and would return again
        (the debug switch)."""
        prints = self._fetching.prints
        for i, chunk in enumerate(bundle.chunks):
            returned = prints.pop((bundle.partition, bundle.epoch, bundle.first + i), None)
            if returned == OTHER_ROWS:
                return ChunkError(
                    "the fetch function gave other rows when the same call was made again; let "
                    "fetch(call) depend on the call alone (call.rng draws), or keep its state in "
                    "fetch(worker_id, batch_size)",
                    call=i,
                )
            if returned is not None and returned != hash_chunk(chunk):
                return ChunkError(
                    "the fetch function changed the arrays after it returned them; return "
                    "new arrays, or copies",
                    call=i,
                )
        return None
