"""Small programs of a feed, and what each gives in every schedule."""

from __future__ import annotations

import random
from collections import deque
from contextlib import suppress
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

import numpy as np

import feeder
from feeder import sources
from schedules.world import Interrupt, Violation, World

NAP_S = 0.01
"""Longer than the enqueuer waits for quick calls."""


class Boom(Exception):
    """What a fetch function fails with."""


class Program(NamedTuple):
    """A feed, and what is done with it."""

    sizes: tuple[int, ...] = (2, 2, 2)
    """Rows of each call of an epoch."""
    batch_size: int = 2
    num_threads: int = 1
    devices: int = 1
    epochs: int = 1
    workers: int = 0
    """So many workers of a function that is no pure one."""
    buffered: int = 100
    """`max_buffered_batches`."""
    naps: tuple[int, ...] = ()
    """Calls that take long, of those beyond the end too."""
    shaky: int | None = None
    """The call that fails once and is made again."""
    fails: int | None = None
    """The call that fails."""
    closes_after: int | None = None
    """So many batches of each device are read, and the feed is stopped."""
    interrupts: bool = False
    """An interrupt may come in a read, which is then made again."""
    asks: int = 0
    """So often another thread asks for the position."""
    keeps: int = 0
    """So many batches each user looks at again later: nothing was written there meanwhile."""
    edits: int = 0
    """So often another thread edits the batch size while the feed runs, whose rows are then the
    records of a source."""
    told: bool = False
    """Each call has `rows_per_call` rows."""

    def rows(self) -> list[int]:
        """All rows in order, up to a failure."""
        rows = []
        for epoch in range(self.epochs):
            for call in range(len(self.sizes)):
                if call == self.fails:
                    return rows
                for worker in range(max(1, self.workers)):
                    rows += self._chunk(epoch, worker, call).tolist()
        return rows

    def _chunk(self, epoch: int, worker: int, call: int) -> np.ndarray:
        first = 1000 * epoch + 100 * worker + sum(self.sizes[:call])
        return np.arange(first, first + self.sizes[call])

    def batches(self) -> list[list[int]]:
        """What comes out, batch by batch."""
        per_epoch = len(self.rows()) if self.fails is not None else len(self.rows()) // self.epochs
        cut, rows = [], iter(self.rows())
        while epoch := list(islice(rows, per_epoch)):
            cut += [epoch[i : i + self.batch_size] for i in range(0, len(epoch), self.batch_size)]
        if self.fails is not None and cut and len(cut[-1]) < self.batch_size:
            cut.pop()
        return cut

    def run(self, world: World) -> _Outcome:
        """What it gives in a world."""
        return _Run(self, world).outcome()


def drawn(seed: int) -> Program:
    """A program of at most four calls an epoch."""
    draw = random.Random(seed)
    workers = draw.choice([0, 0, 0, 2])
    told = not workers and draw.random() < 0.3
    sizes = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 4)))
    calls = range(len(sizes))
    devices = draw.choice([1, 1, 2])
    fault = draw.choice(["", "", "shaky", "fails", "closes"])
    return Program(
        sizes=(sizes[0],) * len(sizes) if told else sizes,
        batch_size=sizes[0] * draw.randint(1, 2) if told else draw.randint(1, 4),
        num_threads=draw.choice([1, 2, 2, 3]),
        devices=devices,
        epochs=draw.choice([1, 1, 2]),
        workers=workers,
        buffered=draw.choice([1, 2, 100]),
        naps=tuple(call for call in range(len(sizes) + 2) if draw.random() < 0.2),
        # A function that is called again would have to know it.
        shaky=draw.choice(calls) if fault == "shaky" and not workers else None,
        fails=draw.choice(calls) if fault == "fails" and not workers else None,
        closes_after=draw.randint(0, 2) if fault == "closes" else None,
        interrupts=draw.random() < 0.3,
        asks=draw.choice([0, 0, 1]),
        keeps=draw.choice([0, 1, 3]),
        edits=draw.choice([0, 0, 1, 2]) if not (workers or told or fault) else 0,
        told=told,
    )


