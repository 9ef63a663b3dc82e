"""`feeder checkpoint`: say what checkpoints are there, whether they are whole, and remove old ones.

DIR is a folder, or a place in an object store: whatever a `CheckpointStore` takes.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from feeder.checkpoint.feed_meta import SNAPSHOT_ENTRY
from feeder.checkpoint.names import check_name, in_order
from feeder.checkpoint.store import CheckpointStore
from feeder.cli.arguments import count
from feeder.errors import CheckpointError, SnapshotFormatError
from feeder.job.checkpoints.epochs import jobs_in, verify_parts
from feeder.state.snapshot import Snapshot


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("checkpoint", description="Look after checkpoints.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, line in (
        ("list", "say which are there, from old to new"),
        ("verify", "read all of them, or one; the exit status is 1 where one is damaged"),
        ("show", "say what is in one, by default in the newest that is whole"),
        ("prune", "remove the oldest of a sequence that feeds or a server wrote, or of epochs"),
    ):
        action = actions.add_parser(name, help=line, description=line)
        action.add_argument("place", metavar="DIR", help="a folder, or s3://, gs://, az://")
        if name in ("verify", "show"):
            action.add_argument("name", metavar="NAME", nargs="?", help="one checkpoint")
        if name == "prune":
            action.add_argument(
                "--keep", metavar="N", type=count(1), required=True, help="how many stay"
            )
            which = action.add_mutually_exclusive_group()
            which.add_argument(
                "--writer", metavar="NAME", default="feed", help="whose sequence (default: feed)"
            )
            which.add_argument(
                "--epochs", action="store_true", help="remove the oldest epochs of each job instead"
            )


def main(arguments: argparse.Namespace) -> int:
    """Do what is asked; returns the exit status."""
    writer = arguments.writer if arguments.action == "prune" else "feed"
    with CheckpointStore(arguments.place, writer=writer) as store:
        _check_folder(store)
        match arguments.action:
            case "list":
                return _list(store)
            case "verify":
                return _verify(store, arguments.name)
            case "show":
                return _show(store, arguments.name)
            case _ if arguments.epochs:
                return _prune_epochs(store, arguments.keep)
            case _:
                return _prune(store, arguments.keep)


def _check_folder(store: CheckpointStore) -> None:
    """Raise `CheckpointError` where the place is a folder that is not there: one whose name is
    mistyped has nothing damaged in it either."""
    place = store.path_of("")
    if "://" in place:
        return
    try:
        os.lstat(place)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"there is no folder {place!r}; name one that checkpoints were written to"
        ) from error
    except OSError:
        return  # What reads there says more of it.


def _all(store: CheckpointStore) -> list[str]:
    """Every checkpoint, and every file that has the name of one of a sequence."""
    # A damaged beginning makes a file of the sequence no checkpoint: it must be named all the same.
    return sorted({*store.names(), *store.sequence_names()}, key=in_order)


def _list(store: CheckpointStore) -> int:
    names = _all(store)
    for name in names:
        try:
            header = store.header(name)
            size = sum(placed.size for placed in header.entries.values())
            entries = f"{len(header.entries)} entr{'y' if len(header.entries) == 1 else 'ies'}"
            print(f"{name}  {entries}, {size} bytes{_told(header.meta)}")
        except CheckpointError as error:
            print(f"{name}  {error}")
    if not names:
        print(f"no checkpoints in {store.url}")
    return 0


def _told(meta: dict[str, Any]) -> str:
    """The meta of a checkpoint, in a line."""
    told = [f"{key} {value!r}" for key, value in meta.items() if value is not None]
    return f"; {', '.join(told)}" if told else ""


def _verify(store: CheckpointStore, name: str | None) -> int:
    if name is not None:
        _check_there(store, name)
    names = _all(store) if name is None else [name]
    num_damaged = 0
    for each in names:
        try:
            receipt = store.verify(each)
            # A manifest is whole when the parts that it means are.
            verify_parts(store, each)
            print(f"whole    {each}  {receipt.num_bytes} bytes, xxh3 {receipt.digest.hex()}")
        except CheckpointError as error:
            num_damaged += 1
            print(f"DAMAGED  {each}  {error}")
    print(f"{len(names) - num_damaged} of {len(names)} checkpoints are whole")
    return 1 if num_damaged else 0


def _check_there(store: CheckpointStore, name: str) -> None:
    """Raise `CheckpointError` where nothing has the name, or can have it."""
    check_name(name)
    try:
        store.header(name)
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise


def _show(store: CheckpointStore, name: str | None) -> int:
    name = store.latest() if name is None else name
    if name is None:
        print(f"feeder: no checkpoint in {store.url} is whole", file=sys.stderr)
        return 1
    loaded, header = store.get(name), store.header(name)
    print(f"{store.path_of(name)}: {loaded.num_bytes} bytes, xxh3 {loaded.digest.hex()}")
    for key, value in loaded.meta.items():
        print(f"  {key}: {value!r}")
    for entry, placed in header.entries.items():
        what = "bytes" if placed.dtype is None else f"{placed.dtype} {list(placed.shape)}"
        print(f"  entry {entry!r}: {what}, {placed.size} bytes")
    data = loaded.entries.get(SNAPSHOT_ENTRY)
    if isinstance(data, bytes):
        try:
            print(Snapshot.from_bytes(data).describe())
        except SnapshotFormatError as error:
            print(f"  {error}")
    return 0


def _prune(store: CheckpointStore, keep: int) -> int:
    # A server that writes this sequence must not find its newest gone.
    store.claim()
    removed = store.retire(keep)
    for name in removed:
        print(f"removed {store.path_of(name)}")
    left = len(store.names(f"{store.writer}."))
    print(f"{len(removed)} removed, {left} left")
    return 0


def _prune_epochs(store: CheckpointStore, keep: int) -> int:
    for epochs in jobs_in(store):
        removed, left = epochs.prune(keep)
        for epoch in removed:
            print(f"removed epoch {epoch} of nodes {epochs.nodes!r}")
        print(f"{len(removed)} removed, {left} left of nodes {epochs.nodes!r}")
    return 0
