"""Draws programs of a feed and its resumes, and compares them with the second oracle."""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import warnings
from typing import Any

import numpy as np

import feeder
from feeder import sources
from property import second

Draws = dict[Any, tuple[dict[Any, Any], dict[Any, Any]]]
EPOCH = 10**4


class Differs(AssertionError):
    """The product and the oracle do not agree."""


class Program:
    """A fetch function and settings of the stream."""

    def __init__(self, seed: int, draws: Draws) -> None:
        self.draw = draw = random.Random(seed)
        self.seed, self.draws = seed, draws
        self.form = draw.choice(("call", "call", "cursor", "replay", "source"))
        self.num = draw.choice((1, 1, 2, 3))
        self.stream: dict[str, Any] = {
            "last_batch": draw.choice(("keep", "drop", "pad", "carry")),
            "last_round": draw.choice(("uneven", "drop", "pad")),
            "rounds": draw.choice(("stream", "epoch")),
        }
        if self.form != "source" and draw.random() < 0.15:  # Other settings are refused.
            self.stream |= {"dont_rebatch": True, "last_batch": "keep", "batch_size": 4}
        elif draw.random() < 0.3:
            self.stream["global_batch_size"] = 12
        else:
            self.stream["batch_size"] = draw.randint(1, 7)
        if self.stream["last_batch"] == "carry":
            self.stream["rounds"] = "stream"
        self.feed_seed = draw.randint(0, 3)
        # With "drop" an epoch may have no batch, and a stream without end then has none at all.
        self.few = 12 if self.stream["last_batch"] == "drop" else 1
        self.records = draw.randint(self.few * 3, self.few * 3 + 30)
        self.shuffle, self.stick = draw.random() < 0.5, draw.random() < 0.5
        self.shards = draw.randint(1, 3)
        may_skip = self.few == 1 and self.records > 9 and not self.shuffle
        self.bad = range(draw.randint(0, 4), self.records if may_skip else 0, 5)
        self.per_call = self.form == "call" and draw.random() < 0.2
        self.per_call &= self.stream["last_batch"] != "carry" and "dont_rebatch" not in self.stream
        self.failing: Any = None
        self.waited: set[Any] = set()

    def rows(self, epoch: int, worker: int, number: int) -> list[int] | None:
        """What a call returns."""
        draw = random.Random(f"{self.seed} {epoch} {worker}")
        sizes = [draw.choice((0, 1, 2, 3, 5, 8)) for _ in range(draw.randint(1, 7))] + [self.few]
        if self.per_call:
            sizes = [1] * sum(sizes)
        if number == len(sizes):
            return None
        first = epoch * EPOCH + worker * 1000 + number * 100
        return list(range(first, first + sizes[number]))

    # As the oracle has it.

    def oracle(self, run: dict[str, Any], failing: Any = None) -> second.Feed:
        settings = {name: run[name] for name in ("epochs", "devices")}

        def fetch(*call: int) -> Any:
            if self.form == "source":
                return self.order(call[0]) if call[2] == 0 else None
            return second.FAILS if call == failing else self.rows(*call)

        workers = self.num if self.form in ("cursor", "replay") else 1
        return second.Feed(fetch, workers, **settings, **self.stream)

    def order(self, epoch: int) -> list[int]:
        """The records of a source, or their places in its shuffled order, which is not told."""
        shard = 0 if self.stick else epoch % self.shards
        first, end = (self.records * (shard + i) // self.shards for i in (0, 1))
        return [epoch * EPOCH + n for n in range(first, end) if n not in self.bad]

    # As the product has it.

    def make(self, run: dict[str, Any], resume: Any) -> feeder.Coordinator:
        settings = {"batch_size": None, **self.stream, **run, "seed": self.feed_seed}
        fetch: Any = {"call": self.call, "cursor": Reader(self).fetch}.get(self.form)
        if self.form == "replay":
            fetch = Stateful(self).fetch
        if self.form == "source":
            fetch = sources.samples(
                self.sample, self.records, on_error="skip", random_shuffle=self.shuffle,
                num_shards=self.shards, stick_to_shard=self.stick,
            )  # fmt: skip
        if self.per_call:
            settings["rows_per_call"] = 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", feeder.ReplayWarning)
            return feeder.init_data_input_workers(
                ["id", "noise"], fetch, num_worker_threads=self.num, resume=resume,
                coordinator=feeder.Coordinator(), **settings,
            )  # fmt: skip

    def sample(self, info: Any) -> tuple[int, float]:
        if info.idx_in_epoch in self.bad:
            raise ValueError("bad")
        return info.epoch_idx * EPOCH + info.idx_in_epoch, info.rng.random()

    def made(self, *call: int) -> Any:
        """The rows of a call, of which some are made only when they are asked for again."""
        if call == self.failing:
            raise OSError("away")
        if call not in self.waited and hash((self.seed, call)) % 60 == 0:
            self.waited.add(call)
            return "not now"
        return self.rows(*call)

    def call(self, call: feeder.Call) -> Any:
        rows = self.made(call.epoch, 0, call.index)
        if rows is None or call.index > 10**3:
            raise StopIteration
        if rows == "not now":
            return None
        return {"noise": call.rng.random(len(rows)), "id": np.array(rows, np.int64)}


class Stateful:
    """A function of worker and hint that can only be called again."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = dict.fromkeys(range(program.num), (0, 0))

    def fetch(self, worker: int, hint: int) -> Any:
        epoch, number = self.at[worker]
        rows = self.program.made(epoch, worker, number)
        if rows == "not now":
            return None
        self.at[worker] = (epoch + 1, 0) if rows is None else (epoch, number + 1)
        if rows is None:
            raise StopIteration
        return [np.array(rows, np.int64), np.array(rows, np.float64)]


class Reader(Stateful):
    """One that can be put back."""

    def cursor(self, worker: int) -> tuple[int, int]:
        return self.at[worker]

    def seek(self, worker: int, cursor: tuple[int, int]) -> None:
        self.at[worker] = cursor


def check(program: Program, batch: Any, wanted: second.Batch) -> None:
    """Compares a batch. What the pages do not compute is the same for the same key, in all
    programs, and another for another key."""

    def same(table: Any, key: Any, value: Any) -> None:
        there, back = program.draws.setdefault(table, ({}, {}))
        if there.setdefault(key, value) != value or back.setdefault(value, key) != key:
            raise Differs(f"{table}: {value} for {key}, not {there[key]}; {back.get(value)} has it")

    got = (batch.epoch, batch.index, batch.step, batch.rows)
    if got != wanted[:4]:
        raise Differs(f"epoch, index, step, rows: {got}, expected {wanted[:4]}")
    rows = list(zip(*(column.ravel().tolist() for column in batch.arrays()), strict=True))
    ids, seed = [row[0] for row in rows], program.feed_seed
    if program.form == "source" and program.shuffle:
        table = ("order", program.records, program.stick and program.shards, seed)
        for i, place in zip(ids, wanted.values, strict=True):
            same((*table, place // EPOCH), place, i)
    elif ids != wanted.values:
        raise Differs(f"{ids}, expected {wanted.values}")
    draws = program.form in ("call", "source")
    for i, noise in rows:
        same(program.form if draws else "none", (draws and seed, i), noise)


class Reading:
    """Reads so many batches of a feed, from its devices in turns, and compares them."""

    def __init__(self, program: Program, feed: Any, num: int, most: int | None) -> None:
        self.program, self.feed, self.most = program, feed, most
        self.batch: Any = None
        self.read = 0
        self.taken: list[list[Any]] = [[] for _ in range(num)]

    def round(self, batches: list[second.Batch]) -> bool:
        """Whether all of a round was read."""
        for i, wanted in enumerate(batches):
            if self.read == self.most:
                return False
            self.batch = next(self.feed.on(i), None)
            if self.batch is None:
                raise Differs(f"nothing, expected step {wanted.step} on {i}")
            check(self.program, self.batch, wanted)
            self.taken[i].append(self.batch)
            self.read += 1
        return True

    def fails(self) -> None:
        """Each device has the error in the place of its next batch."""
        for i in range(len(self.taken)):
            try:
                raise Differs(f"expected an error, not {next(self.feed.on(i), None)}")
            except feeder.FeedError:
                pass

    def ends(self) -> None:
        """No device has another batch, and each batch knows whether its epoch went on."""
        for i, batches in enumerate(self.taken):
            if (more := next(self.feed.on(i), None)) is not None:
                raise Differs(f"expected the end on {i}, not step {more.step}")
            for one, later in itertools.zip_longest(batches, batches[1:]):
                if one and one.last_of_epoch != (later is None or later.epoch > one.epoch):
                    raise Differs(f"last_of_epoch of step {one.step}")


def take(
    program: Program, reading: Reading, run: dict[str, Any], place: second.Place
) -> tuple[second.Place | None, second.Place | None]:
    """Reads a run. The place of a position, which lies after the last round that all devices have
    taken, and that of the last batch's token, which is the end of its round."""
    last: second.Place | None = place
    now: second.Place | None = place
    count = 0
    oracle = program.oracle(run, program.failing)
    try:
        for batches, after in second.rounds(oracle, place, run["skip"]):
            if not reading.round(batches):
                return now, after if reading.read > count else last
            last, now, count = after if batches else last, after, reading.read
    except second.Failed as failed:
        if reading.round(failed.batches):
            reading.fails()
        if reading.read == count:
            return now, last
        # In a round that failed: the rest of it is made and dropped.
        assert now is not None
        rounds = second.rounds(program.oracle(run), now, 0 if count else run["skip"])
        return now, next(rounds).after
    reading.ends()
    return now, last


def execute(seed: int, draws: Draws) -> None:
    """One program: some runs, each from where the one before it was left."""
    program = Program(seed, draws)
    draw = program.draw
    place: second.Place | None = second.Place()
    resume: Any = None
    epochs = draw.choice((1, 2, 3, None))
    for number in range(draw.randint(2, 5)):
        run: dict[str, Any] = {
            "num_threads": draw.choice((None, 1, 2, 3)),
            "max_buffered_batches": draw.choice((1, 3, 100)),
            "devices": draw.choice((1, 1, 2, 3, 4)),
            "epochs": epochs,
            "skip": draw.choice((0, 0, 0, 1, 2)),
        }
        if draw.random() < 0.2:
            run |= {"devices": 1, "num_threads": 0}
        kind = draw.choice(("state_dict", "snapshot", "bytes", "token", "cut"))
        most = draw.choice((0, 1, 3, 8, draw.randint(0, 20) if epochs is None else None))
        program.failing = None
        assert place is not None
        if program.form != "source" and draw.random() < 0.15:  # Behind calls that were made.
            worker = 0 if program.form == "call" else draw.randrange(program.num)
            program.failing = (place.epoch + draw.randint(1, 2), worker, draw.randint(0, 4))
        told = f"seed {seed}: {program.form} {program.num} {program.stream}\n  run {number}: {run} "
        told += f"from {place} by {type(resume).__name__}, {most} batches, then {kind}"
        told += f", fails at {program.failing}"
        try:
            with program.make(run, resume) as coordinator:
                reading = Reading(program, coordinator["train"], run["devices"], most)
                place, after = take(program, reading, run, place)
                if kind in ("token", "cut") and reading.read:
                    place, resume = after, reading.batch.cut
                    resume = resume.token() if kind == "token" else resume
                elif kind == "state_dict":
                    resume = coordinator.state_dict()
                else:
                    resume = coordinator.snapshot()
                    resume = bytes(resume) if kind == "bytes" else resume
        except Exception as error:
            error.add_note(told)
            raise
        if place is None:  # The pages do not tell.
            return
        if epochs is not None and draw.random() < 0.3:
            epochs = draw.choice((epochs + 1, None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # Of records that are left out, and other rounds.
    draws: Draws = {}
    for seed in range(args.seed, args.seed + args.programs):
        execute(seed, draws)
    print(f"{args.programs} programs from seed {args.seed} on: none differs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
