"""`pack`: documents of tokens, several in a row, so that little of a row is padding."""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import whole
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.orders.sharding import Sharding
from feeder.workers.sources.source import Source, as_part
from feeder.workers.sources.steps.ragged import items
from feeder.workers.sources.steps.rows import LEFT_OUT, Step, name_in, samples_of, size_of
from feeder.workers.sources.stores.reading import (
    Columns,
    Faults,
    RecordError,
    Records,
    masked_error,
)
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import is_masked

Long = Literal["split", "drop"]


@public("feeder.sources")
def pack(
    source: Source,
    seq_len: int,
    window: int = 1024,
    long: Long = "split",
    **options: Unpack[OrderOptions],
) -> Source:
    """Documents packed into rows of `seq_len` tokens.

    A call packs one window of documents, whatever the batch size: the longest document first, each
    into the fullest row that has room for it (best fit decreasing; Johnson, 1973; for training:
    Ding et al., arXiv:2404.10830). Rows of a window come in the order of their first documents. A
    window is packed by itself, so a feed resumes by packing one window, and holds no open rows.

    Columns, each of (rows, seq_len), by name: `tokens`, of the documents' dtype, 0 where there is
    none; `segment_ids`, int32, the number of the document in its row from 1, 0 where there is none;
    `positions`, int32, the place in the document from 0; `loss_mask`, bool, true on tokens, or
    where the document's own `loss_mask` is.

    Args:
        source: A record is a document: an array of whole numbers of one axis, or a mapping with
            such an array as `tokens`, and perhaps a `loss_mask` as long. Empty ones are left out.
        seq_len: Tokens of a row.
        window: Documents that are packed together. More of them leave less padding, and make a
            larger chunk: a call's rows are in memory together.
        long: What becomes of a document that is longer than a row: "split" makes documents of
            `seq_len` tokens of it, and one of the rest; "drop" leaves it out and counts it in
            `source.skipped`.
        options: `OrderOptions`; a record is a window.

    Raises:
        ConfigError: an argument is wrong, or pack cannot follow. A record that is no document is a
            RecordError.
    """
    part = as_part(source, "pack")
    if long not in get_args(Long):
        raise ConfigError(f"long is {long!r}, expected one of {get_args(Long)!r}")
    packed = Packed(part, whole("seq_len", seq_len, 1), whole("window", window, 1), long)
    return Source(packed, **options)


@public("feeder.sources")
def packing_efficiency(
    lengths: Iterable[int], seq_len: int, window: int = 1024, long: Long = "split"
) -> float:
    """The share of places in the rows of `pack` that hold a token, for documents of these lengths;
    1.0 is without padding. It reads no documents: to choose a window with.

    Raises:
        ConfigError: an argument is wrong.
    """
    if long not in get_args(Long):
        raise ConfigError(f"long is {long!r}, expected one of {get_args(Long)!r}")
    size, step = whole("seq_len", seq_len, 1), whole("window", window, 1)
    sizes = [whole("a length", length) for length in lengths]
    tokens = rows = 0
    for start in range(0, len(sizes), step):
        kept = [
            piece
            for length in sizes[start : start + step]
            if long == "split" or length <= size
            for piece in pieces(length, size)
        ]
        tokens, rows = tokens + sum(kept), rows + len(best_fit(kept, size))
    return tokens / (rows * size) if rows else 1.0


