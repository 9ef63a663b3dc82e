"""The campaign: children that give inputs in, and a parent that sees how they end.

Input number N of an entry depends on the seed, the entry and N alone, so that a finding can be had
again.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import resource
import signal
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from random import Random
from typing import NamedTuple, NoReturn

from fuzz.entries import ENTRIES, Entry

IN_A_CHILD = {"codec": 250_000, "message": 20_000}
_IN_ANOTHER_CHILD = 2_000
MEMORY_BYTES = 4 * 2**30
_MOST_FINDINGS = 20
_FOUND = 3
"""How a child ends that has found something and told it."""


class Share(NamedTuple):
    """The inputs of one child."""

    entry: str
    seed: int
    first: int
    count: int


class Done(NamedTuple):
    """How a child ended."""

    share: Share
    number: int
    """The input at which something was found; the number behind the last where nothing was."""
    told: str
    """What was found; empty where nothing was."""


def make_input(entry: str, seed: int, number: int) -> bytes:
    """Input `number` of an entry."""
    return _make(ENTRIES[entry], Random(), _key(entry, seed), number)


def _key(entry: str, seed: int) -> int:
    return zlib.crc32(f"{seed} {entry}".encode()) << 64


def _make(entry: Entry, chance: Random, key: int, number: int) -> bytes:
    chance.seed(key | number)
    return entry.make(chance)


# ---- a child


def give_in(share: Share, note: Callable[[int], None]) -> str:
    """Give all inputs of a share in; returns what was found at one of them."""
    entry, chance, key = ENTRIES[share.entry], Random(), _key(share.entry, share.seed)
    for number in range(share.first, share.first + share.count):
        note(number)
        data = _make(entry, chance, key, number)
        try:
            entry.take(data)
        except entry.refusals:
            continue
        except Exception:
            return traceback.format_exc()
    note(share.first + share.count)
    return ""


class _Formatted(logging.Handler):
    """What is logged is put into words, which may fail as well, and told to nobody."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage().encode()


class Child:
    """A forked process that gives a share in. The number of each input is written into shared
    memory, where it is found also after a crash."""

    def __init__(self, share: Share, limit_s: float) -> None:
        self._share, self._limit_s = share, limit_s
        self._number, self._said = mmap.mmap(-1, 8), os.memfd_create("said")
        self._ends = time.monotonic() + limit_s
        self._process = get_context("fork").Process(target=self._run)
        self._process.start()
        self.sentinel = self._process.sentinel

    def _run(self) -> NoReturn:
        """What the process does."""
        for descriptor in (1, 2):
            os.dup2(self._said, descriptor)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        logging.getLogger().addHandler(_Formatted())
        found = give_in(self._share, self._note)
        os.write(self._said, found.encode(errors="replace"))
        sys.exit(_FOUND if found else 0)

    def _note(self, number: int) -> None:
        self._number[:] = number.to_bytes(8, "little")

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    def end(self) -> Done:
        """How it ended; it is killed where it has not by its limit."""
        is_late = not wait([self.sentinel], 0.0)
        if is_late:
            self._process.kill()
        self._process.join()
        code = self._process.exitcode or 0
        with open(self._said, "rb") as said:
            said.seek(0)
            told, number = said.read().decode(), int.from_bytes(self._number[:], "little")
        if is_late:
            told = f"it was not done within {self._limit_s} s\n{told}"
        elif code < 0:
            told = f"the process ended by {signal.Signals(-code).name}\n{told}"
        elif code not in (0, _FOUND):
            told = f"the process ended with status {code}\n{told}"
        return Done(self._share, number, told if code else "")


def run_shares(shares: Iterator[Share], jobs: int, limit_s: float) -> Iterator[Done]:
    """Run a child for each share, so many at a time; yields how they end."""
    children: list[Child] = []
    try:
        while True:
            for share in islice(shares, jobs - len(children)):
                children.append(Child(share, limit_s))
            if not children:
                return
            least_s = min(child.left_s for child in children)
            ended = wait([child.sentinel for child in children], least_s)
            for child in [one for one in children if one.sentinel in ended or not one.left_s]:
                children.remove(child)
                yield child.end()
    finally:
        for child in children:
            child.end()


def shares(arguments: argparse.Namespace) -> Iterator[Share]:
    """The work, in the portions of single children, the entries in turns."""
    names = [arguments.only] if arguments.only else list(ENTRIES)
    left = {name: arguments.inputs for name in names}
    if "codec" in left and arguments.codec_inputs is not None:
        left["codec"] = arguments.codec_inputs
    first = dict.fromkeys(names, arguments.first)
    while any(left.values()):
        for name in names:
            count = min(left[name], IN_A_CHILD.get(name, _IN_ANOTHER_CHILD))
            if count:
                yield Share(name, arguments.seed, first[name], count)
                first[name] += count
                left[name] -= count


def run(arguments: argparse.Namespace) -> int:
    """The whole campaign; returns how many findings there are."""
    findings, counts = 0, dict.fromkeys(ENTRIES, 0)
    for done in run_shares(shares(arguments), arguments.jobs, arguments.limit):
        counts[done.share.entry] += done.number - done.share.first
        if done.told:
            findings += 1
            _tell(done, arguments.keep, arguments.name)
        if findings >= _MOST_FINDINGS:
            break
    for entry, count in counts.items():
        if count:
            print(f"{entry:<12}{count:>12,} inputs")
    print(f"{sum(counts.values()):,} inputs, {findings} findings, seed {arguments.seed}")
    return findings


def _tell(done: Done, keep: str | None, name: str) -> None:
    entry, seed = done.share.entry, done.share.seed
    print(f"FOUND at input {done.number} of {entry!r}:\n{done.told.strip()}")
    print(
        f"again: scripts/nightly {name} --only {entry!r} --seed {seed} --first {done.number} "
        "--inputs 1"
    )
    if keep is not None:
        path = Path(keep) / f"{entry}-{seed}-{done.number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_input(entry, seed, done.number))
        print(f"its bytes: {path}")


def main(argv: Sequence[str] | None = None, name: str = "fuzz") -> int:
    """The command."""
    parser = argparse.ArgumentParser(f"scripts/nightly {name}", description=__doc__)
    parser.set_defaults(name=name)
    add = parser.add_argument
    add("--inputs", type=int, default=2_000, metavar="N", help="of each entry (%(default)s)")
    add("--codec-inputs", type=int, metavar="N", help="of the codec; as many by default")
    add("--seed", type=int, default=1, metavar="N")
    add("--only", choices=list(ENTRIES), help="one entry")
    add("--first", type=int, default=0, metavar="N", help="the number of the first input")
    add("--jobs", type=int, default=os.cpu_count(), metavar="N", help="children at a time")
    add("--limit", type=float, default=300.0, metavar="S", help="seconds for a child (%(default)s)")
    add("--keep", metavar="FOLDER", help="write inputs with findings there")
    arguments = parser.parse_args(argv)
    return 1 if run(arguments) else 0


if __name__ == "__main__":
    sys.exit(main())
