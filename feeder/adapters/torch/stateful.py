"""The states of a user's data set or of its iterator, and when they are loaded.

A data set is told its state before it is iterated over, an iterator after that. An object that is
its own iterator is one: its `__iter__` may make what the state is about.
"""

from __future__ import annotations

import contextlib
from typing import Any

from feeder.adapters.torch.order import is_stateful
from feeder.errors import ResumeError


class DatasetState:
    """That of one data set, in one process. Owned by the thread that iterates."""

    def __init__(self, dataset: Any, states: Any, *, is_iterable: bool) -> None:
        """`states` makes bytes of a state, and the reverse."""
        self._dataset, self._states, self._is_iterable = dataset, states, is_iterable
        self._owner: Any = None
        self._is_iterators = False
        self._loaded: Any = None
        # What the data set said before a state was loaded into it.
        self._fresh: Any = None

    @property
    def is_kept(self) -> bool:
        """Whether somebody has a state."""
        return self._owner is not None

    def load(self, packed: bytes | None) -> None:
        """Load what is the data set's own; None for a loop that begins anew."""
        self._loaded = None if packed is None else self._states.unpack(packed)
        if self._loaded is None:
            if self._fresh is not None:
                # What was loaded would stay: each epoch would be the rest of one.
                self._dataset.load_state_dict(self._fresh[0])
                self._fresh = None
            return
        is_iterators, state = self._loaded
        if is_iterators:
            return
        if self._is_iterable:
            # Before it was iterated over it may have none.
            with contextlib.suppress(Exception):
                self._fresh = [self._dataset.state_dict()]
        self._dataset.load_state_dict(state)

    def begin(self, iterator: Any) -> None:
        """The data set is iterated over by it; None if it is read by index."""
        self._is_iterators = is_stateful(iterator)
        self._owner = (
            iterator
            if self._is_iterators
            else self._dataset
            if is_stateful(self._dataset)
            else None
        )
        if self._loaded is None or not self._loaded[0]:
            return
        if not self._is_iterators:
            raise ResumeError("the state has one of the data set's iterator, which takes none now")
        iterator.load_state_dict(self._loaded[1])

    def read(self) -> bytes | None:
        """What it says now; None if nobody has a state."""
        if self._owner is None:
            return None
        packed: bytes = self._states.pack([self._is_iterators, self._owner.state_dict()])
        return packed
