"""DALI's `random_shuffle`: records are drawn at random from a window that slides over them.

The records of all epochs make one stream. A window of F slots (`initial_fill`) begins with the
first F of them. At step t the draw is among the records of the current epoch that the window
holds; the drawn one changes places with slot t % F, comes out, and the stream's next record takes
that slot. The numbers are libstdc++'s `minstd_rand0`, which runs on through the epochs, so step t
follows from all steps before it. What one step needs is small, though: t, the generator's state
and the window. That is a checkpoint; a cursor is one.

Where a window is too large to be carried about, t and the state of an earlier step are the cursor.
From there a window is walked of which nothing is known at first: each step puts one known record
into it and takes one at random out, so that after some thirty times its slots all is known. (A
slot is missed by n F draws with a probability of about exp(-n), and there are F slots.)
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from threading import Lock
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ResumeError
from feeder.workers.fetch.calls import MAX_BYTES
from feeder.workers.sources.orders.libstdcxx import (
    MAX_DRAWS,
    draw_minstd,
    is_minstd_state,
    seed_minstd,
)
from feeder.workers.sources.orders.orders import Order
from feeder.workers.sources.orders.sharding import Sharding

_BLOCK = 4096
_MAX_BLOCKS = 32
"""A windowed shuffle is walked in blocks of so many steps, and so many blocks are kept."""
# Calls that come a little out of order find their answer made. A block takes about 1 ms
# (2026-11-21).

_MAX_CHECKPOINTS = 64
_MAX_CHECKPOINT_BYTES = 16 * 1024 * 1024
"""So many states of the walk are kept to go back to, with so many bytes together."""
# They bound memory; not measured (2026-11-21).

_SPARE_ROUNDS = 16
"""A window is found by walking so many rounds of it back."""
# Something of it stays unknown with a probability of exp(-16). Then all is walked: slower, and
# the same answer (2026-11-22).

_MAX_STATES = 1024
"""So many states of the random engine are kept, for the cursors of positions to come."""
# They bound memory; not measured (2026-11-22).

_HEADER = struct.Struct("<QIB")
_UNKNOWN = -1

_Kept = TypeVar("_Kept")


class Window:
    """The window at one step of the stream: F slots, each with a place in the stream. Guarded
    by the lock of its `WindowedOrder`."""

    __slots__ = ("_sharding", "_slots", "state", "step")

    def __init__(self, sharding: Sharding, step: int, state: int, slots: list[int]) -> None:
        self._sharding = sharding
        self.step = step
        """The number of the next step."""
        self.state = state
        """The generator's state before it."""
        self._slots = slots

    @classmethod
    def first(cls, sharding: Sharding, fill: int, seed: int) -> Window:
        """The window before the first step."""
        return cls(sharding, 0, seed_minstd(seed), list(range(fill)))

    @classmethod
    def unknown(cls, sharding: Sharding, fill: int, step: int, state: int) -> Window:
        """A window of which it is not known what it holds."""
        return cls(sharding, step, state, [_UNKNOWN] * fill)

    @property
    def is_known(self) -> bool:
        """Whether it is known what all slots hold."""
        return min(self._slots) != _UNKNOWN

    def walk(self, count: int) -> NDArray[np.int64]:
        """Take `count` steps; the places in the stream of the records that come out."""
        parts, stop = [], self.step + count
        while self.step < stop:
            sharding = self._sharding
            end = sharding.offset(sharding.epoch_at(self.step) + 1)
            # Not across an epoch's end: the bound of the draws changes there.
            while self.step < min(stop, end):
                parts.append(self._walk(min(stop, end) - self.step, end))
        return np.concatenate(parts)

    def _walk(self, count: int, end: int) -> NDArray[np.int64]:
        """Take up to `count` steps of the epoch whose records end at `end`."""
        fill, step = len(self._slots), self.step
        count = min(count, MAX_DRAWS)
        steps = np.arange(step, step + count, dtype=np.uint64)
        # Records of later epochs lie behind those of the current one: they are not drawn.
        draws, self.state = draw_minstd(self.state, np.minimum(np.uint64(end) - steps, fill))
        here = steps % np.uint64(fill)
        there = (here + draws) % np.uint64(fill)
        slots, out = self._slots, []
        refill = range(step + fill, step + fill + count)
        for i, k, place in zip(here.tolist(), there.tolist(), refill, strict=True):
            # In this order: a record that is drawn at its own slot is replaced by the newest.
            out.append(slots[k])
            slots[k] = slots[i]
            slots[i] = place
        self.step += count
        return np.array(out, dtype=np.int64)

    def __bytes__(self) -> bytes:
        """The window as bytes. A slot is written as how far it lies behind the newest one, in as
        few bytes as that takes: 2 at a window of 1,024, and 4 are enough for four billion."""
        fill = len(self._slots)
        # Small numbers, though places grow without end: a cursor keeps its size.
        behind = self.step + fill - 1 - np.array(self._slots, dtype=np.int64)
        width = (int(behind.max()).bit_length() + 7) // 8 or 1
        octets = behind.astype("<u8").view(np.uint8).reshape(fill, 8)[:, :width]
        return _HEADER.pack(self.step, self.state, width) + octets.tobytes()

    @classmethod
    def from_bytes(cls, sharding: Sharding, fill: int, data: bytes) -> Window:
        """The reverse of `bytes(window)`.

        Raises:
            ResumeError: the bytes are not a window of this sharding and size.
        """
        if len(data) < _HEADER.size:
            raise ResumeError(f"cursor has {len(data)} bytes, expected {_HEADER.size} or more")
        step, state, width = _HEADER.unpack_from(data)
        # Bytes of a cursor come from a file or a peer: nothing is computed with them before they
        # are checked.
        if step >> 62 or not 1 <= width <= 8 or len(data) != _HEADER.size + fill * width:
            raise ResumeError(
                f"cursor has {len(data)} bytes, which is not a window of initial_fill {fill}"
            )
        octets = np.zeros((fill, 8), dtype=np.uint8)
        octets[:, :width] = np.frombuffer(data, np.uint8, offset=_HEADER.size).reshape(fill, width)
        slots = step + fill - 1 - octets.view("<i8").reshape(fill)
        if not is_minstd_state(state) or step % _BLOCK or not _is_window(sharding, step, slots):
            raise ResumeError("cursor holds a window that this order never has")
        return cls(sharding, step, state, slots.tolist())


