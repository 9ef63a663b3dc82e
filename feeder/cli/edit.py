"""`feeder edit`: change what a run reads from a position on, or from now on at a server."""

from __future__ import annotations

import argparse
import os
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from feeder.cli.arguments import address, count
from feeder.cli.position import add_feed, add_file, feed_in, given, position_in
from feeder.errors import ConfigError
from feeder.state.rewriting import edited
from feeder.state.snapshot import Snapshot

_DESCRIPTION = """\
Change what a run reads from a position on, in a new file, or with --address what a running server
makes from the next round on. The data are not needed, and the feed call that goes on from the new
file gives what the edit says. Sources that are added, that have grown or lose records, schedules
and temperatures are given to the feed call itself, with edit=."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("edit", description=_DESCRIPTION)
    add_file(parser, is_needed=False)
    parser.add_argument("--output", metavar="FILE", help="the snapshot to write")
    parser.add_argument(
        "--address",
        metavar="ADDR",
        type=address,
        help="of a server whose feed is edited, in place of a position",
    )
    parser.add_argument(
        "--keys", metavar="DIR", type=Path, help="of feeder keygen, for a server with keys"
    )
    parser.add_argument("--why", metavar="TEXT", required=True, help="why, for feeder log")
    add_feed(parser)
    parser.add_argument(
        "--weight", metavar="SOURCE=W", type=_weight, action="append", default=[],
        help="the weight of a source; give one for each of the mixture, 0 to take it out",
    )  # fmt: skip
    size = parser.add_mutually_exclusive_group()
    for name, of in (("batch-size", "each batch"), ("global-batch-size", "all queues together")):
        size.add_argument(f"--{name}", metavar="ROWS", type=count(1), help=f"rows of {of}")
    parser.add_argument(
        "--seed", metavar="N", type=count(0, 2**64 - 1), help="the seed of passes to come"
    )


def _weight(text: str) -> tuple[str, Fraction]:
    """A source and its weight."""
    name, is_given, number = text.rpartition("=")
    try:
        weight = Fraction(number)
    except (ValueError, ZeroDivisionError):
        weight = Fraction(-1)
    if not is_given or weight < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not SOURCE=W, with a number of at least 0")
    return name, weight


def main(arguments: argparse.Namespace) -> int:
    """Edit a position, or a served feed."""
    if not arguments.why:
        raise ConfigError("--why is empty, expected a text")
    if len(dict(arguments.weight)) < len(arguments.weight):
        raise ConfigError("--weight names a source twice")
    if arguments.address is not None:
        return edit_served(arguments)
    if arguments.file is None or arguments.output is None:
        raise ConfigError("give FILE and --output for a position, or --address for a server")
    if arguments.keys is not None:
        raise ConfigError("--keys is given without --address: a position needs none")
    return edit_position(arguments)


def edit_served(arguments: argparse.Namespace) -> int:
    """Have a server edit its feed, and say from which step on."""
    if arguments.file is not None or arguments.output is not None:
        raise ConfigError("--address is of a server, and FILE and --output are of a position")
    from feeder.service.client.monitor import Monitor

    with Monitor(arguments.address, arguments.keys) as monitor:
        step = monitor.edit(
            arguments.why, feed=arguments.feed or "", weights=dict(arguments.weight),
            batch_size=arguments.batch_size, global_batch_size=arguments.global_batch_size,
            seed=arguments.seed,
        )  # fmt: skip
    print(f"edited at step {step}")
    if arguments.batch_size is not None or arguments.global_batch_size is not None:
        print(
            f"feeder: batches have another size from step {step} on, so positions before it do not "
            "have the edit: a run that goes on from one needs the new size and edit=",
            file=sys.stderr,
        )
    return 0


def edit_position(arguments: argparse.Namespace) -> int:
    """Write the edited position."""
    if os.path.lexists(arguments.output):
        raise ConfigError(f"{arguments.output!r} is there already: give the name of a new file")
    weights = dict(arguments.weight)
    position = position_in(arguments)
    meant = feed_in(position, arguments.feed)
    sizes = {
        size: rows
        for size in ("batch_size", "global_batch_size")
        if (rows := getattr(arguments, size)) is not None
    }
    with given():
        made = edited(meant, arguments.why, weights=weights, sizes=sizes, seed=arguments.seed)
    states = [made if state is meant else state for state in position.states]
    try:
        Snapshot(tuple(states)).write(arguments.output)
    except OverflowError as error:
        raise ConfigError(
            f"the edit of feed {meant.name!r} has a size of more than 64 bits"
        ) from error
    return 0
