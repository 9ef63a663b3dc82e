"""Whole programs, drawn: a stream, and the runs that it is taken in one after another. Each batch,
each position and each error is what the naive stream says, whatever the runs are run with.

Nothing but the public API is used, so that any engine can be held against it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, pairwise
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st

import feeder
import feeds
from conformance.served import TRANSPORTS, running_over
from feeds import CARRIERS, Record, assert_same, note, note_columns
from fetches import Pure, Replay, Seek, Sizes, no_pause, shaky
from naive import START, At, NaiveBatch, NaiveStream, naive_chunks, naive_dealing
from small import Walk
from standin.gpu import Machine, assert_sound, installed

NUM_WORKERS = 3
TO_THE_END = 10_000
PAUSE_S = 0.0003
GPU_SLOTS = 2
"""Few, so that each is written again and again."""


class Boom(Exception):
    """What a fetch function fails with."""


class Interrupt(KeyboardInterrupt):
    """What a signal's handler raises."""


# ---- fetch functions


class Column(NamedTuple):
    """A column beside the ids."""

    dtype: str
    tail: tuple[int, ...]
    """The shape of a row."""
    axis: int
    """Along which axis of a chunk rows lie."""

    def of(self, ids: np.ndarray) -> np.ndarray:
        """Values that follow from the ids; rows first."""
        numbers = ids[:, None] * 40503 + np.arange(math.prod(self.tail)) * 77
        numbers = numbers % (2 if self.dtype == "?" else 249) + (self.dtype != "?")
        return numbers.astype(self.dtype).reshape(-1, *self.tail)


class Draws(Pure):
    """`fetch(call)`. What comes after the end of an epoch is nobody's."""

    beyond = "end"
    late: frozenset[tuple[int, int]] = frozenset()

    def __call__(self, call: feeder.Call) -> Any:
        if call.index <= max(self.plan(call.epoch)) or self.beyond == "end":
            return super().__call__(call)
        if self.beyond == "error":
            raise IndexError(call.index)
        if self.beyond == "rows":
            return self.make(call, 7)
        # Nothing right now; the end when it is called again.
        if (at := (call.epoch, call.index)) in self.late:
            raise StopIteration
        self.late |= {at}
        return None


class InOrder(Draws):
    """The same, and quick where calls come in order: a cursor names the call that comes next."""

    sought = (0, 0)

    def __call__(self, call: feeder.Call) -> Any:
        assert (call.epoch, call.index) >= self.sought, "a call of before the cursor"
        return super().__call__(call)

    def cursor(self, call: feeder.Call) -> bytes:
        return f"{call.epoch} {call.index + 1}".encode()

    def seek(self, call: feeder.Call, cursor: bytes) -> None:
        epoch, index = map(int, cursor.split())
        is_next_epoch = (call.epoch, call.index) == (epoch + 1, 0)
        assert is_next_epoch or (call.epoch, call.index) == (epoch, index)
        self.sought = call.epoch, call.index


class Even:
    """`fetch(call)`: `per_call` rows in each call but an epoch's last; where there is a place for
    them in a batch, they are written there, or elsewhere, by turns."""

    def __init__(
        self, totals: Sequence[int], make: Any, per_call: int = 0, ways: str = "-"
    ) -> None:
        self.totals, self.make, self.per_call, self.ways = totals, make, per_call, ways

    def __call__(self, call: feeder.Call) -> Any:
        num = self.per_call or call.batch_size
        rows = min(num, self.totals[call.epoch] - call.index * num)
        if rows <= 0:
            for array in (call.out or {}).values():
                array[...] = np.zeros((), array.dtype)  # it may be the place of others by then
            raise StopIteration
        columns = self.make(call, rows)
        way = self.ways[call.index % len(self.ways)]
        if way == "o" and call.out is not None and rows == num:
            for name, array in columns.items():
                call.out[name][...] = array
            return call.out
        for array in (call.out or {}).values() if way == "s" else ():
            array[...] = np.zeros((), array.dtype)  # nonsense, in what is not returned
        for name in {"e": list(columns), "s": ["id"]}.get(way, []):
            place = call.empty(columns[name].shape, columns[name].dtype)
            place[...] = columns[name]
            columns[name] = place
        return columns


