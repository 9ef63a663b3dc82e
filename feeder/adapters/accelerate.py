"""Accelerate: what `Accelerator.prepare` makes of a `DataLoader` keeps its place.

```python
loader = accelerator.prepare(DataLoader(dataset, batch_size=8, shuffle=True))
accelerator.save_state("state")  # the place of the last batch that was used is in it
```

`prepare` makes a loader of its own, which shares batches out to ranks, moves them, and reads one
ahead to know the last one. All that stays Accelerate's; what it reads from is a `DataLoader` of
feeder's again. Nothing is to be imported: a `DataLoader` asks for this when it is prepared.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import accelerate.accelerator
import torch
from accelerate.data_loader import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    SeedableRandomSampler,
)

from feeder.adapters.torch import DataLoader, trainers
from feeder.adapters.torch.callers import READ
from feeder.adapters.torch.generators import as_it_was
from feeder.adapters.torch.samplers import samplers_of
from feeder.errors import ConfigError


def install() -> None:
    """Have the loaders that Accelerate makes of `DataLoader`s keep their places, and `save_state`
    warn of others."""
    theirs = accelerate.accelerator
    make = theirs.prepare_data_loader
    if not isinstance(make, functools.partial):
        theirs.prepare_data_loader = functools.partial(_prepare, make)
        theirs.Accelerator.save_state = _telling(theirs.Accelerator.save_state)


def _telling(save: Callable[..., Any]) -> Callable[..., Any]:
    """`Accelerator.save_state`, which warns of a loop whose place it does not save."""

    @functools.wraps(save)
    def save_state(self: Any, *arguments: Any, **named: Any) -> Any:
        kept = {id(one) for one in self._custom_objects}
        for loader in READ:
            is_kept = isinstance(loader, _Base) or id(loader) in kept
            if loader._is_in_loop and not is_kept:
                warnings.warn(
                    f"a {type(loader).__name__} is being read, and save_state does not save where: "
                    "give a DataLoader to prepare() and read what comes back, and a FeedLoader to "
                    "register_for_checkpointing(), unless its state_dict() is saved elsewhere",
                    stacklevel=2,
                )
        return save(self, *arguments, **named)

    return save_state


def _prepare(make: Callable[..., Any], loader: Any, *arguments: Any, **named: Any) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader, DataLoaderAdapter):
        return make(loader, *arguments, **named)
    if named.get("use_stateful_dataloader"):
        raise ConfigError(
            "use_stateful_dataloader is True, expected False: Accelerate would read by torchdata's "
            "loader, and feeder's has a state by itself"
        )
    loader._is_kept = loader._is_copied = True
    prepared = make(loader, *arguments, **named)
    prepared.base_dataloader.on_error = loader.on_error
    _Place(prepared)
    return prepared


class _Base(DataLoader[Any]):
    """What a prepared loader reads from. Owned by its thread."""

    place: _Place

    def __iter__(self) -> Any:
        draws = self.place.begin()
        iterator = super().__iter__()
        batches = iterator if draws is None else _first_drawn(iterator, draws)
        return _noted(batches, self.place)


def _noted(batches: Iterator[Any], place: _Place) -> Iterator[Any]:
    """The batches; one that fails is read ahead, and the one before it is not given."""
    try:
        yield from batches
    except Exception:
        place.take_back()
        raise


def _first_drawn(iterator: Iterator[Any], draws: dict[str, str]) -> Iterator[Any]:
    """The first batch by other draws: it had been read ahead when the state was saved."""
    with as_it_was((name, state) for name, state in draws.items() if name != "cuda"):
        first = next(iterator, None)
    if first is not None:
        yield first
        yield from iterator


class _Place:
    """Where a prepared loader stands: at the last batch that its user was given. Owned by the
    thread that trains; all ranks save together."""

    def __init__(self, prepared: Any) -> None:
        base = prepared.base_dataloader
        base.__class__ = _Base
        base.begin_states()
        for sampler in samplers_of(base):
            if isinstance(sampler, SeedableRandomSampler) and sampler.generator is None:
                # It makes one when it is first asked; but a state has all from the begin.
                sampler.generator = torch.Generator().manual_seed(sampler.initial_seed)
        base.place, base._is_kept = self, True
        self._prepared, self._base = prepared, base
        # To rank 0 batches come for all ranks, one by one: the place is one between such rounds.
        is_dispatched = isinstance(prepared, DataLoaderDispatcher)
        self._round = prepared.state.num_processes if is_dispatched else 1
        self._asked = 0
        self._draws: dict[str, str] | None = None
        self._said: dict[str, Any] = {}
        # Accelerate saves what has this.
        prepared.use_stateful_dataloader = True
        prepared.state_dict, prepared.load_state_dict = self.state_dict, self.load_state_dict
        prepared._update_state_dict = self._note
        self._note()

    def begin(self) -> dict[str, str] | None:
        """A loop begins; the draws of its first batch, if it goes on with one."""
        draws, self._draws, self._asked = self._draws, None, 0
        return draws

    def _note(self) -> None:
        """Accelerate is about to read, or has come to the end."""
        has_ended = self._prepared.end_of_dataloader
        self._before = self._said
        if has_ended or self._asked % self._round == 0:
            self._said = {
                "state": self._base.state_dict(), "draws": trainers.draws(),
                # It counts the loop at hand when it is over.
                "iteration": self._prepared.iteration + has_ended,
            }  # fmt: skip
        self._asked += 1

    def take_back(self) -> None:
        """What was to be read has failed."""
        self._said = self._before or self._said

    def state_dict(self) -> dict[str, Any]:
        """What all ranks say."""
        return {"ranks": trainers.of_all_ranks(self._said)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there with the next loop. Raises `ResumeError`."""
        said = trainers.of_this_rank(state_dict["ranks"], "state")
        self._base.load_state_dict(said["state"])
        self._prepared.iteration = said["iteration"]
        self._draws = said["draws"] if said["state"]["is_begun"] else None
        self._said = said
