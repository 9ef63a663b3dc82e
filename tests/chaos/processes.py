"""Child processes, watched without polling: what they print, when they stop and when they end, and
what they hold."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from planted.bug import BUGS, planted
from project import ROOT

PLANT = "CHAOS_PLANT"
"""The variable that names a planted bug to a child."""
_PLANTED = ExitStack()
PLANTS = [bug.name for bug in BUGS.values() if "chaos" in bug.by]


class Hang(Exception):
    """Something that had to happen did not."""


class Child:
    """A Python process that prints words; `Watch` reads them."""

    def __init__(
        self, name: str, module: str, argument: str, env: Mapping[str, str], log: Path,
        inside: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`inside`: the words before its command, as of a network namespace."""
        self.name = name
        self.log = log
        self.lines: list[list[str]] = []
        """The words of each line that it has printed."""
        self.stopped = False
        """Whether it has been seen stopped, and was not told to go on since."""
        with log.open("ab") as stderr:
            self._popen = subprocess.Popen(
                [*inside, sys.executable, "-m", module, argument], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=stderr, env=_environment(env),
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        self.pid = self._popen.pid
        assert self._popen.stdout is not None
        self.stdout = self._popen.stdout.fileno()
        os.set_blocking(self.stdout, False)
        self.pidfd = os.pidfd_open(self.pid)
        self.armed = env.get("FEEDER_FAULT", "")
        """The point at which it was told to die."""
        self._rest = b""

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it lives."""
        return self._popen.poll()

    @property
    def struck(self) -> bool:
        """Whether it has come to the point at which it was told to die or to stop."""
        return bool(self.armed) and (self.stopped or self.status == -signal.SIGKILL)

    def said(self, word: str) -> bool:
        """Whether it has printed a line that begins so."""
        return any(line[0] == word for line in self.lines)

    def read(self) -> bool:
        """Read what it has printed; False where it can print no more."""
        try:
            data = os.read(self.stdout, 65536)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).split(b"\n")
        self.lines += [line.decode().split() for line in lines]
        return bool(data)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)
        if number == signal.SIGCONT:
            self.stopped = False

    def close(self) -> None:
        """Let go of a process that has ended."""
        self._popen.wait()
        if self._popen.stdout is not None:
            self._popen.stdout.close()
        os.close(self.pidfd)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    left_out = ("FEEDER_FAULT", "FEEDER_DEBUG")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    return env | {"PYTHONPATH": paths, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"} | extra


def plant_what_was_asked() -> None:
    """In a child: plant the bug that it is told, if any, for as long as it lives."""
    if name := os.environ.get(PLANT):
        _PLANTED.enter_context(planted(BUGS[name]))


class Watch:
    """Waits for what children do; a context manager, which leaves no child alive."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._stops, self._wakeup = socket.socketpair()

    def __enter__(self) -> Watch:
        self._stops.setblocking(False)
        self._wakeup.setblocking(False)
        self._handler = signal.signal(signal.SIGCHLD, lambda *_: None)
        self._fd = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._stops, selectors.EVENT_READ, None)
        return self

    def __exit__(self, *error: object) -> None:
        for child in list(self.children):
            self.end(child)
        signal.set_wakeup_fd(self._fd)
        signal.signal(signal.SIGCHLD, self._handler)
        self._selector.close()
        self._stops.close()
        self._wakeup.close()

    def start(
        self, name: str, module: str, argument: str, env: Mapping[str, str], log: Path,
        inside: Sequence[str] = (),
    ) -> Child:  # fmt: skip
        """Start a process: `python -m module argument`."""
        child = Child(name, module, argument, env, log, inside)
        self.children.append(child)
        self._selector.register(child.stdout, selectors.EVENT_READ, child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        return child

    def end(self, child: Child) -> None:
        """Kill a process, if it lives, and let go of it."""
        child.signal(signal.SIGKILL)
        self.children.remove(child)
        for descriptor in (child.stdout, child.pidfd):
            with contextlib.suppress(KeyError):
                self._selector.unregister(descriptor)
        while child.read():
            if child.status is not None:
                break
        child.close()

    def wait(self, happened: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait until something is true of the children; raises `Hang` where it does not come."""
        if not self.wait_for(happened, timeout_s):
            raise Hang(f"{what} did not happen within {timeout_s:g} s")

    def wait_for(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        """The same; False where it does not come."""
        ends = time.monotonic() + timeout_s
        while not happened():
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return False
            self._look(left_s)
        return True

    def rest(self, seconds: float) -> None:
        """Let so much time pass, and see what happens meanwhile."""
        self.wait_for(lambda: False, seconds)

    def _look(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            child: Child | None = key.data
            if child is None:
                self._look_at_stops()
            elif key.fd == child.pidfd or not child.read():
                self._selector.unregister(key.fd)

    def _look_at_stops(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._stops.recv(4096):
                pass
        for child in self.children:
            with contextlib.suppress(ChildProcessError):
                flags = os.WSTOPPED | os.WNOHANG
                found = os.waitid(os.P_PID, child.pid, flags)
                if found is not None and found.si_pid:
                    child.stopped = True


# ---- what a process holds, and what it leaves


def members(session: int) -> list[str]:
    """Return the processes of a session, which a child began and nobody else joins."""
    return [f"{name} ({pid})" for pid, name, of in _processes() if of == session]


def _processes() -> Iterator[tuple[int, str, int]]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            end = text.rindex(")")
            fields: Sequence[str] = text[end + 2 :].split()
            yield int(stat.parent.name), text[text.index("(") + 1 : end], int(fields[3])


_PAGE = os.sysconf("SC_PAGE_SIZE")


class Holds:
    """What a process holds at one moment."""

    def __init__(self, pid: int) -> None:
        targets = []
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                targets.append(os.readlink(path))
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        self.descriptors = len(targets)
        self.threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        self.resident_bytes = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
        self.arenas = sum("/memfd:" in target for target in targets)
        """Descriptors of sealed memory."""
        self.mappings = sum("/memfd:" in line for line in maps)
        """Mappings of sealed memory."""
        self.named = [line.split()[-1] for line in maps if "/dev/shm/" in line]
        """Mappings of segments that have names, and so outlive their processes."""
