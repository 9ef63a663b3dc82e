"""`seed=`: each epoch shuffled in constant memory, alike in each run."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Sampler

from feeder.workers.sources.orders.options import plan_order

_LIST = 4096
"""Indices that are computed at once."""


class SeededSampler(Sampler[int]):
    """The orders of a seed, one after the other, as sources have them. Owned by the thread that
    iterates."""

    def __init__(self, dataset: Sized, seed: int) -> None:
        self._dataset, self.seed = dataset, seed
        self.epoch, self._at = 0, 0
        self._is_loaded = False
        self.is_told = False
        """Whether the next `set_epoch` is about the loop that has begun."""

    def __iter__(self) -> Iterator[int]:
        num = len(self._dataset)
        order: Any = plan_order(num, {"random_shuffle": True}, list_shuffle=False).make(self.seed)
        self.leave()
        epoch, at, self._is_loaded = self.epoch, self._at, False
        while at < num:
            for index in order.indices(epoch, at, min(num, at + _LIST)).tolist():
                # Whatever it is told in the loop is about the next one.
                at = self._at = at + 1
                yield index
        self.epoch, self._at = epoch + 1, 0

    def __len__(self) -> int:
        return len(self._dataset)

    def set_epoch(self, epoch: int) -> None:
        """Have the next loop be this epoch; the rest of a loop that a state has left stays, since a
        trainer that reads a short loader again within its own epoch tells only that."""
        if self.is_told:
            self.is_told = False
        elif not (self._is_loaded and self._at):
            self.epoch, self._at = epoch, 0

    def go_on(self) -> None:
        """The loop at hand is the rest of one. If nothing is left of it, the trainer may still tell
        its epoch, which is not the next one's."""
        self.is_told |= not self._at

    def leave(self) -> None:
        """The loop at hand has been left: the next one is another epoch."""
        if self._at and not self._is_loaded:
            self.epoch, self._at = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"epoch": self.epoch, "at": self._at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go there."""
        self.epoch, self._at = state_dict["epoch"], state_dict["at"]
        self._is_loaded = True