class Source(Even):
    """As many rows as it is asked for; it tells how many there are, so that what is skipped need
    not be made."""

    gives_all_rows = True

    def rows(self, epoch: int, batch_size: int) -> int:
        return self.totals[epoch]


ORDERS = ("ticket", "arrival")
PURE = {"pure": Draws, "in order": InOrder, "even": Even, "source": Source}
RINGS = ("replay", "seek", "iterable")


class Stream(NamedTuple):
    """What defines the batches."""

    form: str
    epochs: list[list[Sizes]]
    """Of each epoch of each worker the rows of each call; None for a call that gives None."""
    columns: tuple[Column, ...]
    size: int
    """Rows of a batch, or with `is_global` of those of all devices together."""
    is_global: bool
    per_call: int
    """Rows of each call of the form that gives as many in each."""
    workers: int
    seed: int
    last_batch: str
    last_round: str
    rounds: str
    dont_rebatch: bool
    repeatable: bool
    beyond: str
    order: str = "ticket"

    @property
    def names(self) -> tuple[str, ...]:
        draws = ("draw",) if self.form in PURE else ()
        return ("id", *(f"c{i}" for i in range(len(self.columns))), *draws)

    @property
    def axes(self) -> list[int]:
        return [0, *(column.axis for column in self.columns), 0][: len(self.names)]

    def batch_size(self, devices: int) -> int:
        return self.size // devices if self.is_global else self.size

    def settings(self) -> dict[str, Any]:
        """The settings of its feed."""
        return {
            "input_blob_names": self.names, "batch_columns": self.axes, "seed": self.seed,
            "batch_size": None if self.is_global else self.size,
            "global_batch_size": self.size if self.is_global else None,
            "num_worker_threads": self.workers, "epochs": len(self.epochs), "order": self.order,
            "last_batch": self.last_batch, "last_round": self.last_round, "rounds": self.rounds,
            "dont_rebatch": self.dont_rebatch, "repeatable": self.repeatable,
        }  # fmt: skip

    def naive(self, epochs: int = 0) -> NaiveStream:
        """The rows of the first so many epochs; 0 for all."""
        fetch = self.fetch(is_naive=True)
        return naive_chunks(
            fetch, self.names, pure=self.form in PURE, batch_size=self.size,
            num_workers=self.workers, epochs=epochs or len(self.epochs), seed=self.seed,
        )  # fmt: skip

    def fetch(
        self, *, is_naive: bool = False, pause: Any = no_pause, ways: str = "-",
        failing: tuple[int, int] = (0, 0),
    ) -> Any:  # fmt: skip
        """A new fetch function. The call whose first row has the id `failing[0]` fails that many
        times. For the naive feeder the first axis of all columns is rows."""
        first_id, times = failing

        def make(first: int, rows: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
            nonlocal times
            pause()
            if rows and first == first_id and times:
                times -= 1
                raise Boom(first)
            ids = np.arange(first, first + rows)
            columns = [ids, *(column.of(ids) for column in self.columns)]
            if rng is not None:
                columns.append(rng.random(rows))
            if not is_naive:
                moved = zip(columns, self.axes, strict=True)
                columns = [np.ascontiguousarray(np.moveaxis(a, 0, axis)) for a, axis in moved]
            return dict(zip(self.names, columns, strict=True))

        def of_worker(worker: int, epoch: int, call: int, rows: int) -> Any:
            return make(1 + 1000 * (call + 100 * (epoch + 10 * worker)), rows)

        def of_call(call: feeder.Call, rows: int) -> Any:
            per_call = (self.per_call or call.batch_size) if self.is_even else 1000
            first = call.index * per_call
            return make(1 + first + 100_000 * call.epoch, rows, call.rng)

        if self.is_even:
            totals = [sum(chain(*sizes)) for sizes in self.epochs]  # type: ignore[arg-type]
            return PURE[self.form](totals, of_call, self.per_call, ways)
        if self.form == "iterable" and not is_naive:

            def items(worker_id: int, epoch: int) -> Walk:
                sizes = self._sizes(worker_id, epoch)
                return Walk(len(sizes), lambda call: of_worker(worker_id, epoch, call, sizes[call]))

            return feeder.sources.iterable(items, batched=True)
        kind = PURE.get(self.form) or (Seek if self.form == "seek" else Replay)
        made = kind(self._sizes)
        made.make = of_call if self.form in PURE else of_worker
        if self.form in PURE:
            # What fails there would count among the failures of a later call.
            made.beyond = "end" if is_naive or times else self.beyond
        return made

    @property
    def is_even(self) -> bool:
        return self.form in ("even", "source")

    def _sizes(self, worker: int, epoch: int) -> Sizes:
        if epoch >= len(self.epochs) or worker >= NUM_WORKERS:
            return ()
        sizes = self.epochs[epoch][worker]
        return [rows or 0 for rows in sizes] if self.form == "iterable" else sizes


class Leg(NamedTuple):
    """A run of the stream, which goes on where the one before stood."""

    devices: int = 1
    rounds: int = TO_THE_END
    """How many are used."""
    skip: int = 0
    """How many are left out first."""
    epochs: int = 0
    """How many the stream has in this run, of which a later one may have more, or fewer; 0: all."""
    extra: int = 0
    """How many devices have a batch of one more round, which not all have used then."""
    apart: bool = False
    """Whether each device is read to its end before the next."""
    carrier: str = "snapshot"
    """What the position travels in."""
    whose: int = 0
    """The token of which device of the last round."""
    when: str = "at once"
    """When the position is taken: at once, with another round used "before" it is resumed from, or
    when the run has "stopped"."""
    transport: str = ""
    """Over which a server hands its batches out; in process without."""
    gpus: bool = False
    ways: str = ""
    """Where calls write their rows, by turns, with `rows_per_call`."""
    interrupts: tuple[int, ...] = ()
    """After how many calls within it the n-th batch's `next` is interrupted."""
    failing: tuple[int, int, int] | None = None
    """Which call fails, how often, and how often it is made again."""
    run: dict[str, Any] = {}  # noqa: RUF012  # never changed

    def settings(self, stream: Stream) -> dict[str, Any]:
        """The settings that are of this run alone."""
        devices = [f"cuda:{i}" for i in range(self.devices)]
        if self.devices > 2:
            devices[0] = "cpu:9"
        is_local = self.gpus and not self.transport
        gpus = {"devices": devices, "depth": GPU_SLOTS} if is_local else {}
        retries = self.failing[2] if self.failing and stream.form != "replay" else 0
        rows = stream.per_call or stream.size
        is_placed = self.ways and stream.is_even and stream.last_batch != "carry"
        rows = rows if is_placed and stream.batch_size(self.devices) % rows == 0 else None
        # The user's thread can make batches for one device, and may not be interrupted then.
        is_inline = self.devices == 1 and not (gpus or self.interrupts or self.transport)
        num_threads = max(0 if is_inline else 1, self.run.get("num_threads", 1))
        return {
            "devices": self.devices, "skip": self.skip, "rows_per_call": rows,
            "epochs": self.epochs or len(stream.epochs),
            "retries": retries, "retry_backoff_s": 0.0, **self.run, **gpus,
            "num_threads": num_threads,
        }  # fmt: skip


class Program(NamedTuple):
    """A stream, and the runs that it is taken in."""

    stream: Stream
    legs: list[Leg]
    seed: int
    """Of pauses before calls."""


# ---- the programs that are drawn

DTYPES = ("<f4", "<u2", "<f8", "?", "|u1", "<c8", "<f2", "<U4", "|S3", "<M8[s]")
"""The last three are not for GPUs."""
RUNS = st.fixed_dictionaries(
    {
        "num_threads": st.sampled_from((1, 2, 3, 8, 0)),
        "max_buffered_batches": st.sampled_from((100, 1, 2, 5)),
        "max_buffered_bytes": st.sampled_from((None, 1, 1000)),
    }
)


@st.composite
def streams(draw: st.DrawFn, *, order: str, most_devices: int, gpus: bool) -> Stream:
    """Draw a stream that so many devices may read. Every epoch has a row, and where rounds end
    with it a whole one."""
    is_arrival = order == "arrival"
    forms = [*RINGS, "pure", "in order", *(() if is_arrival else ("even", "source"))]
    form = draw(st.sampled_from(forms))
    is_even = form in ("even", "source")
    rounds = draw(st.sampled_from(("stream",) if is_arrival else ("stream", "epoch")))
    dont_rebatch = not is_even and draw(st.integers(0, 7)) == 0
    is_global = not (is_arrival or dont_rebatch) and draw(st.integers(0, 4)) == 0
    per_call = draw(st.integers(1, 4)) if form == "even" else 0
    size = 12 * draw(st.integers(1, 2)) if is_global else draw(st.integers(1, 20))
    if form == "even" and size % per_call:
        size *= per_call
    last_batch = draw(st.sampled_from(("keep", "drop", "pad", "carry")))
    if dont_rebatch:
        last_batch = "keep"
    elif rounds == "epoch" and last_batch == "carry":
        last_batch = "pad"
    last_round = draw(
        st.sampled_from(("uneven", "pad") if is_arrival else ("uneven", "pad", "drop"))
    )
    rows = st.integers(0, 9) | st.sampled_from((0, 1, size, 2 * size, 70))
    sizes = st.lists(rows if is_even else st.none() | rows, max_size=4)
    epochs = draw(
        st.lists(
            st.lists(sizes, min_size=NUM_WORKERS, max_size=NUM_WORKERS), min_size=1, max_size=3
        )
    )
    first = draw(st.integers(1, 9))
    num_chunks = 1
    if rounds == "epoch":
        num_chunks = most_devices if last_round == "drop" else 1
        first = size * (1 if is_global else num_chunks)
    of_worker_0 = [1] * num_chunks if dont_rebatch else [first]
    epochs = [[of_worker_0 + mine, *others] for mine, *others in epochs]
    column = st.builds(
        lambda dtype, tail, axis: Column(dtype, tail, min(axis, len(tail))),
        st.sampled_from(DTYPES[:-3] if gpus else DTYPES),
        st.sampled_from(((), (2,), (3, 2))),
        st.integers(0, 2),
    )
    return Stream(
        form, epochs, tuple(draw(st.lists(column, max_size=2))), size, is_global, per_call,
        draw(st.integers(1, NUM_WORKERS + 1)), draw(st.sampled_from((0, 7, 2**64 - 1))),
        last_batch, last_round, rounds, dont_rebatch,
        form == "replay" or draw(st.integers(0, 3)) > 0,
        "end" if is_arrival else draw(st.sampled_from(("end", "error", "rows", "late"))), order,
    )  # fmt: skip


@st.composite
def legs_of(
    draw: st.DrawFn, devices: int, *, order: str = "ticket", gpus: bool = False, epochs: int = 0
) -> Leg:
    """Draw a run with so many devices, and with up to so many epochs."""
    run = draw(RUNS)
    is_roomy = run["max_buffered_batches"] == 100 and run["max_buffered_bytes"] is None
    is_ticket = order == "ticket"
    run["writable"] = not gpus and draw(st.booleans())
    rounds = draw(st.sampled_from((1, 1, 2, 2, 3, 4, 6, 0)))
    failing = st.tuples(st.integers(0, 9), st.integers(1, 2), st.integers(0, 2))
    return Leg(
        devices, rounds, draw(st.sampled_from((0, 0, 0, 1, 5))) if is_ticket and rounds else 0,
        draw(st.sampled_from((0, 0, 0, *range(1, epochs + 1)))),
        draw(st.integers(0, devices - 1)) if is_ticket else 0,
        is_ticket and is_roomy and not gpus and draw(st.booleans()),
        draw(st.sampled_from(("token", *CARRIERS))), draw(st.integers(0, 9)),
        draw(st.sampled_from(("at once", "before", "stopped"))), "", gpus,
        draw(st.sampled_from(("", "-", "o", "e", "s", "oes-"))),
        () if gpus else tuple(draw(st.lists(st.integers(1, 60), max_size=4))),
        draw(failing) if is_ticket and draw(st.integers(0, 3)) == 0 else None,
        run,
    )  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, order: str = "ticket", one_of: int = 10) -> Program:
    """Draw a program; one of so many is on GPUs."""
    gpus = order == "ticket" and draw(st.integers(1, one_of)) == 1
    numbers = draw(st.lists(st.sampled_from((1, 2, 3, 1, 4, 6)), max_size=4))
    numbers = [min(number, 3) for number in numbers] if gpus else numbers
    stream = draw(streams(order=order, most_devices=max([1, *numbers]), gpus=gpus))
    # What a last round leaves out, or repeats, has numbers of its own where epochs are added.
    is_plain = stream.last_round == "uneven" and not stream.is_global
    epochs = len(stream.epochs) if order == "ticket" and is_plain else 0
    legs = [draw(legs_of(number, order=order, gpus=gpus, epochs=epochs)) for number in numbers]
    return Program(stream, [*legs, Leg(gpus=gpus)], draw(st.integers(0, 1000)))


