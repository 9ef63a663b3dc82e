"""What sources read, and what is done about a record that is defective.

Every store meets the same three troubles: a record that is defective for good, an error that may
pass, and records that do not fit together. They are told apart here, once: an error that may pass
is retried and never skipped, since a skip changes the stream.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock, local
from typing import Any, Literal, NamedTuple, TypeAlias, TypeGuard, TypeVar, get_args

import numpy as np
from numpy.typing import DTypeLike, NDArray

from feeder.workers.errors import ConfigError, FeedError
from feeder.workers.public import public
from feeder.workers.sources.stores.mapped import LARGE_BYTES, MappedCut, MappedRows
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import hint_of_strings
from feeder.workers.stream.copying import DROP_GIL_BYTES, copy_rows
from feeder.workers.stream.memory import POOL

_RECORD_JOIN_BYTES = 8 * 1024
"""Records of at most this size are copied twice or three times, all at once."""
# That takes less time than to copy them one by one (2026-11-21).

_JOINED_BYTES = 1024 * 1024
"""Rows of one call that have at most so many bytes together are joined, whatever their size."""
# A join lets nobody else run, so larger columns are copied row by row (2026-11-24).

RECORD_ATTEMPTS = 4
"""So often a record is read before an `OSError` makes it a defective one that is left out."""
# As `retries=3` makes a call. Defective records are few, so that it costs nothing (2026-11-27).

_SKIPS_LISTED = 100
"""So many records that are left out are named, in the log and in the list of a source."""
# A data set with one bad record in a hundred would fill a disk, and snapshots (2026-11-27).

logger = logging.getLogger("feeder")

Columns: TypeAlias = "tuple[NDArray[Any], ...] | Mapping[str, NDArray[Any]]"
OnError = Literal["raise", "skip"]

_T = TypeVar("_T")
_LASTING = (
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.ELOOP,
    errno.ENAMETOOLONG,
)  # fmt: skip
"""Errors that a file has until somebody mends it."""

_WHY_LENGTH = 300
"""So long may a reason be in a list: it may hold the record itself."""

JOIN_BYTES, _JOINED_BYTES = _RECORD_JOIN_BYTES, _JOINED_BYTES


@public("feeder.sources")
class Record(NamedTuple):
    """What a row was made of: a record of a source, in one of its passes."""

    source: str
    """The name that a mixture, or the number that `concat`, has for the source; of mixtures in
    mixtures from the outermost on, as "web/en". Empty if there is only one source."""
    number: int
    """Its number in the source, before any shuffle."""
    epoch: int
    """Which pass of the source it belongs to, from 0."""
    name: str
    """What errors call it, as a file and the place in it."""


@public("feeder.sources")
class Piece(NamedTuple):
    """What a packed row holds of a document: the record that this is, and which of its tokens."""

    source: str
    """As of `Record`."""
    number: int
    """As of `Record`."""
    epoch: int
    """As of `Record`."""
    name: str
    """As of `Record`."""
    start: int
    """Where it begins in the row."""
    stop: int
    """Where it ends in the row."""
    offset: int
    """Which token of the document the first one is, `bos` and `eos` counted."""


@public("feeder.sources")
class Seen(NamedTuple):
    """Where a record comes in a feed: a row of a batch."""

    step: int
    """The batch."""
    row: int
    """Which of its rows."""
    epoch: int
    """The epoch of the feed that the row belongs to."""
    queue: int
    """The queue, or device, that the batch goes to: that of a rank."""


@public("feeder.sources")
class RecordError(ValueError):
    """A record cannot be read, or does not fit the others. The message begins with its name."""


def masked_error(what: str) -> RecordError:
    """The error for a masked array: a column has no mask."""
    return RecordError(f"{what} has a mask, which would be lost: give filled()")


@public("feeder.sources")
class LeftOut(NamedTuple):
    """A defective record that was left out, and the call that read it first."""

    epoch: int
    """The epoch of the call."""
    call: int
    """Its index in the epoch."""
    name: str
    """What an error message calls the record, such as its file and the byte where it begins."""
    why: str
    """What is wrong with it."""


class _Now(local):
    """Which call the thread makes. Owner: the thread."""

    place: tuple[int, int] | None = (0, 0)
    """Its epoch and index; None where what is read is no row of it."""
    heard: list[tuple[Faults, str, str]] | None = None
    """What was left out, if somebody listens: who has noted it, its name, and why."""


NOW = _Now()


@contextmanager
def aside() -> Iterator[None]:
    """What is read within is no row of the call that the thread makes: what is left out there
    counts for nothing."""
    place, NOW.place = NOW.place, None
    try:
        yield
    finally:
        NOW.place = place


class ReadOnce:
    """Records that one call reads and others have rows of, too.

    Which call reads them depends on the pace of threads. So what was left out of them is noted for
    each call that has rows of them: the first one in the order of the stream counts.
    """

    def __init__(self, read: Callable[[], Any]) -> None:
        with aside():
            before, NOW.heard = NOW.heard, []
            try:
                self.value = read()
                """What was read."""
            finally:
                self._heard, NOW.heard = NOW.heard, before
        self._lock, self._is_counted = Lock(), False

    @property
    def has_left_out(self) -> bool:
        """Whether records were left out."""
        return bool(self._heard)

    def note(self) -> None:
        """The call that the thread makes has rows of these records."""
        if not self._heard or NOW.place is None:
            return
        with self._lock:
            is_first, self._is_counted = not self._is_counted, True
        for faults, name, reason in self._heard:
            found = LeftOut(*NOW.place, name, reason)
            if is_first:
                faults.leave_out(found)
            else:
                faults.count(0, [found])


def may_pass(error: Exception) -> bool:
    """Whether an error may be gone when the record is read again, as of a network."""
    return isinstance(error, OSError) and error.errno not in _LASTING


def why(error: Exception) -> str:
    """What is wrong with a record, as text: a log may keep what it is given, and an error keeps
    what raised it."""
    return (str(_reason_of(error)) or type(error).__name__)[:_WHY_LENGTH]


def _reason_of(error: Exception) -> Any:
    return (isinstance(error, OSError) and error.strerror) or error


class Faults:
    """What is done about defective records: raise, or leave out, count and list. Any thread.

    The list is bounded. It holds what the first calls have left out, so that of one stream it is
    the same for any number of threads and processes.
    """

    def __init__(self, on_error: OnError) -> None:
        if on_error not in get_args(OnError):
            raise ConfigError(f"on_error is {on_error!r}, expected one of {get_args(OnError)!r}")
        self.may_skip = on_error == "skip"
        """Whether defective records are left out."""
        self._lock = Lock()
        self._by_name: dict[str, LeftOut] = {}
        # The epoch in which each of these was counted last.
        self._counted: dict[str, int] = {}
        self.skipped = 0
        """Reads that were left out."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=Lock())

    @property
    def left_out(self) -> list[LeftOut]:
        """Records that were left out, in the order of the calls: the first ones."""
        with self._lock:
            return sorted(self._by_name.values())

    def attempt(self, read: Callable[[], _T]) -> _T:
        """What `read` returns. If records may be left out, an error that may pass, as of a network,
        is no defect yet: the record is read again."""
        # Otherwise the feed makes the whole call again, as often as `retries` says.
        for _ in range(RECORD_ATTEMPTS - 1 if self.may_skip else 0):
            try:
                return read()
            except OSError as error:
                if not may_pass(error):
                    raise
        return read()

    def handle(self, name: Callable[[int], str], index: int, error: Exception) -> None:
        """What reading one record raised: it is raised as a RecordError that names the record, or
        passed over."""
        # Called where it is caught, since a context manager for each record would take longer than
        # a small record. First ours, as a stop or a wrong option: no defect of a record.
        if isinstance(error, FeedError):
            raise error
        if isinstance(error, (ValueError, OSError)):
            self.report(name(index), error)
            return
        if isinstance(error, StopIteration):
            # Passed on, it would end the epoch, and the records that are left would be lost.
            raise RecordError(
                f"{name(index)}: raised StopIteration, which cannot end an epoch here"
            ) from error
        # Any other exception is a bug in the user's code: it goes on as it is, with the record's
        # name.
        error.add_note(f"while reading {name(index)}")
        raise error

    def report(self, name: str, error: Exception) -> None:
        """A record is defective."""
        if not self.may_skip:
            raise RecordError(f"{name}: {_reason_of(error)}") from error
        if NOW.heard is not None:
            NOW.heard.append((self, name, why(error)))
        if NOW.place is not None:
            self.leave_out(LeftOut(*NOW.place, name, why(error)))

    def leave_out(self, found: LeftOut, *, once: bool = True) -> None:
        """List and count a read that is left out, in an epoch `once` for each record; the first
        one of a record is told to the log."""
        name = found.name
        with self._lock:
            # A feed makes its first call twice, and a loader may read a record in two calls.
            self.skipped += not once or self._counted.get(name) != found.epoch
            is_new, number = self._keep(found), len(self._by_name)
            if name in self._by_name:
                self._counted[name] = found.epoch
        if is_new:
            logger.warning("left out %s: %s", name, found.why)
        if is_new and number == _SKIPS_LISTED:
            logger.warning("more records that are left out are counted alone: source.skipped")

    def count(self, num: int, found: Iterable[tuple[int, int, str, str]] = ()) -> None:
        """So many reads were left out, elsewhere or without a name; and these are known."""
        # `+=` is not one operation, and several fetchers skip at once.
        with self._lock:
            self.skipped += num
            for one in found:
                self._keep(LeftOut(*one))

    def _keep(self, found: LeftOut) -> bool:
        """Under the lock: list a record; whether there is a name more now."""
        listed, before = self._by_name, len(self._by_name)
        listed[found.name] = min(found, listed.get(found.name, found))
        if len(listed) > _SKIPS_LISTED:
            last = max(listed.values()).name
            del listed[last]
            self._counted.pop(last, None)
        return len(listed) > before


