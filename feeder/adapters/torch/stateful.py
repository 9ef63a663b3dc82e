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
        # What an iterable said before it was first read, if it said something; and whether another
        # state was loaded into it since.
        self._initial: list[Any] | None = None
        self._is_changed = False

    @property
    def is_kept(self) -> bool:
        """Whether somebody has a state."""
        return self._owner is not None

    def load(self, packed: bytes | None) -> None:
        """Load what is the data set's own; None for a loop that begins anew."""
        if self._is_iterable and self._initial is None:
            self._initial = self._ask()
        self._loaded = None if packed is None else self._states.unpack(packed)
        if self._loaded is None:
            if self._is_changed and self._initial:
                # What was loaded would stay: each epoch would be the rest of one.
                self._dataset.load_state_dict(self._initial[0])
            self._is_changed = False
        elif not self._loaded[0]:
            self._dataset.load_state_dict(self._loaded[1])
            self._is_changed = True

    def _ask(self) -> list[Any]:
        """What the data set says; nothing if it has a state only once it is iterated over."""
        with contextlib.suppress(Exception):
            if is_stateful(self._dataset):
                return [self._dataset.state_dict()]
        return []

    def begin(self, iterator: Any) -> None:
        """The data set is iterated over by it; None if it is read by index."""
        self._is_iterators = is_stateful(iterator)
        owner = iterator if self._is_iterators else self._dataset
        self._owner = owner if is_stateful(owner) else None
        if self._loaded is None or not self._loaded[0]:
            return
        if not self._is_iterators:
            raise ResumeError("the state has one of the data set's iterator, which takes none now")
        iterator.load_state_dict(self._loaded[1])

    def read(self, num: int) -> bytes | None:
        """What it says after so many batches of the loop; None if nobody has a state."""
        is_of_dataset = not self._is_iterators
        if self._owner is None or (self._is_iterable and is_of_dataset and not num):
            # An iterable that has given nothing may say where the loop before ended.
            return None
        packed: bytes = self._states.pack([self._is_iterators, self._owner.state_dict()])
        return packed
