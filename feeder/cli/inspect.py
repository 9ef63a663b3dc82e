"""`feeder inspect`: say what a snapshot file holds."""

from __future__ import annotations

import argparse
from typing import Any

from feeder.snapshot import Snapshot


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("inspect", description="Say what a snapshot file holds.")
    parser.add_argument("file", help="a file written by coordinator.checkpoint(path)")


def main(arguments: argparse.Namespace) -> int:
    """Print the snapshot's description."""
    print(Snapshot.read(arguments.file).describe())
    return 0
