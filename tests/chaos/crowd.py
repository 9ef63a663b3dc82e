"""A crowd of consumers reads all and leaves beside busy loops: their server ends by itself.

The last words of a crowd come in one moment, to a server that gets little of the processor. It may
not take who has said goodbye for lost, since a lost consumer's queue waits for a successor.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np

import feeder
from chaos.processes import Watch

ROUNDS = 4
WITHIN_S = 5.0
"""How long the server may take to end after the last consumer has closed."""
_HUNG_S = 60.0


def make(num: int) -> feeder.Coordinator:
    """Return a coordinator of so many batches that each of a crowd has `ROUNDS`."""

    def fetch(call: feeder.Call) -> list[np.ndarray]:
        if call.index == num * ROUNDS:
            raise StopIteration
        return [np.full(4, call.index)]

    return feeder.init_data_input_workers(
        ["id"], fetch, 4, last_round="drop", coordinator=feeder.Coordinator()
    )


def spin() -> None:
    """Use a core until the process is killed."""
    while True:
        pass


def read(address: str, queue: int, found: dict[int, object]) -> None:
    """Thread body: note the batches of a queue, or what went wrong."""
    plane: Literal["shared", "frames"] = "shared" if queue % 2 else "frames"
    try:
        with feeder.connect(address, queue=queue, timeout=_HUNG_S, plane=plane) as consumer:
            got = [(batch.step, int(batch["id"][0])) for batch in consumer]
        found[queue] = got
    except Exception as error:
        found[queue] = error


def run(num: int) -> float:
    """Have a crowd of so many read all; returns after how many seconds its server had ended.

    Raises `Hang` if it does not end, and `AssertionError` if a consumer had other batches or
    failed.
    """
    with tempfile.TemporaryDirectory(prefix="crowd-") as folder, Watch() as watch:
        address = f"ipc://{folder}/feed.sock"
        log = Path(folder, "server.log")
        server = watch.start("server", "chaos.crowd", f"{num} {address}", {}, log)
        watch.wait(lambda: server.said("ready"), _HUNG_S, "start of the server")
        found: dict[int, object] = {}
        crowd = [
            threading.Thread(target=read, args=(address, i, found), daemon=True) for i in range(num)
        ]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()
        wanted = {i: [(i + num * k,) * 2 for k in range(ROUNDS)] for i in range(num)}
        wrong = {i: found[i] for i in wanted if found[i] != wanted[i]}
        assert not wrong, f"{len(wrong)} consumers, of which one: {next(iter(wrong.items()))}"
        closed = time.monotonic()
        watch.wait(lambda: server.status is not None, _HUNG_S, "end of the server")
        assert server.status == 0, f"the server ended with status {server.status}"
        return time.monotonic() - closed


def crowds(num: int, size: int) -> int:
    """Run so many crowds beside a busy loop for each core; returns the exit status."""
    took = []
    with ExitStack() as stack:
        for _ in range(len(os.sched_getaffinity(0))):
            loop = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
            loop.start()
            stack.callback(loop.join)
            stack.callback(loop.kill)
        for i in range(num):
            took.append(run(size))
            print(f"crowd {i + 1}: the server ended after {took[-1]:.1f} s", flush=True)
    late = sum(seconds > WITHIN_S for seconds in took)
    print(
        f"{num} crowds of {size}: their servers ended within {max(took):.1f} s of the last close "
        f"(median {median(took):.1f}); after more than {WITHIN_S:g} s, {late} failures"
    )
    return 1 if late else 0


def main(num: int, address: str) -> None:
    """The server's process."""
    with feeder.serve(lambda: make(num), address, queues=num, exit_when="acknowledged") as server:
        print("ready", flush=True)
        server.wait()


if __name__ == "__main__":
    import sys

    number, where = sys.argv[1].split()
    main(int(number), where)
