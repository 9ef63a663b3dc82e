"""Runs that are edited, drawn: each row is what a naive model of the run says, whatever was changed
and wherever the run was resumed; and the whole run comes again from its start.

`python -m property.histories --seed S --histories N` draws so many, and counts them. The model has
lists: what is left of the pass of each source, and the counts of the block at hand. It shares no
code with the product; of an order without edits it asks the source alone.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, takewhile
from math import gcd
from typing import Any

import numpy as np
import xxhash

import feeder
from feeder import ConfigError, sources
from feeder.feeds.records import asked_of, records_of
from feeder.state.snapshot import Snapshot, StreamState

UNIT = 10**6
"""Record r of source k is k * UNIT + r."""
NAMES = ("web", "code", "books", "math", "wiki", "talk", "law", "news")
PLAIN = ""


# ---- what a run is made of


@dataclass(frozen=True)
class Data:
    """A source."""

    name: str
    size: int
    order: str
    """"in sequence", "shuffled", "windows"."""
    seed: int | None
    excluded: tuple[tuple[int, int], ...] = ()

    @property
    def kept(self) -> list[int]:
        out = {r for a, b in self.excluded for r in range(a, b)}
        return [r for r in range(self.size) if r not in out]

    def source(self) -> Any:
        first = 0 if self.name == PLAIN else NAMES.index(self.name) * UNIT
        source = sources.arrays(np.arange(self.size) + first)
        source = source.exclude(self.excluded) if self.excluded else source
        if self.order == "in sequence":
            return source
        return source.shuffle(seed=self.seed, window=3 if self.order == "windows" else None)

    def pass_of(self, epoch: int, seed: int) -> list[int]:
        """The records of a pass, of the source alone."""
        own = seed
        if self.name != PLAIN:
            own = xxhash.xxh3_64_intdigest(f"{seed}/{self.name}".encode())
        call = feeder.Call(0, epoch, 0, self.size, own)
        (rows,) = self.source()(call)
        return [int(row) % UNIT for row in rows]


@dataclass(frozen=True)
class Made:
    """What a run is made of from an edit on."""

    parts: dict[str, Data]
    weights: dict[str, int]
    mode: str
    batch: int
    seed: int
    known: dict[str, Data] = field(default_factory=dict)
    """Sources that have been taken out, as they were then."""

    @property
    def shares(self) -> dict[str, int]:
        """The weights, in the smallest numbers."""
        common = gcd(*self.weights.values())
        return {name: weight // common for name, weight in self.weights.items()}

    def source(self, *, all_known: bool) -> Any:
        if PLAIN in self.parts:
            return self.parts[PLAIN].source()
        given = {name: (data.source(), self.weights[name]) for name, data in self.parts.items()}
        if all_known:
            given |= {name: (data.source(), 0) for name, data in self.known.items()}
        return sources.mix(given, on_exhausted=self.mode)


# ---- the model


@dataclass
class Pass:
    """The pass that a source is in."""

    epoch: int
    left: list[int]
    taken: int = 0
    any_order: bool = False
    """Whether records were added within it, so that the rest is in an order of its own."""
    dropped: int = 0
    """How many of those that are left were dropped at an epoch's end, where nobody saw which."""

    @property
    def num_left(self) -> int:
        return len(self.left) - self.dropped


