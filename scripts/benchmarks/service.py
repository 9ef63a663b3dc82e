"""Batches from a server, by size and transport; starting, connecting, failing over.

Fetch functions return chunks that were prepared once. Beside the service run a copy of the same
bytes by one thread, and ZeroMQ as one writes it by hand, without copies. Everything stays on this
host. "CPU here" is the trainer's part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import zmq

import feeder
from benchmarks.children import QUEUED_MESSAGES, Child, Process, address_for
from benchmarks.contenders import COLUMN, copyto, make_coordinator
from benchmarks.fetches import SIZES, SMALL, Array, constant
from benchmarks.harness import Cost, Row, Settings, Take, Watch, batches, once
from benchmarks.report import Load

CONNECT_S = 10.0
TRAINERS = 4
"""Trainers that share a queue."""
MARKED: dict[str, Any] = {"kind": "marking", "credit": 32, "checksum": "off"}
"""What only marks its batches waits for nothing else; a sampled checksum reads a 64th of each."""
SERVE = ("-m", "feeder", "serve", "benchmarks.service:small_feed", "--bind")


def connect(address: str, **options: Any) -> feeder.Consumer:
    """A consumer that does not wait for ever."""
    return feeder.connect(address, timeout=CONNECT_S, reconnect=CONNECT_S, **options)


def small_feed() -> feeder.Coordinator:
    """What the command `feeder serve` serves."""
    return make_coordinator(constant(SMALL), SMALL)


@contextmanager
def served(
    name: str, scheme: str = "ipc", *, kind: str = "constant", trainers: int = 1, **options: Any
) -> Iterator[Take]:
    """Read here, one element of every batch, which is dropped then; other trainers of the same
    queue read in processes of their own. `options` are those of `feeder.connect`. What comes on a
    GPU is not waited for."""
    with (
        address_for(scheme) as address,
        Child("serve", name, address, kind, str(trainers)) as server,
        ExitStack() as stack,
        connect(server.address, **options) as consumer,
    ):
        for replica in range(1, trainers):
            stack.enter_context(Child("read", server.address, str(replica)))
        first = next(consumer)[COLUMN]
        if kind == "constant" and "device" not in options:
            _check(name, first)
        del first
        if "device" in options:
            yield lambda: next(consumer)[COLUMN]
        else:
            yield lambda: next(consumer)[COLUMN].item(0)


@contextmanager
def by_hand(name: str, scheme: str) -> Iterator[Take]:
    """PUSH and PULL of ZeroMQ, without a copy where ZeroMQ needs none."""
    dtype = SIZES[name].dtype
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
        yield lambda: np.frombuffer(receiver.recv(copy=False).buffer, dtype).item(0)


def _check(name: str, batch: Array) -> None:
    """Raise RuntimeError where a first batch is not what the fetch function returns."""
    size = SIZES[name]
    chunk = size.rows(size.chunk_rows)
    if not np.array_equal(batch.ravel(), np.resize(chunk, size.shape).ravel()):
        raise RuntimeError(f"{name}: the first batch is not the one that was to come")


# ---- how soon


def _connect(watch: Watch) -> int:
    """From `feeder.connect` to the first batch, of a server that runs."""
    with address_for("ipc") as address, Child("serve", "small", address) as server:
        # A server's first consumer finds nothing begun. For the next ones the feed goes back: a few
        # times at once, then every half second.
        for counted in (Watch(), watch, watch):
            with ExitStack() as stack, counted:
                next(stack.enter_context(connect(server.address)))[COLUMN].item(0)
    return 2


def _until_ready(watch: Watch) -> int:
    """From the start of a server's process until it says that it listens."""
    with address_for("ipc") as address, ExitStack() as stack:
        with watch:
            process = stack.enter_context(Process([*SERVE, address]))
            process.read_line()
        process.terminate()
    return 1


def _fail_over(scheme: str, plane: str, settings: Settings) -> Cost:
    """From the kill of a server to the trainer's next batch, without the time from the start of the
    next server until it is ready, whose CPU counts."""
    with (
        address_for(scheme) as address,
        Child("serve", "vectors", address) as first,
        connect(first.address, plane=plane) as consumer,
    ):
        last = next(consumer).step
        watch = Watch()
        with watch:
            killed_at = first.kill()
            first.close()
            while consumer.stats()["prefetched_batches"]:
                last = _next_step(consumer, last)
            with Child("serve", "vectors", first.address) as second:
                # What was still on its way from the first server comes at once.
                while not consumer.stats()["reconnects"]:
                    last = _next_step(consumer, last)
                resumed_at = time.monotonic()
                _next_step(consumer, last)
        restart_s = second.ready_at - second.started_at
        return replace(watch.cost(restart_s=restart_s), wall_s=resumed_at - killed_at - restart_s)


def _next_step(consumer: feeder.Consumer, last: int) -> int:
    step: int = next(consumer).step
    if step != last + 1:
        raise RuntimeError(f"batch {step} came after batch {last}")
    return step


COPY = {"images": "copy 20 MB", "vectors": "copy 1 MB", "small": "copy 8 KB"}
BY_HAND = {scheme: f"ZeroMQ by hand, 20 MB, {scheme}" for scheme in ("ipc", "tcp")}
Options = dict[str, Any]
SHARED: tuple[tuple[str, str, Options], ...] = (
    ("images, shared", "images", {}),
    ("images-7, shared", "images-7", {}),
    ("images, shared, checksum sampled", "images", {"checksum": "sampled"}),
    ("images, shared, checksum full", "images", {"checksum": "full"}),
    ("images, shared, filled in place", "images", {"kind": "filling"}),
    ("images, shared, marked in place", "images", MARKED),
    ("vectors, shared", "vectors", {}),
    ("vectors, shared, marked in place", "vectors", MARKED),
    ("small, credit 8", "small", {"credit": 8}),
    ("small, credit 64", "small", {"credit": 64}),
    ("small-4096, credit 64", "small-4096", {"credit": 64}),
)
"""Name, what is served, and options."""
SHARING = {
    "images": "images, shared", "vectors": "vectors, shared", "small": "small, credit 64",
}  # fmt: skip
"""What trainers share a queue of, and the row of one trainer."""
FRAMES: tuple[tuple[str, str, Options], ...] = (
    ("images, frames, ipc", "ipc", {}),
    ("images, frames, tcp", "tcp", {}),
    ("images, frames, tcp, unchecked", "tcp", {"checksum": "off"}),
)

LOAD = Load(
    name="service",
    about=__doc__,
    rows=(
        *(batches(COPY[name], partial(copyto, SIZES[name]), ours=False) for name in COPY),
        *(
            batches(name, partial(served, what, plane="shared", **options),
                    of=COPY[what.partition("-")[0]])
            for name, what, options in SHARED
        ),
        *(
            batches(f"{name}, one of {TRAINERS} trainers",
                    partial(served, name, plane="shared", trainers=TRAINERS), of=alone)
            for name, alone in SHARING.items()
        ),
        *(
            batches(name, partial(served, "images", scheme, plane="frames", **options),
                    of=BY_HAND[scheme])
            for name, scheme, options in FRAMES
        ),
        *(
            batches(name, partial(by_hand, "images", scheme), ours=False)
            for scheme, name in BY_HAND.items()
        ),
        once("connect", _connect),
        once("ready", _until_ready),
        Row(name="failover, ipc", measure=partial(_fail_over, "ipc", "shared"),
            counts_batches=False),
    ),
)  # fmt: skip
main = LOAD.main
