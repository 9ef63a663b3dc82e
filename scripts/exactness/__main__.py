"""Asks every loader the same questions, and prints a table of the answers.

exact: what the run without a fault gives, in the same batches and the same order
lost N, repeated N: records that never came, or came again
moved: all records, in other batches or another order
refused: the loader's error
hung: nothing within the limit
leaked: what the loader has left behind; otherwise clean
not supported: its documents offer no such thing

A loader is a file of scripts/exactness/loaders; --loaders takes other modules, too. A loader that
cannot be asked, such as one that is not installed, is left out, and named.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from exactness.asker import Asker, LeftOut
from exactness.questions import QUESTIONS

LOADERS = sorted(
    (path.stem for path in (Path(__file__).parent / "loaders").glob("[a-z]*.py")),
    key=lambda name: (not name.startswith("feeder"), name),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """The answers of a loader."""

    name: str
    version: str
    answers: Mapping[str, str]


def ask(loader: str, questions: Sequence[str], limit_s: float) -> Column | LeftOut:
    """Ask one loader, if it can be asked."""
    with tempfile.TemporaryDirectory(prefix="exactness-", ignore_cleanup_errors=True) as folder:
        answers = {}
        try:
            with closing(Asker(loader, Path(folder) / "files", limit_s)) as asker:
                for name in questions:
                    answers[name] = QUESTIONS[name](asker)
                    print(f"{loader}: {name}: {answers[name]}", file=sys.stderr)
        except LeftOut as why:
            return why
    return Column(name=asker.about.name, version=asker.about.version, answers=answers)


def table(columns: Sequence[Column], questions: Sequence[str]) -> str:
    """As Markdown."""
    lines = [["", *(column.name for column in columns)], ["---"] * (len(columns) + 1)]
    for name in questions:
        lines.append([QUESTIONS[name].__doc__ or name, *(one.answers[name] for one in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Ask, and print."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench exactness", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--loaders", nargs="+", default=LOADERS, help=f"of {', '.join(LOADERS)}")
    parser.add_argument(
        "--questions", nargs="+", default=list(QUESTIONS), choices=QUESTIONS, metavar="NAME",
        help=f"of {', '.join(QUESTIONS)}",
    )  # fmt: skip
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a run (60)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="loaders asked at once")
    parser.add_argument("--json", type=Path, help="write the answers there, too")
    given = parser.parse_args()

    began = time.monotonic()
    with ThreadPoolExecutor(given.jobs) as pool:
        asked = pool.map(lambda loader: ask(loader, given.questions, given.limit), given.loaders)
        told = dict(zip(given.loaders, asked, strict=True))
    columns = [one for one in told.values() if isinstance(one, Column)]
    print(table(columns, given.questions))
    python = ".".join(map(str, sys.version_info[:3]))
    versions = ", ".join(dict.fromkeys([f"Python {python}", *(one.version for one in columns)]))
    minutes = (time.monotonic() - began) / 60
    print(f"\n{datetime.date.today()}, {versions}; {minutes:.0f} minutes")
    for loader, one in told.items():
        if isinstance(one, LeftOut):
            print(f"{loader} is left out: {one}")
    if given.json:
        given.json.write_text(
            json.dumps({one.name: {"version": one.version, **one.answers} for one in columns})
        )


if __name__ == "__main__":
    main()
