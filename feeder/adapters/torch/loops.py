"""A loop over a `DataLoader`: PyTorch's iterator, and where it stands after each batch.

What a script can see of an iterator is PyTorch's: when the sampler is asked, when the generators
are drawn from, whose turn a worker's batch is. So both kinds of loops are made as PyTorch's are, by
its own base class, and only what they add is written here.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.multiprocessing
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data import dataloader as theirs
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory

from feeder.adapters.datasets import warn_of_replay
from feeder.adapters.skips import NOTHING, sound_samples
from feeder.adapters.torch import child, transport
from feeder.adapters.torch.child import Gave, Job, Read
from feeder.adapters.torch.feed_loader import STATES
from feeder.adapters.torch.generators import (
    as_it_was,
    generator_state,
    process_generators_now,
    process_states,
    set_process_generators,
    set_states,
)
from feeder.adapters.torch.order import START, Begun, Order, Pulled
from feeder.adapters.torch.place import Mark, Stand
from feeder.adapters.torch.samplers import dealt_sampler, own_generators
from feeder.adapters.torch.stateful import DatasetState, has_shrunk
from feeder.adapters.torch.workers import Team, TimedOut, Worker
from feeder.errors import looped_again
from feeder.sources import LeftOut, RecordError

_new = tuple.__new__
_logger = logging.getLogger("feeder")


class _Loop(theirs._BaseDataLoaderIter):
    """What both kinds of loops have. Owned by the thread that iterates."""

    def __init__(self, loader: Any) -> None:
        # Neither keeps the other, but for a loader whose workers persist: workers end when their
        # user drops what they belong to.
        self._loader = weakref.ref(loader)
        self._batch_size = loader.batch_size or 1
        self._begin(loader, super().__init__)

    _left: LeftOut | None = None
    """What the loop has left out last."""

    def _begin(self, loader: Any, make: Callable[[Any], None]) -> None:
        """Begin a loop: `make` is what PyTorch does then."""
        resumed = loader._resumed
        last = loader._stand.mark
        if resumed is not None:
            at = resumed
        elif last.begun is not None:
            at = self.next_mark(last.epoch + 1, 0, last.step)
        else:
            at = last
        if loader._epochs is not None and at.epoch >= loader._epochs:
            raise looped_again(loader._epochs)
        self._is_iterable = loader._dataset_kind == theirs._DatasetKind.Iterable
        self._order, self._pulled_first = None, START
        if self._is_iterable:
            if at.begun is not None:
                set_states(own_generators(loader), at.begun.own)
            own = tuple(map(generator_state, own_generators(loader)))
            self._begun_with = at.begun or Begun(own)
            beginning = contextlib.nullcontext() if at.begun is None else as_it_was(())
        else:
            began = None if at.begun is None else (at.begun, at.pulled)
            # Of an order that was left a sampler may have kept its place, with nothing behind it.
            self._order = Order(loader, began, is_after_end=not loader._stand.is_left)
            beginning = self._order.beginning()
        self._prepare(loader, at)
        with beginning:
            self._start(loader, at, make)
        self._settle(loader, at)
        if at.now is not None and self._is_iterable:
            set_states(own_generators(loader), at.now.own)
        # Not before: what has failed has not begun.
        loader._resumed, loader._newest = None, weakref.ref(self)
        self._faults, self._left = loader._faults, None
        first = self._first(at)._replace(begun=self._begun, pulled=self._pulled_first)
        reach = None if self._order is None else self._order.reach
        self._stand = loader._stand = Stand(first, reach)
        self._at = self._at_first = first

    def _prepare(self, loader: Any, at: Mark) -> None:
        """Load what is to be loaded before the loop begins."""

    def _settle(self, loader: Any, at: Mark) -> None:
        """Load what is to be loaded then: what the user's objects do to the process's generators
        stays."""

    def _first(self, at: Mark) -> Mark:
        """The place of a loop that has given nothing yet."""
        return at

    def _start(self, loader: Any, at: Mark, make: Callable[[Any], None]) -> None:
        raise NotImplementedError

    @property
    def _begun(self) -> Begun:
        """What the loop began with."""
        return self._begun_with if self._order is None else self._order.reach.begun

    def _pull_from(self, at: Mark) -> None:
        """Pull indices through the order."""
        if self._order is not None:
            self._order.begin(self._sampler_iter, at.now, was_pulled=at.seed is not None)
            self._sampler_iter: Any = self._order
            self._pulled_first = self._order.reach.pulled

    def leave_to(self) -> None:
        """A state was loaded into the loader while this loop is there."""
        # Not looked at with each batch.
        self._next_data = self._next_after_load

    def _next_after_load(self) -> Any:
        del self._next_data
        loader = self._loader()
        if loader is not None and loader._resumed is not None:
            if self._at is self._at_first:
                # One who makes the iterator with the loader has loaded the state into both.
                self._leave()
                type(self).__init__(self, loader)
            else:
                warnings.warn(
                    "load_state_dict was called while this iterator is read: it goes on where it "
                    "was, and the state is where the next iter(loader) begins",
                    stacklevel=4,
                )
        return self._next_data()

    def _leave(self) -> None:
        """The loop is begun anew."""

    def _end(self) -> None:
        """The loop is over, and its user is told."""
        if self._at.begun is not None:
            self._stand.mark = self.next_mark(self._at.epoch + 1, 0, self._at.step)

    def _leave_out(self, left: Sequence[tuple[str, str]]) -> None:
        """A batch is given, or nothing of it is left: these are no part of it."""
        number = self._at.pulled.num - 1
        for name, why in left:
            self._left = LeftOut(self._at.epoch, number, name, why)
            self._faults.leave_out(self._left, once=False)

    def _check_given(self) -> None:
        """Raise `RecordError` if the loop has ended and all its samples were left out: a trainer
        would go through epochs of nothing."""
        if not self._at.num and self._left is not None:
            raise RecordError(
                f"no sample of epoch {self._left.epoch} can be read, of which the last is "
                f"{self._left.name}: {self._left.why}"
            )

    def next_mark(self, epoch: int, num: int, step: int) -> Mark:
        """The place of the next loop, before it begins."""
        return Mark(epoch, num, step)


def _make_without_seed(loader: Any, make: Callable[[Any], None]) -> None:
    """PyTorch's iterator, of a loop for which PyTorch drew no seed: its workers had persisted."""
    own = own_generators(loader)
    before = tuple(map(generator_state, own))
    with as_it_was(()):
        make(loader)
    set_states(own, before)


