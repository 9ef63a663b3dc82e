"""What hands batches from one process to another: the service, ZeroMQ by hand, a DataLoader."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import xxhash
import zmq

import feeder
from children import Child, address_for
from contenders import COLUMN, Contender, Take
from factories import LOADS
from fetches import NUM_WORKERS, Array, Load, constant
from roles import QUEUED_MESSAGES

CONNECT_S = 10.0
_LENGTH = 10**9


def has_torch() -> bool:
    """Whether PyTorch is installed; no other benchmark needs it."""
    return importlib.util.find_spec("torch") is not None


def served(
    name: str, scheme: str = "ipc", *, reads: bool = False, replicas: int = 1,
    arena_bytes: dict[int, int] | None = None, **options: Any,
) -> Contender:  # fmt: skip
    """A server in a process of its own, read here: one element of every batch, or all of it, then
    it is dropped. More `replicas` read in processes of their own; `arena_bytes` is told how much
    shared memory that took.

    `options` are those of `feeder.connect`.
    """

    @contextmanager
    def running() -> Iterator[Take]:
        with (
            address_for(scheme) as address,
            Child("serve", name, address, str(replicas)) as server,
            ExitStack() as stack,
            connect(server.address, **options) as consumer,
        ):
            for replica in range(1, replicas):
                stack.enter_context(Child("read", server.address, str(replica)))
            _check(name, next(consumer)[COLUMN])

            def take() -> None:
                next(consumer)[COLUMN].item(0)

            def read() -> None:
                xxhash.xxh3_64_intdigest(next(consumer)[COLUMN])

            yield read if reads else take
            if arena_bytes is not None:
                # Not above: `bench pair` runs this beside commits that have no such module.
                from feeder.service.client.monitor import Monitor

                with Monitor(server.address) as monitor:
                    (feed,) = monitor.fetch().feeds
                assert feed.service is not None
                arena_bytes[replicas] = feed.service.arena_bytes

    return running


def connect(address: str, **options: Any) -> feeder.Consumer:
    """A consumer that does not wait for ever."""
    return feeder.connect(address, timeout=CONNECT_S, reconnect=CONNECT_S, **options)


def by_hand(name: str, scheme: str) -> Contender:
    """PUSH and PULL, without a copy where ZeroMQ needs none."""
    dtype = LOADS[name].dtype

    @contextmanager
    def running() -> Iterator[Take]:
        with (
            address_for(scheme) as address,
            Child("push", name, address) as sender,
            zmq.Context() as context,
            context.socket(zmq.PULL) as receiver,
        ):
            receiver.set(zmq.RCVHWM, QUEUED_MESSAGES)
            receiver.set(zmq.LINGER, 0)
            receiver.connect(sender.address)
            _check(name, np.frombuffer(receiver.recv(), dtype))

            def take() -> None:
                frame = receiver.recv(copy=False)
                np.frombuffer(frame.buffer, dtype).item(0)

            yield take

    return running


@contextmanager
def ping_pong() -> Iterator[Take]:
    """A byte to another process and back over two pipes, each process on a processor of its own:
    what two wake-ups take."""
    processors = os.sched_getaffinity(0)
    here, there = min(processors), max(processors)
    with Child("answer", str(there)) as child:
        to, back = child.pipes
        os.sched_setaffinity(0, {here})

        def take() -> None:
            os.write(to, b"0")
            os.read(back, 1)

        try:
            yield take
        finally:
            os.sched_setaffinity(0, processors)


def one_way(name: str) -> Contender:
    """Batches through `multiprocessing.Pipe`, as bytes, which are not pickled."""
    dtype = LOADS[name].dtype

    @contextmanager
    def running() -> Iterator[Take]:
        with Child("pipe", name) as sender:
            start, end = sender.pipes
            os.write(start, b"0")
            # The descriptor stays the child's, which closes it.
            receiver = Connection(os.dup(end), writable=False)
            try:
                _check(name, np.frombuffer(receiver.recv_bytes(), dtype))
                yield lambda: np.frombuffer(receiver.recv_bytes(), dtype).item(0)
            finally:
                receiver.close()
                sender.kill()

    return running


class Batches:
    """A dataset, as PyTorch wants it, whose items are what a fetch function returns."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._fetch = constant(load)

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> Array:
        return self._fetch(0, self._load.batch_size)[0]


class Samples:
    """A dataset, as PyTorch wants it, of rows that were prepared once."""

    def __init__(self, load: Load) -> None:
        self._rows = load.rows(load.batch_size)

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> Array:
        row: Array = self._rows[index % len(self._rows)]
        return row


def data_loader(name: str) -> Contender:
    """PyTorch's DataLoader with two workers, given whole batches: nothing is left to collate."""

    @contextmanager
    def running() -> Iterator[Take]:
        data = importlib.import_module("torch.utils.data")
        loader = data.DataLoader(Batches(LOADS[name]), batch_size=None, num_workers=NUM_WORKERS)
        # The workers end with the iterator, when nothing refers to it any more.
        batches = partial(next, iter(loader))
        _check(name, batches().numpy())
        yield partial(_touch, batches)

    return running


def _touch(batches: Callable[[], Any]) -> None:
    batches().view(-1)[0].item()


def _check(name: str, batch: Array) -> None:
    """Raise RuntimeError where a first batch is not what the fetch function returns."""
    if not np.array_equal(batch.ravel(), _first_batch(name)):
        raise RuntimeError(f"{name}: the first batch is not the one that was to come")


@cache
def _first_batch(name: str) -> Array:
    """The values of the first batch: those of the chunk, over and over."""
    load = LOADS[name]
    chunk = load.rows(load.chunk_rows)
    return np.resize(chunk, (load.batch_size, *load.row_shape)).ravel()
