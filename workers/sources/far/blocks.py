"""Blocks of objects, on the disk of a host or in memory, brought before they are used.

An object is cut into blocks of `BLOCK_BYTES`; a smaller object is one block. Blocks have numbers in
this process, those of one object one after the other, so that neighbours are told by their numbers
and brought by one request. `Foresight` says which blocks are wanted and which are not; `Folder`
keeps them for all processes of the host; here threads bring them, and readers wait for them.

Nothing here is needed for a byte to be right: a block that is not there, for whatever reason, is
brought when it is read.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from resource import RLIMIT_NOFILE, getrlimit
from threading import Condition, Event, Lock, Thread
from typing import NamedTuple, TypeVar
from weakref import WeakSet

import xxhash

from feeder.workers.errors import StorageError
from feeder.workers.forks import call_in_child
from feeder.workers.sources.far.folder import (
    INDEXES,
    NEVER,
    Claim,
    Folder,
    OpenBlock,
    Outcome,
    room_of,
)
from feeder.workers.sources.far.foresight import FOREVER, Foresight
from feeder.workers.sources.far.objects import RETRY_S, Counts, Known, Objects
from feeder.workers.sources.far.waits import waiting

BLOCK_BYTES = 1 << 20
"""Bytes of a block."""
# A request of 1 MiB takes 10 ms at 100 MB/s, less than its way there and back; a shuffle of small
# records brings as little beside them as may be (2026-11-28, by arithmetic).

_RUN_BLOCKS = 8
"""So many blocks that lie together are brought by one request at most."""

_COMING_BLOCKS = 16
"""While so many blocks are on their way no other is asked for in advance, so that what is needed
first has the way for itself.
"""
# 16 MiB are what 300 MB/s bring in 50 ms. In order at 50 ms and 100 MB/s, with 32 MiB ahead, 1.1
# times the fewest requests; without the limits 2.3 times, and 1.4 with half of what is ahead asked
# for at once (2026-11-28).

_GROWING_BLOCKS = 6
"""While so many are, none is that may yet be asked for with its neighbour."""
# So that with 16 MiB ahead, as in a cache of 64 MiB, a whole run is wanted by then: 1.1 to 1.3
# times the fewest requests, and 2.0 to 2.2 times with 8. With 3, and 8 MiB ahead, an epoch took
# 1.2 times as long at 250 ms and 20 MB/s (2026-11-29).

_REQUESTS = 16
"""So many requests are under way at once, beside those of readers that wait."""

_AHEAD_BYTES = 64 * BLOCK_BYTES
"""So many bytes are brought before they are used, and at most a quarter of the room."""

_FIRST_STEPS = 4
"""A reader begins with so many steps: threads make the first calls in any order."""

_MEMORY_BYTES = 256 * BLOCK_BYTES
"""The room of a cache that is in memory, and of one whose disk fails."""

_OPEN_BLOCKS = max(64, min(256, getrlimit(RLIMIT_NOFILE)[0] // 4))
"""So many blocks on the disk are held open."""
# To open one takes 8 us, to read 4 kB of it 2 us (2026-11-28). What others removed takes room until
# it is closed, so there are few.

_RANK_S = 1.0
"""The table is told at most once in so many seconds when blocks are used next."""

_RANK_BLOCKS = 512
"""Of so many blocks at most."""
# One takes 20 us in a table of 100,000 (2026-11-28), so all take 1 % of a core. Of 300,000 blocks
# each is told before the table thinks that nobody waits for it, by arithmetic.

_WAIT_S = 2 * RETRY_S
"""A reader waits so long for a block that is on its way. A request ends before."""

_T = TypeVar("_T")
logger = logging.getLogger("feeder")


class _Object(NamedTuple):
    known: Known
    objects: Objects
    first: int
    """The number of its first block."""

    @property
    def num_blocks(self) -> int:
        return -(-self.known.size // BLOCK_BYTES)

    def span(self, number: int) -> tuple[int, int]:
        """The bytes of a block."""
        start = (number - self.first) * BLOCK_BYTES
        return start, min(start + BLOCK_BYTES, self.known.size)

    def key(self, number: int) -> str:
        """What the block is called on the disk, in any process."""
        url, size, tag = self.known
        text = f"{url}\n{size}\n{tag}\n{BLOCK_BYTES}\n{number - self.first}"
        return str(xxhash.xxh3_128_hexdigest(text.encode()))


class Blocks:
    """The blocks of one cache in this process. Any thread; what changes is under the
    lock."""

    def __init__(self, path: str, max_bytes: int) -> None:
        """`path` is the folder, and empty for a cache in memory.

        Raises:
            ConfigError: the folder holds other files.
        """
        self.path, self.max_bytes = path, max_bytes or _MEMORY_BYTES
        self._folder = Folder(path, max_bytes) if path else None
        self._memory_room = min(self.max_bytes, _MEMORY_BYTES)
        self._has_told = False
        self._next_number = 0
        self._objects: list[_Object] = []
        self._known: dict[Known, _Object] = {}
        self._registered = 0
        self._counted: WeakSet[Objects] = WeakSet()
        self._start()
        try:
            if self._folder is not None:
                self._folder.prepare()
        except OSError as error:
            self._degrade(error)

    def _start(self) -> None:
        """What a process has for itself, and a forked child anew."""
        if self._folder is not None:
            self._folder.begin()
        self._lock = Lock()
        self._idle = Condition(self._lock)
        self._closed = Event()
        self._ahead_room = min(_AHEAD_BYTES, self.max_bytes // 4)
        self._foresight = Foresight(self.max_bytes, self._ahead_room)
        # Readers that are gone, of which the machine is told by whoever holds the lock next. The
        # garbage collector adds them, in a thread that may hold the lock.
        self._gone: deque[Hashable] = deque()
        self._pending: OrderedDict[int, None] = OrderedDict()
        # Those of them that a step which has begun uses.
        self._urgent: set[int] = set()
        # Those that a reader begins with. While they come nothing is asked for in advance, since it
        # would share the way.
        self._first: set[int] = set()
        self._coming: dict[int, Future[bytes | None]] = {}
        self._memory: OrderedDict[int, bytes] = OrderedDict()
        self._memory_bytes = 0
        # Of the blocks on the disk those that were opened last.
        self._open: OrderedDict[int, OpenBlock] = OrderedDict()
        # What the files of those that were opened were when their checksums were compared.
        self._compared: dict[int, tuple[int, int, int]] = {}
        # Blocks of steps that are over, of which the table is not told yet when they are used next.
        self._used: dict[int, None] = {}
        self._active = 0
        self._dues: dict[int, float] = {}
        self._told_dues = self._began = time.monotonic()
        self._keys: tuple[float, set[str]] = (-_RANK_S, set())
        self._hits = self._waits = 0
        call_in_child(self._start)

    def close(self, wait_s: float = _WAIT_S) -> None:
        """Ask for nothing more in advance, and wait for what is on its way, so long at most."""
        self._closed.set()
        with self._idle:
            self._pending.clear()
            self._urgent.clear()
            self._first.clear()
            self._idle.wait_for(lambda: not self._active, wait_s)
        if self._folder is not None:
            self._folder.close()
        with self._lock:
            self._open.clear()

    def stats(self) -> dict[str, int]:
        """Figures of this process, as `Cache` tells them."""
        totals = dict.fromkeys(Counts.__dataclass_fields__, 0)
        for objects in [*self._counted]:
            for name, value in objects.counts().items():
                totals[name] += value
        with self._lock:
            self._obey()
            return {
                **totals, "hits": self._hits, "waits": self._waits,
                "wanted": len(self._pending), "coming": len(self._coming),
                "ahead": self._foresight.ahead,
            }  # fmt: skip

    @property
    def indexes(self) -> str:
        """The folder for indexes of objects; empty if there is none."""
        if self._folder is None or self._has_told:
            return ""
        folder = os.path.join(self.path, INDEXES)
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
        return folder

    # ---- objects and their blocks

    def register(self, found: Iterable[Known], objects: Objects) -> None:
        """Objects that will be read; `objects` makes their requests."""
        found = [*found]
        there = self._keys_there() if any(known not in self._known for known in found) else set()
        with self._lock:
            self._counted.add(objects)
            for known in found:
                if (one := self._known.get(known)) is not None:
                    # The credentials that were given last are good.
                    self._known[known] = one._replace(objects=objects)
                    if one.num_blocks:
                        self._objects[self._place(one.first)] = self._known[known]
                    continue
                one = _Object(known, objects, self._next_number)
                self._next_number += one.num_blocks
                self._objects.append(one)
                self._known[known] = one
                numbers = range(one.first, one.first + one.num_blocks)
                if numbers:
                    # All but the last are of one size.
                    self._registered += len(numbers[1:]) * self._size(one, numbers[0])
                    self._registered += self._size(one, numbers[-1])
                if there:
                    self._foresight.has(
                        (n, self._size(one, n)) for n in numbers if one.key(n) in there
                    )

    def _keys_there(self) -> set[str]:
        """Keys of blocks on the disk, at most a second old: thousands of objects are registered
        one after the other in a new process."""
        now = time.monotonic()
        if self._folder is not None and now - self._keys[0] > _RANK_S:
            try:
                self._keys = now, self._folder.keys()
            except OSError as error:
                self._degrade(error)
        return self._keys[1]

    def blocks(self, known: Known, start: int, stop: int) -> range:
        """The numbers of the blocks in which bytes of an object lie."""
        first = self._known[known].first
        return range(first + start // BLOCK_BYTES, first + -(-stop // BLOCK_BYTES))

    def read(self, known: Known, start: int, stop: int) -> bytes:
        """Bytes of an object; fewer at its end.

        Raises:
            StorageError: it cannot be read, or is another one by now.
        """
        stop = min(stop, known.size)
        return self.read_each(known, (start,), stop - start)[0] if start < stop else b""

    def read_each(self, known: Known, starts: Iterable[int], size: int) -> list[bytes]:
        """So many bytes of an object from each place on; fewer at its end. Raises as `read`
        does."""
        first, opened, parts = self._known[known].first, self._open.get, []
        for start in starts:
            place, at = divmod(start, BLOCK_BYTES)
            data, block = b"", opened(first + place)
            if block is not None and at + size <= BLOCK_BYTES:
                # What most reads come to, so no lock is taken, and a hit may be left uncounted.
                try:
                    data = block.pread(at, size)
                except OSError:
                    data = b""
            if len(data) == size:
                self._hits += 1
            else:
                # It is not open, or was cut.
                data = self._read(known, start, min(start + size, known.size))
            parts.append(data)
        return parts

    def _read(self, known: Known, start: int, stop: int) -> bytes:
        one = self._known[known]
        numbers, parts = self.blocks(known, start, stop), []
        missing = [n for n in numbers if not self._is_there(one, n)] if len(numbers) > 1 else []
        if mine := [n for n in missing if self._take(n)]:
            with waiting():
                self._bring(one, mine, is_waited_for=True)
        for number in numbers:
            begin, end = one.span(number)
            parts.append(self._part(one, number, max(start, begin) - begin, min(stop, end) - begin))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _take(self, number: int) -> Future[bytes | None] | None:
        """Take it upon oneself to bring a block that is read, if nobody does and it is not in
        memory."""
        with self._lock:
            if number in self._coming or number in self._memory:
                return None
            if number not in self._pending:
                # If it was thought to be there, another process has removed it.
                self._foresight.lost(number)
            self._no_longer_wanted(number)
            coming = self._coming[number] = Future()
            return coming

    def _is_there(self, one: _Object, number: int) -> bool:
        return number in self._memory or (
            self._folder is not None and self._folder.has(one.key(number))
        )

    def _part(self, one: _Object, number: int, start: int, stop: int) -> bytes:
        has_waited = False
        while True:
            with self._lock:
                data = self._memory.get(number)
                coming = self._coming.get(number)
            if data is None and coming is None:
                data = self._from_disk(one, number, start, stop)
                if data is not None:
                    self._count(has_waited)
                    return data
                # It may be there and not be readable, so nobody asks whether it is there.
                if coming := self._take(number):
                    with waiting():
                        self._bring(one, [number], is_waited_for=True)
            if data is None and coming is not None:
                has_waited = True
                try:
                    with waiting():
                        data = coming.result(_WAIT_S)
                except TimeoutError as error:
                    raise StorageError(
                        f"{one.known.url!r} cannot be read: a request of it does not end"
                    ) from error
            if data is not None:
                self._count(has_waited)
                return data[start:stop]

    def _count(self, has_waited: bool) -> None:
        with self._lock:
            self._waits += has_waited
            self._hits += not has_waited

    def _from_disk(self, one: _Object, number: int, start: int, stop: int) -> bytes | None:
        if self._folder is None:
            return None
        block, key = self._open.get(number), ""
        try:
            if block is None:
                key = one.key(number)
                block = self._opened(self._folder, key, number)
            if block is None:
                return None
            data = block.read(start, stop)
        except OSError as error:
            self._cannot_read(self._folder, one.key(number), number, block, error)
            return None
        if key:
            with self._lock:
                self._open[number] = block
                if len(self._open) > _OPEN_BLOCKS:
                    self._open.popitem(last=False)
                self._used[number] = None
            self._tell_dues(at_once=False)
        return data

    def _opened(self, folder: Folder, key: str, number: int) -> OpenBlock | None:
        """A block on the disk, if it is as it was when this process compared it, or is whole."""
        known = self._compared.get(number)
        if known is None:
            folder._compared.discard(key)
        block = self._with_files(partial(folder.open, key))
        if block is not None and known is not None and block.state != known:
            folder._compared.discard(key)
            block = folder.open(key)
        if block is not None:
            self._compared[number] = block.state
        return block

    def _cannot_read(
        self, folder: Folder, key: str, number: int, block: OpenBlock | None, error: OSError
    ) -> None:
        """A block is there and does not open, or it opens and was cut: such a one goes."""
        if block is not None:
            with self._lock:
                self._open.pop(number, None)
                self._compared.pop(number, None)
            try:
                folder.remove(key, block._file)
                return
            except OSError as another:
                error = another
        self._degrade(error)

    # ---- what is read in advance

    def foresee(self, reader: Hashable, blocks: Iterable[tuple[Known, int, int]]) -> int:
        """The next step of a reader: parts of objects that it uses, each with where it begins and
        ends. Returns how many uses are foreseen."""
        numbers: dict[int, int] = {}
        for known, start, stop in blocks:
            one = self._known[known]
            for number in self.blocks(known, start, min(stop, known.size)):
                if number not in numbers:
                    numbers[number] = self._size(one, number)
        with self._lock:
            self._close_gone()
            self._foresight.foresee(reader, [*numbers.items()])
            return self._foresight.foreseen(reader)

    def enter(self, reader: Hashable, step: int) -> None:
        """A step of a reader begins."""
        with self._lock:
            self._foresight.enter(reader, step)
            self._obey()
            urgent = [n for n in self._foresight.blocks_of(reader, step) if n in self._pending]
            self._urgent.update(urgent)
            self._first.update(urgent if step < _FIRST_STEPS else ())
            for number in reversed(urgent):
                self._pending.move_to_end(number, last=False)
        self._pump()

    def leave(self, reader: Hashable, steps: Iterable[int]) -> None:
        """Steps of a reader are over."""
        with self._lock:
            for step in steps:
                if self._folder is not None:
                    self._used.update(dict.fromkeys(self._foresight.blocks_of(reader, step)))
                self._foresight.leave(reader, step)
        self._pump()
        self._tell_dues(at_once=False)

    def knows(self, reader: Hashable) -> bool:
        """Whether steps of a reader are foreseen."""
        with self._lock:
            self._close_gone()
            return self._foresight.knows(reader)

    def has_all(self) -> bool:
        """Whether every block of what is registered is there, and stays: nothing need be foreseen.
        It takes no lock, for each call asks."""
        is_on_its_way = self._pending or self._coming
        return self._foresight.kept == self._registered and not is_on_its_way

    def forget(self, reader: Hashable) -> None:
        """A reader will use nothing more. It takes no lock, so a finalizer may call it."""
        self._gone.append(reader)

    def _close_gone(self) -> None:
        """Under the lock."""
        while self._gone:
            self._foresight.close(self._gone.popleft())

    @staticmethod
    def _size(one: _Object, number: int) -> int:
        """The room that a block takes."""
        start, stop = one.span(number)
        return room_of(stop - start)

    def _object(self, number: int) -> _Object:
        return self._objects[self._place(number)]

    def _place(self, number: int) -> int:
        """Where the object of a block stands among all."""
        return bisect_right(self._objects, number, key=lambda one: one.first) - 1

    def _obey(self) -> None:
        """Under the lock: take what is wanted and what is not."""
        self._close_gone()
        told = self._foresight.instructions()
        for number in told.let_go:
            self._no_longer_wanted(number)
            self._first.discard(number)
            self._drop_from_memory(number)
            self._open.pop(number, None)
            self._compared.pop(number, None)
            self._used.pop(number, None)
            self._dues[number] = NEVER
        for number in told.bring:
            self._dues.pop(number, None)
            self._pending[number] = None

    def _no_longer_wanted(self, number: int) -> None:
        self._pending.pop(number, None)
        self._urgent.discard(number)

    def _pump(self) -> None:
        """Start a thread if something is to be brought and there may be one more."""
        with self._lock:
            self._obey()
            if self._closed.is_set() or self._active >= _REQUESTS or not self._next_wanted():
                return
            self._active += 1
        try:
            Thread(target=self.run_requests, name="feeder far", daemon=True).start()
        except RuntimeError:
            # The process may have no more threads. Those that run bring it, or whoever reads it.
            with self._lock:
                self._active -= 1
                self._idle.notify_all()

    def run_requests(self) -> None:
        """Bring blocks until none is wanted. Thread body."""
        while run := self._next_run():
            # Another thread, for what else is wanted.
            self._pump()
            try:
                self._bring(self._object(run[0]), run, is_waited_for=False)
            except Exception:
                # Whoever needs a block of these brings it, and is told.
                logger.debug("a block cannot be brought in advance", exc_info=True)

    def _next_run(self) -> list[int]:
        """Blocks that lie together and are wanted, the most urgent one among them; none, and the
        thread is at its end."""
        while True:
            with self._lock:
                run = [] if self._closed.is_set() else self._next_wanted()
                if not run:
                    self._active -= 1
                    self._idle.notify_all()
                    return []
                one = self._object(run[0])
                mine = [n for n in run if n not in self._coming and n not in self._memory]
                for number in run:
                    del self._pending[number]
                # At once: a reader that finds a block neither wanted nor coming thinks it removed.
                self._coming.update((number, Future()) for number in mine)
                self._urgent.difference_update(run)
                self._first.difference_update({*run} - {*mine})
            there = [n for n in mine if self._is_there(one, n)]
            for number in there:
                self._arrived(number, None)
            with self._lock:
                self._used.update(dict.fromkeys(there))
            if missing := [n for n in mine if n not in there]:
                return missing

    def _next_wanted(self) -> list[int]:
        """Under the lock: blocks to bring next by one request; none if nothing is to be brought
        now."""
        if self._first and not self._urgent:
            return []
        first, num_coming = next(iter(self._pending), None), len(self._coming)
        if first is None:
            return []
        run = self._run_around(first)
        if self._urgent.isdisjoint(run):
            # What is wanted next may lie beside what was wanted last.
            may_grow = len(run) < _RUN_BLOCKS and next(reversed(self._pending)) in run
            if num_coming >= (_GROWING_BLOCKS if may_grow else _COMING_BLOCKS):
                return []
            if run[-1] + 1 < self._stretch(first).stop and self._is_well_ahead():
                return []
        return run

    def _is_well_ahead(self) -> bool:
        """Under the lock: whether nearly all that is ahead is here, so that nothing is late if it
        is asked for when its neighbours are: a reader that is slower than the store would have each
        block asked for by itself, as soon as there is room for it."""
        size, readers = room_of(BLOCK_BYTES), self._foresight.num_readers
        is_here = self._foresight.ahead - size * (len(self._pending) + len(self._coming))
        # Of several readers one may stand still, and what is here may be its part.
        has_room = self._ahead_room >= 2 * _RUN_BLOCKS * BLOCK_BYTES * readers
        return has_room and is_here >= self._ahead_room - max(
            _RUN_BLOCKS * size, self._ahead_room // 4
        )

    def _stretch(self, number: int) -> range:
        """Under the lock: the blocks that may be brought by one request with one of them. They
        begin at multiples of their number, so that few runs are cut."""
        one = self._object(number)
        start = number - (number - one.first) % _RUN_BLOCKS
        return range(start, min(start + _RUN_BLOCKS, one.first + one.num_blocks))

    def _run_around(self, first: int) -> list[int]:
        """Under the lock: wanted blocks that lie together with one of them. What somebody waits for
        does not wait for others: none comes before it, and, as a reader begins, none after it, for
        which its other calls would wait."""
        before = self._urgent if first in self._urgent else self._pending
        after = self._urgent if first in self._first else self._pending
        stretch, run = self._stretch(first), [first]
        while run[0] - 1 in stretch and run[0] - 1 in before:
            run.insert(0, run[0] - 1)
        while run[-1] + 1 in stretch and run[-1] + 1 in after:
            run.append(run[-1] + 1)
        return run

    # ---- bringing

    def _bring(self, one: _Object, numbers: Sequence[int], *, is_waited_for: bool) -> None:
        """Bring blocks that this thread has begun, by as few requests as may be. Raises what the
        first request that fails raises; its readers are told the same."""
        claims: dict[int, Claim | None] = {}
        left = set(numbers)
        try:
            self._tell_dues(at_once=True)
            for number in numbers:
                outcome = self._claim(one, number)
                is_free = isinstance(outcome, Claim) or outcome is None
                # One that is there and that a reader waits for is one that it could not read.
                if not (is_free or is_waited_for):
                    if outcome is Outcome.FULL:
                        with self._lock:
                            self._foresight.lost(number)
                    self._arrived(number, None)
                    left.discard(number)
                else:
                    claims[number] = outcome if isinstance(outcome, Claim) else None
            for run in _runs(claims):
                waiting = iter(run)

                def arrived(data: bytes, waiting: Iterator[int] = waiting) -> None:
                    number = next(waiting)
                    self._store(number, claims.pop(number), data)
                    self._arrived(number, data)
                    left.discard(number)
                    self._pump()

                start, stop = one.span(run[0])[0], one.span(run[-1])[1]
                one.objects.bring(one.known, start, stop, BLOCK_BYTES, arrived)
        except BaseException as error:
            self._failed(left, error)
            raise
        finally:
            for claim in claims.values():
                if claim is not None:
                    claim.drop()

    def _claim(self, one: _Object, number: int) -> Claim | Outcome | None:
        if self._folder is None:
            return None
        with self._lock:
            due = self._due(number)
        try:
            start, stop = one.span(number)
            name = f"{one.known.url}#{number - one.first}"
            claim = partial(self._folder.claim, one.key(number), stop - start, name, due)
            return self._with_files(claim)
        except OSError as error:
            self._degrade(error)
            return None

    def _store(self, number: int, claim: Claim | None, data: bytes) -> None:
        if claim is not None:
            try:
                claim.write(data)
                return
            except OSError as error:
                self._degrade(error)
        with self._lock:
            self._drop_from_memory(number)
            self._memory[number] = data
            self._memory_bytes += len(data)
            while self._memory_bytes > self._memory_room:
                farthest = max(self._memory, key=self._foresight.distance)
                self._drop_from_memory(farthest)
                self._foresight.lost(farthest)

    def _drop_from_memory(self, number: int) -> None:
        self._memory_bytes -= len(self._memory.pop(number, b""))

    def _arrived(self, number: int, data: bytes | None) -> None:
        with self._lock:
            future = self._coming.pop(number)
            self._first.discard(number)
        future.set_result(data)

    def _failed(self, numbers: Iterable[int], error: BaseException) -> None:
        if not isinstance(error, Exception):
            error = StorageError("reading was interrupted")
        with self._lock:
            futures = [self._coming.pop(number) for number in numbers]
            self._first.difference_update(numbers)
            for number in numbers:
                self._foresight.lost(number)
        for future in futures:
            future.set_exception(error)

    # ---- the disk

    def _due(self, number: int) -> float:
        """Under the lock: when a block is used next, by the pace so far."""
        distance = self._foresight.distance(number)
        if distance == FOREVER:
            # Nobody has foreseen it: somebody reads it now.
            return time.time()
        pace_s = (time.monotonic() - self._began) / max(1, self._foresight.used)
        return time.time() + max(0.0, distance) * pace_s

    def _tell_dues(self, *, at_once: bool) -> None:
        """Tell the table which blocks nobody needs, and now and then when others are used next."""
        now = time.monotonic()
        with self._lock:
            is_time = now - self._told_dues > _RANK_S
            if self._folder is None or not (at_once or is_time):
                return
            dues, self._dues = self._dues, {}
            if is_time:
                self._told_dues = now
                for number in [*islice(self._used, _RANK_BLOCKS)]:
                    del self._used[number]
                    dues.setdefault(number, self._due(number))
        if not dues:
            return
        try:
            self._folder.rank((self._object(n).key(n), due) for n, due in dues.items())
        except OSError as error:
            self._degrade(error)

    def _with_files(self, open_one: Callable[[], _T]) -> _T:
        """What opens a file returns; if the process has too many, those that are held make room."""
        try:
            return open_one()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        with self._lock:
            held, self._open = self._open, OrderedDict()
        held.clear()
        return open_one()

    def _degrade(self, error: OSError) -> None:
        """The disk fails: say so once. Each block is tried anew, and kept in memory if it fails."""
        if not self._has_told:
            self._has_told = True
            logger.warning(
                "the cache %r cannot be written (%s): blocks are kept in memory, at most %d MiB",
                self.path, error.strerror or error, self._memory_room >> 20,
            )  # fmt: skip


def _runs(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Numbers that follow one another, together, as many as one request brings."""
    for _, group in groupby(enumerate(sorted(numbers)), key=lambda each: each[1] - each[0]):
        run = [number for _, number in group]
        yield from (run[at : at + _RUN_BLOCKS] for at in range(0, len(run), _RUN_BLOCKS))