@st.composite
def served_programs(draw: st.DrawFn) -> Program:
    """Draw a program whose runs are served, but for some."""
    program = draw(programs(one_of=3))
    ways = st.sampled_from(("", "shared", *TRANSPORTS))
    legs = [
        leg._replace(skip=0, extra=0, failing=None, transport=way, when="at once")
        if (way := draw(ways))
        else leg
        for leg in program.legs
    ]
    return program._replace(legs=legs)


@st.composite
def alike(draw: st.DrawFn) -> Program:
    """Draw a program whose runs have one device, and every batch of the stream."""
    stream = draw(streams(order="ticket", most_devices=1, gpus=False))._replace(repeatable=True)
    legs = draw(st.lists(legs_of(1), min_size=2, max_size=4))
    plain = {"interrupts": (), "failing": None}
    return Program(
        stream, [one._replace(**plain, run=one.run | {"writable": False}) for one in legs],
        draw(st.integers(0, 1000)),
    )  # fmt: skip


# ---- and what becomes of them


COUNTS = Counter[str]()
"""What has happened in the programs of this process."""


def take(device: Any, interrupts: list[int]) -> feeder.Batch | None:
    """The next batch of a device, which is asked for again where an interrupt comes: after so many
    moments at which the interpreter looks for signals, when it has called a function, or one that
    is written in C has returned."""
    if not interrupts:
        return next(device, None)
    left = interrupts.pop()

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal left
        if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
            left -= 1
            if left == 0:
                raise Interrupt

    sys.setprofile(count)
    try:
        return next(device, None)
    except Interrupt:
        sys.setprofile(None)
        COUNTS["interrupts"] += 1
        return next(device, None)
    finally:
        sys.setprofile(None)


