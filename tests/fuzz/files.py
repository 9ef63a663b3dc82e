"""Where hostile files are put, how commands read them, and how a checkpoint is sealed over a
hostile header."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import xxhash

from feeder import cli
from feeder.errors import FeedError

_FOLDER = Path(
    tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
)
"""In memory where there is such a place; for this process and those that it forks."""


@atexit.register
def _remove(maker: int = os.getpid()) -> None:
    if os.getpid() == maker:
        shutil.rmtree(_FOLDER, ignore_errors=True)


def folder(name: str) -> Path:
    """A folder of this process."""
    path = _FOLDER / str(os.getpid()) / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def sealed(header: bytes, data: bytes = b"") -> bytes:
    """A checkpoint with such a header, whose digest fits."""
    numbers = (1).to_bytes(4, "little") + len(header).to_bytes(8, "little")
    numbers += len(data).to_bytes(8, "little")
    return b"".join((b"FEEDCKPT", numbers, xxhash.xxh3_128_digest(numbers + header), header, data))


def run_command(*words: str) -> None:
    """Run a command, which ends as a command does, whatever lies in the files."""
    # A file of text and not a buffer of it: what cannot be written as UTF-8 ends a command too.
    told = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        status = cli.main(words)
    told.seek(0)
    output = told.read()
    assert status in (0, 1, 2), output
    assert "Traceback" not in output and not output.startswith("usage"), output


def try_all(reads: Iterable[Callable[[], object]]) -> None:
    """Read in several ways; raises the first refusal, once all have been tried."""
    refusals = []
    for read in reads:
        try:
            read()
        except FeedError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
