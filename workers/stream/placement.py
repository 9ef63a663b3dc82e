"""Places: which slot a batch gets before its calls are made, and which rows of it each call fills.

Where each call gives `rows_per_call` rows, call n of an epoch fills the n-th part of the epoch's
batches, whatever the calls before it give. So it may write there, and nothing is copied later.

`Plan` is the arithmetic. `Placement` takes slots ahead of the merge, and gives them to batches as
calls ask for their places. `Place` is what one call is given. An executor in another process asks
`Placement.place` before it sends a call, and writes into the same memory.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from feeder.workers.errors import FetchError
from feeder.workers.stream.batch import Call
from feeder.workers.stream.buffers import Arrays, OpenSlot, OpenSlots, Slot
from feeder.workers.stream.chunks import Schema, part_of

_SLOTS_KEPT = 2
"""So many slots of a device may be kept by the fetch function while slots are short."""
# Their memory is missing to the batches ahead. With two the calls wait no longer for slots that
# may never come back; not measured (2026-11-25).


class Plan(NamedTuple):
    """Which part of which batch each call of an epoch fills, from one call on."""

    epoch: int
    first_call: int
    """The call that a batch begins with."""
    first_turn: int
    """The turn of that batch."""
    calls_per_batch: int

    def of_call(self, call: int) -> tuple[int, int]:
        """The turn of the batch that a call belongs to, negative numbers before the first, and
        which of the batch's calls it is."""
        batches, part = divmod(call - self.first_call, self.calls_per_batch)
        return self.first_turn + batches, part

    def begin_of(self, turn: int) -> int:
        """The call that the batch of a turn begins with."""
        return self.first_call + (turn - self.first_turn) * self.calls_per_batch


class Place:
    """The rows of a slot that one call fills. The thread that makes the call owns it."""

    __slots__ = ("_axes", "_left", "_names", "arrays")

    def __init__(self, names: Sequence[str], axes: Sequence[int], arrays: Arrays) -> None:
        self.arrays = arrays
        """The rows of each column."""
        self._names, self._axes = names, axes
        # The columns that `find` has not given yet: two may be alike.
        self._left = list(range(len(arrays)))

    @property
    def out(self) -> dict[str, NDArray[Any]]:
        """The arrays by name."""
        return dict(zip(self._names, self.arrays, strict=True))

    def find(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any] | None:
        """The first column that is like this and was not given yet, all of its rows or the first
        ones; None where there is none."""
        # Of just this dtype: who asks for another byte order may write bytes, and not numbers.
        wanted = np.dtype(dtype)
        for i in self._left:
            array, axis = self.arrays[i], self._axes[i]
            if array.dtype != wanted or array.ndim != len(shape):
                continue
            if (*shape[:axis], *shape[axis + 1 :]) != (
                *array.shape[:axis], *array.shape[axis + 1 :],
            ):  # fmt: skip
                continue
            if shape[axis] <= array.shape[axis]:
                self._left.remove(i)
                return part_of(array, axis, 0, shape[axis])
        return None

    def close(self) -> None:
        """The call is over: who has kept the arrays can no longer write through them."""
        for array in self.arrays:
            array.flags.writeable = False


@contextmanager
def writing_to(place: Place, call: Call) -> Iterator[None]:
    """While this lasts, `call.out` and `call.empty` give memory of the place."""
    call._place = place
    try:
        yield
    finally:
        # The call may be kept, and must not keep a slot.
        call._place = None
        place.close()


class _Opened(NamedTuple):
    """A slot, and the arrays over it that calls write to."""

    slot: OpenSlot
    arrays: Arrays


