"""`feeder inspect`: say what a snapshot file holds."""

from __future__ import annotations

import argparse
from typing import Any

from feeder.cli.position import add_file, position_in


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    add_file(commands.add_parser("inspect", description="Say what a snapshot file holds."))


def main(arguments: argparse.Namespace) -> int:
    """Print the snapshot's description."""
    print(position_in(arguments).describe())
    return 0
