"""`pack`: documents of tokens, several in a row, so that little of a row is padding.

Documents are packed within windows of a fixed number of documents, so the rows of a window follow
from the lengths in it alone: a resume, or another thread, packs one window and no other. A packing
over the whole stream would pad less, and would have to be done again from the start to find row n.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from threading import Lock
from typing import Any, Literal, NamedTuple, Unpack, get_args

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import whole
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.orders.sharding import Sharding
from feeder.workers.sources.source import Source, as_part
from feeder.workers.sources.steps.ragged import GROUP, Stretch, Windowed, items
from feeder.workers.sources.steps.rows import size_in
from feeder.workers.sources.stores.kept import Kept
from feeder.workers.sources.stores.reading import (
    NOW,
    Columns,
    Faults,
    Piece,
    ReadOnce,
    RecordError,
    masked_error,
)
from feeder.workers.sources.stores.records import LEFT_OUT, Records
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import is_masked

_logger = logging.getLogger("feeder")

_READ_TOGETHER = 16
"""Documents that are read together where a piece of a window is bounded."""

Long = Literal["split", "drop", "truncate"]


@dataclass(frozen=True)
class Layout:
    """How documents become rows, beside their windows. Never changes."""

    seq_len: int
    long: Long = "split"
    bos: int | None = None
    eos: int | None = None
    pad: int = 0
    per_token: tuple[str, ...] = ()
    per_document: tuple[str, ...] = ()
    cu_seqlens: int | None = None

    def describe(self) -> dict[str, Any]:
        """What is not as it is without options, for the fingerprint."""
        usual = Layout(self.seq_len)
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for field in fields(self)
            if (value := getattr(self, field.name)) != getattr(usual, field.name)
            and field.name != "long"
        }


@public("feeder.sources")
def pack(
    source: Source,
    seq_len: int,
    window: int = 1024,
    long: Long = "split",
    *,
    window_tokens: int | None = None,
    bos: int | None = None,
    eos: int | None = None,
    pad: int = 0,
    per_token: Iterable[str] = (),
    per_document: Iterable[str] = (),
    cu_seqlens: int | None = None,
    **options: Unpack[OrderOptions],
) -> Source:
    """Documents packed into rows of `seq_len` tokens.

    A call packs one window of documents, whatever the batch size: the longest document first, each
    into the fullest row that has room for it (best fit decreasing; Johnson, 1973; for training:
    Ding et al., arXiv:2404.10830). Rows of a window come in the order of their first documents. A
    window is packed by itself, so a feed resumes by packing one window, and holds no open rows.

    Columns, each of (rows, seq_len), by name: `tokens`, of the documents' dtype, `pad` where there
    is none; `segment_ids`, int32, the number of the document in its row from 1, 0 if there is
    none; `positions`, int32, the place in the document from 0; `loss_mask`, bool, true on tokens,
    or where the document's own `loss_mask` is.

    Args:
        source: A record is a document: an array of whole numbers of one axis, or a mapping with
            such an array as `tokens`, and perhaps a `loss_mask` as long. Empty ones are left out.
        seq_len: Tokens of a row.
        window: Documents that are packed together. More of them leave less padding, and make a
            larger chunk: a call's rows are in memory together.
        long: What becomes of a document that is longer than a row: "split" makes documents of
            `seq_len` tokens of it, and one of the rest, each with positions from 0; "drop" leaves
            it out and counts it in `source.skipped`; "truncate" keeps its first `seq_len` tokens.
        window_tokens: A window is packed as soon as its documents have so many tokens together, a
            longer document alone, so that a call's rows are bounded: in pieces, each by itself.
        bos: A token that is put before each document; `loss_mask` is false there where the document
            has one.
        eos: A token that is put after each document; `loss_mask` is true there.
        pad: The token where there is none.
        per_token: Names of other columns that have an entry for each token. They come as columns of
            (rows, seq_len, ...), 0 at padding, `bos` and `eos`.
        per_document: Names of other columns that have one entry for a document, such as its number.
            Each token of the document gets it, in a column of (rows, seq_len, ...); padding has 0.
        cu_seqlens: The most documents of a row. A row then has the columns `cu_seqlens`, int32 of
            (rows, cu_seqlens + 2), where its documents begin, what is padding, and `seq_len`
            repeated; and `max_seqlen`, int32 of (rows,), the longest of these stretches.
        options: `OrderOptions`; a record is a window.

    Raises:
        ConfigError: an argument is wrong, or pack cannot follow. A record that is no document is a
            RecordError.
    """
    part = as_part(source, "pack", turns=True)
    if long not in get_args(Long):
        raise ConfigError(f"long is {long!r}, expected one of {get_args(Long)!r}")
    columns = [*map(str, per_token)], [*map(str, per_document)]
    if taken := _COLUMNS & {*columns[0], *columns[1]} or {*columns[0]} & {*columns[1]}:
        raise ConfigError(f"per_token and per_document name {sorted(taken)} twice, or pack has it")
    layout = Layout(
        whole("seq_len", seq_len, 1 + (bos is not None) + (eos is not None)),
        long,
        bos=None if bos is None else whole("bos", bos),
        eos=None if eos is None else whole("eos", eos),
        pad=whole("pad", pad),
        per_token=tuple(columns[0]),
        per_document=tuple(columns[1]),
        cu_seqlens=None if cu_seqlens is None else whole("cu_seqlens", cu_seqlens, 1),
    )
    bound = None if window_tokens is None else whole("window_tokens", window_tokens, 1)
    packed = Source(Packed(part, layout, whole("window", window, 1), bound), **options)
    num_shards = packed._plan.sharding.num_shards
    return packed.dealt(num_shards) if num_shards > 1 else packed


_COLUMNS = {"tokens", "segment_ids", "positions", "loss_mask", "cu_seqlens", "max_seqlen"}


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
            if long != "drop" or length <= size
            for piece in pieces(min(length, size) if long == "truncate" else length, size)
        ]
        tokens, rows = tokens + sum(kept), rows + len(best_fit(kept, size))
    return tokens / (rows * size) if rows else 1.0


def pieces(length: int, size: int) -> list[int]:
    """The lengths of what a document is split into: full rows, and the rest."""
    full, rest = divmod(length, size)
    return [size] * full + [rest] * (rest > 0)


def best_fit(lengths: Sequence[int], size: int, most: int | None = None) -> list[list[int]]:
    """Which documents each row holds: the longest first, each in the fullest row with room, and at
    most so many in a row.

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
        if left and len(rows[number]) != most:
            insort(room, (left, number))
    return sorted(sorted(row) for row in rows)