def empty_for(call: Call | None, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Memory for a column: the place of the call's rows where they lie together, else memory that
    came back, since fresh memory costs as much in page faults as the copy."""
    if has_place(call):
        array = call.empty(shape, dtype)
        if array.flags.c_contiguous:
            return array
    return POOL.empty(shape, dtype)


def has_place(call: Call | None) -> TypeGuard[Call]:
    """Whether the rows of a call have a place in their batch."""
    return call is not None and call.out is not None


def stack(
    rows: Sequence[NDArray[Any]], names: Callable[[int], str], column: str, cure: str = "",
    call: Call | None = None,
) -> NDArray[Any]:  # fmt: skip
    """Rows as one new array, in the place of the call's rows if there is one; `names` calls the
    i-th by its name. `cure` is what makes rows of different shapes alike.

    Raises:
        RecordError: a row has another shape or dtype than the first.
    """
    shape, dtype = rows[0].shape, rows[0].dtype
    # `count` compares in C, by identity first: nearly always the rows are alike.
    if (
        dtype.hasobject
        or [row.dtype for row in rows].count(dtype) < len(rows)
        or [row.shape for row in rows].count(shape) < len(rows)
    ):
        _refuse_unlike(rows, names, column, cure)
    if len(rows) * rows[0].nbytes <= _JOINED_BYTES and not has_place(call):
        try:
            return np.ndarray((len(rows), *shape), dtype, bytearray().join(rows))
        except (BufferError, ValueError, TypeError):
            pass  # Not contiguous, or of a dtype that the buffer protocol does not know.
    stacked = empty_for(call, (len(rows), *shape), dtype)
    copy_rows(stacked, octets(stacked), 0, 0, len(rows), [row[np.newaxis] for row in rows])
    return stacked


def _refuse_unlike(
    rows: Sequence[NDArray[Any]], names: Callable[[int], str], column: str, cure: str
) -> None:
    """Name the row that is not like the first, or holds Python objects."""
    shape, dtype = rows[0].shape, rows[0].dtype
    for i, row in enumerate(rows):
        if row.dtype.hasobject:
            is_none = row.ndim == 0 and row.item() is None
            what = "is None" if is_none else "holds Python objects"
            raise RecordError(f"{names(i)}: {column} {what}, expected numbers")
        if row.shape != shape or row.dtype != dtype:
            hint = cure if row.shape != shape else hint_of_strings(row.dtype, dtype)
            raise RecordError(
                f"{names(i)}: {column} is {row.dtype}{list(row.shape)}, {names(0)} has "
                f"{dtype}{list(shape)}: the rows of a batch must be alike{hint}"
            )


class EvenRows(Sequence[memoryview]):
    """The same stretch of records of equally many bytes, their bytes joined. Read-only."""

    def __init__(self, joined: bytes, record_bytes: int, start: int, stop: int) -> None:
        self._joined = joined
        self._record_bytes = record_bytes
        self._start, self._stop = start, stop

    def __len__(self) -> int:
        return len(self._joined) // self._record_bytes

    def __getitem__(self, i: Any) -> Any:
        at = range(0, len(self._joined), self._record_bytes)[i]
        return memoryview(self._joined)[at + self._start : at + self._stop]

    def octets(self) -> NDArray[np.uint8]:
        """The rows as an array of two axes, over the joined bytes."""
        shape = len(self), self._stop - self._start
        strides = self._record_bytes, 1
        return np.ndarray(shape, np.uint8, self._joined, self._start, strides)

    def tolist(self) -> list[bytes]:
        """Each row."""
        rows: list[bytes] = self._rows().tolist()
        return rows

    def tobytes(self) -> bytes:
        """The rows, joined."""
        return self._rows().tobytes()

    def _rows(self) -> NDArray[np.void]:
        # NumPy keeps the GIL while it makes objects of an array, and it is quick with voids.
        row = np.dtype((np.void, self._stop - self._start))
        return np.ndarray((len(self),), row, self._joined, self._start, (self._record_bytes,))


def stack_bytes(
    rows: Sequence[memoryview], shape: tuple[int, ...], call: Call | None = None
) -> NDArray[np.uint8]:
    """Rows of equally many bytes as one new array, each row of the shape; in the place of the
    call's rows if there is one."""
    size = len(rows[0])
    if size <= JOIN_BYTES and not isinstance(rows, EvenRows) and not has_place(call):
        return np.ndarray((len(rows), *shape), np.uint8, bytearray().join(rows))
    stacked = empty_for(call, (len(rows), *shape), np.uint8)
    if isinstance(rows, EvenRows):
        stacked.reshape(len(rows), size)[:] = rows.octets()
    elif (cut := _as_cut(rows, size)) is not None:
        # NumPy gives up the GIL once for all that lie evenly, and for each of the others.
        target, start = stacked.reshape(len(rows), size), 0
        for array in cut.arrays():
            target[start : start + len(array)] = array
            start += len(array)
    else:
        flat = octets(stacked)
        for i, row in enumerate(rows):
            flat[i * size : (i + 1) * size] = row
    return stacked


def _as_cut(rows: Sequence[memoryview], size: int) -> MappedCut | None:
    """Rows by where they lie, where they are worth it."""
    if isinstance(rows, MappedCut):
        return rows
    if size >= DROP_GIL_BYTES or (size >= LARGE_BYTES and MappedRows.of(rows[:3]).are_one_run):
        return MappedRows.of(rows).cut(0, size)
    return None


def octets(array: NDArray[Any]) -> memoryview:
    """The memory of a contiguous array as bytes."""
    return array.reshape(-1).view(np.uint8).data
