"""Draws programs of a feed and its resumes, and compares them with the second oracle.

    cd tests && python -m property.second_campaign --programs 2000 --seed 1
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import warnings
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

import feeder
from feeder import sources

from property import second

FORMS = ("call", "call", "cursor", "replay", "source")
NAMES = ["id", "hint", "worker", "noise"]


class Program:
    """A fetch function, settings of the stream, and some runs of it, one after the other."""

    def __init__(self, seed: int, draws: dict[Any, Any]) -> None:
        self.draw = draw = random.Random(seed)
        self.seed, self.draws = seed, draws
        self.form = draw.choice(FORMS)
        self.workers = draw.choice((1, 1, 2, 3))
        self.shuffle = draw.random() < 0.5
        self.stream = {
            "seed": draw.randint(0, 3),
            "last_batch": draw.choice(("keep", "drop", "pad", "carry")),
            "dont_rebatch": self.form != "source" and draw.random() < 0.15,
            "last_round": draw.choice(("uneven", "drop", "pad")),
            "rounds": draw.choice(("stream", "epoch")),
        }
        few = 36 if self.stream["last_batch"] == "drop" else 1  # or an epoch may have no batch
        self.records = draw.randint(few, few + 30)
        self.num_shards = draw.randint(1, min(3, self.records))
        self.stick = draw.random() < 0.5
        may = few == 1 and self.records > 9 and not self.shuffle
        self.bad = set(range(draw.randint(0, 4), self.records, 5) if may else ())
        if self.stream["dont_rebatch"]:  # others are refused
            self.stream["last_batch"] = "keep"
        if self.stream["last_batch"] == "carry":
            self.stream["rounds"] = "stream"
        if draw.random() < 0.3 and not self.stream["dont_rebatch"]:
            self.stream["global_batch_size"] = 12
        else:
            self.stream["batch_size"] = draw.randint(1, 7)
        self.per_call = 0
        if self.form == "call" and draw.random() < 0.2 and self.stream["last_batch"] != "carry":
            self.per_call = 0 if self.stream["dont_rebatch"] else 1
        self.failing: tuple[int, ...] | None = None
        self.once: set[Any] = set()

    def sizes(self, *key: int) -> list[int]:
        """How many rows the calls of an epoch, and of a worker, give."""
        draw = random.Random(str((self.seed, key)))
        num = draw.randint(1, 7)
        sizes = [self.per_call or draw.choice((0, 1, 2, 3, 5, 8)) for _ in range(num)]
        few = 12 if self.stream["last_batch"] == "drop" else 1
        return sizes + [self.per_call or few] * (few if self.per_call else 1)

    # What the oracle is given.

    def oracle(self, run: dict[str, Any], failing: Any) -> second.Feed:
        hint = self.stream.get("batch_size") or self.stream["global_batch_size"]
        if self.form == "source":
            chunks = second.source(self.order)
        elif self.form == "call":

            def call(epoch: int, index: int) -> Any:
                sizes = self.sizes(epoch)
                if (epoch, index) == failing:
                    return second.FAILS
                if index == len(sizes):
                    return None
                return [
                    (epoch * 10**4 + index * 100 + i, hint, index % self.workers, (epoch, index, i))
                    for i in range(sizes[index])
                ]

            chunks = second.calls(call)
        else:

            def work(epoch: int, worker: int, number: int) -> Any:
                sizes = self.sizes(epoch, worker)
                if (epoch, worker, number) == failing:
                    return second.FAILS
                if number == len(sizes):
                    return None
                row = epoch * 10**4 + worker * 1000 + number * 100
                return [(row + i, hint, worker, None) for i in range(sizes[number])]

            chunks = second.workers(work, self.workers)
        stream = {name: value for name, value in self.stream.items() if name != "seed"}
        return second.Feed(chunks, epochs=run["epochs"], devices=run["devices"], **stream)

    def order(self, epoch: int) -> list[Any]:
        shard = 0 if self.stick else epoch % self.num_shards
        first, end = (self.records * (shard + i) // self.num_shards for i in (0, 1))
        if self.shuffle:  # which permutation is not told, only that it is one
            return [(None, (epoch, place)) for place in range(first, end)]
        return [(n, (epoch, n)) for n in range(first, end) if n not in self.bad]

    # What the product is given.
    def make(self, run: dict[str, Any], resume: Any) -> Any:
        settings = {**self.stream, **run}
        if self.form == "source":
            source = sources.samples(
                self.sample,
                self.records,
                on_error="skip",
                random_shuffle=self.shuffle,
                num_shards=self.num_shards,
                stick_to_shard=self.stick,
            )
            names, fetch = ["id", "noise"], source
        else:
            names = NAMES if self.form == "call" else NAMES[:3]
            fetch = self.call if self.form == "call" else Reader(self).fetch
            if self.form == "replay":
                fetch = Forgetful(self).fetch
            if self.per_call:
                settings["rows_per_call"] = 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", feeder.ReplayWarning)
            return feeder.init_data_input_workers(
                names,
                fetch,
                settings.pop("batch_size", None),
                self.workers,
                coordinator=feeder.Coordinator(),
                resume=resume,
                **settings,
            )

    def sample(self, info: Any) -> tuple[int, float]:
        if info.idx_in_epoch in self.bad:
            raise ValueError("bad")
        return info.idx_in_epoch, info.rng.random()

    def stumble(self, key: Any) -> bool:
        """Whether this call is not to be made yet; raises where it fails for good."""
        if key == self.failing:
            raise OSError("away")
        if key in self.once or hash((self.seed, key)) % 60:
            return False
        self.once.add(key)
        return True

    def call(self, call: Any) -> Any:
        if self.stumble((call.epoch, call.index)):
            return None
        sizes = self.sizes(call.epoch)
        if call.index >= len(sizes):
            raise StopIteration
        num = sizes[call.index]
        return {
            "noise": call.rng.random(num),
            "id": call.epoch * 10**4 + call.index * 100 + np.arange(num),
            "hint": np.full(num, call.batch_size),
            "worker": np.full(num, call.worker_id),
        }


class Forgetful:
    """A function of worker and hint that can only be called again."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = dict.fromkeys(range(program.workers), (0, 0))

    def fetch(self, worker: int, hint: int) -> Any:
        epoch, number = self.at[worker]
        if self.program.stumble((epoch, worker, number)):
            return None
        sizes = self.program.sizes(epoch, worker)
        if number == len(sizes):
            self.at[worker] = (epoch + 1, 0)
            raise StopIteration
        self.at[worker] = (epoch, number + 1)
        row = epoch * 10**4 + worker * 1000 + number * 100
        num = sizes[number]
        return [row + np.arange(num), np.full(num, hint), np.full(num, worker)]