class _Outcome(NamedTuple):
    rows: tuple[tuple[tuple[int, ...], ...], ...]
    """Of each device its batches."""
    positions: tuple[tuple[int, bytes], ...]
    """Those that the user of a single device saw after each batch, and those that another thread
    asked for, each with the number of batches before it."""


class _Run:
    def __init__(self, program: Program, world: World, *, resume: bytes | None = None) -> None:
        self._program, self._world = program, world
        self._was_shaken, self._is_resumed = False, resume is not None
        coordinator = self._coordinator = feeder.Coordinator()
        settings: dict[str, Any] = {"resume": resume, "epochs": program.epochs}
        fetch = self._by_worker if program.workers else self._by_call
        if program.edits:
            fetch = sources.arrays(np.array(program.rows()))
            settings["epochs"] = 1
        if program.told:
            settings["rows_per_call"] = program.sizes[0]
        if program.workers:
            settings["num_worker_threads"] = program.workers
        feeder.init_data_input_workers(
            ["x"], fetch, program.batch_size, coordinator=coordinator,
            num_threads=program.num_threads, devices=program.devices,
            max_buffered_batches=program.buffered, timeout=3600.0,
            retries=int(program.shaky is not None), retry_backoff_s=0.1, **settings,
        )  # fmt: skip
        self._feed = coordinator["train"]
        self._made = [[0, 0] for _ in range(program.workers)]
        self._rows: list[list[tuple[int, ...]]] = [[] for _ in range(program.devices)]
        self._positions: list[tuple[int, bytes]] = []

    def outcome(self) -> _Outcome:
        program, world = self._program, self._world
        with self._coordinator:
            devices = range(1, program.devices)
            threads = [world.thread(self._read, device) for device in devices]
            threads += [world.thread(self._ask) for _ in range(program.asks)]
            if not self._is_resumed:
                threads += [world.thread(self._edit, 1 + i) for i in range(program.edits)]
            self._read(0)
            if program.closes_after is None:
                for thread in threads:
                    thread.join()
                left = self._feed.stats()["buffered_bytes"]
                if program.fails is None and left:
                    raise Violation(f"all has been read, and {left} bytes count as buffered")
        for thread in threads:
            thread.join()
        for thread in world.threads:
            if thread.error is not None and not isinstance(thread.error, feeder.ClosedError):
                raise thread.error
        alive = [t.name for t in world.threads[1:] if t.is_alive()]
        if alive:
            raise Violation(f"threads run after the stop: {alive}")
        return _Outcome(tuple(tuple(rows) for rows in self._rows), tuple(self._positions))

    def _by_call(self, call: feeder.Call) -> Any:
        if call.index >= len(self._program.sizes):
            self._take_time(call.index)
            raise StopIteration
        return self._give(call.epoch, 0, call.index)

    def _by_worker(self, worker_id: int, batch_size: int) -> Any:
        epoch, call = self._made[worker_id]
        if call == len(self._program.sizes):
            self._made[worker_id] = [epoch + 1, 0]
            raise StopIteration
        chunk = self._give(epoch, worker_id, call)
        self._made[worker_id] = [epoch, call + 1]
        return chunk

    def _give(self, epoch: int, worker: int, call: int) -> Any:
        program = self._program
        self._take_time(call)
        if call == program.fails or (call == program.shaky and not self._was_shaken):
            self._was_shaken = True
            raise Boom
        return [program._chunk(epoch, worker, call)]

    def _take_time(self, call: int) -> None:
        self._world.point()
        if call in self._program.naps:
            self._world.sleep(NAP_S)

    def _read(self, device: int) -> None:
        program, feed = self._program, self._feed.on(device)
        kept: deque[np.ndarray] = deque()
        while program.closes_after is None or len(self._rows[device]) < program.closes_after:
            try:
                batch = self._next(feed)
            except StopIteration:
                return
            except feeder.FetchError as error:
                if program.fails is None or not isinstance(error.__cause__, Boom):
                    raise
                return
            step, rows = batch.step, self._rows[device]
            rows.append(tuple(batch["x"].tolist()))
            kept.append(batch["x"])
            del batch
            while len(kept) > program.keeps:
                if tuple(kept[0].tolist()) != rows[-len(kept)]:
                    raise Violation(f"a batch was {rows[-len(kept)]}, and is {kept[0]}")
                kept.popleft()
            if program.devices == 1 and (told := self._ask()) != step + 1:
                raise Violation(f"the position after batch {step} says {told}")

    def _next(self, feed: feeder.DeviceFeed) -> feeder.Batch:
        world = self._world
        if self._program.interrupts:
            world.interrupted = world.here
            try:
                return next(feed)
            except Interrupt:
                return next(feed)
            finally:
                world.interrupted = None
        return next(feed)

    def _edit(self, batch_size: int) -> None:
        self._world.point()
        # If it comes too late, nothing is edited.
        with suppress(feeder.ResumeError):
            self._feed.edit(why=f"{batch_size} rows", batch_size=batch_size)

    def _ask(self) -> int:
        self._world.point()
        snapshot = self._feed.snapshot()
        step = snapshot.states[0].summary[2]
        self._positions.append((step, bytes(snapshot)))
        return step


