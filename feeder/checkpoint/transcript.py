"""A transcript: for each step that was handed out, a digest of its rows, in a chain.

A file is of one queue. It begins with a line of JSON, which spaces fill up to a multiple of 32
bytes; cells of 32 bytes follow. The first 16 bytes of a cell are what it says, the other 16 are the
chain: the first 16 bytes of SHA-256 over the line and what all cells say up to this one. So whoever
knows the chain at a step knows whether any cell before it was changed, and a file that was cut off
anywhere is read up to its last whole cell.

A cell whose first byte is not 0 is a step: the XXH3-128 digest of its numbers, its columns and all
their bytes, with 128 in place of a first byte of 0. XXH3 finds every change that is not made on
purpose, at the speed of memory; SHA-256 over all rows would cost small batches a third of their
speed. A cell whose first byte is 0 is a mark: which step comes next, or the settings from here on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.errors import TranscriptError
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.digests import has_padding, octets_of

FORMAT = 1
CELL_BYTES = 32
_SAYS_BYTES = 16
SUFFIX = ".transcript"
_NEXT, _SETTINGS = 1, 2
# A zero, the kind of mark, nothing, and for `_NEXT` how many steps lie from one cell to the next,
# and the step.
_NEXT_FIELDS, _SETTINGS_FIELDS = Struct(">xB2xIQ"), Struct(">xB6x8s")
_NUMBERS = Struct("<4Q")

_MOST_STEPS = 2**62
"""Far beyond the end of any run."""

# ---- The digest of a step


class StepDigests:
    """Digests of the steps of one queue. Owned by the thread that is handed the batches."""

    def __init__(self) -> None:
        # How the columns of the batch before are told, and their shapes: of nearly all batches they
        # are alike, and the dtypes of a stream never change.
        self._told = b""
        self._shapes: list[tuple[int, ...]] | None = None

    def of(self, batch: Batch) -> bytes:
        """The digest of a batch: of its numbers, of its columns' names, dtypes and shapes, and of
        all their bytes in C order, with zeros where there is padding."""
        arrays = batch.columns
        if [array.shape for array in arrays] != self._shapes:
            return self._of_others(batch)
        hasher = xxhash.xxh3_128(_NUMBERS.pack(batch.step, batch.epoch, batch.index, batch.rows))
        hasher.update(self._told)
        try:
            for array in arrays:
                hasher.update(array)
        except (BufferError, ValueError):
            # Rows that do not lie in C order, or of a dtype that the buffer protocol does not know.
            return self._of_others(batch)
        return hasher.digest()

    def _of_others(self, batch: Batch) -> bytes:
        """The same of a batch whose columns are not as those of the batch before, or do not simply
        lie in memory."""
        names, arrays = batch._names, batch.columns
        told = [[name, a.dtype.str, a.shape] for name, a in zip(names, arrays, strict=True)]
        self._told = json.dumps(told, separators=(",", ":")).encode()
        # With padding every batch comes here.
        self._shapes = None if any(map(has_padding, arrays)) else [array.shape for array in arrays]
        numbers = _NUMBERS.pack(batch.step, batch.epoch, batch.index, batch.rows)
        hasher = xxhash.xxh3_128(numbers + self._told)
        for array in arrays:
            hasher.update(octets_of(array))
        return hasher.digest()


# ---- Cells


def head(feed: str, stream: int, queue: int) -> bytes:
    """The line that a file begins with."""
    line = json.dumps(
        {"feeder": "transcript", "format": FORMAT, "feed": feed, "stream": stream, "queue": queue}
    ).encode()
    return line + b" " * (-(len(line) + 1) % CELL_BYTES) + b"\n"


def file_name(feed: str, stream: int, queue: int, replica: int = 0) -> str:
    """The name of a queue's file; of several trainers that share the queue each has its own."""
    more = f".{replica}" if replica else ""
    return f"{quote(feed, safe='')}.{stream}.{queue}{more}{SUFFIX}"


def says_step(digest: bytes) -> bytes:
    """What the cell of a step says."""
    return digest if digest[0] else b"\x80" + digest[1:]


def says_next(step: int, stride: int) -> bytes:
    """What a mark says: the next cell is this step, and each later one so many steps on."""
    return _NEXT_FIELDS.pack(_NEXT, stride, step)


def says_settings(fingerprint: bytes) -> bytes:
    """What a mark says: the digest of the settings that positions have from here on."""
    return _SETTINGS_FIELDS.pack(_SETTINGS, fingerprint)