class LocalLoop(_Loop, theirs._SingleProcessDataLoaderIter):
    """A loop in the caller's own thread: nothing is read ahead, and all draws are from the caller's
    generators."""

    def _prepare(self, loader: Any, at: Mark) -> None:
        self._state: DatasetState = loader._dataset_state
        ((num, packed, self._is_done),) = at.readers or ((at.num, None, False),)
        self._num_again = num if packed is None and not self._is_done else 0
        self._packed = packed
        if self._is_iterable:
            self._state.load(packed)

    def _start(self, loader: Any, at: Mark, make: Callable[[Any], None]) -> None:
        if not self._is_iterable:
            if at.is_kept:
                _make_without_seed(loader, make)
            else:
                make(loader)
                for _ in range(1, 1 if at.begun is None else at.begun.times):
                    self._sampler_iter = iter(self._index_sampler)
            self._pull_from(at)
            samples = _SoundSamples if loader.on_error == "skip" else _Samples
            self._dataset_fetcher = samples(
                self._dataset, self._auto_collation, self._collate_fn, self._drop_last
            )
            return
        if at.begun is None:
            self._begun_with = self._begun_with._replace(process=process_states())
        with contextlib.nullcontext() if at.begun is None else as_it_was(at.begun.process):
            make(loader)
            if at.readers is not None and self._num_again:
                warn_of_replay(stacklevel=8)
                for _ in range(self._num_again):
                    self._pass_over(self._dataset_fetcher.dataset_iter)

    def _settle(self, loader: Any, at: Mark) -> None:
        if not self._is_iterable:
            self._state.load(self._packed)
            self._state.begin(None)
            self._has_said = self._state.is_kept
            return
        fetcher = self._dataset_fetcher
        num = 0 if self._is_done else at.num
        fetcher.dataset_iter = self._state.begin(fetcher.dataset_iter, num)
        self._has_said = self._state.is_kept
        if self._has_said:
            # It has all that the generators of the process would say of the samples.
            self._begun_with = self._begun_with._replace(process=())

    def _first(self, at: Mark) -> Mark:
        if not self._state.is_kept or at.begun is not None:
            return at
        return at._replace(readers=((at.num, None, False),))

    def _end(self) -> None:
        self._state.end()
        super()._end()

    def _pass_over(self, iterator: Iterator[Any]) -> None:
        try:
            for _ in range(self._batch_size):
                next(iterator)
        except StopIteration:
            raise has_shrunk() from None
        except Exception:
            return  # What failed then fails again, and was told then.

    def _next_data(self) -> Any:
        if self._is_iterable and self._is_done:
            self._end()
            raise StopIteration
        while (data := self._read()) is NOTHING:
            pass
        return data

    def _read(self) -> Any:
        """Read the next batch, and stand behind it; `NOTHING` if all of it is left out."""
        fetcher = self._dataset_fetcher
        if self._has_said:
            self._stand.said = self._stand.said or self._state.read(self._at.num)
        try:
            data = fetcher.fetch(self._next_index())
        except StopIteration:
            self._end()
            self._check_given()
            raise
        except Exception:
            # Nobody has it: a state is still one of the batch before.
            self._at = self._after()
            raise
        if self._pin_memory and data is not NOTHING:
            data = pin_memory(data, self._pin_memory_device)
        self._at = self._stand.mark = self._after(given=data is not NOTHING)
        self._stand.said = None
        if not self._is_iterable and fetcher.left:
            self._leave_out(fetcher.left)
        return data

    def _after(self, *, given: bool = True) -> Mark:
        """The place after one more batch, also one that failed, or of which nothing is given."""
        at, order = self._at, self._order
        num, step = at.num + given, at.step + given
        if order is not None:
            readers = ((num, None, False),) if self._has_said else None
            reach = order.reach
            # One for each batch, and a third of the time that its class takes.
            return _new(Mark, (
                at.epoch, num, step, reach.begun, reach.pulled, at.seed, readers, 0,
                at.is_kept, None,
            ))  # fmt: skip
        has_ended = self._dataset_fetcher.ended
        if has_ended:
            self._state.end()
        readers = ((num, None, has_ended),)
        return Mark(at.epoch, num, step, self._begun, START, None, readers)


