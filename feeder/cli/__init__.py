"""The command `feeder`: each command is a module of this package, imported when it is called.

A command's module has two functions: `add_parser(commands)` adds the command's own parser to
what argparse calls subparsers, and `main(arguments) -> int` runs it and returns the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType

import feeder
from feeder.errors import ConfigError, FeedError

COMMANDS = {
    "cache": "list, prune and verify what sources of URLs keep on this host",
    "checkpoint": "list, verify, show and prune checkpoints",
    "compare": "say whether two runs were handed the same rows",
    "config": "check a configuration, or show it with who set what",
    "consume": "read a served feed, and say how fast it is and what came",
    "demo": "train, be killed, resume, and compare",
    "doctor": "say what this machine lacks, and what to do",
    "edit": "change what a run reads from a position on, or from now on",
    "index": "index files of records, and decompress those that are compressed",
    "inspect": "say what a snapshot file holds",
    "keygen": "make the keys of a server and its clients",
    "log": "say what a run was made of, from edit to edit",
    "serve": "serve feeds to consumers in other processes",
    "top": "show what a server's feeds do, and what holds them up",
    "when": "say at which steps a run has a record",
    "which": "say which records a step of a run was made of",
}
"""Every command with its line of help; the module of the same name is in this package."""
DEBUG = "--debug"
INTERRUPTED = 130
"""The exit status of a command that SIGINT ended before it could do anything: 128 and the signal's
number, as shells say it."""
NO_THREAD = (
    "this process can start no further thread: raise the limit of threads (ulimit -u, pids.max) or "
    "of memory"
)
UNREAD = 141
"""The exit status of a command whose output nobody reads on, as where SIGPIPE ends one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 0, 1 for an error of feeder, 2 where it was
    called or configured wrongly."""
    try:
        # Flushed here, where a broken pipe can be caught; at exit the interpreter would tell of it.
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, else the interpreter would tell at its exit.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD


def _run(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["demo"]:
        from feeder.cli import demo

        return demo.main(words[1:])  # It parses its words itself: its options come with it.
    # Taken out here, so that it may stand after any command's own words.
    debug, words = DEBUG in words, [word for word in words if word != DEBUG]
    arguments = _make_parser(words[:1]).parse_args(words)
    try:
        return int(_module(arguments.command).main(arguments))
    except FeedError as error:
        if debug:
            traceback.print_exc()
        print(f"feeder: {error}", file=sys.stderr)
        # A supervisor need not start a command again that was configured wrongly.
        return 2 if isinstance(error, ConfigError) else 1
    except RuntimeError as error:
        # Python's, which has no class of its own.
        if debug or "can't start new thread" not in str(error):
            raise
        print(f"feeder: {NO_THREAD}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        if debug:
            traceback.print_exc()
        return INTERRUPTED


def _make_parser(called: Sequence[str]) -> argparse.ArgumentParser:
    """Make the parser; of the commands' own it has the one that is called."""
    parser = argparse.ArgumentParser(prog="feeder", description="exact batches, resumed exactly")
    parser.add_argument("--version", action="version", version=f"feeder {feeder.__version__}")
    parser.add_argument(DEBUG, action="store_true", help="show where an error comes from")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    # The other commands' modules stay unloaded: `feeder --help` needs none of their packages.
    for name, line in COMMANDS.items():
        if name in called:
            _module(name).add_parser(commands)
        else:
            commands.add_parser(name, help=line, add_help=False)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")