class Placement:
    """The slots of the batches to come, and which call writes where.

    The thread that makes batches takes slots (`provide`), for batches in the order of the stream,
    so that the next batch of a device always has one. Fetchers ask for places, under the lock. All
    else is the merging thread's.
    """

    def __init__(
        self,
        schema: Schema,
        slots: OpenSlots,
        *,
        rows_per_call: int,
        batch_size: int,
        num_devices: int,
    ) -> None:
        self.rows_per_call = rows_per_call
        self.calls_per_batch = batch_size // rows_per_call
        self._schema, self._slots, self._batch_size = schema, slots, batch_size
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        # The turn of the next batch, and of the first that has no slot; the slots between them.
        self._turn = self._end = 0
        self._given: dict[int, _Opened] = {}
        # By device: slots that no batch has, and those that the fetch function still refers to.
        self._spare: list[list[_Opened]] = [[] for _ in range(num_devices)]
        self._kept: list[list[OpenSlot]] = [[] for _ in range(num_devices)]

    def plan(self, epoch: int, first_call: int, first_turn: int) -> Plan:
        """The plan of an epoch, or of the rest of it."""
        return Plan(epoch, first_call, first_turn, self.calls_per_batch)

    # ---- the thread that makes batches

    def begin(self, plan: Plan | None) -> None:
        """From now on calls fill batches like this; None where a batch does not begin with a call.
        All calls that were given a place before have returned."""
        with self._lock:
            for turn, opened in self._given.items():
                self._spare[self._device(turn)].append(opened)
            self._given.clear()
            self._plan = plan
            if plan is not None:
                self._turn = self._end = plan.first_turn

    def provide(self, most: int) -> bool:
        """Take slots for the next batches, at most so many; returns whether the next one has a slot
        or needs none yet. Raises what taking a slot raises, and `FetchError` where the fetch
        function keeps them all."""
        if self._plan is None or self._schema.columns is None:
            return True
        while self._end < self._turn + most:
            device = self._device(self._end)
            opened = self._spare[device].pop() if self._spare[device] else self._open(device)
            if opened is None:
                break
            with self._lock:
                self._given[self._end] = opened
                self._end += 1
        return self._end > self._turn

    def allowed(self, next_call: int) -> tuple[int, int] | None:
        """The epoch, and the first call of it that may not be made yet; None where any may. The
        merge waits for `next_call`."""
        plan = self._plan
        if plan is None:
            return None
        if self._schema.columns is None:
            # What is called before the first rows came has no place: as little as may be.
            return plan.epoch, max(plan.first_call + plan.calls_per_batch, next_call + 1)
        # After a call that gave fewer rows comes the epoch's end, or an error: that needs none.
        return plan.epoch, max(plan.begin_of(self._end), next_call + 1)

    def take(self, turn: int) -> Slot | None:
        """The slot of the next batch, whose turn this is; None where none is free."""
        if self._plan is not None:
            return self._given[turn].slot if self.provide(1) else None
        device, columns = self._device(turn), self._schema.columns
        if self._spare[device]:
            return self._spare[device].pop().slot
        assert columns is not None
        return self._slots.take_slot(device, columns, self._batch_size)

    def give_back(self, device: int) -> None:
        """An epoch has ended, and a batch is to be made that no call writes to: give back what no
        call writes to either."""
        for opened in self._spare[device]:
            self._slots.put_back(device, opened.slot)
        self._spare[device].clear()

    def pass_by(self, turn: int, slot: Slot | None) -> None:
        """The batch of this turn is made: in this slot, or in memory that is none."""
        if self._plan is None:
            return
        with self._lock:
            opened = self._given.pop(turn, None)
            self._turn = turn + 1
            self._end = max(self._end, self._turn)
        # Calls may have been given a slot that the batch does not lie in.
        if opened is not None and opened.slot is not slot:
            self._spare[self._device(turn)].append(opened)

    def forget(self, at_hand: Any) -> None:
        """Let go of all slots, and of the one that is being written; when nobody calls any more."""
        if at_hand is not None:
            at_hand.close()
        for opened in (*self._given.values(), *chain(*self._spare)):
            opened.slot.close()
        self._given.clear()
        self._spare = [[] for _ in self._spare]
        self._kept = [[] for _ in self._kept]
        self._plan = None

    def _open(self, device: int) -> _Opened | None:
        """A slot that nobody looks at; None where none is free."""
        columns, kept = self._schema.columns, self._kept[device]
        assert columns is not None
        if kept and (opened := self._reopen(kept)) is not None:
            return opened
        while True:
            slot: Any = self._slots.take_slot(device, columns, self._batch_size)
            if slot is None:
                if len(kept) < _SLOTS_KEPT:
                    return None
                # What looks kept may be garbage in a cycle.
                gc.collect()
                if (opened := self._reopen(kept)) is not None:
                    return opened
                raise FetchError(
                    f"the fetch function keeps what call.out or call.empty gave it in {len(kept)} "
                    "calls, and no memory is left for the next batch; keep a copy"
                )
            arrays = slot.open()
            if arrays is not None:
                return _Opened(slot, arrays)
            kept.append(slot)

    @staticmethod
    def _reopen(kept: list[OpenSlot]) -> _Opened | None:
        for slot in kept:
            if (arrays := slot.open()) is not None:
                kept.remove(slot)
                return _Opened(slot, arrays)
        return None

    # ---- fetchers

    def place(self, epoch: int, call: int) -> Place | None:
        """Where a call of an epoch writes its rows; None where that is not known yet, or no slot is
        there for it."""
        with self._lock:
            plan = self._plan
            if plan is None or plan.epoch != epoch or call < plan.first_call:
                return None
            turn, part = plan.of_call(call)
            opened = self._given.get(turn)
        if opened is None:
            return None
        names, axes, first = self._schema.names, self._schema.axes, part * self.rows_per_call
        stop = first + self.rows_per_call
        # New views for each call: those of a call that is over can no longer be written to.
        arrays = tuple(
            [part_of(a, axis, first, stop) for a, axis in zip(opened.arrays, axes, strict=True)]
        )
        return Place(names, axes, arrays)

    def _device(self, turn: int) -> int:
        return turn % len(self._spare)