def pieces(length: int, size: int) -> list[int]:
    """The lengths of what a document is split into: full rows, and the rest."""
    full, rest = divmod(length, size)
    return [size] * full + [rest] * (rest > 0)


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Which documents each row holds: the longest first, each in the fullest row with room.

    The documents of a row are in their order, and so are the rows, by their first documents.
    """
    # The rows that have room, sorted by how much, the newest last: found in O(log n).
    room: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[i]
        at = bisect_left(room, (length, -1))
        if at == len(room):
            number, left = len(rows), size - length
            rows.append([i])
        else:
            free, number = room.pop(at)
            left = free - length
            rows[number].append(i)
        if left:
            insort(room, (left, number))
    return sorted(sorted(row) for row in rows)


class Packed(Step):
    """Windows of documents, each as the rows that they are packed into. Any thread reads."""

    kind = "pack"

    def __init__(self, of: Records, seq_len: int, window: int, long: Long) -> None:
        super().__init__(of)
        self._seq_len, self._window, self._long = seq_len, window, long
        # A window may have no document left, and has as many rows as it takes.
        self.traits = replace(self.traits, is_last=True, one_per_call=True, may_skip=True)
        self._faults = Faults("skip")
        # How windows are dealt out to shards; None where these are stretches.
        self._sharding: Sharding | None = None

    def __len__(self) -> int:
        return -(-size_of(self.parts[0]) // self._window)

    @property
    def skipped(self) -> int:
        """Reads of documents that were left out: too long, or defective."""
        return super().skipped + self._faults.skipped

    def dealt(self, num_shards: int) -> Packed:
        """The same with windows that are dealt out to shards in turn, where the documents come in
        other proportions at the start than at the end; else the same."""
        deal = getattr(self.parts[0], "dealt", None)
        if deal is None or num_shards > len(self) or deal(num_shards) is self.parts[0]:
            return self
        step = copy.copy(self)
        step._sharding = Sharding(num_records=len(self), num_shards=num_shards)
        return step

    def as_it_was(self) -> Step | None:
        """The same as it was in an earlier format, in which shards were stretches."""
        step = copy.copy(self)
        step._sharding = None
        older = super(Packed, step).as_it_was()
        return step if older is None and self._sharding is not None else older

    def _number(self, index: int) -> int:
        """The window that record `index` is."""
        if self._sharding is None:
            return index
        (shard,) = self._sharding.shards_of(np.array([index])).tolist()
        place = index - self._sharding.bound(shard)
        return place * self._sharding.num_shards + self._sharding.residue(shard)

    def read_up_to(self, call: Call, record: int) -> dict[str, dict[str, Any]]:
        """What has been read of each source of a mixture, up to a window of the epoch."""
        part: Any = self.parts[0]
        read = getattr(part, "read_up_to", None)
        stop = min(record * self._window, size_of(part))
        found: dict[str, dict[str, Any]] = read(call, stop) if read else {}
        return found

    def cursor_at(self, call: Call, row: int) -> bytes:
        """The cursor of documents that are walked through, at a window."""
        part: Any = self.parts[0]
        cursor: bytes = part.cursor_at(call, row * self._window)
        return cursor

    def seek_to(self, call: Call, cursor: bytes) -> None:
        """Take such a cursor."""
        part: Any = self.parts[0]
        part.seek_to(call, cursor)

    def name(self, index: int) -> str:
        """The window."""
        return f"window {self._number(index)}"

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """The rows of one window."""
        start = self._number(int(indices[0])) * self._window
        stop = min(start + self._window, size_of(self.parts[0]))
        samples = samples_of(self.parts[0], np.arange(start, stop), call)
        documents: list[Document] = []
        for number, sample in enumerate(samples, start):
            cut = [] if sample is LEFT_OUT else self._cut(sample, number, call)
            documents += cut
            if cut and cut[0][0].dtype != documents[0][0].dtype:
                raise RecordError(
                    f"{name_in(self.parts[0], number, call)}: documents of a window are "
                    f"{documents[0][0].dtype} and {cut[0][0].dtype}, expected one dtype"
                )
        if not documents:
            return None
        rows = best_fit([len(tokens) for tokens, _ in documents], self._seq_len)
        return lay_out([[documents[i] for i in row] for row in rows], self._seq_len, call)

    def _cut(self, sample: Any, number: int, call: Call) -> list[Document]:
        """A document as pieces that fit into a row."""
        size = self._seq_len
        tokens, mask = _document(sample, lambda: name_in(self.parts[0], number, call))
        if len(tokens) > size and self._long == "drop":
            self._faults.count(1)
            return []
        return [
            (tokens[at : at + size], None if mask is None else mask[at : at + size])
            for at in range(0, len(tokens), size)
        ]

    def describe(self) -> dict[str, Any]:
        """How documents are packed."""
        return {
            **super().describe(), "seq_len": self._seq_len, "window": self._window,
            "long": self._long, **({} if self._sharding is None else {"windows": "dealt"}),
        }  # fmt: skip


Document = tuple[NDArray[Any], "NDArray[Any] | None"]
"""Tokens, and which of them count for the loss where not all do."""


def _document(sample: Any, name: Callable[[], str]) -> Document:
    mask = None
    # Arrays, the commonest documents, are told first: to tell a mapping asks its abstract class.
    if isinstance(sample, np.ndarray):
        given = sample
    elif isinstance(sample, Mapping):
        if "tokens" not in sample:
            raise RecordError(f"{name()}: has the columns {list(sample)}, expected 'tokens'")
        mask = sample.get("loss_mask")
        given = sample["tokens"]
    else:
        (_, given), *others = items(sample)
        if others:
            raise RecordError(
                f"{name()}: has {len(others) + 1} columns without names, expected an array, or a "
                "mapping of 'tokens' and 'loss_mask'"
            )
    if is_masked(type(given)) or is_masked(type(mask)):
        raise masked_error(f"{name()}: the document")
    tokens = np.asarray(given)
    # An empty list is an array of floats.
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
        raise RecordError(
            f"{name()}: the document is {tokens.dtype}{list(tokens.shape)}, expected "
            "whole numbers in one axis"
        )
    if mask is not None:
        mask = np.asarray(mask).astype(bool)
        if mask.shape != tokens.shape:
            raise RecordError(
                f"{name()}: loss_mask has the shape {list(mask.shape)}, tokens {list(tokens.shape)}"
            )
    return tokens, mask


def lay_out(
    rows: Sequence[Sequence[Document]], seq_len: int, call: Call
) -> dict[str, NDArray[Any]]:
    """The columns of rows of documents, all of one dtype."""
    shape, dtype = (len(rows), seq_len), rows[0][0][0].dtype
    tokens, segments = _zeros(call, shape, dtype), _zeros(call, shape, np.int32)
    positions, masked = _zeros(call, shape, np.int32), []
    count = np.arange(seq_len, dtype=np.int32)
    # Slice by slice: to reckon the place of each token takes five times as long.
    for row, documents in enumerate(rows):
        start = 0
        for number, (document, mask) in enumerate(documents, 1):
            stop = start + len(document)
            tokens[row, start:stop] = document
            segments[row, start:stop] = number
            positions[row, start:stop] = count[: len(document)]
            if mask is not None:
                masked.append((row, start, stop, mask))
            start = stop
    loss_mask = call.empty(shape, np.bool_)
    np.greater(segments, 0, out=loss_mask)
    for row, start, stop, mask in masked:
        loss_mask[row, start:stop] = mask
    return {
        "tokens": tokens,
        "segment_ids": segments,
        "positions": positions,
        "loss_mask": loss_mask,
    }


def _zeros(call: Call, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    made = call.empty(shape, dtype)
    made.fill(0)
    return made
