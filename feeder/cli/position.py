"""The position that a command is about: the file that holds it, and the feed that is meant."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

from feeder.checkpoint.resuming import find_position
from feeder.errors import CheckpointError, ConfigError, ResumeError
from feeder.state.snapshot import Snapshot, StreamState


def add_file(parser: argparse.ArgumentParser, *, is_needed: bool = True) -> None:
    """Add the argument that names the file."""
    parser.add_argument(
        "file", nargs=None if is_needed else "?", help="a snapshot, a checkpoint, or a folder of "
        "those",
    )  # fmt: skip


def add_feed(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the feed."""
    parser.add_argument("--feed", metavar="NAME", help="which feed, if the position has several")


@contextmanager
def given() -> Iterator[None]:
    """A position that cannot be read is a wrong argument: to call the command again is no help."""
    try:
        yield
    except (CheckpointError, ResumeError) as error:
        raise ConfigError(str(error)) from error


def position_in(arguments: argparse.Namespace) -> Snapshot:
    """The position in the file. Raises `ConfigError`."""
    with given():
        position = find_position(os.path.abspath(arguments.file), None).position
    assert isinstance(position, Snapshot)
    return position


def feed_in(position: Snapshot, feed: str | None) -> StreamState:
    """Where the feed of that name stands; the only one without a name. Raises `ConfigError` if that
    is none or several."""
    named = {f"{state.name}[{state.number}]": state for state in position.states}
    wanted = [state for name, state in named.items() if feed in (None, name, state.name)]
    if len(wanted) != 1:
        raise ConfigError(f"the position holds the feeds {[*named]}: name one with --feed")
    return wanted[0]
