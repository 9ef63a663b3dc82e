"""Writing a transcript beside the feeding: digests as steps are handed out, cells in groups.

A digest is made in the thread that is handed the batch, before that thread has it: nobody has
changed its rows, what was read ahead and never handed out is not told, and a batch that comes again
after an interrupt is told once. Cells are written some hundreds at a time, and all of them before a
position leaves the process: so a run that was killed finds in its transcript all steps before the
position that it goes on from.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any, NamedTuple

from feeder import durable
from feeder.checkpoint.transcript import (
    SUFFIX,
    Prefix,
    StepDigests,
    cells_of,
    damaged,
    file_name,
    head,
    parse,
    says_next,
    says_settings,
    says_step,
)
from feeder.errors import TranscriptError
from feeder.workers.fetch.threads import under_lock
from feeder.workers.stream.batch import Batch

logger = logging.getLogger("feeder")

_MOST_WAITING = 1024
"""Steps whose cells are written at once: 32 KB, and a hundredth of a second of 8 KB batches."""
# What flock raises on file systems without locks, as some network ones.
_NO_LOCKS = {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK}


class Start(NamedTuple):
    """Where a run begins to write."""

    step: int
    """The first step that no run before has handed out."""
    stride: int
    """Queues: so many steps lie between two of one queue."""
    then: Set[bytes]
    """The digests of the settings that a file of the run may have there: those of now, those in the
    position that it goes on from, and those before edits that lie there or behind, since an edit is
    often told only with the first step after it."""
    now: bytes
    """The digest of the settings in its own positions."""
    is_even: bool = True
    """Whether each queue has a batch of every round but the last: if none ends with an epoch."""


class _Told(NamedTuple):
    """What a file says, and the cells that belong behind it and are not written yet."""

    chain: Any
    """The running SHA-256 of the line and of what all cells say."""
    settings: bytes = b""
    """The settings that the last step had."""
    expected: int | None = None
    """The step that comes next, as a mark has said."""
    stride: int = 1
    last: int = -1
    """The last step of this run."""
    size: int = 0
    """Bytes of the file."""
    cells: bytes = b""


class Transcript:
    """The transcript of one queue.

    One thread begins it; the thread that reads the queue calls `note`. Any thread may call `flush`,
    `sync` and `close`. The steps that wait are a deque, which the reading thread fills; all else is
    guarded by the lock, and changes by one assignment at a time, since an interrupt may come
    between any two.
    """

    def __init__(self, folder: str, feed: str, stream: int, queue: int, replica: int = 0) -> None:
        self._folder, self._queue = folder, queue
        self._of_stream = file_name(feed, stream, 0).removesuffix(f"0{SUFFIX}")
        self._name = file_name(feed, stream, queue, replica)
        self.path = os.path.join(folder, self._name)
        """The file."""
        self._line = head(feed, stream, queue)
        self._digest = StepDigests().of
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._lock = threading.RLock()
        self._file: int | None = None
        self._told = _Told(None)
        self._start = Start(0, 1, set(), b"")

    # ---- begun

    @under_lock
    def begin(self, start: Start) -> None:
        """Go on in the file before the step that the run goes on with: what lies beyond is cut off.
        Raises `TranscriptError` if the file is of another run, damaged before that step, or written
        by somebody else."""
        with _named(self.path):
            self._make()
            file = _open(self.path)
            try:
                found = _cut(file, self.path, start)
                if not self._queue:
                    self._cut_others(start)
            except BaseException:
                os.close(file)
                raise
        settings = found.settings[-1][1] if found.settings else b""
        self._told = _Told(found.chain, settings, found.expected, found.stride, size=found.size)
        self._start, self._file = start, file
        # Also if it is dropped without a close.
        self._close_file = weakref.finalize(self, os.close, file)
        # Of rounds that end with an epoch nobody knows which of them had a batch for this queue.
        is_told = start.stride == 1 or start.is_even
        if is_told and found.expected is not None and found.expected < start.step:
            logger.warning(
                "the transcript %r ends before step %d, and the run goes on with step %d: the steps"
                " in between are missing", self.path, found.expected, start.step,
            )  # fmt: skip

    def _make(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        fs = durable.Fs()
        with (
            durable.opened(fs, fs.open_folder(self._folder)) as folder,
            contextlib.suppress(FileExistsError),
        ):
            # A file has its line from the start, whenever the process ends.
            durable.write(fs, folder, self._name, [self._line], replace=False)

    def _cut_others(self, start: Start) -> None:
        """Cut off the files of queues that there are no more: nobody else does."""
        pattern = re.compile(rf"{re.escape(self._of_stream)}(\d+)(\.\d+)?{re.escape(SUFFIX)}")
        for name in sorted(os.listdir(self._folder)):
            queue = pattern.fullmatch(name)
            if queue is not None and int(queue[1]) >= start.stride:
                path = os.path.join(self._folder, name)
                file = _open(path)
                try:
                    _cut(file, path, start)
                finally:
                    os.close(file)

    # ---- written

    def note(self, batch: Batch) -> None:
        """A batch is about to be handed out. It is told once, however often it is noted."""
        self._waiting.append((batch.step, self._digest(batch)))
        if len(self._waiting) >= _MOST_WAITING:
            self.flush()

    @under_lock
    def flush(self) -> None:
        """Write all steps that were noted: the end of this process does not lose them. Raises
        `TranscriptError`; they are kept then, and the next call writes them."""
        if self._file is None:
            return
        # The reading thread may add others meanwhile.
        num = len(self._waiting)
        self._told = self._after([self._waiting[i] for i in range(num)])
        for _ in range(num):
            self._waiting.popleft()
        cells, size = self._told.cells, self._told.size
        if cells:
            with _named(self.path):
                _write_at(self._file, cells, size)
            self._told = self._told._replace(cells=b"", size=size + len(cells))

    def _after(self, steps: list[tuple[int, bytes]]) -> _Told:
        """What is told after some steps."""
        chain, settings, expected, told_stride, last, size, cells = self._told
        now, stride = self._start.now, self._start.stride
        says: list[bytes] = []
        for step, digest in steps:
            # After an interrupt steps are here that were told already.
            if step <= last:
                continue
            if step != expected or told_stride != stride or settings != now:
                if settings != now:
                    says.append(says_settings(now))
                if (step, stride) != (expected, told_stride):
                    says.append(says_next(step, stride))
                settings, told_stride = now, stride
            says.append(digest if digest[0] else says_step(digest))
            last, expected = step, step + stride
        chain = chain.copy()
        cells += cells_of(chain, says)
        return _Told(chain, settings, expected, told_stride, last, size, cells)

    @property
    def settings(self) -> bytes:
        """The digest of the settings that positions have now."""
        return self._start.now

    @under_lock
    def go_on_as(self, now: bytes) -> None:
        """The run is edited: positions have these settings from here on, also before the next step.
        The thread that reads the queue says so. Raises `TranscriptError`; it is said again then."""
        self.flush()
        told = self._told
        if self._file is not None and told.settings != now:
            chain = told.chain.copy()
            cells = told.cells + cells_of(chain, [says_settings(now)])
            self._told = told._replace(chain=chain, settings=now, cells=cells)
            self.flush()
        self._start = self._start._replace(now=now)

    @under_lock
    def sync(self) -> None:
        """The same, and the loss of power does not lose them either."""
        self.flush()
        if self._file is not None:
            with _named(self.path):
                os.fsync(self._file)

    @under_lock
    def close(self) -> None:
        """Write what is left, and let go of the file; harmless when done before."""
        try:
            self.sync()
        finally:
            self._forget()

    def after_fork(self) -> None:
        """This is a forked child: the parent writes."""
        self._lock = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            self._file = None
            self._close_file()


# ---- Files


def _open(path: str) -> int:
    """Open a file that nobody else writes to."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return file
        os.close(file)
        if isinstance(error, BlockingIOError):
            raise TranscriptError(
                f"the transcript {path!r} is being written by another feed or process: give each "
                "run a folder of its own"
            ) from error
        raise
    return file


def _cut(file: int, path: str, start: Start) -> Prefix:
    """Cut a file off before a step, and return what is left of it."""
    data = Path(path).read_bytes()
    found = parse(data, path)
    num, settings = found.upto(start.step)
    if num == len(found.steps) and not found.was_cut_off:
        raise damaged(path, found)
    if settings and settings.isdisjoint(start.then):
        raise TranscriptError(
            f"the transcript {path!r} is of another run: at step {start.step} its feed had other "
            "settings than the position that this run goes on from; give another folder"
        )
    end = int(found.ends[num - 1]) if num else found.begins
    os.ftruncate(file, end)
    return parse(data[:end], path)


def _write_at(file: int, data: bytes, at: int) -> None:
    left = memoryview(data)
    while left:
        num = os.pwrite(file, left, at)
        left, at = left[num:], at + num


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TranscriptError(f"the transcript {path!r} cannot be written: {error}") from error