class Reader(Forgetful):
    """One that can be put back."""

    def cursor(self, worker: int) -> tuple[int, int]:
        return self.at[worker]

    def seek(self, worker: int, cursor: tuple[int, int]) -> None:
        self.at[worker] = cursor


class Differs(AssertionError):
    """The product and the oracle do not agree."""


def check(program: Program, batch: Any, wanted: second.Batch) -> None:
    """One batch that was handed out, beside one that should be."""
    got = (batch.epoch, batch.index, batch.step, batch.rows)
    if got != wanted[:4]:
        raise Differs(f"epoch, index, step, rows: {got}, expected {wanted[:4]}")
    columns = [column.tolist() for column in batch.arrays()]
    if program.form == "source":  # whose batches have a second axis of length 1
        columns = [[value for row in column for value in np.ravel(row)] for column in columns]
    rows = list(zip(*columns, strict=True))
    if len(rows) != len(wanted.values):
        raise Differs(f"{len(rows)} rows, expected {len(wanted.values)}")
    for row, value in zip(rows, wanted.values, strict=True):
        seed = program.stream["seed"]
        if program.form == "source":
            epoch, place = value[1]
            if value[0] is None:
                shards = program.num_shards if program.stick else 0
                program.same(("order", program.records, shards, seed, epoch), place, row[0])
            elif row[0] != value[0]:
                raise Differs(f"record {row[0]}, expected {value[0]}")
            program.same("record", (seed, epoch, row[0]), row[1])
        elif row[:3] != value[:3]:
            raise Differs(f"row {row[:3]}, expected {value[:3]}")
        elif program.form == "call":
            program.same("call", (seed, *value[3]), row[3])


def same(self: Program, table: Any, key: Any, value: Any) -> None:
    """What the pages do not compute is the same for the same key, and another for another."""
    there, back = self.draws.setdefault(table, ({}, {}))
    if there.setdefault(key, value) != value or back.setdefault(value, key) != key:
        raise Differs(f"{table}: {value} for {key}, {there[key]}, {back[value]}")


Program.same = same


