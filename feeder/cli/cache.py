"""`feeder cache`: say what the cache of a host holds, whether it is whole, and make it smaller."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from feeder.cli.arguments import count
from feeder.errors import ConfigError
from feeder.observe.humanize import duration, size
from feeder.workers.sources.far.folder import INDEXES, NEVER, Entry, Folder, is_cache


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "cache", description="Look after the folder of a feeder.Cache, in which sources of URLs "
        "keep what they have read. Jobs may use it meanwhile.",
    )  # fmt: skip
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, line in (
        ("list", "say what is there of each object, and when it is needed next"),
        ("prune", "remove blocks until few enough bytes are left, and what killed jobs have left"),
        ("verify", "compare all blocks and indexes with their checksums, and remove those that are "
         "damaged; the exit status is 1 if there are any"),
    ):  # fmt: skip
        action = actions.add_parser(name, help=line, description=line)
        action.add_argument("folder", metavar="DIR", help="the folder of the cache")
        if name == "prune":
            action.add_argument("--to", metavar="BYTES", type=count(0), required=True,
                                help="how many bytes stay at most")  # fmt: skip
            action.add_argument("--indexes", action="store_true",
                                help="remove indexes too: no job may run then")  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Do what is asked; returns the exit status."""
    if not is_cache(arguments.folder):
        raise ConfigError(f"{arguments.folder!r} is no cache of feeder's")
    # A bound that nothing reaches: nothing is written here.
    folder = Folder(arguments.folder, 2**62)
    try:
        match arguments.action:
            case "list":
                return _list(folder)
            case "prune":
                print(f"removed {folder.prune(arguments.to)} blocks")
                if arguments.indexes:
                    indexes = _indexes(folder)
                    for path in indexes:
                        path.unlink(missing_ok=True)
                    print(f"removed {len(indexes)} indexes")
                return 0
            case _:
                return _verify(folder)
    except OSError as error:
        raise ConfigError(f"{arguments.folder!r} cannot be used: {error.strerror}") from error
    finally:
        folder.close()


def _list(folder: Folder) -> int:
    by_object: dict[str, list[Entry]] = {}
    for entry in folder.entries():
        by_object.setdefault(entry.name.rpartition("#")[0] or "(unknown)", []).append(entry)
    for name, entries in sorted(by_object.items()):
        total = size(sum(entry.size for entry in entries))
        print(f"{name}: {len(entries)} blocks, {total}, {_when(min(e.due for e in entries))}")
    every = [entry for entries in by_object.values() for entry in entries]
    print(f"{len(every)} blocks, {size(sum(entry.size for entry in every))}")
    indexes = _indexes(folder)
    print(f"{len(indexes)} indexes, {size(sum(path.stat().st_size for path in indexes))}")
    return 0


def _when(due: float) -> str:
    if due >= NEVER:
        return "needed by nobody"
    left = due - time.time()
    return f"needed in {duration(left)}" if left > 0 else f"was needed {duration(-left)} ago"


def _verify(folder: Folder) -> int:
    whole, damaged = folder.verify()
    damaged += _verify_indexes(folder)
    for name in damaged:
        print(f"{name} was damaged, and is removed")
    print(f"{whole} blocks are whole")
    return 1 if damaged else 0


def _indexes(folder: Folder) -> list[Path]:
    return [*Path(folder.path, INDEXES).glob("[0-9a-f]" * 16 + ".*.feeder-index")]


def _verify_indexes(folder: Folder) -> list[str]:
    """Remove the damaged ones; returns which. A source makes them anew."""
    # NumPy is only needed here.
    from feeder.workers.sources.stores.offsets import is_whole_index

    damaged = [path for path in _indexes(folder) if not is_whole_index(str(path))]
    for path in damaged:
        path.unlink(missing_ok=True)
    return [f"the index {path.name}" for path in damaged]
