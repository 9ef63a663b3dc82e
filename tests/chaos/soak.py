"""Reads many small batches, reconnecting again and again, and sees that nothing grows.

The server is a process of its own; every second reconnect is a new consumer with the old one's
state, the others are connections that break under a consumer.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median_high

import numpy as np

import feeder
from chaos.processes import Child, Holds, Watch
from feeder import Consumer

BATCH_SIZE = 8
PER_CONNECTION = 100
"""Batches between two reconnects."""
LEAST = 6 * PER_CONNECTION
"""Batches of the shortest run."""

_WARM_UP = 0.2
"""The part of the batches after which nothing may grow any more."""
_GROWTH_BYTES = 2 << 20
"""By how much resident memory may wander: pages of the allocator's, not of ours."""


def make() -> feeder.Coordinator:
    """Return a coordinator with an endless feed of small batches whose rows count up."""

    def fetch(call: feeder.Call) -> list[np.ndarray]:
        return [np.arange(5 * call.index, 5 * call.index + 5)]

    return feeder.init_data_input_workers(
        ["id"], fetch, BATCH_SIZE, epochs=None, coordinator=feeder.Coordinator()
    )


class Soak:
    """The consumer's side, and what both processes held half-way between reconnects."""

    def __init__(self, address: str, server: Child) -> None:
        self._address = address
        self._pids = {"consumer": os.getpid(), "server": server.pid}
        self.sizes: dict[str, list[Holds]] = {name: [] for name in self._pids}
        self.num_broken = self.num_found_again = 0
        """Connections that were broken, and those that the consumers made again."""

    def run(self, num_batches: int) -> None:
        """Read so many batches; raises `AssertionError` where one is not the next."""
        consumer = self._connect(None)
        wanted = self._wanted()
        try:
            for i in range(num_batches):
                assert next(consumer)["id"].tolist() == next(wanted).tolist(), f"batch {i}"
                if (i + 1) % PER_CONNECTION == 0:
                    if (i + 1) // PER_CONNECTION % 2:
                        self.num_found_again += consumer.stats()["reconnects"]
                        state = consumer.state_dict()
                        consumer.close()
                        consumer = self._connect(state)
                    else:
                        break_connections(self._address.removeprefix("ipc://"))
                        self.num_broken += 1
                elif (i + 1) % PER_CONNECTION == PER_CONNECTION // 2:
                    self._measure()
        finally:
            consumer.close()

    def _connect(self, state: dict[str, bytes] | None) -> Consumer:
        # Credit for less than a connection's batches: each break is met before the next.
        return feeder.connect(
            self._address, resume=state, rejoin=state is not None, credit=PER_CONNECTION // 4
        )

    def _wanted(self) -> Iterator[np.ndarray]:
        first = 0
        while True:
            yield np.arange(first, first + BATCH_SIZE)
            first += BATCH_SIZE

    def _measure(self) -> None:
        gc.collect()
        for name, pid in self._pids.items():
            self.sizes[name].append(Holds(pid))

    def growth(self) -> list[str]:
        """Return a line for each thing that has grown since the warm-up."""
        lines = []
        for name, sizes in self.sizes.items():
            warm = sizes[int(_WARM_UP * len(sizes)) :]
            half = len(warm) // 2
            for what in ("descriptors", "threads", "mappings", "resident_bytes"):
                slack = _GROWTH_BYTES if what == "resident_bytes" else 0
                before = median_high(getattr(size, what) for size in warm[:half])
                after = median_high(getattr(size, what) for size in warm[half:])
                if after > before + slack:
                    lines.append(f"{what} of the {name} grew from {before} to {after}")
        return lines


def break_connections(path: str) -> None:
    """Shut this process's connections to a unix socket under whoever uses them."""
    for name in os.listdir("/proc/self/fd"):
        # Meanwhile another thread may close what is listed.
        with contextlib.suppress(OSError):
            if Path(f"/proc/self/fd/{name}").is_socket():
                _break_connection(os.dup(int(name)), path)


def _break_connection(descriptor: int, path: str) -> None:
    with socket.socket(fileno=descriptor) as sock:
        if sock.family == socket.AF_UNIX and sock.getpeername() == path:
            sock.shutdown(socket.SHUT_RDWR)


def soak(num_batches: int) -> int:
    """Run the soak and say what it found; returns the exit status."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, Watch() as watch:
        address = f"ipc://{folder}/feed.sock"
        log = Path(folder, "server.log")
        server = watch.start("server", "chaos.soak", address, {"TMPDIR": folder}, log)
        watch.wait(lambda: server.said("ready"), 10.0, "start of the server")
        run = Soak(address, server)
        run.run(num_batches)
    seconds = time.monotonic() - started
    for name, sizes in run.sizes.items():
        print(f"{name}: {vars(sizes[int(_WARM_UP * len(sizes))])}, at the end {vars(sizes[-1])}")
    lines = run.growth()
    if run.num_found_again < run.num_broken - 1:
        lines.append(f"{run.num_broken} breaks, but {run.num_found_again} connections made again")
    print("\n".join(lines) or "nothing grew")
    print(
        f"{num_batches} batches, {num_batches // PER_CONNECTION} reconnects, {len(lines)} failures "
        f"in {seconds:.1f} s"
    )
    return 1 if lines else 0


def main(address: str) -> None:
    """The server's process."""
    with feeder.serve(make, address) as server:
        print("ready", flush=True)
        server.wait()


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