def take(program: Program, coordinator: Any, run: Any, failing: Any, place: Any, most: Any) -> Any:
    """Reads so many batches in turns. The last one, the place of a position, and that of its token.

    A position lies after the last round that all devices have taken, or that has ended.
    """
    feed, oracle = coordinator["train"], program.oracle(run, failing)
    batch, read, last, numbers = None, 0, place, range(run["devices"])

    def read_round(batches: list[second.Batch]) -> bool:
        nonlocal batch, read
        for i, wanted in enumerate(batches):
            if read == most:
                return False
            batch = next(feed.on(i), None)
            if batch is None:
                raise Differs(f"nothing, expected step {wanted.step} on {i}")
            check(program, batch, wanted)
            read += 1
        return True

    try:
        for batches, after in second.rounds(oracle, place, run["skip"]):
            count = read
            if not read_round(batches):
                return batch, place, after if read > count else place
            last = after if batches else last
            place = after
    except second.Failed as failed:
        count = read
        if read_round(failed.args[0]):
            for i in numbers:
                try:
                    raise Differs(f"expected an error, not {next(feed.on(i), None)}")
                except feeder.FeedError:
                    pass
        if read == count:
            return batch, place, last
        # A token in a round that failed: the rest of the round is made and dropped.
        skip = 0 if count else run["skip"]
        *_, round_ = islice(second.rounds(program.oracle(run, None), place, skip), 1)
        return batch, place, round_.after
    for i in numbers:
        if (more := next(feed.on(i), None)) is not None:
            raise Differs(f"expected the end on {i}, not step {more.step}")
    return batch, place, last


def execute(seed: int, draws: Any, folder: Path) -> None:
    program = Program(seed, draws)
    draw = program.draw
    place, resume, epochs = second.Place(), None, draw.choice((1, 2, 3, None))
    for number in range(draw.randint(2, 5)):
        run = {
            "num_threads": draw.choice((None, 1, 2, 3)),
            "max_buffered_batches": draw.choice((1, 3, 100)),
            "devices": draw.choice((1, 1, 2, 3, 4)),
            "epochs": epochs,
            "skip": draw.choice((0, 0, 0, 1, 2)),
        }
        if draw.random() < 0.2:
            run["skip"], run["devices"], run["num_threads"] = 0, 1, 0
        kinds = ("state_dict", "snapshot", "bytes", "file", "token", "cut")
        kind = draw.choice(kinds)
        most = draw.choice((0, 1, 3, 8, None))
        most = draw.randint(0, 20) if most is None and epochs is None else most
        program.failing = None
        if program.form != "source" and draw.random() < 0.15:  # behind calls that were made
            key = (draw.randint(place.epoch + 1, place.epoch + 2), draw.randrange(program.workers), draw.randint(0, 4))
            program.failing = (key[0], key[2]) if program.form == "call" else key
        told = f"run {number}: {run} from {place} by {type(resume).__name__}, {most} batches"
        try:
            if TRACE:
                print(told, kind, program.failing)
            with program.make(run, resume) as coordinator:
                batch, before, after = take(program, coordinator, run, program.failing, place, most)
                if kind in ("token", "cut") and batch is not None:
                    resume, place = batch.cut, after
                    resume = resume.token() if kind == "token" else resume
                else:
                    place = before
                    if kind == "state_dict":
                        resume = coordinator.state_dict()
                    elif kind == "file":
                        resume = str(folder / "feed.snapshot")
                        coordinator.checkpoint(resume)
                    else:
                        resume = coordinator.snapshot()
                        resume = bytes(resume) if kind == "bytes" else resume
                if place is None:
                    return
        except Exception as error:
            stream = {**program.stream, "form": program.form, "workers": program.workers}
            error.add_note(f"seed {seed}: {stream}; {told}; then {kind}")
            raise
        if epochs is not None and draw.random() < 0.3:
            epochs = draw.choice((epochs + 1, None))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep-going", action="store_true")
    args = parser.parse_args()
    global TRACE
    TRACE = args.programs == 1
    logging.disable(logging.WARNING)  # records that are left out, and other rounds
    draws: dict[Any, Any] = {}
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seed, args.seed + args.programs):
            import time; t0 = time.time()
            try:
                execute(seed, draws, Path(folder))
            except Exception as error:
                failed += 1
                print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), sep="\n  ", flush=True)
                if not args.keep_going:
                    return 1
            if time.time() - t0 > 2: print("SLOW", seed, time.time() - t0, flush=True)
    print(f"{args.programs} programs from seed {args.seed}: {failed} differ")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