class Checked:
    """What schedules of a program give, held against the rows in order. A position is taken by a
    run without threads once, since a place at an epoch's end may be told in two ways."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._batches = [tuple(batch) for batch in program.batches()]
        self._seen: set[tuple[int, bytes]] = set()

    def check(self, outcome: _Outcome) -> None:
        """Raises `Violation` if rows or positions are wrong."""
        program, most = self.program, self.program.closes_after
        if program.edits:
            self._check_edited(outcome)
            return
        for device, rows in enumerate(outcome.rows):
            expected = tuple(self._batches[device :: program.devices][:most])
            # Another device's user may have stopped the feed before.
            if rows != (expected[: len(rows)] if most is not None and device else expected):
                raise Violation(f"device {device} had {rows}, expected {expected}")
        for step, position in outcome.positions:
            if (step, position) not in self._seen:
                rows = self._rows_from(position)
                if rows != self._dealt(step):
                    raise Violation(f"from the position after batch {step} came {rows}")
                self._seen.add((step, position))

    def _check_edited(self, outcome: _Outcome) -> None:
        """Batches are of any size after an edit, which ends a round: so they follow in turns."""
        batches = [batch for turn in zip_longest(*outcome.rows) for batch in turn if batch]
        if (rows := [*chain.from_iterable(batches)]) != self.program.rows():
            raise Violation(f"in turns came {rows}: {outcome.rows}")
        for step, position in outcome.positions:
            rest = [*chain.from_iterable(batches[step:])]
            found = self._rows_from(position)
            if rest != [
                row for turn in zip_longest(*found) for batch in turn for row in batch or ()
            ]:
                raise Violation(f"from the position after batch {step} came {found}")

    def _dealt(self, step: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """What each device gets from there on."""
        num = self.program.devices
        numbers = range(step, len(self._batches))
        return tuple(
            tuple(self._batches[i] for i in numbers if i % num == device) for device in range(num)
        )

    def _rows_from(self, position: bytes) -> tuple[tuple[tuple[int, ...], ...], ...]:
        again = self.program._replace(
            num_threads=int(self.program.devices > 1), closes_after=None, shaky=None, naps=(),
            asks=0, keeps=0, interrupts=False, batch_size=self._size_in(position),
        )  # fmt: skip
        world = World(lambda steps: 0)
        return world.run(lambda _: _Run(again, world, resume=position).outcome()).rows

    def _size_in(self, position: bytes) -> int:
        if not self.program.edits:
            return self.program.batch_size
        size: int = feeder.Snapshot.from_bytes(position).states[0].fingerprint["batch_size"]
        return size