@contextmanager
def running(
    stream: Stream, leg: Leg, resume: Any, seed: int, failing: tuple[int, int] = (0, 0)
) -> Iterator[tuple[feeder.Coordinator, list[Any]]]:
    """Run a leg; its devices."""
    fetch = stream.fetch(pause=shaky(seed, PAUSE_S), ways=leg.ways or "-", failing=failing)
    settings = stream.settings() | leg.settings(stream)
    run = feeds.running
    if leg.transport:
        consumers = {"device": "cuda", "credit": GPU_SLOTS} if leg.gpus else {}
        run = running_over(leg.transport, **consumers)
    with run(fetch, resume=resume, **settings) as (coordinator, feed):
        yield coordinator, [feed.on(i) for i in range(leg.devices)]


class Failing(NamedTuple):
    """The call of a leg that fails."""

    id: int = 0
    """Of its first row; 0 for none."""
    times: int = 0
    told: tuple[int, int] = (0, 0)
    """Its worker and its number, where an error tells of it."""
    row: float = math.inf
    """Batches up to there come."""


def failing_in(
    leg: Leg, stream: Stream, naive: NaiveStream, row: int, at: int, size: int | None
) -> Failing:
    """The call that fails, of those that give rows from a place on, in a run that begins at row
    `at` with batches of `size` rows."""
    starts = zip(naive.starts, naive.chunks, strict=False)
    later = [(start, chunk) for start, chunk in starts if start >= row and chunk.rows]
    if stream.last_batch == "drop" and size is not None:
        # Whether a call is made of which all rows are left out depends on when it is known that
        # its epoch ends.
        left_out = set[int]()
        for begin, end in pairwise((0, *naive.ends)):
            begin = max(begin, at)
            left_out.update(range(end - (end - begin) % size, end) if begin < end else ())
        later = [one for one in later if one[0] not in left_out]
    if leg.failing is None or not later:
        return Failing()
    which, times, retries = leg.failing
    start, chunk = later[which % len(later)]
    is_told = times > (0 if stream.form == "replay" else retries)
    told = chunk.worker_id, chunk.call
    return Failing(int(chunk.columns[0][0]), times, told, start if is_told else math.inf)