def _is_window(sharding: Sharding, step: int, slots: NDArray[np.int64]) -> bool:
    """Whether slots hold different places, none of a past epoch and all newer ones in turn."""
    fill = len(slots)
    current = sharding.epoch_at(step)
    first, end = sharding.offset(current), sharding.offset(current + 1)
    ordered = np.sort(slots)
    if ordered[0] < first or ordered[-1] >= step + fill or (np.diff(ordered) == 0).any():
        return False
    # Those of later epochs have not been drawn from, so each still lies where it was put.
    later = np.arange(max(end, step), step + fill, dtype=np.int64)
    return bool(np.array_equal(slots[later % fill], later))


def encode_step(step: int, state: int) -> bytes:
    """The cursor of a window that is too large to be written down: a step before it, and the
    generator's state there."""
    return _HEADER.pack(step, state, 0)


class WindowedOrder(Order):
    """DALI's `random_shuffle` with its `initial_fill` and `seed`.

    Blocks of steps that were asked for lately are kept, and checkpoints from which the others are
    walked again. In order a position costs about 0.2 µs; out of order it costs a walk from the
    nearest checkpoint before it, of 4,096 steps or about as many as the window has slots.
    Checkpoints lie at fixed steps, so a cursor depends on the position alone. `listing` is what
    DALI's readers of files draw from in place of the sorted records. Its lock guards all that is
    kept; any thread asks.
    """

    is_computed = False

    def __init__(
        self,
        sharding: Sharding,
        fill: int,
        seed: int,
        listing: NDArray[np.int64] | None = None,
    ) -> None:
        super().__init__(sharding)
        self._fill = fill
        self._seed = seed
        self._listing = listing
        # Writing down a window takes as long as walking a sixth as many steps as it has slots.
        self._stride = -(-fill // _BLOCK) * _BLOCK
        rounds = math.log(fill) + _SPARE_ROUNDS
        # So many steps before a window that is too large begins the walk that leads to it.
        self._behind = math.ceil(fill * rounds / self._stride) * self._stride
        self._states: OrderedDict[int, int] = OrderedDict()
        self._head = Window.first(sharding, fill, seed)
        self._blocks: OrderedDict[int, NDArray[np.int64]] = OrderedDict()
        self._checkpoints: OrderedDict[int, bytes] = OrderedDict()
        self._lock = Lock()

    def indices(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        offset, first = self.sharding.offset(epoch), self.sharding.first(epoch)
        with self._lock:
            records = self._places(offset + start, offset + stop) + (first - offset)
        return records if self._listing is None else self._listing[records]

    def _places(self, start: int, stop: int) -> NDArray[np.int64]:
        parts = []
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            base = number * _BLOCK
            parts.append(self._block(number)[max(start - base, 0) : stop - base])
        return np.concatenate(parts) if len(parts) != 1 else parts[0]

    def _block(self, number: int) -> NDArray[np.int64]:
        if number in self._blocks:
            return self._blocks[number]
        self._approach(number * _BLOCK)
        while self._head.step < number * _BLOCK:
            self._advance()
        return self._advance()

    def _advance(self) -> NDArray[np.int64]:
        """Walk the head through one block, and keep what came out."""
        step = self._head.step
        if step % self._stride == 0:
            self._note_state(self._head)
            if step not in self._checkpoints:
                self._keep(step, bytes(self._head))
        block = self._head.walk(_BLOCK)
        self._blocks[step // _BLOCK] = block
        if len(self._blocks) > _MAX_BLOCKS:
            self._blocks.popitem(last=False)
        return block

    def _approach(self, step: int) -> None:
        """Put the head at the nearest place that is known and not after `step`."""
        known = max((at for at in self._checkpoints if at <= step), default=0)
        if known <= self._head.step <= step:
            return
        if known:
            window = Window.from_bytes(self.sharding, self._fill, self._checkpoints[known])
        else:
            window = Window.first(self.sharding, self._fill, self._seed)
        self._head = window

    def _keep(self, step: int, checkpoint: bytes) -> None:
        self._checkpoints[step] = checkpoint
        limit = min(_MAX_CHECKPOINTS, max(2, _MAX_CHECKPOINT_BYTES // len(checkpoint)))
        if len(self._checkpoints) > limit:
            self._checkpoints.popitem(last=False)

    def _note_state(self, window: Window) -> None:
        self._states[window.step] = window.state
        if len(self._states) > _MAX_STATES:
            self._states.popitem(last=False)

    def cursor(self, epoch: int, position: int) -> bytes:
        """The checkpoint at or before a position: 13 bytes and 2 to 4 per slot, or 13 in all where
        that is too much for a token."""
        step = (self.sharding.offset(epoch) + position) // self._stride * self._stride
        if step == 0:
            return b""
        with self._lock:
            checkpoint = self._at_hand(step, self._checkpoints)
            if len(checkpoint) <= MAX_BYTES:
                return checkpoint
            begin = step - self._behind
            if begin <= 0:
                return b""
            return encode_step(begin, self._at_hand(begin, self._states))

    def _at_hand(self, step: int, kept: OrderedDict[int, _Kept]) -> _Kept:
        """What is kept of a step that a walk keeps something of; walked to, if need be."""
        if step not in kept:
            self._block(step // _BLOCK)
        if step not in kept:
            # The block was at hand, the rest no longer.
            self._blocks.clear()
            self._block(step // _BLOCK)
        return kept[step]

    def seek(self, cursor: bytes) -> None:
        if not cursor:
            return
        window = self._unknown(cursor)
        with self._lock:
            if window is None:
                window = Window.from_bytes(self.sharding, self._fill, cursor)
            elif self._get_to_know(window):
                cursor = bytes(window)
            else:
                return  # The first call walks from the beginning.
            self._keep(window.step, cursor)
            self._head = window

    def _unknown(self, cursor: bytes) -> Window | None:
        """The window that a cursor without one stands for; None where there is one."""
        if len(cursor) != _HEADER.size or cursor[-1]:
            return None
        step, state, _ = _HEADER.unpack(cursor)
        if step >> 62 or step % self._stride or not is_minstd_state(state):
            raise ResumeError("cursor holds a step that this order does not begin at")
        return Window.unknown(self.sharding, self._fill, step, state)

    def _get_to_know(self, window: Window) -> bool:
        """Walk until it is known what a window holds; False where it is not."""
        stop = window.step + self._behind
        while window.step < stop:
            self._note_state(window)
            window.walk(self._stride)
        return window.is_known