class Packed(Windowed):
    """Windows of documents, each as the rows that they are packed into. Any thread reads."""

    kind = "pack"

    def __init__(
        self, of: Records, layout: Layout, window: int, bound: int | None = None
    ) -> None:  # fmt: skip
        # Windows that are walked through, or have one piece, come one after the other.
        is_alone = bound is None or of.traits.walks
        super().__init__(of, window, 1 if is_alone else GROUP)
        self._layout, self._bound = layout, bound
        self._faults = Faults("skip")
        self._told: set[str] = set()
        self._cuts = Kept(4 * GROUP)

    def of_parts(self, parts: Sequence[Records]) -> Packed:
        """The same of other parts, without what is known of the pieces of these."""
        (of,) = parts
        step = Packed(of, self._layout, self._window, self._bound)
        step._shards = self._shards
        return step

    def records_of(self, size: int) -> int:
        """How many records it has of so many."""
        # Without a bound a record is a whole window.
        return -(-size // self._window) if self._bound is None else super().records_of(size)

    def repacked(self, of: Records, packing: Mapping[str, Any]) -> Packed:
        """The same of other documents, in rows and windows as `describe` tells them."""
        layout = replace(self._layout, seq_len=packing["seq_len"])
        return Packed(of, layout, packing["window"], packing.get("window_tokens"))

    @property
    def skipped(self) -> int:
        """Reads of documents that were left out: too long, or defective."""
        return super().skipped + self._faults.skipped

    def dealt(self, num_shards: int) -> Packed:
        """The same with windows that are dealt out to shards in turn, where the documents come in
        other proportions at the start than at the end, or windows in pieces; otherwise the same."""
        documents = self.parts[0]
        if self._bound is None and (
            num_shards > len(self) or documents.dealt(num_shards) is documents
        ):
            return self
        return super().dealt(num_shards)

    def _place(self, record: int) -> tuple[int, int]:
        """The window and the piece that a record is."""
        if self._bound is not None:
            return super()._place(record)
        if self._shards == 1:
            return record, 0
        sharding = Sharding(num_records=len(self), num_shards=self._shards)
        (shard,) = sharding.shards_of(np.array([record])).tolist()
        return (record - sharding.bound(shard)) * self._shards + sharding.residue(shard), 0

    def read_up_to(self, call: Call, record: int, first: int = 0) -> dict[str, dict[str, Any]]:
        """What has been read of each source of a mixture, up to a window of the epoch."""
        if first or self._shards > 1:
            return {}
        part = self.parts[0]
        stop = min(self._windows(record) * self._window, size_in(part, call.epoch))
        return part.read_up_to(call, stop)

    def _windows(self, record: int) -> int:
        """The windows before a record, as nearly as that can be told."""
        return record if self._bound is None else record // self._window

    def cursor_at(self, call: Call, row: int) -> bytes:
        """The cursor of documents that are walked through, at a window."""
        part: Any = self.parts[0]
        cursor: bytes = part.cursor_at(call, self._windows(row) * self._window)
        return cursor

    def seek_to(self, call: Call, cursor: bytes) -> None:
        """Take such a cursor."""
        part: Any = self.parts[0]
        part.seek_to(call, cursor)

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """The rows of one window, or of a piece of it."""
        start, samples = self._found(indices, call)
        packing = self._packed(start, samples, call)
        if not packing.documents:
            return None
        rows = [[packing.documents[i] for i in row] for row in packing.rows]
        try:
            return lay_out(rows, self._layout, call)
        except (TypeError, ValueError, OverflowError) as error:
            where = self.parts[0].name_in(start, call)
            raise RecordError(f"{where}, or the {len(samples) - 1} after it: {error}") from error

    def read_origins(
        self, indices: NDArray[np.int64], call: Call
    ) -> list[tuple[Piece, ...]]:  # fmt: skip
        """Of each row the pieces of documents that it holds."""
        start, samples = self._found(indices, call)
        packing = self._packed(start, samples, call)
        if not packing.documents:
            return []
        records = self.parts[0].origins(np.arange(start, start + len(samples)), call)
        rows = []
        for row in packing.rows:
            ends = np.cumsum([len(packing.documents[i].tokens) for i in row]).tolist()
            rows.append(tuple(
                Piece(*record, first, stop, packing.places[i][1])
                for i, first, stop in zip(row, [0, *ends[:-1]], ends, strict=True)
                for record in records[packing.places[i][0] - start]
            ))  # fmt: skip
        return rows

    def _found(self, indices: NDArray[np.int64], call: Call) -> tuple[int, list[Any]]:
        """The documents that a record has, and the number of the first."""
        window, piece = self._place(int(indices[0]))
        start, size = window * self._window, size_in(self.parts[0], call.epoch)
        stop = min(start + self._window, size)
        if start >= size:
            return start, []
        if self._bound is not None:
            return self._piece(window, piece, start, stop, call)
        return start, self._taken(start, stop, call)

    def _taken(self, start: int, stop: int, call: Call) -> list[Any]:
        return self.parts[0].samples(np.arange(start, stop), call)

    def _piece(
        self, window: int, number: int, first: int, end: int, call: Call
    ) -> tuple[int, list[Any]]:  # fmt: skip
        """As many documents of a window as the bound on tokens has room for, and the number of the
        first."""
        key = call.seed, call.epoch, window
        cuts: _Cuts = self._cuts.get(key, lambda: _Cuts(first, end))
        samples: list[Any] | None = None
        with cuts.lock:
            # A piece begins where the one before it ends: mostly that has been read.
            while len(cuts.starts) < number + 2 and cuts.starts[-1] < cuts.stop:
                read = ReadOnce(lambda: self._bounded(cuts, call))
                # What is left out is noted by the call that it belongs to: read again for it.
                samples = None if read.has_left_out else read.value
        if len(cuts.starts) < number + 2:
            return first, []
        start, stop = cuts.starts[number : number + 2]
        if samples is None or len(cuts.starts) > number + 2:
            samples = self._taken(start, stop, call)
        return start, samples

    def _left_in(self, window: int, pieces: int, rows: int, call: Call) -> list[Stretch]:
        start = window * self._window
        stop = min(start + self._window, size_in(self.parts[0], call.epoch))
        if self._bound is None:
            return self._left_of_rows(start, self._taken(start, stop, call), rows, call)
        left: list[Stretch] = []
        while (found := self._piece(window, pieces, start, stop, call))[1]:
            left += self._left_of_rows(*found, rows, call)
            pieces, rows = pieces + 1, 0
        return left

    def _left_of_rows(
        self, start: int, samples: Sequence[Any], rows: int, call: Call
    ) -> list[Stretch]:
        """What of documents that are packed together is not in the first rows."""
        seq_len, most = self._layout.seq_len, self._layout.cu_seqlens
        cuts: list[tuple[int, int, int]] = []
        for number, sample in enumerate(samples, start):
            made = [] if sample is LEFT_OUT else self._cut(sample, number, call)
            cuts += [(number, i * seq_len, len(piece.tokens)) for i, piece in enumerate(made)]
        packed = best_fit([length for _, _, length in cuts], seq_len, most)
        came = {i for row in packed[:rows] for i in row}
        left: list[Stretch] = []
        for number, of in groupby(range(len(cuts)), key=lambda i: cuts[i][0]):
            sample, pieces = samples[number - start], list(of)
            first, end = sample[1:] if isinstance(sample, Remainder) else (0, None)
            if came.isdisjoint(pieces):
                # Also what a truncation would leave out now.
                left.append(Stretch(number, first, end))
                continue
            for _, at, length in (cuts[i] for i in pieces if i not in came):
                at += first
                if left and left[-1][::2] == (number, at):
                    left[-1] = left[-1]._replace(stop=at + length)
                else:
                    left.append(Stretch(number, at, at + length))
        return left

    def _bounded(self, cuts: _Cuts, call: Call) -> list[Any]:
        """The documents of the next piece; at least one."""
        assert self._bound is not None
        start, tokens = cuts.starts[-1], 0
        taken: list[Any] = []
        while start + len(taken) < cuts.stop:
            at = start + len(taken)
            try:
                found = self._taken(at, min(at + _READ_TOGETHER, cuts.stop), call)
            except StopIteration:
                # Documents that are walked through end somewhere.
                if not taken and len(cuts.starts) == 1:
                    raise
                cuts.stop = at
                break
            for sample in found:
                if sample is not LEFT_OUT:
                    tokens += len(self._stretch(sample, at + len(taken), call).tokens)
                if taken and tokens > self._bound:
                    cuts.starts.append(start + len(taken))
                    return taken
                taken.append(sample)
        if taken:
            cuts.starts.append(start + len(taken))
        return taken

    def _packed(self, start: int, samples: Sequence[Any], call: Call) -> _Packing:
        """How documents become rows."""
        documents: list[Document] = []
        places: list[tuple[int, int]] = []
        for number, sample in enumerate(samples, start):
            cut = [] if sample is LEFT_OUT else self._cut(sample, number, call)
            documents += cut
            first = sample.start if isinstance(sample, Remainder) else 0
            places += [(number, first + i * self._layout.seq_len) for i in range(len(cut))]
            if cut and cut[0].tokens.dtype != documents[0].tokens.dtype:
                raise RecordError(
                    f"{self.parts[0].name_in(number, call)}: documents of a window are "
                    f"{documents[0].tokens.dtype} and {cut[0].tokens.dtype}, expected one dtype"
                )
        lengths = [len(document.tokens) for document in documents]
        rows = best_fit(lengths, self._layout.seq_len, self._layout.cu_seqlens)
        return _Packing(documents, places, rows)

    def _cut(self, sample: Any, number: int, call: Call) -> list[Document]:
        """A document as pieces that fit into a row."""
        layout = self._layout
        tokens, mask, others = self._stretch(sample, number, call, is_ended=True)
        if not len(tokens):
            return []
        size = layout.seq_len
        if len(tokens) > size and layout.long == "drop":
            if NOW.place is not None:
                self._faults.count(1)
            return []
        stop = min(len(tokens), size) if layout.long == "truncate" else len(tokens)
        whole = Document(tokens, mask, others)
        return [whole.cut(at, min(at + size, stop)) for at in range(0, stop, size)]

    def _stretch(self, sample: Any, number: int, call: Call, *, is_ended: bool = False) -> Document:
        """The document of a record, or what is left of it; between its first and its last token
        if it `is_ended`, as what is left always is."""
        layout, is_part = self._layout, isinstance(sample, Remainder)
        made = self._document(sample.sample if is_part else sample, number, call)
        if not len(made.tokens):
            return made
        if (is_ended or is_part) and (layout.bos is not None or layout.eos is not None):
            made = _ended(*made, layout)
        return made.cut(sample.start, sample.stop) if is_part else made

    def _document(self, sample: Any, number: int, call: Call) -> Document:
        """The document of a record, with the columns that are carried."""
        layout = self._layout

        def name() -> str:
            return self.parts[0].name_in(number, call)

        tokens, mask = _document(sample, name)
        others: dict[str, NDArray[Any]] = {}
        if not (layout.per_token or layout.per_document):
            if isinstance(sample, Mapping) and len(sample) > 1:
                self._tell_of_columns(sample)
            return Document(tokens, mask, others)
        has = sample if isinstance(sample, Mapping) else {}
        for column in (*layout.per_token, *layout.per_document):
            if column not in has:
                raise RecordError(f"{name()}: has no column {column!r}, which is to be carried")
            value = np.asarray(has[column])
            if value.dtype.kind not in "biufcV":
                raise RecordError(f"{name()}: column {column!r} is {value.dtype}, expected numbers")
            if column in layout.per_document:
                value = np.broadcast_to(value, (len(tokens), *value.shape))
            elif not value.ndim or len(value) != len(tokens):
                raise RecordError(
                    f"{name()}: column {column!r} has the shape {list(value.shape)}, expected an "
                    f"entry for each of {len(tokens)} tokens; per_document is for one of all"
                )
            others[column] = value
        self._tell_of_columns(has)
        return Document(tokens, mask, others)

    def _tell_of_columns(self, sample: Mapping[Any, Any]) -> None:
        """Log once which columns are left out."""
        layout = self._layout
        known = {"tokens", "loss_mask", *layout.per_token, *layout.per_document}
        if new := sample.keys() - known - self._told:
            self._told |= new
            _logger.warning(
                "pack leaves out the columns %s: name them in per_token= or per_document= to have "
                "them, or leave them out by map", sorted(map(str, new)),
            )  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """How documents are packed."""
        return {
            **super().describe(), "seq_len": self._layout.seq_len, "window": self._window,
            "long": self._layout.long, **self._layout.describe(),
            **({} if self._bound is None else {"window_tokens": self._bound}),
        }  # fmt: skip


class Document(NamedTuple):
    """What a row holds of a document. Arrays as long as the tokens."""

    tokens: NDArray[Any]
    mask: NDArray[Any] | None
    """Which of them count for the loss where not all do."""
    others: dict[str, NDArray[Any]]
    """Columns that are carried."""

    def cut(self, start: int, stop: int | None) -> Document:
        """Some of its tokens."""
        return Document(
            self.tokens[start:stop],
            None if self.mask is None else self.mask[start:stop],
            {name: other[start:stop] for name, other in self.others.items()},
        )


class Remainder(NamedTuple):
    """A sample of which some tokens are left: see `Stretch`."""

    sample: Any
    start: int
    stop: int | None


class _Packing(NamedTuple):
    """Documents, cut into what fits into a row, and the rows that they are packed into."""

    documents: list[Document]
    places: list[tuple[int, int]]
    """Of each the record that it is of, and its first token there."""
    rows: list[list[int]]
    """Of each row its documents."""


class _Cuts:
    """Where the pieces of a window begin. Its lock is held while more of them are found."""

    def __init__(self, start: int, stop: int) -> None:
        self.starts, self.stop, self.lock = [start], stop, Lock()


def _ended(
    tokens: NDArray[Any], mask: NDArray[Any] | None, others: dict[str, NDArray[Any]], layout: Layout
) -> Document:
    """A document between its first and its last token."""
    given = [token for token in (layout.bos, layout.eos) if token is not None]
    if not all(_fits(token, tokens.dtype) for token in given):
        raise RecordError(f"bos and eos are {given}, which {tokens.dtype} does not hold")
    before, after = (int(token is not None) for token in (layout.bos, layout.eos))
    bos, eos = (np.array(given[:before], tokens.dtype), np.array(given[before:], tokens.dtype))
    carried = {}
    for name, other in others.items():
        if name in layout.per_document:
            size = len(tokens) + before + after
            carried[name] = np.broadcast_to(other[:1], (size, *other.shape[1:]))
        else:
            padding = [(before, after), *[(0, 0)] * (other.ndim - 1)]
            carried[name] = np.pad(other, padding)
    if mask is not None:
        mask = np.concatenate((np.zeros(before, bool), mask, np.ones(after, bool)))
    return Document(np.concatenate((bos, tokens, eos)), mask, carried)


def _fits(token: int, dtype: np.dtype[Any]) -> bool:
    return token <= np.iinfo(dtype).max


def _document(sample: Any, name: Callable[[], str]) -> tuple[NDArray[Any], NDArray[Any] | None]:
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


def lay_out(rows: Sequence[Sequence[Document]], layout: Layout, call: Call) -> dict[str, Any]:
    """The columns of rows of documents, all of one dtype."""
    first, seq_len = rows[0][0], layout.seq_len
    shape = (len(rows), seq_len)
    tokens, segments = _zeros(call, shape, first.tokens.dtype), _zeros(call, shape, np.int32)
    if layout.pad:
        if not _fits(layout.pad, tokens.dtype):
            raise ValueError(f"pad is {layout.pad}, which {tokens.dtype} does not hold")
        tokens.fill(layout.pad)
    others = {
        name: _zeros(call, (*shape, *other.shape[1:]), other.dtype)
        for name, other in first.others.items()
    }
    positions, masked = _zeros(call, shape, np.int32), []
    count = np.arange(seq_len, dtype=np.int32)
    # Slice by slice: to reckon the place of each token takes five times as long.
    for row, documents in enumerate(rows):
        start = 0
        for number, (document, mask, carried) in enumerate(documents, 1):
            stop = start + len(document)
            tokens[row, start:stop] = document
            segments[row, start:stop] = number
            positions[row, start:stop] = count[: len(document)]
            if mask is not None:
                masked.append((row, start, stop, mask))
            for name, other in carried.items():
                column = others[name]
                if other.dtype != column.dtype or other.shape[1:] != column.shape[2:]:
                    raise ValueError(
                        f"column {name!r} is {other.dtype}{list(other.shape[1:])} and "
                        f"{column.dtype}{list(column.shape[2:])}, expected one dtype and shape"
                    )
                column[row, start:stop] = other
            start = stop
    loss_mask = call.empty(shape, np.bool_)
    np.greater(segments, 0, out=loss_mask)
    for row, start, stop, mask in masked:
        loss_mask[row, start:stop] = mask
    columns = {
        "tokens": tokens, "segment_ids": segments, "positions": positions, "loss_mask": loss_mask,
        **others,
    }  # fmt: skip
    if layout.cu_seqlens is not None:
        columns["cu_seqlens"] = bounds = call.empty((len(rows), layout.cu_seqlens + 2), np.int32)
        bounds.fill(seq_len)
        for row, documents in enumerate(rows):
            ends = np.cumsum([0, *(len(document.tokens) for document in documents)])
            bounds[row, : len(ends)] = ends
        columns["max_seqlen"] = np.diff(bounds, axis=1).max(axis=1).astype(np.int32)
    return columns


def _zeros(call: Call, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    made = call.empty(shape, dtype)
    made.fill(0)
    return made