class Reader:
    """What a leg reads, beside what it is to be."""

    def __init__(self, devices: list[Any], leg: Leg) -> None:
        self._devices, self._leg, self._interrupts = devices, leg, list(leg.interrupts)
        self._got: dict[tuple[int, int], feeder.Batch] = {}
        self._is_writable = leg.run.get("writable", False)
        self._kept: list[tuple[feeder.Batch, Record]] | None = None if leg.gpus else []

    def read(self, device: int, wanted: Record) -> feeder.Batch:
        batch = take(self._devices[device], self._interrupts)
        assert_same([note(batch)] if batch is not None else [], [wanted], "device", device)
        assert batch is not None
        if self._is_writable:
            for array in batch.arrays():
                array[...] = np.zeros((), array.dtype)
        elif self._kept is not None:
            self._kept.append((batch, wanted))
        return batch

    def read_rounds(
        self, dealt: list[tuple[int, list[Record]]], ends: list[At], stream: Stream,
        naive: NaiveStream, failing: Failing,
    ) -> int:  # fmt: skip
        """Read these rounds, or those that come before a call fails; how many they are."""
        order = [(r, device) for r, (_, parts) in enumerate(dealt) for device in range(len(parts))]
        if self._leg.apart and not failing.id:
            order.sort(key=lambda one: one[1])
        for r, device in order:
            end, parts = dealt[r]
            # Where rounds may be dropped all batches of one come with its last; repeated ones come
            # when the end of the epoch is known.
            last = parts[-1 if stream.last_round == "drop" else device]
            row = ends[min(last[2] - ends[0].step + 1, end)].row
            if (row if last[3] else naive.ends[last[0]]) > failing.row:
                return r
            self._got[r, device] = self.read(device, parts[device])
        return len(dealt)

    def newest(self, dealt: list[tuple[int, list[Record]]]) -> list[feeder.Batch]:
        """The batches of the last of these rounds."""
        last = len(dealt) - 1
        return [self._got[last, i] for i in range(len(dealt[last][1]))] if dealt else []

    def check_kept(self) -> None:
        """Who keeps batches finds in them what was there."""
        for batch, wanted in self._kept or ():
            assert_same([note(batch)], [wanted], "kept")

    def check_cuts(self) -> None:
        """Where the next batch has come, too, the place after a batch is just before that one."""
        real = {batch.step: batch for batch, _ in self._kept or () if batch.rows}
        for step, batch in real.items():
            if step + 1 in real:
                after, cut = real[step + 1], batch.cut
                assert (cut.epoch, cut.index, cut.step) == (after.epoch, after.index, after.step)
                assert not cut.finished

    def check_end(self, failing: Failing) -> None:
        """There is no other batch: the stream has ended, or has failed."""
        for device in self._devices[: 1 if failing.row < math.inf else None]:
            for _ in range(2):
                if failing.row == math.inf:
                    assert next(device, None) is None
                else:
                    with pytest.raises(feeder.FetchError) as caught:
                        next(device)
                    assert (caught.value.worker_id, caught.value.call) == failing.told
                    assert isinstance(caught.value.__cause__, Boom)
                    del caught  # its traceback would hold this frame, and what was read


