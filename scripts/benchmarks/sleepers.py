"""Stand-ins of Ray and of a thousand actors: a few processes speak for all of them, and sleep.

What they say is what actors say, over ZeroMQ with a key each; only the fetch function is missing. A
ticket is answered after a while with one row for each of its calls.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from children import Process
from feeder.executors.actor import HELLO, Greeting, Invitation
from feeder.executors.pickles import dump
from feeder.executors.wire import FULL, Calls, Made, Place, decode, encode

SLEEP_S = 0.25
"""How long a worker sleeps for a ticket."""
MOST_CALLS = 16
"""Calls of a ticket that are answered together."""
HOST = ("-c", "import sleepers; sleepers.main()")


def resident_kib() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


@contextmanager
def hosts(num: int, num_hosts: int) -> Iterator[Callable[..., Any]]:
    """What stands for `feeder.executors.cluster.Cluster`, with so many workers at hand."""
    with ExitStack() as stack:
        made = [stack.enter_context(Process(HOST)) for _ in range(num_hosts)]
        keys = []
        for host in made:
            host.write_line(str(num // num_hosts + 1))
            keys.append(json.loads(host.read_line()))

        class Cluster:
            """The workers of these processes, given out one by one."""

            def __init__(self, options: Any) -> None:
                self._numbers = itertools.count()

            def check(self) -> None:
                pass

            def host(self) -> str:
                return "127.0.0.1"

            def start(self) -> Any:
                number = next(self._numbers)
                return number % num_hosts, number // num_hosts

            def hello(self, handle: Any, told: Callable[..., None]) -> None:
                host, number = handle
                told(Greeting(number, f"{host}", "bench", keys[host][number].encode()), None)

            def serve(self, handle: Any, to: Invitation, told: Callable[..., None]) -> None:
                host, number = handle
                invitation = [number, to.generation, to.tcp, to.key.decode()]
                made[host].write_line(json.dumps(invitation))

            def kill(self, handle: Any) -> None:
                pass

            def how(self, error: Any) -> tuple[str, bool]:
                return "has left", False

            def room(self) -> tuple[str, bool]:
                return "", False

        yield Cluster


class Sleeper:
    """One worker."""

    def __init__(self, context: zmq.Context[Any], keys: tuple[bytes, bytes]) -> None:
        self._context, self._keys = context, keys
        self.dealer: Any = None
        self._has_told = False

    def join(self, generation: int, address: str, key: str) -> None:
        """Come to the driver."""
        dealer = self.dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.curve_publickey, dealer.curve_secretkey = self._keys
        dealer.curve_serverkey = key.encode()
        dealer.connect(address)
        dealer.send(HELLO.pack(generation))

    def answer(self, ticket: Calls) -> None:
        """One row for each call."""
        num = min(ticket.most_calls, MOST_CALLS)
        dtypes = [] if self._has_told else [dump(np.dtype(np.int64))]
        self._has_told = True
        chunks: Any = [[Place(1, 8 * i, 0, (1,))] for i in range(num)]
        made = Made(chunks, [], FULL, b"", dtypes, [(1, 8 * num)], [], [], 0, ticket.number)
        self.dealer.send_multipart([encode(made), bytes(8 * num)])


def main() -> None:
    """The body of a process: it serves its workers until its input ends."""
    num = int(sys.stdin.readline())
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 2 * num + 16)
    pairs = [zmq.curve_keypair() for _ in range(num)]
    print(json.dumps([public.decode() for public, _ in pairs]), flush=True)
    workers = [Sleeper(context, pair) for pair in pairs]
    poller, by_socket = zmq.Poller(), {}
    stdin = os.fdopen(os.dup(0), "rb", buffering=0)
    poller.register(stdin.fileno(), zmq.POLLIN)
    due: list[tuple[float, int, Sleeper, Any]] = []
    counts, rest = itertools.count(), b""
    while True:
        left_ms = max(0, int(1000 * (due[0][0] - time.monotonic()) + 1)) if due else None
        for ready, _ in poller.poll(left_ms):
            if ready == stdin.fileno():
                data = os.read(stdin.fileno(), 65536)
                if not data:
                    context.destroy(linger=0)
                    return
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    number, *told = json.loads(line)
                    workers[number].join(*told)
                    poller.register(workers[number].dealer, zmq.POLLIN)
                    by_socket[workers[number].dealer] = workers[number]
                continue
            body, *_ = ready.recv_multipart()
            ticket = decode(body)
            if isinstance(ticket, Calls):
                wakes = time.monotonic() + SLEEP_S
                heapq.heappush(due, (wakes, next(counts), by_socket[ready], ticket))
        while due and due[0][0] <= time.monotonic():
            _, _, worker, ticket = heapq.heappop(due)
            worker.answer(ticket)
