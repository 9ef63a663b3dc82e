"""The states of a user's data set or of its iterator, and when they are loaded.

A data set is told its state before it is iterated over, an iterator after that. An object that is
its own iterator is one: its `__iter__` may make what the state is about.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from feeder.adapters.torch.order import is_stateful
from feeder.errors import ResumeError

Kind = Literal["begin", "rest", "next"]
"""What a loop is that a loaded state bears upon: it begins with one, or it is the rest of one, or
no state was loaded since the loop before."""

_NOTHING = object()


class DatasetState:
    """That of one data set, in one process. Owned by the thread that iterates.

    Between two loops over an iterable its state may say how many loops it has had, or only that the
    loop before came to its end. And a state that was loaded may stay in an object, so that each
    later loop would be the rest of one. What the loop gives first tells, see `_Checked`.
    """

    def __init__(self, dataset: Any, states: Any, *, is_iterable: bool) -> None:
        """`states` makes bytes of a state, and the reverse."""
        self._dataset, self._states, self._is_iterable = dataset, states, is_iterable
        self._owner: Any = None
        self._is_iterators = False
        self._loaded: Any = None
        # What an iterable said before it was first read, if it said something.
        self._initial: bytes | None = None
        # What it said before this loop.
        self._between: bytes | None = None
        # Whether no loop was left early since it was begun.
        self._is_whole = True
        self._is_changed = False
        # What it said after the first sample since a state was loaded; None if it gave none.
        self._passed: bytes | None = None
        # Whether the rest of a loop was to be given, and nothing of it was.
        self._is_unread = False

    @property
    def is_kept(self) -> bool:
        """Whether somebody has a state."""
        return self._owner is not None

    def load(self, packed: bytes | None) -> None:
        """Load what is the data set's own; None for a loop that begins anew."""
        if self._is_iterable and self._initial is None:
            self._initial = self.between()
        self._loaded = None if packed is None else self._states.unpack(packed)
        if self._loaded is not None and not self._loaded[0]:
            self._dataset.load_state_dict(self._loaded[1])
            self._is_changed, self._passed = True, None
        self._between = packed or (self.between() if self._is_iterable else None)

    def between(self) -> bytes | None:
        """What the data set says between two loops; None if it has a state only once it is
        iterated over, and after a loop that was left, of which it may speak."""
        with contextlib.suppress(Exception):
            if self._is_whole and is_stateful(self._dataset):
                packed: bytes = self._states.pack([False, self._dataset.state_dict()])
                return packed
        return None

    def begin(self, iterator: Any, num: int = 0) -> Any:
        """The data set is iterated over by it, and so many batches were given before; None if it is
        read by index. Returns what to iterate over."""
        self._is_whole = False
        self._is_iterators = is_stateful(iterator)
        owner = iterator if self._is_iterators else self._dataset
        self._owner = owner if is_stateful(owner) else None
        if self._loaded is not None and self._loaded[0]:
            if not self._is_iterators:
                raise ResumeError("the state is one of the data set's iterator, which has none now")
            iterator.load_state_dict(self._loaded[1])
            return iterator
        if self._initial is None or (self._loaded is None and not self._is_changed):
            return iterator
        kind: Kind = "next" if self._loaded is None else "rest" if num else "begin"
        is_unread, self._is_unread = self._is_unread, kind == "rest"
        if kind == "next" and is_unread:
            # Nobody has taken what was loaded.
            return self.anew()
        return _Checked(self, iterator, kind)

    def end(self) -> None:
        """The loop has had all."""
        self._is_whole = True

    def anew(self) -> Iterator[Any]:
        """Iterate as if nothing was loaded."""
        assert self._initial is not None
        self._dataset.load_state_dict(self._states.unpack(self._initial)[1])
        self._is_changed = False
        return iter(self._dataset)

    def is_stale(self, kind: Kind, *, is_empty: bool) -> bool:
        """Whether a loop that has come to its first sample is to be begun anew: it has none, or it
        is where the one before was that began with a loaded state."""
        now = None if is_empty else self._states.pack(self._dataset.state_dict())
        is_stale = (is_empty and kind != "rest") or (kind == "next" and now == self._passed)
        self._passed, self._is_changed, self._is_unread = now, kind != "next", False
        return is_stale

    def read(self, num: int) -> bytes | None:
        """What it says after so many batches of the loop; None if nobody has a state."""
        if self._is_iterable and not num and not self._is_iterators:
            # An iterable that has given nothing may say where the loop before ended.
            return self._between
        if self._owner is None:
            return None
        packed: bytes = self._states.pack([self._is_iterators, self._owner.state_dict()])
        return packed


class _Checked:
    """An iterator over a data set into which a state was loaded, for this loop or for the one
    before: begun anew without it if that has stayed."""

    def __init__(self, state: DatasetState, iterator: Iterator[Any], kind: Kind) -> None:
        self._state, self._iterator, self._kind = state, iterator, kind
        self._is_first = True

    def __iter__(self) -> _Checked:
        return self

    def __next__(self) -> Any:
        if not self._is_first:
            return next(self._iterator)
        found = next(self._iterator, _NOTHING)
        self._is_first = False
        if self._state.is_stale(self._kind, is_empty=found is _NOTHING):
            self._iterator = self._state.anew()
            return next(self._iterator)
        if found is _NOTHING:
            raise StopIteration
        return found
