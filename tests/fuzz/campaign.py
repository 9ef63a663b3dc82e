"""The campaign: children that give inputs in, and a parent that sees how they end.

Input number N of an entry depends on the seed, the entry and N alone, so that a finding can be had
again. A child notes the number of the input that it gives in, where the parent finds it also after
the child has crashed.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import NamedTuple

from fuzz.entries import ENTRIES, Entry

_IN_A_CHILD = {"codec": 250_000, "message": 20_000}
_IN_ANOTHER_CHILD = 2_000
_MEMORY_BYTES = 4 * 2**30
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


def give_in(share: Share, note: Callable[[int], None], plant: Callable[[int], None]) -> str:
    """Give all inputs of a share in; returns what was found at one of them."""
    entry, chance, key = ENTRIES[share.entry], Random(), _key(share.entry, share.seed)
    for number in range(share.first, share.first + share.count):
        note(number)
        data = _make(entry, chance, key, number)
        try:
            plant(number)
            entry.take(data)
        except entry.refusals:
            continue
        except Exception:
            return traceback.format_exc()
    note(share.first + share.count)
    return ""


_PLANTED_AT = 7


def _crash(number: int) -> None:
    if number == _PLANTED_AT:
        os.kill(os.getpid(), signal.SIGSEGV)


def _hang(number: int) -> None:
    if number == _PLANTED_AT:
        threading.Event().wait()


def _fail(number: int) -> None:
    if number == _PLANTED_AT:
        raise LookupError("planted")


PLANTS: dict[str | None, Callable[[int], None]] = {
    None: lambda number: None,
    "crash": _crash,
    "hang": _hang,
    "error": _fail,
}


class _Formatted(logging.Handler):
    """What is logged is put into words, which may fail as well, and told to nobody."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage().encode()


def _run_child(share: Share, noted: str, plant: str | None) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.getLogger().addHandler(_Formatted())
    with (
        open(noted, "r+b") as file,
        mmap.mmap(file.fileno(), 8) as memory,
        memoryview(memory) as octets,
        octets.cast("Q") as counter,
    ):

        def note(number: int) -> None:
            counter[0] = number

        found = give_in(share, note, PLANTS[plant])
    print(found, end="")
    return _FOUND if found else 0


# ---- the parent


def run_share(share: Share, limit_s: float, plant: str | None) -> Done:
    """Run one child to its end, or to the limit."""
    with tempfile.NamedTemporaryFile(prefix="fuzz-") as noted:
        noted.write(share.first.to_bytes(8, "little"))
        noted.flush()
        command = [
            sys.executable, "-m", "fuzz.campaign", "--child", noted.name, "--only", share.entry,
            "--seed", str(share.seed), "--first", str(share.first), "--inputs", str(share.count),
            *(["--plant", plant] if plant else []),
        ]  # fmt: skip
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as child:
            try:
                told, _ = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                child.kill()
                told, _ = child.communicate()
                told = f"it was not done within {limit_s} s\n{told}"
        number = int.from_bytes(Path(noted.name).read_bytes(), "little")
    if child.returncode < 0 and not told.startswith("it was not done"):
        told = f"the process ended by {signal.Signals(-child.returncode).name}\n{told}"
    elif child.returncode not in (0, _FOUND, -signal.SIGKILL):
        told = f"the process ended with status {child.returncode}\n{told}"
    return Done(share, number, told if child.returncode else "")


def shares(arguments: argparse.Namespace) -> Iterator[Share]:
    """The work, in the portions of single children, the entries in turns."""
    names = [arguments.only] if arguments.only else list(ENTRIES)
    left = {name: arguments.inputs for name in names}
    if "codec" in left and arguments.codec_inputs is not None:
        left["codec"] = arguments.codec_inputs
    first = dict.fromkeys(names, arguments.first)
    while any(left.values()):
        for name in names:
            count = min(left[name], _IN_A_CHILD.get(name, _IN_ANOTHER_CHILD))
            if count:
                yield Share(name, arguments.seed, first[name], count)
                first[name] += count
                left[name] -= count


def run(arguments: argparse.Namespace) -> int:
    """The whole campaign; returns how many findings there are."""
    findings, counts = 0, dict.fromkeys(ENTRIES, 0)

    def one(share: Share) -> Done:
        return run_share(share, arguments.limit, arguments.plant)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in pool.map(one, shares(arguments)):
            share = done.share
            counts[share.entry] += done.number - share.first
            if done.told:
                findings += 1
                _tell(done, arguments.keep)
            if findings >= _MOST_FINDINGS:
                pool.shutdown(cancel_futures=True)
                break
    for entry, count in counts.items():
        if count:
            print(f"{entry:<12}{count:>12,} inputs")
    print(f"{findings} findings, seed {arguments.seed}")
    return findings


def _tell(done: Done, keep: str | None) -> None:
    entry, seed = done.share.entry, done.share.seed
    print(f"FOUND at input {done.number} of {entry!r}:\n{done.told.strip()}")
    print(f"again: scripts/nightly fuzz --only {entry} --seed {seed} --first {done.number} --inputs 1")
    if keep is not None:
        path = Path(keep) / f"{entry}-{seed}-{done.number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_input(entry, seed, done.number))
        print(f"its bytes: {path}")


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser("scripts/nightly fuzz", description=__doc__)
    add, names = parser.add_argument, [name for name in PLANTS if name]
    add("--inputs", type=int, default=2_000, metavar="N", help="of each entry (%(default)s)")
    add("--codec-inputs", type=int, metavar="N", help="of the codec; as many by default")
    add("--seed", type=int, default=1, metavar="N")
    add("--only", choices=list(ENTRIES), help="one entry")
    add("--first", type=int, default=0, metavar="N", help="the number of the first input")
    add("--jobs", type=int, default=os.cpu_count(), metavar="N", help="children at a time")
    add("--limit", type=float, default=300.0, metavar="S", help="seconds for a child (%(default)s)")
    add("--keep", metavar="FOLDER", help="write inputs with findings there")
    add("--plant", choices=names, help=f"a mistake at input {_PLANTED_AT} of each entry")
    add("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.child is not None:
        share = Share(arguments.only, arguments.seed, arguments.first, arguments.inputs)
        return _run_child(share, arguments.child, arguments.plant)
    return 1 if run(arguments) else 0


if __name__ == "__main__":
    sys.exit(main())
