"""The command `feeder`: each command is a module of this package, imported when it is called.

A command's module has two functions: `add_parser(commands)` adds the command's own parser to
what argparse calls subparsers, and `main(arguments) -> int` runs it and returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

import feeder
from feeder.errors import FeedError

COMMANDS = {
    "checkpoint": "list, verify, show and prune checkpoints",
    "consume": "read a served feed, and say how fast it is and what came",
    "demo": "train, be killed, resume, and compare",
    "doctor": "say what this machine lacks, and what to do",
    "inspect": "say what a snapshot file holds",
    "keygen": "make the keys of a server and its clients",
    "serve": "serve feeds to consumers in other processes",
}
"""Every command with its line of help; the module of the same name is in this package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 for an error of feeder, 2 for usage."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["demo"]:
        from feeder import demo

        return demo.main(words[1:])
    arguments = _make_parser(words[:1]).parse_args(words)
    try:
        return int(_module(arguments.command).main(arguments))
    except FeedError as error:
        print(f"feeder: {error}", file=sys.stderr)
        return 1


def _make_parser(called: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser; of the commands' own it has the one that is called."""
    parser = argparse.ArgumentParser(prog="feeder", description="exact batches, resumed exactly")
    parser.add_argument("--version", action="version", version=f"feeder {feeder.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, line in COMMANDS.items():
        if name in called:
            _module(name).add_parser(commands)
        else:
            commands.add_parser(name, help=line, add_help=False)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