class Model:
    """A run, row by row. Raises `AssertionError` at the first row that cannot be."""

    def __init__(self, made: Made) -> None:
        self.made = made
        self.epoch = 0
        self.passes: dict[str, Pass] = {}
        self.seeds: dict[str, int] = {}
        self.begun = 0
        self._begin_epoch()

    # -- passes

    def _next_pass(self, name: str, epoch: int) -> None:
        data = self.made.parts[name]
        seed = self.made.seed
        self.passes[name] = Pass(epoch, data.pass_of(epoch, seed))

    def _begin_epoch(self) -> None:
        lengths = {}
        for name, data in self.made.parts.items():
            if self.made.mode != "repeat" or name not in self.passes:
                self._next_pass(name, 0 if self.made.mode == "repeat" else self.epoch)
            lengths[name] = len(data.kept)
        self._blocks = self._plan(lengths)
        self._block = Counter[str]()

    # -- blocks

    def _plan(self, left: dict[str, int]) -> Iterator[Counter[str]]:
        """The blocks of an epoch, or of its rest."""
        left, mode = dict(left), self.made.mode
        if PLAIN in left:
            yield Counter(left)
            return
        if mode == "repeat":
            counts = self._counts(left)
            num = max(-(-left[name] // counts[name]) for name in left)
            for _ in range(num):
                yield Counter(counts)
            return
        while alive := {name: n for name, n in left.items() if n > 0}:
            counts = self._counts(alive)
            is_whole = all(left[name] >= n for name, n in counts.items())
            if mode == "stop" and not (is_whole and len(alive) == len(left)):
                return
            block = Counter({name: min(left[name], n) for name, n in counts.items()})
            for name, n in block.items():
                left[name] -= n
            yield block

    def _counts(self, names: Any) -> dict[str, int]:
        common = gcd(*(self.made.weights[name] for name in names))
        return {name: self.made.weights[name] // common for name in names}

    def _refill(self) -> bool:
        """Whether the epoch has another record."""
        while not +self._block:
            block = next(self._blocks, None)
            if block is None:
                return False
            self._block = Counter(block)
        return True

    # -- what comes

    def row(self, value: int) -> None:
        """The next row of the run."""
        assert self._refill(), "a row behind the end of the epoch"
        number, record = divmod(value, UNIT)
        name = PLAIN if PLAIN in self.made.parts else NAMES[number]
        assert self._block[name] > 0, (name, self._block)
        self._block[name] -= 1
        self._take(name, record)

    def _take(self, name: str, record: int | None) -> None:
        now = self.passes[name]
        if not now.num_left:
            assert self.made.mode == "repeat", (name, "has no record left")
            self._next_pass(name, now.epoch + 1)
            now = self.passes[name]
        if record is None and now.any_order:
            now.dropped += 1
        elif record is None:
            now.left.pop(0)
        elif now.any_order:
            assert record in now.left, (name, record, "is not left")
            now.left.remove(record)
        else:
            assert record == now.left[0], (name, record, now.left[:5])
            now.left.pop(0)
        now.taken += 1

    def end_epoch(self) -> None:
        """The epoch has ended; what is left of it was dropped."""
        while self._refill():
            name = next(name for name, n in self._block.items() if n)
            self._block[name] -= 1
            self._take(name, None)
        self.epoch += 1
        self._begin_epoch()

    @property
    def left(self) -> int:
        """Rows of the epoch that are still to come."""
        self._refill()
        blocks = list(self._blocks)
        self._blocks = iter(blocks)
        return sum(self._block.values()) + sum(sum(block.values()) for block in blocks)

    # -- an edit

    def edit(self, made: Made) -> None:
        """From here on the run is made of this."""
        was = self.made
        # In another order the same sources are the same mixture.
        then, now = ((m.parts, m.shares, m.seed) for m in (was, made))
        if then == now:
            self.made = made
            return
        for name in was.parts:
            if made.mode == "repeat" and not self.passes[name].num_left:
                # The next record of it is of the next pass.
                self._next_pass(name, self.passes[name].epoch + 1)
        self.made = made
        for name, data in made.parts.items():
            now = self.passes.get(name)  # type: ignore[assignment]
            is_over = now is not None and not now.num_left and now.epoch < self.epoch
            if now is None or (made.mode != "repeat" and is_over and name not in was.parts):
                self._next_pass(name, 0 if made.mode == "repeat" else self.epoch)
                continue
            if now.taken == 0:
                # Nothing of the pass has come: it is one of the new set, and of the new seed.
                self.passes[name] = Pass(now.epoch, data.pass_of(now.epoch, made.seed))
                continue
            before = was.parts.get(name) or was.known[name]
            kept = set(data.kept)
            # What was excluded may be what was dropped, which nobody knows.
            now.left = [record for record in now.left if record in kept]
            if new := [r for r in range(before.size, data.size) if r in kept]:
                now.left += new
                # Behind the others in sequence; among them if it is shuffled.
                now.any_order = now.any_order or data.order != "in sequence"
        left = {name: self.passes[name].num_left for name in made.parts}
        self._blocks, self._block = self._plan(left), Counter()


# ---- drawing


def draw_data(draw: random.Random, name: str) -> Data:
    order = draw.choice(["in sequence", "shuffled", "shuffled", "windows"])
    return Data(name, draw.randint(1, 25), order, draw.choice([None, 3, 8]))


def draw_made(draw: random.Random) -> Made:
    mode = draw.choice(["drop", "stop", "repeat"])
    if draw.random() < 0.15:
        return Made({PLAIN: draw_data(draw, PLAIN)}, {PLAIN: 1}, "drop", draw.randint(1, 6), 7)
    names = draw.sample(NAMES, draw.randint(1, 6))
    parts = {name: draw_data(draw, name) for name in names}
    if mode == "stop":
        parts = {name: replace(data, size=data.size + 9) for name, data in parts.items()}
    weights = {name: draw.randint(1, 4) for name in names}
    return Made(parts, weights, mode, draw.randint(1, 6), draw.randint(0, 3))


KINDS = (
    "weights", "order", "add", "remove", "put back", "grow", "exclude", "batch", "seed", "note",
)  # fmt: skip


def draw_edit(draw: random.Random, made: Made) -> tuple[str, Made]:
    """What the run is made of after one more edit, and of which kind it is."""
    kind = draw.choice(KINDS)
    parts, weights, known = dict(made.parts), dict(made.weights), dict(made.known)
    name = draw.choice(list(parts))
    fresh = [n for n in NAMES if n not in parts and n not in known]
    if PLAIN in parts and kind in KINDS[:5]:
        kind = "note"
    if kind in ("batch", "seed"):
        numbers = {"batch": (1, 6), "seed": (0, 3)}
        return kind, replace(made, **{kind: draw.randint(*numbers[kind])})
    if kind == "weights":
        weights = {n: draw.randint(1, 4) for n in parts}
    elif kind == "order":
        parts = {n: parts[n] for n in draw.sample(list(parts), len(parts))}
    elif kind == "add" and fresh and len(parts) < 6:
        new = draw.choice(fresh)
        parts[new] = draw_data(draw, new)
        weights[new] = draw.randint(1, 4)
    elif kind == "remove" and len(parts) > 1:
        known[name] = parts.pop(name)
        weights.pop(name)
    elif kind == "put back" and known and len(parts) < 6:
        back = draw.choice(list(known))
        parts[back] = known.pop(back)
        weights[back] = draw.randint(1, 4)
        if draw.random() < 0.3:
            parts[back] = replace(parts[back], size=parts[back].size + draw.randint(1, 9))
    elif kind == "grow":
        parts[name] = replace(parts[name], size=parts[name].size + draw.randint(1, 9))
    elif kind == "exclude":
        data = parts[name]
        first = draw.randrange(data.size)
        ranges = sources_ranges(data.excluded, (first, min(data.size, first + draw.randint(1, 4))))
        if replace(data, excluded=ranges).kept:
            parts[name] = replace(data, excluded=ranges)
    return kind, replace(made, parts=parts, weights=weights, known=known)


def sources_ranges(
    old: tuple[tuple[int, int], ...], new: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Ranges, and one more."""
    out = sorted({r for a, b in (*old, new) for r in range(a, b)})
    merged: list[tuple[int, int]] = []
    for record in out:
        if merged and merged[-1][1] == record:
            merged[-1] = merged[-1][0], record + 1
        else:
            merged.append((record, record + 1))
    return tuple(merged)


# ---- a history


Batches = dict[int, list[int]]


class History:
    """A run that is edited, beside its model."""

    names: Sequence[str] = ("x",)
    last_batches: Sequence[str] = ("keep", "drop")

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.made = self.draw_made()
        self.is_global = self.draw.random() < 0.2
        self.last_batch = self.draw.choice(self.last_batches)
        self.queues = 1
        self.made = self._sized(self.made)
        if not self._has_batches(self.made):
            self.last_batch = "keep"
        self.model = self.model_of(self.made)
        self.state: Any = None
        self.batches: Batches = {}
        self.done = Counter[str]()
        self.keeps_batch = True

    def draw_made(self) -> Any:
        """What the run begins with."""
        return draw_made(self.draw)

    def draw_edit(self, made: Any) -> tuple[str, Any]:
        """One more edit, and of which kind it is."""
        return draw_edit(self.draw, made)

    def model_of(self, made: Any) -> Any:
        """A model of the run."""
        return Model(made)

    def _has_batches(self, made: Made) -> bool:
        """Whether a whole epoch has a batch."""
        try:
            source = made.source(all_known=False)
        except ConfigError as error:
            assert "fewer than one block" in str(error)
            return False
        return self.last_batch == "keep" or source.epoch_size >= made.batch

    def _sized(self, made: Made) -> Made:
        """With a global batch that all numbers of queues divide."""
        return replace(made, batch=60) if self.is_global else made

    def feed(self, made: Made, queues: int, resume: Any, **more: Any) -> Any:
        size = {"global_batch_size" if self.is_global else "batch_size": made.batch}
        return feeder.init_data_input_workers(
            [*self.names], made.source(all_known=more.pop("all_known", True)), devices=queues,
            epochs=None, seed=made.seed, last_batch=self.last_batch, num_threads=1,
            coordinator=feeder.Coordinator(), resume=resume, max_buffered_batches=queues,
            **size, **more,
        )  # fmt: skip

    def run(self, rounds: int, *, edits: bool) -> None:
        """Some rounds, after an edit or none."""
        made, more = self.made, {}
        if edits and self.state is not None:
            for _ in range(self.draw.randint(1, 2)):
                kind, edited = self.draw_edit(made)
                if self._has_batches(self._sized(edited)):
                    made = edited
                    self.done[kind] += 1
            more["edit"] = f"edit {sum(self.done.values())}"
            self.keeps_batch = self.keeps_batch and made.batch == self.made.batch
            then = {**self.made.known, **self.made.parts}
            known = {name: then[name] for name in made.known if name in then}
            made = self._sized(replace(made, known=known))
            self._end_epochs()
            self._edit(made)
            self.made = made
        self.queues = self.draw.randint(1, 5)
        if self.is_global:
            self.queues = self.draw.choice([1, 2, 3, 4, 5])
        with self.feed(made, self.queues, self.state, **more) as coordinator:
            queues = [coordinator["train"].on(i) for i in range(self.queues)]
            first = None
            for _ in range(rounds):
                of_round = [next(queue) for queue in queues]
                first = of_round[0]
                for batch in of_round:
                    self._note(batch)
            self.state = self._position(coordinator, first)
        self.done["resumes"] += 1

    def _edit(self, made: Any) -> None:
        self.model.edit(made)

    def _note(self, batch: Any) -> None:
        rows = batch["x"].tolist()
        assert batch.step == len(self.batches), (batch.step, len(self.batches))
        self.batches[batch.step] = rows
        self._end_epochs()
        assert batch.epoch == self.model.epoch, (batch.epoch, self.model.epoch)
        for row in rows:
            self.model.row(row)
        size = self._rows
        assert len(rows) == size or (self.last_batch, self.model.left) == ("keep", 0), "short"

    @property
    def _rows(self) -> int:
        """Rows of a batch."""
        return self.made.batch // (self.queues if self.is_global else 1)

    def _end_epochs(self) -> None:
        """An epoch ends if it has no batch more."""
        while self.model.left < (self._rows if self.last_batch == "drop" else 1):
            self.model.end_epoch()

    def _position(self, coordinator: Any, first: Any) -> Any:
        kind = self.draw.choice(["state dict", "snapshot", "within a round"])
        snapshot = coordinator.snapshot()
        if kind == "snapshot":
            return bytes(snapshot)
        if kind == "within a round" and first is not None:
            # As a consumer of one queue has it.
            (state,) = snapshot.states
            state = state._replace(token=first.cut.token(), rows=None)
            return bytes(Snapshot((state,)))
        return coordinator.state_dict()

    def replay(self) -> None:
        """All batches come again from the start of the run, by its history."""
        data = self.state["feeder"] if isinstance(self.state, dict) else self.state
        start = Snapshot.from_bytes(data).at_start()
        with self.feed(self.made, 1, start) as coordinator:
            feed = coordinator["train"]
            for batch in islice(feed, len(self.batches)):
                assert batch["x"].tolist() == self.batches[batch.step], batch.step
            for step in self.draw.sample(sorted(self.batches), min(5, len(self.batches))):
                if not self.is_global:
                    self._ask(feed, coordinator.snapshot().states[0], step)
        self.done["replays"] += 1

    def _ask(self, feed: Any, state: StreamState, step: int) -> None:
        """The records of a batch, and when one of them comes, are those that came: the feed says
        so, and its position, if no source of the run is gone."""
        rows = [row % UNIT for row in self.batches[step]]
        told = feed.records(step)
        assert [one.number for (one,) in told] == rows, step
        number = self.draw.randrange(len(rows))
        value, (one,) = self.batches[step][number], told[number]
        wanted = [
            (at, row)
            for at, values in sorted(self.batches.items())
            for row, other in enumerate(values)
            if other == value
        ]
        last = max(self.batches)
        seen = [*takewhile(lambda seen: seen.step <= last, feed.when(one.source, one.number))]
        assert [(seen.step, seen.row) for seen in seen] == wanted, (step, one)
        try:
            alone, _ = asked_of(state)
            again = records_of(alone, step)
        except ConfigError as error:
            assert "was taken out by the edit at step" in str(error)
            return
        assert [[one[:3] for one in row] for row in again] == [
            [one[:3] for one in row] for row in told
        ]


def run(
    seed: int, *, most_edits: int = 20, each_step: bool = False, of: type[History] = History
) -> Counter[str]:
    """One history."""
    history = of(seed)
    draw = history.draw
    num = draw.randint(1, most_edits)
    history.run(draw.randint(1, 4), edits=False)
    for _ in range(num):
        history.run(1 if each_step else draw.randint(1, 4), edits=True)
        while each_step and draw.random() < 0.8:
            history.run(1, edits=False)
    if history.keeps_batch and not history.is_global:
        history.replay()
    return history.done


def campaign(seed: int, histories: int) -> Counter[str]:
    """Many of them, half of packed rows, of which a tenth is resumed at each step."""
    from property.packed_histories import PackedHistory

    done = Counter[str]()
    for number in range(histories):
        one = seed * 1_000_000 + number
        try:
            of = PackedHistory if number // 10 % 2 else History
            done += run(one, each_step=number % 10 == 9, of=of)
        except BaseException as error:
            error.add_note(f"history {one}, each_step={number % 10 == 9}")
            raise
        done["histories"] += 1
    return done


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--histories", type=int, default=1000)
    told, began = parser.parse_args(arguments), time.monotonic()
    logging.getLogger("feeder").setLevel(logging.ERROR)
    done = campaign(told.seed, told.histories)
    counts = ", ".join(f"{count} {what}" for what, count in sorted(done.items()))
    print(f"seed {told.seed}: {counts} in {time.monotonic() - began:.0f} s, 0 differ")


if __name__ == "__main__":
    main()