class Stand(NamedTuple):
    """Where a leg has come to."""

    at: At
    position: Any
    is_over: bool = False


def check(program: Program) -> int:
    """Run a program beside the naive stream; how many runs it was."""
    machine = Machine(num_gpus=4, seed=program.seed, registers=program.seed % 3 > 0)
    with installed(machine):
        is_arrival = program.stream.order == "arrival"
        num = (check_arrival if is_arrival else check_legs)(program)
    assert_sound(machine)
    return num


def check_legs(program: Program) -> int:
    """Run a program each batch of which is known."""
    stream, stand, number = program.stream, Stand(START, None), 0
    for number, leg in enumerate(program.legs):
        stand = check_leg(stream, leg, stand, program.seed + number)
        if stand.is_over:
            break
    with running(stream, Leg(), stand.position, 0) as (_, devices):
        assert next(devices[0], None) is None, "the stream had ended"
    return number + 2


def check_leg(stream: Stream, leg: Leg, stand: Stand, seed: int) -> Stand:
    """Run a leg beside the naive stream; where it has come to."""
    naive = stream.naive(leg.epochs)
    size = None if stream.dont_rebatch else stream.batch_size(leg.devices)
    # The rounds that are used, and some more: a few batches of an epoch may be in none.
    most = (leg.skip + leg.rounds + 2 + len(stream.epochs)) * leg.devices
    batches = list(islice(naive.batches(size, stream.last_batch, stand.at), most))
    records = [note_at(batch, stream.axes) for batch, _ in batches]
    ends = [stand.at, *(end for _, end in batches)]
    rounds = naive_dealing(records, 0, leg.devices, stream.rounds, stream.last_round)
    for _ in islice(rounds, leg.skip):
        pass
    dealt = list(islice(rounds, leg.rounds))
    failing_from = stand.at.row
    if leg.skip:
        # Of rows that are skipped nobody knows whether they were called for, and neither of those
        # that an epoch leaves out behind them.
        first = dealt[0][1][0][2] - stand.at.step if dealt else len(batches)
        failing_from = ends[first + 1].row - batches[first][0][3] if dealt else naive.ends[-1]
    failing = failing_in(leg, stream, naive, failing_from, stand.at.row, size)
    following = next(rounds, None)
    with running(stream, leg, stand.position, seed, failing[:2]) as (coordinator, devices):
        reader = Reader(devices, leg)
        num = reader.read_rounds(dealt, ends, stream, naive, failing)
        is_over = num == len(dealt) and following is None and failing.row == math.inf
        if num < len(dealt) or following is None:
            reader.check_end(failing)
        is_whole = following is not None and len(following[1]) == leg.devices
        if is_whole and not failing.id:
            for device in range(leg.extra):
                reader.read(device, following[1][device])
        reader.check_kept()
        # Rows that are carried make the last batch of an epoch the first one of the next; what is
        # dropped lies between two batches; a batch that was sent is not told of an epoch's end.
        # Nor is the end of an epoch the place after its last batch if smaller batches, of more
        # queues, may have the rows in between.
        has_rest = stream.last_batch == "carry" or (
            stream.last_batch == "drop" and stream.is_global
        )
        is_cut = not has_rest and stream.last_round != "drop"
        if is_cut and not leg.transport:
            reader.check_cuts()
        newest = reader.newest(dealt[:num])
        if leg.when != "stopped":
            position = take_position(stream, leg, coordinator, newest)
        if is_whole and not failing.id and leg.when == "before":
            for device in range(leg.extra, leg.devices):
                reader.read(device, following[1][device])
    if leg.when == "stopped":
        position = take_position(stream, leg, coordinator, newest)
    # What a last round leaves out is behind a feed at its end, not behind a token or a consumer.
    is_told = stream.last_round != "drop" or not (
        leg.transport or carrier_of(stream, leg, newest) == "token"
    )
    if is_over and is_told:
        # Rows that are dropped there are not asked for again.
        at = ends[-1]._replace(row=max(ends[-1].row, naive.ends[-1]))
        return Stand(at, position, is_over=leg.epochs in (0, len(stream.epochs)))
    at = ends[dealt[num - 1][0]] if num else stand.at
    return Stand(at, position)