def cells_of(chain: Any, says: Sequence[bytes]) -> bytes:
    """Cells that say this. `chain` is the running SHA-256 of what comes before, and goes on."""
    parts: list[bytes] = []
    add, update, digest = parts.append, chain.update, chain.digest
    for one in says:
        update(one)
        add(one)
        add(digest())
    # Of each digest the first half: cut off together, since one by one it would cost more than the
    # digest.
    rows = np.frombuffer(b"".join(parts), np.uint8).reshape(-1, _SAYS_BYTES + chain.digest_size)
    return rows[:, :CELL_BYTES].tobytes()


class Prefix(NamedTuple):
    """What can be read of a file: all cells up to the first that is not of the chain."""

    line: dict[str, Any]
    """What the file says of itself."""
    steps: NDArray[np.int64]
    """The number of each step."""
    digests: NDArray[np.uint8]
    """What the cell of each says, 16 bytes a row."""
    ends: NDArray[np.int64]
    """Where the cell of each ends."""
    settings: list[tuple[int, bytes]]
    """The digests of settings, and how many steps come before each."""
    size: int
    """Bytes of the line and all these cells."""
    chain: Any
    """The running SHA-256 of the line and of what they say."""
    expected: int | None
    """The step that comes next; None if no mark says it."""
    stride: int
    """Steps from one cell to the next."""
    begins: int
    """Where its first cell begins."""
    rest: bytes
    """What follows and is no cell of the chain."""

    @property
    def was_cut_off(self) -> bool:
        """Whether what follows is what a write leaves that was cut off: a part of a cell, and
        zeros."""
        return not any(self.rest[CELL_BYTES:])

    def upto(self, step: int) -> tuple[int, set[bytes]]:
        """How many steps come before that one; and the settings that a position there may have."""
        num = int(np.searchsorted(self.steps, step))
        before = [digest for at, digest in self.settings if at < num][-1:]
        return num, {*before, *(digest for at, digest in self.settings if at == num)}


