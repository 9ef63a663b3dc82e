"""Hugging Face: a `Trainer` that goes on with the next batch, wherever it was stopped.

```python
trainer = FeedTrainer(model, args, train_loader=DataLoader(dataset, batch_size=8, shuffle=True))
trainer.train(resume_from_checkpoint=True)
```

The position is in each checkpoint's `trainer_state.json`: so the two are whole together. A trainer
that goes on counts the batches that it had, and would read them again to pass them over: here the
loader stands behind them already, and nothing is read twice.
"""

from __future__ import annotations

import sys
from typing import Any

import transformers.trainer
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length

from feeder.adapters.loop import from_plain, to_plain
from feeder.adapters.torch import DataLoader as DataLoader
from feeder.adapters.torch import FeedLoader as FeedLoader
from feeder.adapters.torch import trainers
from feeder.errors import ConfigError

_skip_by_reading = transformers.trainer.skip_first_batches


def _skip(loader: Any, num_batches: int = 0) -> Any:
    """What a loader has behind so many batches: of one that stands there, the loader."""
    if getattr(loader, "__dict__", {}).pop("_stands_there", False):
        return loader
    return _skip_by_reading(loader, num_batches)


# By this name a Trainer looks it up.
transformers.trainer.skip_first_batches = _skip


class FeedCallback(TrainerCallback, ExportableState):
    """Keeps the position of the training loader in the trainer's checkpoints, and loads it where
    the trainer goes on. Owned by the trainer's thread.

    Give it to a Trainer by `callbacks=`; `get_train_dataloader` is to return the loader itself.
    """

    def __init__(self) -> None:
        self._loader: Any = None
        self._control: Any = None
        # The epoch of the trainer and the batches of it that it has trained on; and where it goes
        # on, as its next epoch.
        self._epoch, self._batches = 0, 0
        self._next: tuple[int, int] | None = (0, 0)
        self._has_ended = False
        # What all ranks said when it was told to save.
        self._said: list[Any] | None = None

    # ---- where the trainer is

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the trainer count what it had; it is not read again."""
        args.ignore_data_skip = False

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count from its first batch on, or from where the trainer goes on."""
        self._epoch, self._batches = self._next or (self._epoch + 1, 0)
        self._next, self._has_ended, self._control = None, False, control

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch, and the step goes on."""
        self._batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last batch of a step."""
        self._batches += 1
        self._gather(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The trainer takes no more of the loop, unless it takes no more at all."""
        self._has_ended = not control.should_training_stop
        self._gather(state, control)
        vars(self._loader).pop("_stands_there", None)

    def _is_over(self) -> bool:
        if self._has_ended or (self._control is not None and self._control.should_epoch_stop):
            return True
        return has_length(self._loader) and self._batches >= len(self._loader)

    # ---- the state

    def _place(self) -> dict[str, Any]:
        is_over = self._is_over()
        said = trainers.state_of(self._loader, is_over=is_over)
        at = {"epoch": self._epoch + 1, "batches": 0} if is_over else {
            "epoch": self._epoch, "batches": self._batches}  # fmt: skip
        if isinstance(self._loader, FeedLoader):
            said["state"] = to_plain(said["state"])
        return {**said, **at}

    def _gather(self, state: Any, control: Any) -> None:
        """All ranks say where they stand, at once; one of them saves."""
        self._control, self._said = control, None
        if control.should_save:
            self._said = trainers.of_all_ranks(self._place())

    def state(self) -> dict[str, Any]:
        """The position as JSON has it."""
        if self._loader is None:
            return {"args": {}, "attributes": {}}
        return {"args": {}, "attributes": {"ranks": self._said or [self._place()]}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Load the position of the checkpoint that the trainer goes on from."""
        self._loader, self._said = train_dataloader, None
        self._next, self._has_ended = (0, 0), False
        if not state.global_step:
            return
        said = position_of(state)
        if said is None:
            raise ConfigError(
                f"the checkpoint of step {state.global_step} has no position of a loader: it "
                "was saved without FeedCallback, or by an older feeder"
            )
        if args.ignore_data_skip:
            raise ConfigError(
                "ignore_data_skip is True, expected False: with FeedCallback nothing is read again,"
                " and the Trainer is to count the batches that it had"
            )
        if isinstance(self._loader, FeedLoader):
            said["state"] = from_plain(said["state"])
        trainers.load_state(self._loader, said)
        self._next = said["epoch"], said["batches"]
        self._loader._stands_there = True


def position_of(state: Any) -> dict[str, Any] | None:
    """What a trainer's state has of this rank; None if it was saved without `FeedCallback`."""
    found = (state.stateful_callbacks.get(FeedCallback.__name__) or {}).get("attributes", {})
    if "ranks" in found:
        return dict(trainers.of_this_rank(found["ranks"], "state"))
    # Of an older feeder, which has no epochs: the trainer counts.
    return None


class FeedTrainer(Trainer):
    """A trainer whose training batches come from `train_loader`; all else is Trainer's. The thread
    that trains owns it.

    Args:
        train_loader: Gives the batches, as dicts of the model's inputs.
    """

    def __init__(self, *arguments: Any, train_loader: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._train_loader = train_loader
        self.args.ignore_data_skip = False
        self.add_callback(FeedCallback())
        self._has_draws = False

    def get_train_dataloader(self) -> Any:
        """The loader."""
        return self._train_loader

    def _init_training_state(self, *arguments: Any, **named: Any) -> Any:
        # Trainer counts by a length, which there may not be, or which may be wrong.
        counted = super()._init_training_state(*arguments, **named)
        said = position_of(self.state) if self.state.global_step else None
        if self.state.global_step >= self.state.max_steps > 0:
            return sys.maxsize, 0  # It would train one step more.
        return counted if said is None else (said["epoch"], said["batches"])

    def _run_epoch(self, *arguments: Any, **named: Any) -> Any:
        checkpoint = named.get("resume_from_checkpoint")
        is_first = named.get("epoch") == named.get("epochs_trained")
        if checkpoint is not None and is_first and named.get("steps_trained_in_current_epoch"):
            # Before it reads; Trainer does so behind the batches that it would pass over.
            super()._load_rng_state(checkpoint)
            self._has_draws = True
        return super()._run_epoch(*arguments, **named)

    def _load_rng_state(self, checkpoint: Any) -> None:
        if not self._has_draws:
            super()._load_rng_state(checkpoint)
        self._has_draws = False
