"""`DataLoader`: PyTorch's own, whose place in the data is a state that can be loaded.

It is a subclass of PyTorch's: arguments, attributes, lengths, warnings and the samples themselves
are PyTorch's, with the same draws at the same moments. What is added is `state_dict()` after any
batch; and with `num_workers` other processes, which begin as quickly, are replaced when they end,
and whose random draws do not depend on how many they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch.utils.data
from torch.utils.data import dataloader as theirs
from torch.utils.data.distributed import DistributedSampler

from feeder.adapters.datasets import is_stateful
from feeder.adapters.skips import AN_ITERABLE_ENDS, check_on_error
from feeder.adapters.streams import FEEDS
from feeder.adapters.torch import place
from feeder.adapters.torch.callers import note_reader, tell_copier, tell_saver
from feeder.adapters.torch.feed_loader import STATES, FeedLoader
from feeder.adapters.torch.generators import generator_state, set_states
from feeder.adapters.torch.loops import LocalLoop, WorkerLoop
from feeder.adapters.torch.order import Begun, Now
from feeder.adapters.torch.place import Mark, Stand
from feeder.adapters.torch.samplers import (
    dealt_sampler,
    load_states,
    own_generators,
    stateful_samplers,
    states_of,
)
from feeder.adapters.torch.shuffle import SeededSampler
from feeder.adapters.torch.stateful import DatasetState
from feeder.errors import ConfigError, ResumeError
from feeder.sources import LeftOut, Source
from feeder.state.state_dict import STATE_KEY
from feeder.workers.sources.stores.reading import Faults, OnError

_T = TypeVar("_T")

_CONTEXT: Any = torch.utils.data.DataLoader.multiprocessing_context

_FORMAT = "feeder DataLoader 1"
_OF_FEED_LOADER = ("rank", "world_size", "executor", "device", "on_device")


class DataLoader(torch.utils.data.DataLoader[_T]):
    """PyTorch's `DataLoader`, with `state_dict` and `load_state_dict`.

    All arguments are PyTorch's, and mean what they mean there. A data set that is feeder's own (a
    source, a fetch function, a feed, a consumer) gives a `FeedLoader`.

    Args:
        seed: With `shuffle=True`: epochs are shuffled by this seed, alike in each run, in constant
            memory; of a `DistributedSampler` its seed. By default the order is PyTorch's, drawn
            from its generators.
        epochs: After so many loops a further one raises `ConfigError`; None is without end.
        snapshot_every_n_steps: Of torchdata's `StatefulDataLoader`; a state is one of every batch.
        on_error: "skip" leaves out samples whose `__getitem__` raises `ValueError`, `RuntimeError`
            or, several times, `OSError`: their batches are shorter, and one of which nothing is
            left is not given. `left_out` lists them.

    One thread iterates; any thread may ask for states.
    """

    def __new__(cls, dataset: Any = None, *arguments: Any, **named: Any) -> Any:
        if cls is DataLoader and _is_feeders(dataset):
            return FeedLoader(dataset, *arguments, **named)
        return super().__new__(cls)

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        seed: int | None = None,
        epochs: int | None = None,
        snapshot_every_n_steps: int | None = 1,
        on_error: OnError = "raise",
        **named: Any,
    ) -> None:
        for name in _OF_FEED_LOADER:
            if name in named:
                raise ConfigError(
                    f"{name} is an argument of FeedLoader, which deals one order out to all ranks: "
                    "from feeder.adapters.torch import FeedLoader"
                )
        if seed is not None and type(sampler) is DistributedSampler:
            # As Lightning deals an order out to ranks.
            sampler.seed = seed
        elif seed is not None:
            if not shuffle or generator is not None:
                raise ConfigError("seed is given, expected with shuffle=True and without generator")
            sampler, shuffle = SeededSampler(dataset, seed), None
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn,
            pin_memory, drop_last, timeout, worker_init_fn, multiprocessing_context, generator,
            **named,
        )  # fmt: skip
        self._epochs, self.on_error = epochs, on_error
        if check_on_error(on_error) and self._dataset_kind == theirs._DatasetKind.Iterable:
            raise ConfigError(f"on_error is {on_error!r}: {AN_ITERABLE_ENDS}")
        self.begin_states()

    def begin_states(self) -> None:
        """Stand before the first loop."""
        self._stand = Stand(Mark())
        # The loop that was begun last, if no state was loaded since; a weak reference.
        self._newest: Any = None
        # Loaded, and not yet gone on from.
        self._resumed: Mark | None = None
        # Whether the samplers were told states and not iterated over since; perhaps of their end.
        self._is_loaded = False
        self._faults = Faults("skip")
        # Of a data set that is read here, and not by workers.
        self._dataset_state = self._make_dataset_state()

    def _make_dataset_state(self) -> DatasetState:
        is_iterable = self._dataset_kind == theirs._DatasetKind.Iterable
        return DatasetState(self.dataset, STATES, is_iterable=is_iterable)

    # ---- what frameworks do with it

    _epochs: int | None = None
    on_error: OnError = "raise"
    _is_kept = False
    """Whether a framework's callback keeps the states."""
    _is_copied = False
    """Whether a framework has made another loader of it."""

    @property
    def _is_accelerate_prepared(self) -> bool:
        # Accelerate's question, before it makes a loader of its own.
        from feeder.adapters import accelerate

        accelerate.install()
        return False

    @property
    def multiprocessing_context(self) -> Any:
        """As PyTorch's."""
        tell_copier(self)
        return _CONTEXT.fget(self)

    @multiprocessing_context.setter
    def multiprocessing_context(self, context: Any) -> None:
        _CONTEXT.fset(self, context)

    # ---- loops

    def __iter__(self) -> Any:
        note_reader(self)
        return super().__iter__()

    @property
    def _is_in_loop(self) -> bool:
        """Whether an epoch is begun, and not given whole."""
        return self._stand.mark.begun is not None

    def _get_iterator(self) -> Any:
        return WorkerLoop(self) if self.num_workers else LocalLoop(self)

    @property
    def epoch(self) -> int:
        """The epoch that is being looped over, or that the next loop gives; from 0. Each loop is
        one, also one that was left early."""
        return (self._resumed or self._stand.mark).epoch

    @property
    def step(self) -> int:
        """The batches that all loops have given since the start, before a resume too."""
        return (self._resumed or self._stand.mark).step

    @property
    def skipped(self) -> int:
        """Reads of samples that were left out, up to the last batch, before a resume too."""
        return self._faults.skipped

    @property
    def left_out(self) -> list[LeftOut]:
        """The first hundred of these, by epoch and batch."""
        return self._faults.left_out

    def leave(self) -> None:
        """The loop that was begun last has been left: from now on a state is one of the next loop.
        For trainers that count batches, and so never ask for the end of a loop."""
        last, iterator = self._resumed or self._stand.mark, self.__dict__.get("_iterator")
        if last.begun is not None:
            after = Mark if iterator is None else iterator.next_mark
            last = after(last.epoch + 1, 0, last.step)
            if isinstance(self.sampler, SeededSampler):
                self.sampler.leave()
        self._stand = Stand(last)
        self._newest, self._resumed = None, None

    def close(self) -> None:
        """End the workers, if some persist; the next loop starts others."""
        iterator = self.__dict__.get("_iterator")
        self._iterator = None
        if iterator is not None:
            iterator.close()

    # ---- the state

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was given last, of numbers and texts, for a trainer's
        checkpoint. In a loop it is one in this epoch, after the loop one of the next epoch."""
        tell_saver(self)
        mark = self._resumed or self._stand.mark
        is_begun = mark.begun is not None
        if not is_begun:
            own = tuple(map(generator_state, own_generators(self)))
            states, is_after_end = states_of(stateful_samplers(self)), not self._stand.is_left
            mark = mark._replace(begun=Begun(own, states=states, is_after_end=is_after_end))
            is_map = self._dataset_kind == theirs._DatasetKind.Map
            if not self.num_workers and (is_map or self._resumed is None):
                said = self._dataset_state.read(0) if is_map else self._dataset_state.between()
                mark = mark._replace(readers=None if said is None else ((0, said, False),))
        elif self._resumed is None:
            stand, own = self._stand, tuple(map(generator_state, own_generators(self)))
            now = Now(own, 0, False)
            if (reach := stand.reach) is not None:
                # A batch that is being read, or has failed, is pulled and not given.
                num, digest, has_ended = reach.drawn
                now = Now(own, max(0, num - mark.pulled.num), has_ended, digest)
                mark = mark._replace(begun=reach.begun)
            if mark.readers is not None and not self.num_workers:
                # If nothing is being read it says now what it said after that batch.
                ((num, _, is_done),) = mark.readers
                said = stand.said or self._dataset_state.read(num)
                mark = mark._replace(readers=((num, said, is_done),))
            mark = mark._replace(now=now)
        state = {"format": _FORMAT, "fits": self._fits(), "is_begun": is_begun, **place.write(mark)}
        if self._faults.skipped:
            state["left_out"] = {
                "reads": self.skipped,
                "first": [list(one) for one in self.left_out],
            }
        return state

    def _fits(self) -> dict[str, Any]:
        """What must be equal for a state to fit."""
        is_iterable = self._dataset_kind == theirs._DatasetKind.Iterable
        sampler = (
            self.batch_sampler if self.batch_size is None and self._auto_collation else self.sampler
        )
        found: dict[str, Any] = {
            "dataset": type(self.dataset).__name__,
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "sampler": type(sampler).__name__,
        }
        if is_iterable:
            # The trainer is no worker: it reads all of what n workers would share.
            found["is_read_by_workers"] = self.num_workers > 0
        else:
            found["samples"] = _length(self.dataset)
            # Each worker has a data set of its own.
            found["has_state"] = is_stateful(self.dataset) and not self.num_workers
        if (dealt := dealt_sampler(self)) is not None:
            found["sampler_seed"], found["sampler_shuffle"] = dealt.seed, dealt.shuffle
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state: the next loop gives the rest of its epoch. Raises `ResumeError` for a
        state that does not fit; of a sampler that gives other samples the next loop tells."""
        if not isinstance(state_dict, dict) or state_dict.get("format") != _FORMAT:
            raise ResumeError(_refusal(state_dict))
        then, now = state_dict.get("fits") or {}, self._fits()
        for name in now:
            if then.get(name) != now[name]:
                raise ResumeError(f"{name}: {then.get(name)!r} then, {now[name]!r} now")
        try:
            mark = place.read(state_dict)
            was_left = mark.begun is not None and not mark.begun.is_after_end
            faults = _faults_of(state_dict)
            if not state_dict["is_begun"]:
                mark = self._go_between(mark)
        except (KeyError, TypeError, ValueError) as error:
            raise ResumeError(f"the state of the DataLoader is damaged: {error!r}") from error
        newest, self._newest, self._resumed = self._newest, None, mark
        self._faults = faults
        self._stand = Stand(self._stand.mark, was_left=was_left)
        if newest is not None and (loop := newest()) is not None:
            loop.leave_to()
        if mark.begun is not None and mark.begun.dealt is not None:
            # The script may tell it, too, before the next loop.
            sampler = dealt_sampler(self)
            if sampler is not None:
                sampler.set_epoch(mark.begun.dealt[0])

    def _go_between(self, mark: Mark) -> Mark:
        """Between two loops: all that a loop begins with is put where it was."""
        assert mark.begun is not None
        set_states(own_generators(self), mark.begun.own)
        load_states(stateful_samplers(self), mark.begun.states)
        self._is_loaded = True
        if mark.readers is not None and self._dataset_kind == theirs._DatasetKind.Map:
            self._dataset_state.load(mark.readers[0][1])
            mark = mark._replace(readers=None)
        return Mark(
            mark.epoch, 0, mark.step, seed=mark.seed, readers=mark.readers, is_kept=mark.is_kept
        )

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        # A copy stands where this one does, and has no loop.
        return {**self.__dict__, "_iterator": None, "_newest": None,
                "_stand": self._stand.copy(), "_faults": copy.deepcopy(self._faults),
                "_dataset_state": self._make_dataset_state()}  # fmt: skip


def _is_feeders(dataset: Any) -> bool:
    """Whether only a `FeedLoader` can read it."""
    if isinstance(dataset, (*FEEDS, Source)):
        return True
    is_data = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    return callable(dataset) and not is_data and not isinstance(dataset, type)


def _faults_of(state: dict[str, Any]) -> Faults:
    """What had been left out. Raises `KeyError`, `TypeError` or `ValueError` if it is damaged."""
    faults, said = Faults("skip"), state.get("left_out", {"reads": 0, "first": ()})
    faults.count(int(said["reads"]), [tuple(one) for one in said["first"]])
    return faults


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _refusal(state: Any) -> str:
    if isinstance(state, dict) and STATE_KEY in state:
        return (
            "the state is one of FeedLoader, or of the DataLoader of an older feeder, which was "
            "the same: a place in one order for all ranks; load it into a FeedLoader, which deals "
            "rows out to rank= of world_size="
        )
    keys = f" with the keys {list(state)[:4]}" if isinstance(state, dict) else ""
    return f"expected a state of feeder's DataLoader, got a {type(state).__name__}{keys}"
