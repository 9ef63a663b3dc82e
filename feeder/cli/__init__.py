"""The command `feeder`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import feeder
from feeder.errors import FeedError
from feeder.snapshot import Snapshot


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 for an error of feeder, 2 for usage."""
    parser = argparse.ArgumentParser(prog="feeder", description="exact batches, resumed exactly")
    parser.add_argument("--version", action="version", version=f"feeder {feeder.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("demo", help="train, be killed, resume, and compare", add_help=False)
    inspect = commands.add_parser("inspect", help="say what a snapshot file holds")
    inspect.add_argument("file", help="a file written by coordinator.checkpoint(path)")
    arguments, rest = parser.parse_known_args(argv)
    if arguments.command == "demo":
        from feeder import demo

        return demo.main(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return _inspect(arguments.file)


def _inspect(path: str) -> int:
    try:
        print(Snapshot.read(path).describe())
    except FeedError as error:
        print(f"feeder: {error}", file=sys.stderr)
        return 1
    return 0
