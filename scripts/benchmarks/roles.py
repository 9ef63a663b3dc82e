"""What the other processes of the service's benchmarks do. Each ends when its parent does.

A child is called with its role and that role's arguments, and writes one line when it is ready:
the time on the clock that all processes of a host share, and where it is to be reached.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

QUEUED_MESSAGES = 4
"""Messages that a hand-written sender and its receiver each queue: of 19.8 MB more are no help."""


def serve(name: str, address: str, replicas: str = "1") -> None:
    """A feeder's server."""
    import feeder
    from factories import LOADS, make

    # Named only where it says something: `bench pair` serves by commits that know of none, too.
    shared: dict[str, Any] = {} if replicas == "1" else {"replicas": int(replicas)}
    with feeder.serve(partial(make, LOADS[name]), address, **shared) as server:
        _tell(server.addresses[0])
        _wait_for_parent()


def serve_places(kind: str, name: str, address: str, places: str) -> None:
    """A feeder's server of a feed whose fetch function writes its rows where they belong, or
    elsewhere."""
    import feeder
    from places import make

    with feeder.serve(make(kind, name, places=places == "1"), address) as server:
        _tell(server.addresses[0])
        _wait_for_parent()


def push(name: str, address: str) -> None:
    """What one writes by hand: a PUSH socket that sends the same batch without a copy."""
    import zmq

    from factories import LOADS

    load = LOADS[name]
    batch = load.rows(load.batch_size)
    context: zmq.Context[Any] = zmq.Context()
    sender = context.socket(zmq.PUSH)
    sender.set(zmq.SNDHWM, QUEUED_MESSAGES)
    sender.set(zmq.LINGER, 0)
    sender.bind(address)
    poller = zmq.Poller()
    poller.register(sender, zmq.POLLOUT)
    poller.register(sys.stdin, zmq.POLLIN)
    _tell(sender.get_string(zmq.LAST_ENDPOINT))
    while sys.stdin.fileno() not in dict(poller.poll()):
        # Its receiver may be gone since: then there is nobody to wait for.
        with contextlib.suppress(zmq.Again):
            sender.send(batch, zmq.DONTWAIT, copy=False)
    sender.close()
    context.term()


def answer(processor: str) -> None:
    """One side of a ping-pong: each byte that it reads it writes back."""
    os.sched_setaffinity(0, {int(processor)})
    _tell(processor)
    while byte := os.read(sys.stdin.fileno(), 1):
        os.write(sys.stdout.fileno(), byte)


def pipe(name: str) -> None:
    """What one writes by hand for small batches: the sending end of `multiprocessing.Pipe`, from a
    byte on. It sends until it is killed."""
    from multiprocessing.connection import Connection

    from factories import LOADS

    load = LOADS[name]
    batch = load.rows(load.batch_size)
    _tell(name)
    os.read(sys.stdin.fileno(), 1)
    sender = Connection(sys.stdout.fileno(), readable=False)
    while True:
        sender.send_bytes(batch)


def hold(address: str) -> None:
    """A consumer that takes one batch, keeps it and takes no more."""
    import feeder

    with feeder.connect(address) as consumer:
        batch = next(consumer)
        _tell(address)
        _wait_for_parent()
        del batch


def read(address: str, replica: str) -> None:
    """A consumer that reads one element of each batch, for as long as its parent lives."""
    import feeder
    from contenders import COLUMN

    consumer = feeder.connect(address, replica=int(replica))

    def go_on() -> None:
        for batch in consumer:
            batch[COLUMN].item(0)

    threading.Thread(target=go_on, daemon=True).start()
    _tell(address)
    _wait_for_parent()


def annoy(kind: str, address: str) -> None:
    """A peer that misbehaves, from the first refusal on."""
    from annoying import annoying, go_on

    turns = annoying(kind, address)
    next(turns)
    _tell(address)
    go_on(turns)


def _tell(address: str) -> None:
    print(time.monotonic(), address, flush=True)


def _wait_for_parent() -> None:
    """Return when the parent lets go of the pipe, or dies."""
    sys.stdin.read()


ROLES: Mapping[str, Callable[..., None]] = {
    "serve": serve,
    "serve_places": serve_places,
    "push": push,
    "answer": answer,
    "pipe": pipe,
    "hold": hold,
    "read": read,
    "annoy": annoy,
}


def main() -> None:
    """Play the role that the command line names."""
    role, *arguments = sys.argv[1:]
    logging.getLogger("feeder").setLevel(logging.ERROR)
    ROLES[role](*arguments)
