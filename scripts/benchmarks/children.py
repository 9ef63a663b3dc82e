"""Child processes of the benchmarks, which are always reaped, and the roles that they play.

A child is told its role and that role's arguments. It writes one line when it is ready: the time
on the clock that all processes of a host share, and where it is to be reached. It ends when its
parent does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

SCRIPTS = Path(__file__).parents[1]
"""Where a child finds this package; the package that is measured is on its path before."""
STOP_S = 10.0
QUEUED_MESSAGES = 4
"""Messages that a hand-written sender and its receiver each queue: of 20 MB more are no help."""


class Process:
    """A Python process; a context manager that leaves none behind, nor a file of its."""

    def __init__(self, arguments: Sequence[str]) -> None:
        # What a process that is killed leaves in the folder for temporary files goes with it.
        self._folder = tempfile.TemporaryDirectory(prefix="feeder-bench-")
        self.started_at = time.monotonic()
        """When it was started, in seconds of the clock that all processes of a host share."""
        # A session of its own: what the terminal sends to the benchmark is not for its children.
        self._process = subprocess.Popen(
            [sys.executable, *arguments], cwd=SCRIPTS, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "TMPDIR": self._folder.name},
        )  # fmt: skip

    def read_line(self) -> str:
        """The next line that it writes; raises RuntimeError where it has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return line.rstrip("\n")

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""
        self._process.terminate()

    def kill(self) -> float:
        """Kill it (SIGKILL); returns when that was."""
        at = time.monotonic()
        self._process.kill()
        return at

    def kill_all(self) -> None:
        """Kill it and the processes that it has started, where any are left."""
        # It leads its session. While it is not waited for, nobody else gets its number.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of it, and wait until it has ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            print(f"{self._process.args!r} did not end within {STOP_S} s", file=sys.stderr)
            self._process.kill()
            self._process.wait()
        finally:
            self._process.stdout.close()
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Child(Process):
    """A process in one of the roles, which is ready."""

    def __init__(self, role: str, *arguments: str) -> None:
        super().__init__(["-m", "benchmarks.children", role, *arguments])
        try:
            ready_at, self.address = self.read_line().split(maxsplit=1)
        except BaseException:
            self.kill()
            self.close()
            raise
        self.ready_at = float(ready_at)
        """When it was ready."""


@contextmanager
def address_for(scheme: str) -> Iterator[str]:
    """An address on this host where nobody listens: a socket in a folder of its own, or a port
    that the system chooses."""
    with tempfile.TemporaryDirectory(prefix="feeder-bench-") as folder:
        yield f"ipc://{folder}/bench.sock" if scheme == "ipc" else "tcp://127.0.0.1:*"


# ---- roles


def serve(name: str, address: str, kind: str = "constant", replicas: str = "1") -> None:
    """A server of batches whose fetch function is of a kind; what writes its rows itself writes
    them where they belong."""
    import feeder
    from benchmarks.contenders import make_coordinator
    from benchmarks.fetches import KINDS, SIZES

    # Named only where they say something: `bench pair` serves by commits that know of none, too.
    shared: dict[str, Any] = {} if replicas == "1" else {"replicas": int(replicas)}
    size = SIZES[name]
    places: dict[str, Any] = {} if kind == "constant" else {"rows_per_call": size.batch_size}
    fetch = KINDS[kind](size)
    with feeder.serve(
        lambda: make_coordinator(fetch, size, epochs=None, **places), address, **shared
    ) as server:
        _tell(server.addresses[0])
        _wait_for_parent()


def push(name: str, address: str) -> None:
    """What one writes by hand: a PUSH socket that sends the same batch without a copy."""
    import zmq

    from benchmarks.fetches import SIZES

    size = SIZES[name]
    batch = size.rows(size.batch_size)
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


def read(address: str, replica: str) -> None:
    """A consumer that reads one element of each batch, for as long as its parent lives."""
    import feeder
    from benchmarks.contenders import COLUMN

    consumer = feeder.connect(address, replica=int(replica))

    def run_reading() -> None:
        for batch in consumer:
            batch[COLUMN].item(0)

    threading.Thread(target=run_reading, daemon=True).start()
    _tell(address)
    _wait_for_parent()


def _tell(address: str) -> None:
    print(time.monotonic(), address, flush=True)


def _wait_for_parent() -> None:
    """Return when the parent lets go of the pipe, or dies."""
    sys.stdin.read()


ROLES: Mapping[str, Callable[..., None]] = {"serve": serve, "push": push, "read": read}

if __name__ == "__main__":
    logging.getLogger("feeder").setLevel(logging.ERROR)
    ROLES[sys.argv[1]](*sys.argv[2:])
