"""`feeder index`: make the indexes of files before a job reads them, and write down what compressed
files hold."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from feeder.errors import ConfigError
from feeder.observe.humanize import size

_SUFFIXES = {
    "jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl", "txt": "text", "tar": "webdataset",
    "tgz": "webdataset", "tfrecord": "tfrecord", "tfrecords": "tfrecord",
}  # fmt: skip
_KINDS = [*dict.fromkeys(_SUFFIXES.values()), "mds"]


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "index",
        description="Make the indexes that sources.webdataset, tfrecord and jsonl read files by, "
        "and decompress files that are compressed, so that records are read in any order. What a "
        "compressed file holds lies beside its index. Of objects of stores, by URLs, the indexes "
        "become objects beside them, which every source finds; the variables of the environment "
        "say how a store is reached. What is there is not made again.",
    )
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="a file, a URL, a pattern, or a folder"
    )
    parser.add_argument("--as", dest="kind", choices=_KINDS,
                        help="what the files are (default: by their names)")  # fmt: skip
    parser.add_argument("--index", metavar="DIR",
                        help="where indexes are kept (default: beside their files)")  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Index each path, and say what it holds."""
    for path in arguments.paths:
        for records, place in _written(path, arguments.kind or _kind_of(path), arguments.index):
            told = f", {size(os.stat(place).st_size)}" if os.path.exists(place) else ""
            print(f"{place}: {records} records{told}", flush=True)
    return 0


def _written(path: str, kind: str, folder: str | None) -> Iterator[tuple[int, str]]:
    # Sources are loaded where they are looked at.
    from feeder.workers.sources import shards
    from feeder.workers.sources.far.objects import is_url
    from feeder.workers.sources.far.paths import files_of
    from feeder.workers.sources.mds import write_shards
    from feeder.workers.sources.stores.offsets import write_index

    if kind == "mds":
        if is_url(path):
            raise ConfigError(f"{path!r}: MDS shards of a store need no index")
        yield from write_shards(path)
        return
    scan, suffixes = {
        "jsonl": (shards.scan_json, shards.LINES), "text": (shards.scan_lines, ("txt",)),
        "webdataset": (shards.scan_tar, shards.TARS),
        "tfrecord": (shards.scan_tfrecord, shards.TFRECORDS),
    }[kind]  # fmt: skip
    listed = files_of(path, "files to index", suffixes)
    for number, file in enumerate(listed, 1):
        if is_url(file) and sys.stderr.isatty():
            print(f"{file}, file {number} of {len(listed)}", end="\r", file=sys.stderr, flush=True)
        yield write_index(file, scan, folder)


def _kind_of(path: str) -> str:
    if os.path.exists(os.path.join(path, "index.json")):
        return "mds"
    # Of "x.tfrecord-00001-of-00010.gz" too.
    for part in reversed(os.path.basename(path).lower().split(".")[1:]):
        if kind := _SUFFIXES.get(part.partition("-")[0]):
            return kind
    raise ConfigError(f"{path!r} does not say what it is by its name: give --as")