def check_places(program: Program) -> None:
    """The place after a batch is told in the same bytes, whatever run came to it, from wherever."""
    stream, wanted = program.stream, []
    for number, leg in enumerate(program.legs):
        at = leg.rounds % len(wanted) if wanted else 0
        resume = wanted[at - 1] if at else None
        leg = leg._replace(skip=0)
        with running(stream, leg, resume, program.seed + number) as (_, (device,)):
            tokens = [batch.cut.token() for batch in list(device)]
        assert tokens == wanted[at:] or not wanted, (number, at)
        wanted = wanted or tokens


def take_position(stream: Stream, leg: Leg, source: Any, newest: list[feeder.Batch]) -> Any:
    """Where a run has come to, of whose newest round these are the batches; it may have none."""
    if leg.transport:
        source = source.consumers[leg.whose % max(1, len(newest))]
    carrier = CARRIERS[carrier_of(stream, leg, newest)]
    return carrier(source, newest[leg.whose % len(newest)] if newest else None)  # type: ignore


def carrier_of(stream: Stream, leg: Leg, newest: list[feeder.Batch]) -> str:
    """What a position is carried by. A token holds no rows."""
    is_bare = leg.carrier == "token" and not (newest and stream.repeatable)
    return "bytes" if is_bare else leg.carrier


