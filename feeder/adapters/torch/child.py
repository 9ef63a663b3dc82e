"""What a worker of a loader does: it reads the batches that it is asked for, in turn.

It is what PyTorch's worker is to a data set: seeded, with one thread for computing, with
`get_worker_info()`, and `worker_init_fn` called in it. What is other: before each batch of a data
set with `__getitem__` the generators are seeded by the batch's number, so that its draws are the
same in whichever worker; and an iterable can begin in the middle.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data.graph_settings import apply_random_seed

from feeder.adapters import skips
from feeder.adapters.torch import transport
from feeder.adapters.torch.stateful import DatasetState, has_shrunk
from feeder.executors.blocks import Writer
from feeder.executors.wire import HungUp, Place, Wire
from feeder.workers.fetch.seeding import seed_for_call


class Job(NamedTuple):
    """What all workers of a loader are told: its data set, and what is done with its samples."""

    dataset: Any
    is_iterable: bool
    batch_size: int | None
    """None if the samples of an iterable are no batches, and for data sets with `__getitem__`."""
    makes_batches: bool
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    worker_init_fn: Callable[[int], Any] | None
    num_workers: int
    seeds_samples: bool
    """Whether draws belong to a sample's place among all ranks, not to the batch."""
    states: Any
    """`pack` and `unpack` of the states of iterables."""
    skips: bool
    """Whether samples that are defective are left out."""


class Begin(msgspec.Struct, array_like=True, tag=1):
    """A loop begins. The answers to those of a loop before are not wanted any more."""

    loop: int
    """Counted by who asks."""
    epoch: int
    seed: int
    reader: tuple[int, bytes | None, bool] | None
    """Of an iterable: the batches that it has given, its state after them, and whether that was
    all."""


class Read(msgspec.Struct, array_like=True, tag=2):
    """A batch is asked for."""

    number: int
    """Of the loop; of an iterable the worker's own."""
    indices: bytes
    """As `transport` writes them."""
    first_place: int = 0
    stride: int = 0
    """Where its samples lie among those of all ranks."""
    freed: list[int] = []


class Gave(msgspec.Struct, array_like=True, tag=3):
    """A batch; or that the iterable has ended; or the pickled exception."""

    loop: int
    kind: int
    stream: bytes
    places: list[Place]
    blocks: list[tuple[int, int]]
    fresh: list[tuple[int, int]]
    dropped: list[int]
    state: bytes | None
    is_done: bool
    """Whether an iterable has no more: its state is one of after its end."""
    left_out: list[tuple[str, str]] = []
    """The names of samples that are no part of the batch, and why."""


class Fork(msgspec.Struct, array_like=True, tag=4):
    """To the zygote: a worker has ended, and another one takes its number."""

    worker_id: int
    ended: int
    """The process to be waited for, if the zygote has forked it; otherwise 0."""


class Forked(msgspec.Struct, array_like=True, tag=5):
    """Its process id, and its socket comes along; or why there is none."""

    pid: int
    error: str
    status: int
    """The wait status of the one that has ended."""


BATCH, END, ERROR, NOTHING = range(4)
"""`NOTHING`: all samples of a batch are left out."""

Message = Begin | Read | Gave | Fork | Forked


class Line(Wire):
    """A connection with one worker, or with the zygote."""

    decode = staticmethod(msgspec.msgpack.Decoder(Message).decode)


def main(descriptor: int, worker_id: int, job: Job) -> None:
    """The body of a worker."""
    code = 1
    try:
        # What a fork has from its parent is nobody's garbage: to look through it would copy it, and
        # end what is the parent's.
        gc.freeze()
        # A signal to the terminal's processes is the trainer's to answer.
        os.setsid()
        with socket.socket(fileno=descriptor) as sock:
            _Worker(Line(sock), worker_id, job).run()
    except HungUp:
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for stream in (sys.stdout, sys.stderr):
            # The user's function may have closed it.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(code)


