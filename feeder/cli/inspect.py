"""`feeder inspect`: say what a snapshot file holds."""

from __future__ import annotations

import argparse
import os
from typing import Any

from feeder.checkpoint.resuming import find_position
from feeder.state.snapshot import Snapshot


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("inspect", description="Say what a snapshot file holds.")
    parser.add_argument(
        "file",
        help="a snapshot, a checkpoint, or a folder of those",
    )


def main(arguments: argparse.Namespace) -> int:
    """Print the snapshot's description."""
    position = find_position(os.path.abspath(arguments.file), None).position
    assert isinstance(position, Snapshot)
    print(position.describe())
    return 0
