"""Stateful iterators: `state_dict` and `load_state_dict` say where they stand.

An iterator cannot be asked for record n. So each worker is one iterator, whose own `state_dict` is
the worker's cursor: a position holds it, and `seek` gives it back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import flag
from feeder.workers.sources.collate import Collate, check_collate, make_columns
from feeder.workers.sources.stores.reading import Columns

_STATE_METHODS = ("state_dict", "load_state_dict")


@dataclass(slots=True, kw_only=True)
class _Worker:
    """Where one worker stands. Owned by the thread that calls for the worker."""

    epoch: int = 0
    ended: bool = False
    """Whether the iterator has given its last sample, which the feed is yet to be told."""
    iterator: Iterator[Any] | None = None
    """None before the first call of an epoch."""
    owner: Any = None
    """What has the state methods: the iterator, or what it was made from."""


@public("feeder.sources")
class IterableSource:
    """Samples of stateful iterators, one per worker: a fetch function
    `fetch(worker_id, batch_size)` with `cursor(worker_id)` and `seek(worker_id, cursor)`.

    The cursor is the iterator's state and the epoch, so it is as large as that state. It is read
    after every call; `state_dict` has to be quick. Any thread calls it; the scheduler lets one
    thread at a time call for a worker, so each worker's state has one owner at a time.
    """

    _has_numbers = False  # of records, that steps could ask for

    def __init__(
        self, factory: Callable[..., Any], *, batched: bool, collate: Collate | None
    ) -> None:
        if not callable(factory):
            raise ConfigError(f"factory is {factory!r}, expected a function that makes an iterator")
        if flag("batched", batched) and collate is not None:
            raise ConfigError("collate is for single samples, and batched is True: leave it out")
        self._factory = factory
        self._num_arguments = _num_arguments(factory)
        self._batched = batched
        self._collate = check_collate(collate)
        # Each entry is touched by the fetcher that holds this worker's partition, one at a time.
        self._workers: dict[int, _Worker] = {}

    def __call__(self, worker_id: int, batch_size: int) -> Columns:
        worker = self._worker(worker_id)
        if worker.iterator is None and not worker.ended:
            self._begin(worker_id, worker, None)
        # An iterator that gives batches gives one per call.
        size = 1 if self._batched else batch_size
        samples = [] if worker.ended else list(islice(worker.iterator or (), size))
        # What a finished iterator says of its state is not to be relied on.
        worker.ended = len(samples) < size
        if not samples:
            self._workers[worker_id] = _Worker(epoch=worker.epoch + 1)
            # The next call begins the next epoch with a new iterator.
            raise StopIteration
        if self._batched:
            columns: Columns = samples[0]
            return columns
        return make_columns(
            samples, lambda i: f"worker {worker_id}, sample {i} of the call", self._collate
        )

    def _worker(self, worker_id: int) -> _Worker:
        return self._workers.setdefault(worker_id, _Worker())

    def _begin(self, worker_id: int, worker: _Worker, state: Any) -> None:
        if self._num_arguments == 0 and len(self._workers) > 1:
            raise ConfigError(
                f"factory takes no worker_id, and workers {sorted(self._workers)!r} would all give "
                "the same samples: take one, or give num_worker_threads=1"
            )
        # As many arguments as the function takes: none, the worker, or the worker and the epoch.
        made = self._factory(*(worker_id, worker.epoch)[: self._num_arguments])
        owner = made if _is_stateful(made) else None
        # An iterable with state is put back before it is iterated over.
        if owner is not None and state is not None:
            owner.load_state_dict(state)
        iterator = iter(made)
        if owner is None:
            if not _is_stateful(iterator):
                raise ConfigError(
                    f"factory made {type(made).__name__}, expected an iterator with state_dict() "
                    "and load_state_dict(state): one without is for fetch(worker_id, batch_size), "
                    "which resumes by replay"
                )
            owner = iterator
            if state is not None:
                owner.load_state_dict(state)
        # Taken by `next` alone: the `__iter__` of an iterator may begin anew.
        worker.iterator, worker.owner = map(next, repeat(iterator)), owner

    def cursor(self, worker_id: int) -> dict[str, Any]:
        """Where a worker stands after its last call."""
        worker = self._worker(worker_id)
        begun = worker.iterator is not None and not worker.ended
        # Before the first call and after the last there is no state to ask for: the epoch number
        # says it all.
        state = worker.owner.state_dict() if begun else None
        return {"epoch": worker.epoch, "ended": worker.ended, "begun": begun, "state": state}

    def seek(self, worker_id: int, cursor: dict[str, Any]) -> None:
        """Put a worker to where a cursor says."""
        worker = _Worker(epoch=cursor["epoch"], ended=cursor["ended"])
        self._workers[worker_id] = worker
        if cursor["begun"]:
            self._begin(worker_id, worker, cursor["state"])

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        return {
            "source": "iterable",
            "batched": self._batched,
            "collate": self._collate is not None,
        }


@public("feeder.sources")
def iterable(
    factory: Callable[..., Any], *, batched: bool = False, collate: Collate | None = None
) -> IterableSource:
    """Samples of stateful iterators, stacked into columns; each worker has one of its own.

    It takes no order options: the iterators are the order. So the number of workers belongs to
    the stream, and the factory is to deal out the samples to them.

    Args:
        factory: Makes a worker's iterator, or an iterable, for each epoch: `factory(worker_id)`,
            `factory(worker_id, epoch)`, or for a feed of one worker `factory()`. It, or what
            `iter` makes of it, has `state_dict()`, plain values, and `load_state_dict(state)`.
        batched: Whether an item is a chunk of any number of rows, else one sample: a tuple by
            column, a mapping by name, or one array or number.
        collate: Makes columns of a list of samples, in place of stacking.

    Raises:
        ConfigError: an argument is wrong.
    """
    return IterableSource(factory, batched=batched, collate=collate)


def _is_stateful(made: Any) -> bool:
    return all(callable(getattr(made, name, None)) for name in _STATE_METHODS)


def _num_arguments(factory: Callable[..., Any]) -> int:
    """How many of (worker_id, epoch) a factory requires."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p for p in parameters if p.kind in positional and p.default is p.empty]
    if len(required) > 2:
        raise ConfigError(
            f"factory requires {len(required)} arguments, expected (), (worker_id) or "
            "(worker_id, epoch)"
        )
    return len(required)
