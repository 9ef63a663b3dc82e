"""Processes of this host: an interpreter of their own forks them, and says how they ended.

Each process has a socket of its own and answers its tickets in turn. Whoever waits for the oldest
of them reads the answer: no thread stands in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

from feeder.errors import ClosedError
from feeder.executors.lines import Mapped
from feeder.executors.options import Processes
from feeder.executors.pool import MOST_STILLBORN, Launcher, Member
from feeder.executors.wire import Fork, Forked, HungUp, Look, Reap, Reaped, Seen, Wire
from feeder.workers.errors import CallLost

_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""Linear algebra in each of many processes would start a thread for each core."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from feeder.executors.zygote import main; main(sys.argv[1:])"
)

_MOST_ZYGOTES = 8
"""One after the other that may end before they have forked a process."""

_END_S = 5.0
"""How long the zygote may take to end, once it was told; then it is killed."""

_QUICK_S = 0.005
"""A ticket of quick calls takes one millisecond. To be without a ticket for a tenth of one then
costs two percent at most."""


class Zygote:
    """The interpreter that forks. Owner: the pool's lock, but for `hang_up`."""

    def __init__(self, options: Processes) -> None:
        here, there = socket.socketpair()
        self._wire = Wire(here)
        path = [place for place in sys.path if isinstance(place, str)]
        descriptor = -1
        try:
            with there:
                # None of the standard ones, over there: here these may be closed.
                descriptor = fcntl.fcntl(there, fcntl.F_DUPFD_CLOEXEC, 3)
            # As multiprocessing does it: with -O, say, a function has no asserts there either.
            flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
            # -P: a module of the working directory may have the name of one that it imports.
            arguments = [
                sys.executable, *flags, "-P", "-c", _PROGRAM, json.dumps(path), str(descriptor),
                str(os.getpid()), json.dumps(list(options.preload)),
            ]  # fmt: skip
            self._process = subprocess.Popen(
                arguments, env={**_ONE_THREAD, **os.environ, **options.variables},
                pass_fds=[descriptor], stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            here.close()
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        # What its imports came to, once it has told: empty where all went well.
        self._problem: str | None = None

    def fork(self) -> tuple[int, Wire]:
        """A new process: its id and its socket.

        Raises `HungUp`, `CallLost` where there can be none, and `OSError` where this process may
        not have more descriptors."""
        if self._problem is None:
            ready, _ = self._wire.receive()
            self._problem = ready.error
        if self._problem:
            raise CallLost(self._problem)
        self._wire.send(Fork())
        forked, descriptors = self._wire.receive()
        assert isinstance(forked, Forked)
        if forked.error:
            raise CallLost(forked.error)
        return forked.pid, Wire(socket.socket(fileno=descriptors[0]))

    def reap(self, pid: int) -> str:
        """End a process and say how it ended."""
        try:
            self._wire.send(Reap(pid))
            reaped, _ = self._wire.receive()
        except HungUp:
            # Its processes end with it.
            return "ended with the process that had forked it"
        assert isinstance(reaped, Reaped)
        code = os.waitstatus_to_exitcode(reaped.status)
        peak = f"; it had {reaped.peak_kb // 1024} MiB of memory at most" if code < 0 else ""
        return how_it_ended(code) + peak

    def look(self, pid: int) -> str:
        """The Python stacks of a process; empty where there are none to be had."""
        try:
            self._wire.send(Look(pid))
            seen, _ = self._wire.receive()
        except HungUp:
            return ""
        assert isinstance(seen, Seen)
        return seen.stack

    def hang_up(self) -> None:
        """Who waits for it need not any longer, and it ends. Any thread."""
        self._wire.hang_up()

    def close(self) -> str:
        """End it, and all processes that it has forked; returns how it ended."""
        self._wire.close()
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return how_it_ended(code)


def how_it_ended(code: int) -> str:
    """How a process ended, by its exit code."""
    if code >= 0:
        return f"exited with status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    hint = ", as the kernel does if memory is short" if code == -signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


class _Process(Member):
    """A process, and what has forked it. Owner: the pool's lock."""

    def __init__(self, generation: int, zygote: Zygote, pid: int) -> None:
        super().__init__(generation)
        self.zygote = zygote
        self.pid = pid


class Forking(Launcher):
    """Starts processes of this host, each when a ticket waits for one more."""

    quick_s = _QUICK_S
    askers_read = True

    def __init__(self, options: Processes) -> None:
        self._options = options
        self._zygote: Zygote | None = None
        self._most = 0
        self.most_calls = options.max_calls

    def start(self, num: int) -> None:
        self._most = num
        # All of them may be killed at once by whatever needs memory.
        self.most_stillborn = MOST_STILLBORN * num
        # What hinders it now is told by the first call.
        with self.pool.lock, contextlib.suppress(OSError):
            self._zygote = Zygote(self._options)

    def start_one(self) -> bool:
        if self.pool.num_ready >= self._most:
            return False
        try:
            zygote, pid, wire = self._fork()
            member = _Process(self.pool.next_generation(), zygote, pid)
            try:
                assert self.pool.load is not None
                self.pool.join(member, Mapped(wire, *self.pool.load()))
            except OSError:
                wire.close()
                zygote.reap(pid)
                raise
        except ClosedError:
            return False
        except CallLost as error:
            self.pool.fail_all(str(error))
            return False
        except OSError as error:
            self.pool.fail_all(f"no process could be started: {error}")
            return False
        return True

    def _fork(self) -> tuple[Zygote, int, Wire]:
        """A new process, of a new zygote where the old one was killed; what that had forked has
        ended with it."""
        how = ""
        for _ in range(_MOST_ZYGOTES):
            if self._zygote is None:
                self._zygote = Zygote(self._options)
            # After the zygote is noted: `interrupt` sees it, or is seen here.
            if self.pool.is_closed:
                raise ClosedError("the feed is stopped")
            try:
                return self._zygote, *self._zygote.fork()
            except HungUp:
                how = self._drop_zygote()
        raise CallLost(
            f"no process could be started: {_MOST_ZYGOTES} processes that were to fork them ended "
            f"one after the other; the last one {how}"
        )

    def _drop_zygote(self) -> str:
        zygote, self._zygote = self._zygote, None
        return "" if zygote is None else zygote.close()

    def end(self, member: Member) -> str:
        assert isinstance(member, _Process)
        member.line.close()
        return member.zygote.reap(member.pid)

    def look(self, member: Member) -> str:
        assert isinstance(member, _Process)
        return member.zygote.look(member.pid)

    def interrupt(self) -> None:
        if (zygote := self._zygote) is not None:
            zygote.hang_up()

    def close(self) -> None:
        with self.pool.lock:
            self._drop_zygote()