class _Samples(_MapDatasetFetcher):
    """PyTorch's way to a batch, and an error names the sample."""

    left: Sequence[tuple[str, str]] = ()
    """What was left out of the batch, and why."""

    def fetch(self, indices: Any) -> Any:
        dataset = self.dataset
        if not self.auto_collation or getattr(dataset, "__getitems__", None):
            return super().fetch(indices)
        index = None
        try:
            samples = [dataset[index := each] for each in indices]
        except Exception as error:
            with contextlib.suppress(Exception):  # Of a class that may not be changed.
                error.add_note(f"while reading sample {index!r}")
            raise
        return self.collate_fn(samples)


class _SoundSamples(_Samples):
    """The same, and samples that are defective are left out."""

    def fetch(self, indices: Any) -> Any:
        before = process_generators_now()
        samples, self.left = sound_samples(
            self.dataset, indices, makes_batches=self.auto_collation, read=self._read,
            begin=partial(set_process_generators, before),
        )  # fmt: skip
        return NOTHING if samples is NOTHING else self.collate_fn(samples)

    def _read(self, index: Any, number: int) -> Any:
        try:
            return self.dataset[index]
        except Exception as error:
            with contextlib.suppress(Exception):  # Of a class that may not be changed.
                error.add_note(f"while reading sample {index!r}")
            raise


class _Asked(NamedTuple):
    """A batch that a worker is to give."""

    worker: Worker
    before: Pulled
    """Where the order stood before it."""
    pulled: Pulled
    """Where it stands after it."""