class _Worker:
    """Owner: the process's one thread."""

    def __init__(self, line: Line, worker_id: int, job: Job) -> None:
        self._line, self._id, self._job = line, worker_id, job
        self._blocks = Writer()
        self._dataset = job.dataset
        self._loop = self._seed = self._epoch = -1
        self._is_ready = False
        # What the begin of the loop raised: it is told at each batch.
        self._broken: ExceptionWrapper | None = None
        self._iterator: Iterator[Any] = iter(())
        self._state = DatasetState(self._dataset, job.states, is_iterable=job.is_iterable)
        self._is_done = False
        # What the batch that is read leaves out.
        self._left: list[tuple[str, str]] = []

    def run(self) -> None:
        """Answer until the trainer hangs up."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(1)
        transport.collate_into(self._blocks)
        while True:
            message, _ = self._line.receive()
            if isinstance(message, Begin):
                self._begin(message)
            else:
                self._read(message)

    # ---- a loop

    def _begin(self, told: Begin) -> None:
        self._loop, self._seed, self._epoch = told.loop, told.seed, told.epoch
        self._broken = None
        try:
            if not self._is_ready:
                self._get_ready()
            if self._job.is_iterable:
                self._open(told.reader or (0, None, False))
        except Exception:
            self._broken = ExceptionWrapper(where=self._where())

    def _get_ready(self) -> None:
        job = self._job
        seed = self._seed + self._id
        random.seed(seed)
        torch.manual_seed(seed)
        np.random.seed(torch_worker._generate_state(self._seed, self._id))
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=self._id, num_workers=job.num_workers, seed=seed, dataset=self._dataset
        )
        if job.worker_init_fn is not None:
            job.worker_init_fn(self._id)
        self._is_ready = True

    def _open(self, reader: tuple[int, bytes | None, bool]) -> None:
        num, packed, self._is_done = reader
        if not self._is_done:
            seed_for_call(self._seed + self._id, self._epoch, -1)
        self._state.load(packed)
        if self._is_done:
            return
        if isinstance(self._dataset, IterDataPipe):
            # Its shuffles are the same in all workers, each of which has its share of them.
            apply_random_seed(self._dataset, torch.Generator().manual_seed(self._seed))
        self._iterator = self._state.begin(iter(self._dataset), num)
        if packed is None:
            for number in range(num):
                # What failed then fails again, and was told then.
                with contextlib.suppress(Exception):
                    self._samples(number)
            if self._is_done:
                raise has_shrunk()

    # ---- batches

    def _read(self, told: Read) -> None:
        self._blocks.free(told.freed)
        kind, made = BATCH, None
        self._left = []
        try:
            if self._broken is not None:
                kind, made = ERROR, self._broken
            else:
                made = self._make(told)
                if made is skips.NOTHING:
                    kind, made = NOTHING, None
        except StopIteration:
            kind, made = (END, None) if self._job.is_iterable else (ERROR, self._wrapped())
        except Exception:
            kind, made = ERROR, self._wrapped()
        state = None
        try:
            if kind == END:
                # Also of a successor that had nothing to read, and so has iterated over nothing.
                self._state.end()
                state = self._state.between()
            elif self._state.is_kept:
                state = self._state.read(told.number + 1)
        except Exception:
            self._reading = " while asking the data set for its state"
            kind, made = ERROR, self._wrapped()
        self._answer(kind, made, state)

    def _make(self, told: Read) -> Any:
        if self._job.is_iterable:
            self._reading = f" while reading batch {told.number} of the iterable"
            return self._job.collate_fn(self._samples(told.number))
        indices = transport.read_indices(told.indices)
        self._reading = f" while reading samples {transport.name_samples(indices)}"
        samples = self._take(indices, told)
        if samples is skips.NOTHING:
            return samples
        return self._job.collate_fn(samples)

    def _take(self, indices: Any, told: Read) -> Any:
        dataset, job = self._dataset, self._job
        first = told.first_place if job.seeds_samples else told.number
        begin = partial(seed_for_call, self._seed, self._epoch, first)

        def read(index: Any, number: int) -> Any:
            if job.seeds_samples:
                seed_for_call(self._seed, self._epoch, first + number * told.stride)
            self._reading = f" while reading sample {index!r}"
            return dataset[index]

        if job.skips:
            samples, self._left = skips.sound_samples(
                dataset, indices, makes_batches=job.makes_batches, read=read, begin=begin,
                seeds_each=job.seeds_samples,
            )  # fmt: skip
        else:
            has_all = job.makes_batches and getattr(dataset, "__getitems__", None)
            if has_all or not job.seeds_samples:
                begin()
            if not job.makes_batches:
                return dataset[indices]
            if has_all:
                return dataset.__getitems__(indices)
            samples = [read(index, number) for number, index in enumerate(indices)]
        self._reading = f" while collating samples {transport.name_samples(indices)}"
        return samples

    def _samples(self, number: int) -> Any:
        """The next samples of the iterable, as PyTorch takes them. Raises `StopIteration`."""
        if self._is_done:
            raise StopIteration
        seed_for_call(self._seed + self._id, self._epoch, number)
        size = self._job.batch_size
        if size is None:
            return next(self._iterator)
        samples = []
        for _ in range(size):
            try:
                samples.append(next(self._iterator))
            except StopIteration:
                self._is_done = True
                break
        if not samples or (self._job.drop_last and len(samples) < size):
            raise StopIteration
        return samples

    _reading = ""
    """What it is doing, for errors."""

    # ---- answers

    def _where(self) -> str:
        return f"in DataLoader worker process {self._id}{self._reading}"

    def _wrapped(self) -> ExceptionWrapper:
        return ExceptionWrapper(where=self._where())

    def _answer(self, kind: int, made: Any, state: bytes | None) -> None:
        try:
            stream, places = transport.pack(made, self._blocks)
        except Exception as error:
            stream, places = self._unsent(made, kind, error)
            kind = ERROR
        blocks, fresh, descriptors, dropped = self._blocks.lend()
        answer = Gave(
            self._loop,
            kind,
            stream,
            places,
            blocks,
            fresh,
            dropped,
            state,
            self._is_done,
            [] if kind == ERROR else self._left,
        )
        self._line.send(answer, descriptors)
        self._blocks.sent()

    def _unsent(self, made: Any, kind: int, error: Exception) -> tuple[bytes, list[Place]]:
        """What cannot be sent, as an error that can."""
        self._blocks.lend()
        if kind == ERROR:
            # A class of exceptions that pickle does not find.
            text = f"{made.exc_type.__name__} {made.where}.\nOriginal {made.exc_msg}"
            return transport.pack(RuntimeError(text), self._blocks)
        where = transport.path_to_unpicklable(made)
        return transport.pack(
            TypeError(
                f"{where} cannot be sent from DataLoader worker process {self._id}"
                f"{self._reading}: {error}"
            ),
            self._blocks,
        )
