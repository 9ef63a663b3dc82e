"""Child processes of benchmarks, which are always reaped, and bounds in time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType

LIMIT_S = 60.0
"""Nothing that is measured once takes so long, unless it hangs."""
_STOP_S = 10.0
ROLE = ("-c", "import roles; roles.main()")
"""Arguments of Python for a process in a role; the role and its own arguments follow."""


@contextmanager
def bounded(seconds: float = LIMIT_S) -> Iterator[None]:
    """Raise TimeoutError in the main thread when what is done here takes longer."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"a measurement did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def address_for(scheme: str) -> Iterator[str]:
    """An address on this host where nobody listens: a socket in a folder of its own, or a port
    that the system chooses."""
    with tempfile.TemporaryDirectory(prefix="feeder-bench-") as folder:
        yield f"ipc://{folder}/bench.sock" if scheme == "ipc" else "tcp://127.0.0.1:*"


class Process:
    """A Python process; a context manager that leaves none behind, nor a file of its."""

    def __init__(self, arguments: Sequence[str]) -> None:
        # What a process that is killed leaves in the folder for temporary files goes with it.
        self._folder = tempfile.TemporaryDirectory(prefix="feeder-bench-")
        self.started_at = time.monotonic()
        """When it was started, in seconds of the clock that all processes of a host share."""
        # A session of its own: what the terminal sends to the benchmark is not for its children.
        self._process = subprocess.Popen(
            [sys.executable, *arguments], cwd=Path(__file__).parent, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "TMPDIR": self._folder.name},
        )  # fmt: skip

    def read_line(self) -> str:
        """The next line that it writes; raises RuntimeError where it has ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args!r} ended with {self._process.wait()}")
        return line.rstrip("\n")

    def write_line(self, line: str) -> None:
        """Write a line to its input."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    @property
    def pipes(self) -> tuple[int, int]:
        """The descriptors of what it reads and of what it writes; behind the lines that were read
        it has written nothing yet."""
        assert self._process.stdin is not None and self._process.stdout is not None
        return self._process.stdin.fileno(), self._process.stdout.fileno()

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
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            print(f"{self._process.args!r} did not end within {_STOP_S} s", file=sys.stderr)
            self._process.kill()
            self._process.wait()
        finally:
            self._process.stdout.close()
            self._folder.cleanup()

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Child(Process):
    """A process in one of the roles, which is ready."""

    def __init__(self, role: str, *arguments: str) -> None:
        super().__init__([*ROLE, role, *arguments])
        try:
            ready_at, self.address = self.read_line().split(maxsplit=1)
        except BaseException:
            self.kill()
            self.close()
            raise
        self.ready_at = float(ready_at)
        """When it was ready."""

    def __enter__(self) -> Child:
        return self