def read_file(path: str | os.PathLike[str]) -> Prefix:
    """What can be read of a transcript. Raises `TranscriptError` if it is none."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise TranscriptError(f"the transcript {os.fspath(path)!r} cannot be read: {error}") from (
            error
        )
    return parse(data, os.fspath(path))


def parse(data: bytes, name: str) -> Prefix:
    """The same of bytes."""
    line, begins = _line_of(data, name)
    cells = np.frombuffer(data, np.uint8, (len(data) - begins) // CELL_BYTES * CELL_BYTES, begins)
    cells = cells.reshape(-1, CELL_BYTES)
    num = _num_whole(data[:begins], cells)
    says, size = cells[:num, :_SAYS_BYTES], begins + num * CELL_BYTES
    is_step = says[:, 0] != 0
    at = np.flatnonzero(is_step)
    steps, settings = np.zeros(len(at), np.int64), []
    expected: int | None = None
    stride, first = 1, 0
    for mark in [*np.flatnonzero(~is_step).tolist(), num]:
        # The steps from one mark to the next.
        last = int(np.searchsorted(at, mark))
        if last > first:
            if expected is None or expected + stride * (last - first) > _MOST_STEPS:
                raise TranscriptError(f"the transcript {name!r} says no sound number of its steps")
            steps[first:last] = expected + stride * np.arange(last - first)
            expected += stride * (last - first)
        first = last
        told = says[mark].tobytes() if mark < num else b"\0\0"
        if told[1] == _NEXT:
            _, stride, expected = _NEXT_FIELDS.unpack(told)
        elif told[1] == _SETTINGS:
            settings.append((last, _SETTINGS_FIELDS.unpack(told)[1]))
    return Prefix(
        line=line, steps=steps, digests=says[at], ends=begins + (at + 1) * CELL_BYTES,
        settings=settings, size=size, chain=_chain(data[:begins], says), expected=expected,
        stride=stride, begins=begins, rest=data[size:],
    )  # fmt: skip


def _chain(line: bytes, says: NDArray[np.uint8]) -> Any:
    return sha256(line + says.tobytes())


def _num_whole(line: bytes, cells: NDArray[np.uint8]) -> int:
    """How many cells are of the chain. Found by halving: the chain at a cell tells of all cells
    before it."""

    def is_whole(num: int) -> bool:
        chain = _chain(line, cells[:num, :_SAYS_BYTES]).digest()[:_SAYS_BYTES]
        return not num or bool(chain == cells[num - 1, _SAYS_BYTES:].tobytes())

    low, high = 0, len(cells)
    if is_whole(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_whole(middle) else (low, middle)
    return low


def _line_of(data: bytes, name: str) -> tuple[dict[str, Any], int]:
    size = data[:65536].find(b"\n") + 1
    try:
        line = json.loads(data[:size])
        number = line["format"]
        is_transcript = line["feeder"] == "transcript" and not size % CELL_BYTES
        named = str(line["feed"]), int(line["stream"]), int(line["queue"])
    except (ValueError, LookupError, TypeError):
        is_transcript = False
    if not is_transcript:
        raise TranscriptError(f"{name!r} is no transcript: its first line is none of feeder's")
    if number != FORMAT:
        raise TranscriptError(
            f"the transcript {name!r} has format {number}, expected {FORMAT}; update feeder"
        )
    return {**line, "feed": named[0], "stream": named[1], "queue": named[2]}, size


# ---- A whole run


class Steps(NamedTuple):
    """The steps of one stream, of all its queues."""

    steps: NDArray[np.int64]
    """Their numbers, ascending."""
    digests: NDArray[np.uint8]
    """What the cell of each says."""


def read_run(path: str | os.PathLike[str]) -> dict[str, Steps]:
    """The steps of each stream of a run, by name: of a folder, or of one file. Raises
    `TranscriptError`."""
    place = Path(path)
    files = sorted(place.glob(f"*{SUFFIX}")) if place.is_dir() else [place]
    if not files:
        raise TranscriptError(f"the folder {os.fspath(path)!r} has no transcript, *{SUFFIX}")
    found: dict[str, list[tuple[Path, Prefix]]] = {}
    for file in files:
        prefix = read_file(file)
        if not prefix.was_cut_off:
            raise damaged(file, prefix)
        name = f"{prefix.line['feed']}[{prefix.line['stream']}]"
        found.setdefault(name, []).append((file, prefix))
    return {name: _joined(name, parts) for name, parts in sorted(found.items())}


def _joined(name: str, parts: Sequence[tuple[Path, Prefix]]) -> Steps:
    steps = np.concatenate([prefix.steps for _, prefix in parts])
    digests = np.concatenate([prefix.digests for _, prefix in parts])
    order = np.argsort(steps, kind="stable")
    steps, digests = steps[order], digests[order]
    is_again = np.diff(steps) == 0
    differs = is_again & (digests[1:] != digests[:-1]).any(axis=1)
    if differs.any():
        raise TranscriptError(
            f"two files have step {steps[1:][differs][0]} of {name}, and differ in it: they are of "
            "two runs"
        )
    is_first = np.append(True, ~is_again)[: len(steps)]
    return Steps(steps[is_first], digests[is_first])


def damaged(path: str | os.PathLike[str], prefix: Prefix) -> TranscriptError:
    """The error of a file of which more follows than a write leaves that was cut off."""
    after = f"after step {prefix.steps[-1]}" if len(prefix.steps) else "before its first step"
    return TranscriptError(
        f"the transcript {os.fspath(path)!r} is damaged at byte {prefix.size}, {after}: "
        f"{len(prefix.rest)} bytes follow that are not of its chain"
    )


class Difference(NamedTuple):
    """How the steps of one stream differ in two runs."""

    num_equal: int
    """How many steps are in both, and equal."""
    first: int | None
    """The first step that is in both, and differs."""
    num_different: int
    """How many such steps there are."""
    only_one: list[tuple[int, int]]
    """The steps that the first run alone has, each from and to."""
    only_other: list[tuple[int, int]]
    """The steps that the second run alone has."""

    @property
    def is_equal(self) -> bool:
        """Whether all steps are in both, and equal."""
        return not (self.num_different or self.only_one or self.only_other)


def compare(one: Steps | None, other: Steps | None) -> Difference:
    """How two runs differ in a stream; None is a run without it."""
    one, other = one or _NOTHING, other or _NOTHING
    _, at, there = np.intersect1d(one.steps, other.steps, assume_unique=True, return_indices=True)
    differs = (one.digests[at] != other.digests[there]).any(axis=1)
    steps = one.steps[at][differs]
    return Difference(
        num_equal=int((~differs).sum()),
        first=int(steps[0]) if len(steps) else None,
        num_different=len(steps),
        only_one=_ranges(np.delete(one.steps, at)),
        only_other=_ranges(np.delete(other.steps, there)),
    )


_NOTHING = Steps(np.empty(0, np.int64), np.empty((0, _SAYS_BYTES), np.uint8))


def _ranges(steps: NDArray[np.int64]) -> list[tuple[int, int]]:
    runs = np.split(steps, np.flatnonzero(np.diff(steps) != 1) + 1)
    return [(int(run[0]), int(run[-1])) for run in runs if len(run)]
