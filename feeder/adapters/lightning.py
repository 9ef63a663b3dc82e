"""Lightning: loaders whose place goes into the trainer's checkpoints.

```python
trainer = lightning.Trainer(callbacks=[FeedCheckpoint()])
trainer.fit(model, DataLoader(dataset, batch_size=32, shuffle=True), ckpt_path="last")
```

A trainer by itself saves the states of its loaders, but loads none at an epoch's end, and not what
it combines them by; it takes a batch ahead of a loader without length, keeps what one rank says for
all, and keeps no generators, from which PyTorch's orders are drawn. `FeedCheckpoint` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from feeder.adapters.torch import DataLoader as DataLoader
from feeder.adapters.torch import FeedLoader as FeedLoader
from feeder.adapters.torch import trainers
from feeder.adapters.torch.shuffle import SeededSampler
from feeder.errors import ResumeError


class FeedCheckpoint(Callback):
    """Keeps in Lightning's checkpoints where the training loaders stand, as of the last batch that
    was trained on, and the generators of the process. Owned by the trainer's thread.

    All ranks save together. A checkpoint of another number of ranks is gone on from if all ranks
    share one order, as by `DistributedSampler`; else it raises `ResumeError`.
    """

    def __init__(self) -> None:
        self._trainer: Trainer | None = None
        self._said: list[Any] | None = None
        # Of the moment of the checkpoint, where a batch is read before that.
        self._draws: dict[str, str] | None = None
        # From a checkpoint of an epoch's last batch.
        self._begins_epoch = self._begins_twice = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Have the states loaded just before the trainer begins to read."""
        self._trainer = trainer
        if stage == "fit":
            loop, load = trainer.fit_loop, type(trainer.fit_loop)._load_combined_loader_states

            def load_all() -> None:
                load(loop)
                self._load(loop)

            loop._load_combined_loader_states = load_all

    def state_dict(self) -> dict[str, Any]:
        """What all ranks say; empty without one of feeder's loaders."""
        trainer = self._trainer
        if trainer is None or not isinstance(trainer.fit_loop._combined_loader, _Noted):
            return {} if self._said is None else {"ranks": self._said}
        loop = trainer.fit_loop
        is_over = loop._combined_loader.has_ended or loop.epoch_loop._num_ready_batches_reached()
        epoch, batches = loop.epoch_progress.current, loop.epoch_loop.batch_progress.current
        is_ending = is_over and epoch.processed < epoch.started
        said = {
            **loop._combined_loader.used(is_over=is_over),
            # The one that the trainer tells samplers next.
            "epoch": epoch.processed + is_ending,
            # It makes new loaders before it reads again.
            "are_new": is_over and trainer.reload_dataloaders_every_n_epochs == 1,
            # In a validation after the last batch: the trainer then reads nothing before it ends
            # the epoch.
            "is_hollow": is_ending and batches.completed == batches.ready,
            "is_ended": is_ending and batches.completed < batches.ready,
            "draws": trainers.draws(),
        }
        return {"ranks": trainers.of_all_ranks(said)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep states until there are loaders."""
        if "loaders" in state_dict:
            # Of an older feeder.
            state_dict = {"ranks": [state_dict]}
        self._said = state_dict.get("ranks")

    def _load(self, loop: Any) -> None:
        """The trainer has made its loaders, and reads next."""
        combined = loop._combined_loader
        loaders = _loaders(combined)
        if not loaders:
            return
        if type(combined) is CombinedLoader:
            combined.__class__ = _Noted
        elif not isinstance(combined, _Noted):
            combined.__class__ = type(type(combined).__name__, (_Noted, type(combined)), {})
        for loader in loaders:
            loader._is_kept = True
        said = None if self._said is None else trainers.of_this_rank(self._said, "loaders")
        combined.begin(said)
        self._said = None
        if said is None:
            if self._begins_twice:
                combined.begin_first()
                for loader in loaders:
                    _set_sampler_epoch(loader, loop.epoch_progress.current.processed)
            self._begins_twice = False
            return
        if len(said["loaders"]) != len(loaders):
            raise ResumeError(f"{len(said['loaders'])} loaders then, {len(loaders)} now")
        # Over loaders that it makes for an epoch Lightning begins two loops, but one if it resumes.
        self._begins_twice = said.get("are_new", False) and not said["is_hollow"]
        for loader, state in zip(loaders, said["loaders"], strict=True):
            if not said.get("are_new"):
                trainers.load_state(loader, state)
            _tell(loader, said.get("epoch", 0))
        draws, before = said.get("draws"), said.get("draws_before")
        if draws is not None:
            trainers.set_draws(before or draws)
        self._draws = before and draws
        self._begins_epoch = said.get("is_ended", False)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What was read ahead has been read ahead again."""
        if self._draws is not None:
            trainers.set_draws(self._draws)
        if self._begins_epoch:
            # Of an epoch without length Lightning would count on from its last batch; and it
            # counts one more now.
            trainer.fit_loop.epoch_loop.batch_progress.current.completed = -1
        self._draws, self._begins_epoch = None, False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note how many batches the trainer has ahead of this one."""
        combined = trainer.fit_loop._combined_loader
        if isinstance(combined, _Noted):
            combined.ahead = len(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def _loaders(combined: Any) -> list[Any]:
    return [one for one in combined.flattened if isinstance(one, trainers.LOADERS)]


def _tell(loader: Any, epoch: int) -> None:
    """What Lightning tells samplers: of a later epoch before it begins a loop, and if it resumes
    once more after that."""
    _set_sampler_epoch(loader, epoch)
    sampler = getattr(loader, "sampler", None)
    if epoch and isinstance(sampler, SeededSampler):
        sampler.is_told = True


class _Noted(CombinedLoader):
    """The trainer's own combination, which notes where its loaders stand. Owned by its thread."""

    ahead: int | None
    """Batches that the trainer has ahead of the one it trains on; None before the first."""
    has_ended: bool

    def begin(self, resumed: dict[str, Any] | None) -> None:
        """Go on from a place with the next loop, and note from then on."""
        self._resumed, self._ends = resumed, list[_End]()
        self._unread = list[tuple[FeedLoader, Any]]()
        self._places, self._takes_ahead = deque[dict[str, Any]](maxlen=2), False
        self.ahead, self.has_ended = None, False

    def begin_first(self) -> None:
        """A loop that is left at once, as the trainer begins it."""
        iter(self)
        if self._takes_ahead:
            next(self, None)

    def __iter__(self) -> Any:
        resumed, loaders = self._resumed, self.flattened
        for loader, mark in self._unread:
            # Its loop begins with a batch; but this one has ended by another loader's end.
            loader._is_begun |= loader._mark is mark
        are_over = (resumed and resumed.get("are_over")) or [False] * len(loaders)
        # What has ended in this epoch gives no more: to begin it would begin its next loop.
        if resumed and (resumed.get("is_hollow") or resumed.get("are_new")):
            are_over = [True] * len(loaders)
        begun = loaders
        if all(are_over) or self._mode == "max_size":
            begun = [() if over else one for one, over in zip(loaders, are_over, strict=True)]
            self._flattened = begun
        super().__iter__()
        found: Any = self._iterator
        self._flattened = found.iterables = loaders
        if self._mode == "max_size_cycle":
            found._consumed = list(are_over)
        self.begin(None)
        self._ends = list(map(_End, found.iterators, are_over))
        if resumed:
            own = [one for one in begun if isinstance(one, FeedLoader)]
            self._unread = [(one, one._mark) for one in own if one._mark.place.index]
        found.iterators = list(self._ends)
        self._takes_ahead = sized_len(self) is None
        self._note()
        return self

    def __next__(self) -> Any:
        if self._places:
            self._places[-1]["draws_before"] = trainers.draws()
        try:
            return super().__next__()
        except StopIteration:
            self.has_ended = True
            raise
        finally:
            self._note()

    def _note(self) -> None:
        if self._takes_ahead:
            self._places.append(self._place(is_over=False))

    def _place(self, *, is_over: bool) -> dict[str, Any]:
        return {
            "loaders": [trainers.state_of(one, is_over=is_over) for one in _loaders(self)],
            "are_over": [not is_over and end.is_over for end in self._ends],
        }

    def used(self, *, is_over: bool) -> dict[str, Any]:
        """Where the loaders stood after the last batch that was trained on."""
        if is_over or not self._places or self.ahead == 0:
            return self._place(is_over=is_over)
        return self._places[0]


class _End(Iterator[Any]):
    """Notes that an iterator has ended."""

    def __init__(self, iterator: Any, is_over: bool) -> None:
        self._iterator, self.is_over = iterator, is_over

    def __next__(self) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self.is_over = True
            raise
