"""One stream, wired together: fetchers, merge, assembler, enqueuer, and the threads they run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from workers.assembler import Assembler, Slots
from workers.batch import Cut, Leftover
from workers.calls import make_calls
from workers.channel import Channel
from workers.chunks import Columns, Schema, hash_chunk
from workers.enqueuer import Dealer, DeviceQueue, Enqueuing, run_enqueuer
from workers.errors import ChunkError
from workers.fetcher import Fetching, run_fetcher
from workers.ledger import Ledger
from workers.merge import Merge
from workers.position import Frame, Lanes, Place, Position, Span
from workers.rota import Bundle, Rota
from workers.runs import Run
from workers.scope import Scope
from workers.spec import RunSpec, StreamSpec
from workers.stats import BatchStats, FetchStats, totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where a stream goes on."""

    cut: Cut
    """The place to go on at."""
    rows: tuple[NDArray[Any], ...] | None = None
    """The rows left over at the cut, where they are at hand; else their chunk is fetched again."""
    columns: Columns | None = None
    """The columns as they were observed then."""


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
    ) -> None:
        rounds = -(-run.num_threads // spec.num_workers) if spec.pure else 1
        self._lanes = lanes = Lanes(
            num_lanes=spec.num_workers * rounds, pure=spec.pure, arrival=spec.order == "arrival"
        )
        self._spec, self._run, self._name = spec, run, name
        self._scope = Scope()
        cut = resume.cut if resume is not None else None
        leftover = cut.leftover if cut is not None and not cut.finished else None
        rows = resume.rows if resume is not None else None
        position = cut.position if cut is not None else lanes.origin()
        # Where the rows left over are not at hand, the stream goes on before their chunk.
        refetched = leftover if rows is None else None
        if refetched is not None:
            position = lanes.rewind(position, refetched)
        start = lanes.spread(position)
        frame = Frame(lanes, encode, spec.epochs)
        epoch, index, step = (cut.epoch, cut.index, cut.step) if cut is not None else (0, 0, 0)
        self.start_cut = cut or Place(frame, Span(start, (), (), [], ()), 0, 0, None, epoch).cut()
        """Where the stream begins."""
        self.schema = Schema(
            spec.names,
            spec.axes,
            ragged=spec.dont_rebatch,
            known=resume.columns if resume is not None else None,
        )
        self._make_fetching(start, len(queues))
        merge = self._make_merge(start, refetched)
        assembler = Assembler(
            spec, frame, self.schema, slots, num_devices=len(queues),
            epoch=epoch, index=index, step=step, expected=refetched,
        )  # fmt: skip
        injected = None
        if cut is not None and leftover is not None and rows is not None:
            injected = self._leftover_run(cut, leftover, rows)
        self.batch_stats = BatchStats()
        self._dealer = Dealer(queues, self.channel, assembler, spec, report)
        self._enqueuing = Enqueuing(
            spec, self.channel, merge, assembler, self._dealer, self._fetching,
            self.batch_stats, injected,
            begins_epoch=index == 0 and leftover is None and spec.last_batch != "carry",
        )  # fmt: skip

    def _make_fetching(self, start: Position, num_devices: int) -> None:
        spec, run, lanes = self._spec, self._run, self._lanes
        self.ledger = Ledger(run.max_rows, run.max_bytes, num_devices)
        self.channel = Channel(
            Rota(lanes, start, spec.epochs),
            self.ledger,
            timeout_s=run.timeout_s,
            marked=spec.seekable,
            describe=lambda lane, call: (spec.worker_id(lane), lanes.number(lane, call)),
            name=self._name,
        )
        self.fetch_stats = FetchStats(lanes.num_lanes)
        calls = [make_calls(spec, run, lanes, start, lane) for lane in range(lanes.num_lanes)]
        self._fetching = Fetching(spec, run, self.channel, calls, self.fetch_stats)

    def _make_merge(self, start: Position, refetched: Leftover | None) -> Merge:
        return Merge(
            self._lanes,
            self.schema,
            start,
            self._spec.epochs,
            chained=not (self._spec.pure or self._spec.seekable),
            describe=self.channel.describe,
            check=self._check if self._run.debug else None,
            first_lane=None if refetched is None else self._lane_of(refetched),
        )

    def start(self) -> None:
        """Start the threads."""
        for i in range(self._run.num_threads):
            self._scope.start(
                f"feeder {self._name} fetcher {i}", run_fetcher, self.channel, self._fetching.fill
            )
        self._scope.start(
            f"feeder {self._name} enqueuer", run_enqueuer, self._enqueuing, self._dealer
        )

    def close(self) -> None:
        """Wake all threads, so that they end. The device queues are closed by their owner."""
        self.channel.close()

    def join(self, deadline_s: float) -> None:
        """Wait for the threads; raises `StuckWorkerError` where one does not end."""
        self._scope.close(deadline_s)

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what the stream has done so far."""
        ledger = self.ledger
        return {
            **totals(self.fetch_stats, self.batch_stats),
            "buffered_rows": ledger.rows,
            "buffered_bytes": ledger.bytes,
            "peak_buffered_rows": ledger.peak_rows,
            "peak_buffered_bytes": ledger.peak_bytes,
        }

    def _lane_of(self, leftover: Leftover) -> int:
        return leftover.call % self._lanes.num_lanes if self._spec.pure else leftover.lane

    def _leftover_run(self, cut: Cut, leftover: Leftover, rows: tuple[NDArray[Any], ...]) -> Run:
        """The rows of a snapshot as the first run of the stream."""
        lanes, lane = self._lanes, self._lane_of(leftover)
        before = lanes.spread(lanes.rewind(cut.position, leftover))
        call = leftover.call // lanes.num_lanes if self._spec.pure else leftover.call
        mark = None if self._spec.pure else cut.position.marks[lane]
        marks = None if mark is None else (mark,)
        span = Span(before, (lane,), (call,), [leftover.rows], (marks,))
        num_rows = leftover.rows - leftover.taken
        self.ledger.add(num_rows, sum(array.nbytes for array in rows))
        columns: list[list[Any]] = [[array] for array in rows]
        return Run(span, columns, [num_rows], leftover.taken, leftover.digest)

    def _check(self, bundle: Bundle) -> ChunkError | None:
        """Whether the chunks are still what the fetch function returned (the debug switch)."""
        prints = self._fetching.prints
        for i, chunk in enumerate(bundle.chunks):
            returned = prints.pop((bundle.lane, bundle.epoch, bundle.first + i), None)
            if returned is not None and returned != hash_chunk(chunk):
                return ChunkError(
                    "the fetch function changed the arrays after it returned them; return "
                    "new arrays, or copies",
                    call=i,
                )
        return None
