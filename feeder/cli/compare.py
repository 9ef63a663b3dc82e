"""`feeder compare`: say whether two runs were handed the same rows, and from which step on not."""

from __future__ import annotations

import argparse
import json
from typing import Any

from feeder.checkpoint.transcript import Difference, compare, read_run
from feeder.cli.arguments import in_words
from feeder.errors import ConfigError, TranscriptError


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "compare",
        description="Say whether two runs were handed the same rows, by their transcripts, and "
        "which step is the first that differs. The exit status is 0 if all steps are in both and "
        "equal, 1 if not, and 2 if one of them cannot be read.",
    )
    parser.add_argument("one", metavar="A", help="the folder of a run's transcript, or one file")
    parser.add_argument("other", metavar="B", help="that of another run")
    parser.add_argument("--json", action="store_true", help="print it as JSON, feed by feed")


def main(arguments: argparse.Namespace) -> int:
    """Compare them."""
    try:
        one, other = read_run(arguments.one), read_run(arguments.other)
    except TranscriptError as error:
        raise ConfigError(str(error)) from error
    found = {
        name: compare(one.get(name), other.get(name)) for name in dict.fromkeys([*one, *other])
    }
    if arguments.json:
        told = {name: {**one._asdict(), "is_equal": one.is_equal} for name, one in found.items()}
        print(json.dumps(told, indent=2))
    else:
        for name, difference in found.items():
            print("\n".join(_lines(name, difference)))
    return 0 if all(difference.is_equal for difference in found.values()) else 1


def _lines(name: str, found: Difference) -> list[str]:
    lines = [f"{name}: {_steps(found.num_equal)} equal"]
    if found.first is not None:
        lines.append(
            f"  step {found.first} is the first that differs, of {found.num_different}; its "
            f"records: feeder which STATE {found.first}"
        )
    for run, ranges in (("A", found.only_one), ("B", found.only_other)):
        if ranges:
            lines.append(f"  in {run} alone: steps {in_words(ranges)}")
    return lines


def _steps(num: int) -> str:
    return f"{num} step{'s are' if num != 1 else ' is'}"