class WorkerLoop(_Loop):
    """A loop whose batches are made by workers, and given in the order in which they were asked
    for. Indices are pulled by the caller's thread alone: some at the begin, then one batch for each
    that is given."""

    _team: Any = None
    """The `Team`; none before the first loop."""

    def __init__(self, loader: Any) -> None:
        self._persistent = loader.persistent_workers
        super().__init__(loader)

    def _leave(self) -> None:
        self._team.close()

    def next_mark(self, epoch: int, num: int, step: int) -> Mark:
        # None before its first loop.
        seed = getattr(self, "_base_seed", None) if self._persistent else None
        readers = None
        if seed is not None and self._is_iterable:
            workers = self._team.workers
            if all(worker.has_ended for worker in workers):
                # All were given whole: what their data sets say then is known.
                readers = tuple((0, worker.reader[1], False) for worker in workers)
        return Mark(epoch, num, step, seed=seed, readers=readers, is_kept=seed is not None)

    def _start(self, loader: Any, at: Mark, make: Callable[[Any], None]) -> None:
        if self._is_iterable and loader._resumed is not None and self._team is not None:
            # What an iterable has counted in a worker cannot be taken back there.
            self._team.close()
        is_new = self._team is None or self._team.is_closed
        self._is_kept = self._persistent and at.is_kept
        # PyTorch iterates over the sampler when a loop begins. To begin workers, it does so twice
        # and draws their seed in between. A resumed loop draws what it drew when it began first.
        if is_new and self._is_kept:
            _make_without_seed(loader, make)
        else:
            if not is_new and not self._is_kept:
                iter(self._index_sampler)
                torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            make(loader)
        if is_new:
            self._hire(loader, at)
        self._pull_from(at)
        self._asked: deque[_Asked] = deque()
        self._pulled = self._pulled_first
        self._timeout_s, self._in_order = loader.timeout, loader.in_order
        self._prefetch = loader.prefetch_factor
        is_dealt = dealt_sampler(loader) is not None
        if at.seed is not None and (at.begun is None or not is_dealt):
            self._base_seed = at.seed
        is_given = at.seed is not None and at.begun is not None
        self._seed = at.seed if is_given else self._draw_seed(loader)
        self._turn = at.turn
        # An iterable has a reader in each worker; otherwise the order has the number of the batch.
        readers = at.readers or ((0, None, False),) * self._num
        readers = readers if self._is_iterable else (None,) * self._num
        is_told = is_new or loader._resumed is not None
        self._team.begin(at.epoch, self._seed, readers, is_told=is_told)
        for _ in range(self._prefetch * self._num):
            self._ask()

    def _first(self, at: Mark) -> Mark:
        readers = tuple(worker.reader for worker in self._team.workers)
        readers_now = readers if self._is_iterable else None
        return at._replace(seed=self._seed, readers=readers_now, is_kept=self._is_kept)

    def _hire(self, loader: Any, at: Mark) -> None:
        """Begin the workers."""
        self._num = loader.num_workers
        if self._is_iterable and at.readers is not None and len(at.readers) != self._num:
            self._num = len(at.readers)
            _logger.info(
                "the state is one of %d workers, each of which reads the iterable by itself: so "
                "many read the rest of the epoch", self._num,
            )  # fmt: skip
        init = loader.worker_init_fn
        if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
            init = partial(theirs._sharding_worker_init_fn, init, self._world_size, self._rank)
        self._team = Team(_job_of(loader, self._num, init), *_method_of(loader))
        self._finalizer = weakref.finalize(self, Team.close, self._team)
        # Once more, as PyTorch does it.
        if at.begun is None or at.begun.times > 1 or self._is_kept:
            self._sampler_iter = iter(self._index_sampler)
        if self._shared_seed is not None:
            theirs._share_dist_seed(loader.generator, self._pg)
        if self._order is not None and at.begun is None:
            self._order.reach.begun = self._order.reach.begun._replace(times=2)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Another loop, with the workers that persist."""
        if self._team is not None and self._num != loader.num_workers:
            self._team.close()
        self._begin(loader, super()._reset)

    def _draw_seed(self, loader: Any) -> int:
        """What the draws of the workers in this loop belong to."""
        if self._shared_seed is not None:
            # PyTorch's for the shuffles of a DataPipe, alike on all ranks.
            return int(self._shared_seed)
        dealt = dealt_sampler(loader)
        # Alike on all ranks, who may each have another state of PyTorch's generator.
        seed: int = self._base_seed if dealt is None else (dealt.seed << 32) + dealt.epoch
        return seed

    # ---- batches

    def _ask(self) -> None:
        """Pull a batch of indices, and ask the next worker for its samples."""
        try:
            indices = self._next_index()
        except StopIteration:
            return
        worker = self._next_worker()
        if worker is None:
            return
        order = self._order
        if order is None:
            assert worker.reader is not None
            told = Read(worker.reader[0] + len(worker.asked), transport.write_indices(indices))
            self._asked.append(_Asked(worker, START, START))
        else:
            before, self._pulled = self._pulled, order.reach.pulled
            told = Read(self._pulled.num - 1, transport.write_indices(indices), *order.place)
            self._asked.append(_Asked(worker, before, self._pulled))
        self._team.ask(worker, told)

    def _next_worker(self) -> Worker | None:
        """The worker whose turn it is, as PyTorch counts; None if all iterables have ended."""
        workers: list[Worker] = self._team.workers
        going = sum(not worker.has_ended for worker in workers)
        for _ in workers:
            worker = workers[self._turn]
            self._turn = (self._turn + 1) % len(workers)
            if worker.has_ended:
                continue
            most = self._prefetch * len(workers) // going
            if self._in_order or len(worker.asked) < most:
                return worker
        return None

    def _next_data(self) -> Any:
        timeout = self._timeout_s
        until = time.monotonic() + timeout if timeout > 0 else None
        while self._asked:
            at = 0 if self._in_order else self._next_ready(until)
            worker, _, pulled = self._asked[at]
            if worker.has_ended:
                del self._asked[at]
                continue
            answer = self._answer(worker, until)
            del self._asked[at]
            self._ask()
            if answer.kind == child.NOTHING:
                pulled = pulled if self._in_order else self._behind()
                self._stand.mark = self._at = self._at._replace(begun=self._begun, pulled=pulled)
                self._leave_out(answer.left_out)
            elif answer.kind != child.END:
                return self._give(worker, answer, pulled if self._in_order else self._behind())
        self._end()
        if not self._persistent_workers:
            self.close()
        self._check_given()
        raise StopIteration

    def _answer(self, worker: Worker, until: float | None) -> Gave:
        try:
            answer: Gave = self._team.answer(worker, until)
        except TimedOut:
            raise RuntimeError(
                f"DataLoader timed out after {self._timeout_s} seconds{self._team.doing(worker)}"
            ) from None
        except RuntimeError:
            self.close()
            raise
        return answer

    def _behind(self) -> Pulled:
        """Where the order stands before the first batch that was not given, and which later ones
        were."""
        if not self._asked:
            return self._pulled
        first = self._asked[0].before
        missing = {asked.pulled.num - 1 for asked in self._asked}
        later = set(range(first.num, self._pulled.num)) | set(self._pulled.given)
        return first._replace(given=tuple(sorted(later - missing)))

    def _next_ready(self, until: float | None) -> int:
        """Which of the batches that are asked for is there first."""
        going = [asked.worker for asked in self._asked if not asked.worker.has_ended]
        if not going:
            return 0
        try:
            first = self._team.first(going, until)
        except TimedOut:
            return 0
        return next(at for at, asked in enumerate(self._asked) if asked.worker is first)

    def _give(self, worker: Worker, answer: Gave, pulled: Pulled) -> Any:
        at, turn = self._at, 0
        readers: tuple[Any, ...] | None = None
        if self._is_iterable:
            readers = tuple(one.reader for one in self._team.workers)
            turn = (worker.id + 1) % len(readers)
        self._at = Mark(
            at.epoch, at.num + 1, at.step + 1, self._begun, pulled, self._seed, readers, turn,
            self._is_kept,
        )  # fmt: skip
        data = transport.unpack(answer.stream, worker.buffers(answer))
        # A state after a batch that failed is still one of the batch before: nobody has it.
        if isinstance(data, ExceptionWrapper):
            try:
                data.reraise()
            except StopIteration:
                self._end()  # For the user's loop it is its end, as in PyTorch.
                raise
        if answer.kind == child.ERROR:
            raise data
        self._stand.mark = self._at
        self._leave_out(answer.left_out)
        return pin_memory(data, self._pin_memory_device) if self._pin_memory else data

    def close(self) -> None:
        """End the workers."""
        if self._team is not None:
            self._team.close()


def _job_of(loader: Any, num_workers: int, init: Callable[[int], Any] | None) -> Job:
    return Job(
        loader.dataset, loader._dataset_kind == theirs._DatasetKind.Iterable, loader.batch_size,
        loader._auto_collation, loader.collate_fn, loader.drop_last, init, num_workers,
        dealt_sampler(loader) is not None, STATES, loader.on_error == "skip",
    )  # fmt: skip


def _method_of(loader: Any) -> tuple[str, Any]:
    """How workers begin: as `multiprocessing` begins processes."""
    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    return context.get_start_method(), context
