"""The states of a user's data set or of its iterator, and when they are loaded.

A data set is told its state before it is iterated over, an iterator after that. An object that is
its own iterator is one: its `__iter__` may make what the state is about.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Literal

from feeder.adapters.datasets import is_stateful
from feeder.errors import ResumeError

Kind = Literal["begin", "rest", "next", "unread"]
"""What a loop is that a loaded state bears upon: it begins with one; or is the rest of one; or it
comes after such a loop; or after the rest of one, of which nobody has read anything."""

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
        # What the loop before was, if a state was loaded for it; and of the rest of one, what the
        # data set said after its first sample: empty if it had none, None if it was not read.
        self._before: Kind | None = None
        self._passed: bytes | None = None

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
            self._before, self._passed = "begin", None
        if self._loaded is None:
            self._between = self.between() if self._is_iterable else None
        else:
            # False of a state that is one between two loops itself.
            self._between = packed if self._loaded[2] is False else self._loaded[2]

    def between(self) -> bytes | None:
        """What the data set says between two loops; None if it has a state only once it is
        iterated over. After a loop that was left, of which it may speak, what it said before."""
        if not self._is_whole:
            return self._between
        with contextlib.suppress(Exception):
            if is_stateful(self._dataset):
                packed: bytes = self._states.pack([False, self._dataset.state_dict(), False])
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
        if self._initial is None or self._before is None:
            return iterator
        kind: Kind
        if self._loaded is not None:
            kind = self._before = "rest" if num else "begin"
        else:
            kind = "unread" if self._before == "rest" and self._passed is None else "next"
        return _Checked(self, iterator, kind)

    def end(self) -> None:
        """The loop has had all."""
        self._is_whole = True

    def anew(self) -> Iterator[Iterator[Any]]:
        """Iterators over the data set as it was before the loop whose rest was loaded, and as it
        was at first."""
        for packed in filter(None, (self._between, self._initial)):
            self._dataset.load_state_dict(self._states.unpack(packed)[1])
            yield iter(self._dataset)

    def is_stale(self, kind: Kind, *, is_empty: bool) -> bool:
        """Whether a loop that has come to its first sample is to be begun anew: it has none, or it
        is where the one before was, which was the rest of one."""
        now = b"" if is_empty else self._states.pack(self._dataset.state_dict())
        is_stale = kind != "rest" and (is_empty or kind == "unread" or now == self._passed)
        self._before = kind if kind in ("begin", "rest") else None
        self._passed = now if kind == "rest" else None
        return is_stale

    def read(self, num: int) -> bytes | None:
        """What it says after so many batches of the loop; None if nobody has a state."""
        if self._is_iterable and not num and not self._is_iterators:
            # An iterable that has given nothing may say where the loop before ended.
            return self._between
        if self._owner is None:
            return None
        return self._pack(self._is_iterators, self._owner.state_dict())

    def _pack(self, is_iterators: bool, state: Any) -> bytes:
        # With what a loop began with, for the loop after one that is left.
        packed: bytes = self._states.pack([is_iterators, state, self._between])
        return packed


def has_shrunk() -> ResumeError:
    """An iterable that is read again comes to its end before the place that a state says."""
    return ResumeError("the iterable has fewer samples than it had given when the state was taken")


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
            for iterator in self._state.anew():
                self._iterator, found = iterator, next(iterator, _NOTHING)
                if found is not _NOTHING:
                    break
        if found is _NOTHING:
            raise StopIteration
        return found