def note_at(batch: NaiveBatch, axes: Sequence[int]) -> Record:
    """Write a batch of the naive stream down as one whose rows lie along these axes."""
    columns = (np.moveaxis(a, 0, axis) for a, axis in zip(batch[4], axes, strict=True))
    return *batch[:4], note_columns(columns)


def check_arrival(program: Program) -> int:
    """Run a program whose rows come in any order: none is lost, and none comes twice."""
    stream, naive, position = program.stream, program.stream.naive(), None
    got: list[feeder.Batch] = []
    for number, leg in enumerate(program.legs):
        with running(stream, leg, position, program.seed + number) as (coordinator, devices):
            taken: list[feeder.Batch | None] = []
            interrupts = list(leg.interrupts)
            for _ in range(leg.rounds):
                taken += [take(device, interrupts) for device in devices]
                if taken[-1] is None:
                    break
            got += filter(None, taken)
            if taken and taken[-1] is not None:
                position = take_position(stream, leg, coordinator, [taken[-1]])
        if taken and taken[-1] is None:
            break
    assert [batch.step for batch in got if batch.rows] == list(range(sum(b.rows > 0 for b in got)))
    ids = [int(one) for batch in got for one in batch["id"][: batch.rows]]
    of = {int(one): chunk[:2] for chunk in naive.chunks for one in chunk.columns[0]}
    assert not Counter(ids) - Counter(of.keys()), "a row is none of the stream, or came twice"
    epochs = [of[one][0] for one in ids]
    assert epochs == sorted(epochs)
    for epoch, rows in enumerate(np.diff([0, *naive.ends]).tolist()):
        lost = rows % stream.size if stream.last_batch == "drop" else 0
        assert epochs.count(epoch) == rows - lost
    for worker in range(stream.workers if stream.form in RINGS else 0):
        own = [one for one in ids if of[one][1] == worker]
        assert own == sorted(own, key=lambda one: (of[one][0], one)), worker
    return number + 1
