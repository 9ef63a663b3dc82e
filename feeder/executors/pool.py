"""The processes of an executor as this process sees them: started, asked, buried, replaced.

Each process has a socket of its own and answers its tickets in turn. Whoever sends a ticket waits
until those before it have read their answers, and then reads its own: no thread stands in between.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feeder.errors import ClosedError
from feeder.executors import pickles, plain
from feeder.executors.blocks import Reader, map_shared
from feeder.executors.options import Processes
from feeder.executors.wire import (
    PROGRESS_BYTES,
    Calls,
    Fork,
    Forked,
    HungUp,
    Load,
    Logged,
    Look,
    Made,
    Reap,
    Reaped,
    Said,
    Seen,
    Wire,
)
from feeder.state import codec
from feeder.workers.errors import CallLost
from feeder.workers.stats import ExecutorCounts
from feeder.workers.stream.dtypes import read_dtype

logger = logging.getLogger("feeder")

_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"
)
"""Linear algebra in each of many processes would start a thread for each core."""

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
    "from feeder.executors.zygote import main; main(sys.argv[1:])"
)

MOST_STILLBORN = 32
"""A function whose loading ends the process would be loaded for ever. A machine that kills what
needs memory may take several in a row."""

_MOST_ZYGOTES = 8
"""One after the other that may end before they have forked a process."""

_END_S = 5.0
"""How long the zygote may take to end, once it was told; then it is killed."""

_QUICK_S = 0.005
"""An answer within this time is a quick one: a ticket of quick calls takes one millisecond. To be
without a ticket for a tenth of one then costs two percent at most."""

_LOOK_S = 1.0
"""How long who asks for a stack waits for the pool's lock: the stream has come to its end."""


class Ended(NamedTuple):
    """How a process ended."""

    pid: int
    how: str


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

    def reap(self, pid: int) -> Ended:
        """End a process and say how it ended."""
        try:
            self._wire.send(Reap(pid))
            reaped, _ = self._wire.receive()
        except HungUp:
            # Its processes end with it.
            return Ended(pid, "ended with the process that had forked it")
        assert isinstance(reaped, Reaped)
        code = os.waitstatus_to_exitcode(reaped.status)
        peak = f"; it had {reaped.peak_kb // 1024} MiB of memory at most" if code < 0 else ""
        return Ended(pid, how_it_ended(code) + peak)

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


class Process:
    """One process. What is received belongs to the thread whose turn it is, all else to the pool's
    lock."""

    def __init__(
        self,
        number: int,
        place: int,
        zygote: Zygote,
        pid: int,
        wire: Wire,
        progress: NDArray[np.uint8],
    ) -> None:
        self._progress = progress
        self.zygote = zygote
        """What has forked it, and reaps it."""
        self.num_tickets = 0
        """Tickets that were sent."""
        self.number = number
        """Counted through all that have been started: a worker's last call was made in one."""
        self.place = place
        self.pid = pid
        self.wire = wire
        self.blocks = Reader()
        self.num_waiting = 0
        """Tickets whose answers have not been read."""
        self.num_calls = 0
        """Calls that it has made, and those that tickets without an answer allow it."""
        self.has_answered = False
        """Whether it has come so far."""
        self.is_quick = False
        """Whether its last answer came quickly."""
        self.is_retired = False
        """Whether another one has its place: it ends when it has answered."""
        self.ended: Ended | None = None
        """How it ended; None while it lives."""
        self.last = threading.Lock()
        """Locked until the last ticket's answer has been read."""

    def num_begun(self, ticket: int) -> int:
        """How many calls of a ticket it has begun."""
        last, begun = self._progress.view(np.uint64)[:2].tolist()
        return int(begun) if last == ticket else 0


class Lost(Exception):
    """The process ended before it answered."""

    def __init__(self, ended: Ended, num_begun: int, num_deaths: int = 1) -> None:
        super().__init__(f"process {ended.pid} {ended.how}")
        self.ended = ended
        self.num_begun = num_begun
        """How many calls of the ticket it had begun."""
        self.num_deaths = num_deaths
        """How many processes ended in that call: several may have had the ticket."""


class Pool:
    """The processes of one executor.

    Any fetcher thread asks; the lock guards which processes there are and what is sent. The thread
    that starts and closes the feed starts and closes it.
    """

    def __init__(self, options: Processes) -> None:
        self._options = options
        self._lock = threading.Lock()
        # Notified where a process may have room for a ticket; and the turns of those that wait.
        self._room = threading.Condition(self._lock)
        self._turns: list[tuple[int, int]] = []
        self._zygote: Zygote | None = None
        # By place, and those whose place has been given to another one.
        self._processes: list[Process | None] = []
        self._retired: set[Process] = set()
        self._num_started = 0
        # By place, how many processes ended in a row before they had answered.
        self._num_stillborn: list[int] = []
        # By the thread that waits: the process, and the ticket.
        self._asked: dict[int, tuple[Process, Any]] = {}
        self._is_closed = False
        self._load: Callable[[], tuple[Load, int]] | None = None
        self.num_deaths = 0
        """Processes that ended by themselves; any thread may read."""

    # ---- life

    def start(self, num: int, load: Callable[[], tuple[Load, int]]) -> None:
        """Start so many processes, in the background; `load` gives what each is told first, and a
        descriptor that comes along, which stays open here."""
        with self._lock:
            self._load = load
            self._processes = [None] * num
            self._num_stillborn = [0] * num
            # What hinders it now is told by the first call.
            with contextlib.suppress(OSError):
                self._zygote = Zygote(self._options)

    def interrupt(self) -> None:
        """Who waits for an answer gets a `ClosedError`."""
        self._is_closed = True
        # Without the lock: whoever holds it may wait for a process to be started.
        if (zygote := self._zygote) is not None:
            zygote.hang_up()
        with self._lock:
            for process in self._alive():
                process.wire.hang_up()
            self._room.notify_all()

    def close(self) -> None:
        """End all processes, and the zygote; when no thread asks any more."""
        self.interrupt()
        with self._lock:
            self._drop_zygote()
            for process in self._alive():
                self._end(process)
            # And with them the memory that came, as far as nobody looks at it.
            self._processes.clear()

    def _alive(self) -> list[Process]:
        """Those that have not been found to have ended."""
        placed = [process for process in self._processes if process is not None]
        return [process for process in (*placed, *self._retired) if process.ended is None]

    def _end(self, process: Process) -> Ended:
        """End a process; under the lock."""
        self._retired.discard(process)
        if process.ended is None:
            process.wire.close()
            process.ended = process.zygote.reap(process.pid)
        return process.ended

    def _drop_zygote(self) -> str:
        zygote, self._zygote = self._zygote, None
        return "" if zygote is None else zygote.close()

    # ---- tickets

    def ask(
        self, ticket: Any, place: int | None, prepare: Callable[[Any], None], most_deaths: int = 1
    ) -> Any:
        """Send a ticket to the process of a place, or to the one that has least to do, and wait for
        its answer: a `Made` with arrays for chunks, or an `Answered`. One process has it, so more
        than one death there cannot be.

        Raises:
            Lost: the process ended before it answered.
            ClosedError: the pool is closed.
            CallLost: no process could be started.
        """
        ident = threading.get_ident()
        with self._lock:
            if place is None:
                self._wait_for_room(ticket)
            process = self._choose(place)
            before, process.last = process.last, threading.Lock()
            mine = process.last
            mine.acquire()
            process.num_waiting += 1
            prepare(process)
            reserved = self._limit(process, ticket)
            process.num_tickets += 1
            ticket.number = number = process.num_tickets
            ticket.freed = process.blocks.freed()
            self._asked[ident] = process, ticket
            with contextlib.suppress(HungUp):  # It is found out where the answer is read.
                process.wire.send(ticket)
        answer, took = None, 0.0
        try:
            with before:
                began = time.monotonic()
                answer = self._read(process)
                took = time.monotonic() - began
                return answer
        except (HungUp, ValueError, OSError) as error:
            raise self._bury(process, number, error) from None
        finally:
            self._let_go(process, answer, ident, reserved, took)
            # After that: whoever comes next does not wait for a process that was ended.
            mine.release()

    def _limit(self, process: Process, ticket: Any) -> int:
        """Have a ticket's calls be no more than its process may make; returns how many."""
        if not isinstance(ticket, Calls):
            return 0
        most = self._options.max_calls
        if most is not None:
            # Half of what is left: another ticket may be under way at the same time.
            left = most - process.num_calls
            ticket.most_calls = min(ticket.most_calls, max(1, left // 2))
        process.num_calls += ticket.most_calls
        return ticket.most_calls

    def _let_go(
        self, process: Process, answer: Any, ident: int, reserved: int, took: float
    ) -> None:
        """A thread has its answer, which took so long, or will have none."""
        with self._lock:
            process.is_quick = took < _QUICK_S
            process.num_waiting -= 1
            self._asked.pop(ident, None)
            if isinstance(answer, Made):
                process.num_calls += answer.num_calls - reserved
            if answer is None:
                # What is left of the answer must not be taken for the next one's.
                self._end(process)
            elif not process.has_answered:
                process.has_answered = True
                self._num_stillborn[process.place] = 0
            if process.is_retired and not process.num_waiting:
                self._end(process)
            self._room.notify_all()

    def _wait_for_room(self, ticket: Any) -> None:
        """Wait until a process has room for a ticket, and no ticket of an earlier call waits: the
        stream needs that one first."""
        turn = (ticket.epoch, ticket.first) if isinstance(ticket, Calls) else (-1, -1)
        self._turns.append(turn)
        try:
            while self._is_full() or (min(self._turns) < turn and not self._is_closed):
                self._room.wait()
        finally:
            self._turns.remove(turn)
            self._room.notify_all()

    def _is_full(self) -> bool:
        """Whether a ticket that any process may answer has to wait. A process gets its next ticket
        before it has answered only where it answers quickly: behind a slow call the ticket would
        wait while another process has nothing to do."""
        if self._is_closed:
            return False
        return all(
            process is not None and process.ended is None and process.num_waiting > process.is_quick
            for process in self._processes
        ) and bool(self._processes)

    def _choose(self, place: int | None) -> Process:
        if self._is_closed or not self._processes:
            raise ClosedError("the feed is not running")
        places = range(len(self._processes)) if place is None else (place,)
        best = min(places, key=self._waiting_at)
        process = self._processes[best]
        if process is not None and process.ended is None:
            most = self._options.max_calls
            if most is None or process.num_calls < most:
                return process
            self._retire(process)
        self._processes[best] = None
        process = self._processes[best] = self._start_one(best)
        return process

    def _retire(self, process: Process) -> None:
        """A process has made all the calls that it may make."""
        process.is_retired = True
        self._retired.add(process)
        if not process.num_waiting:
            self._end(process)

    def _waiting_at(self, place: int) -> int:
        process = self._processes[place]
        return 0 if process is None or process.ended is not None else process.num_waiting

    def _start_one(self, place: int) -> Process:
        assert self._load is not None
        try:
            zygote, pid, wire = self._fork()
        except OSError as error:
            raise CallLost(f"no process could be started: {error}") from error
        self._num_started += 1
        try:
            progress = self._send_load(wire)
        except OSError as error:
            wire.close()
            zygote.reap(pid)
            raise CallLost(f"no process could be started: {error}") from error
        return Process(self._num_started, place, zygote, pid, wire, progress)

    def _fork(self) -> tuple[Zygote, int, Wire]:
        """A new process, of a new zygote where the old one was killed; what that had forked has
        ended with it."""
        how = ""
        for _ in range(_MOST_ZYGOTES):
            if self._zygote is None:
                self._zygote = Zygote(self._options)
            # After the zygote is noted: `interrupt` sees it, or is seen here.
            if self._is_closed:
                raise ClosedError("the feed is stopped")
            try:
                return self._zygote, *self._zygote.fork()
            except HungUp:
                how = self._drop_zygote()
        raise CallLost(
            f"no process could be started: {_MOST_ZYGOTES} processes that were to fork them ended "
            f"one after the other; the last one {how}"
        )

    def _send_load(self, wire: Wire) -> NDArray[np.uint8]:
        """Tell a process what it needs; returns where it notes its progress."""
        assert self._load is not None
        load, descriptor = self._load()
        page = os.memfd_create("feeder-progress", os.MFD_CLOEXEC)
        try:
            os.ftruncate(page, PROGRESS_BYTES)
            progress = map_shared(page, PROGRESS_BYTES)
            # Where it has ended already, that is found out where its answer is read.
            with contextlib.suppress(HungUp):
                wire.send(load, [descriptor, page])
            return progress
        finally:
            os.close(page)

    def _read(self, process: Process) -> Any:
        if process.ended is not None:
            raise HungUp("it has ended")
        while True:
            message, descriptors = process.wire.receive()
            match message:
                case Said(is_error, text):
                    say(is_error, text)
                case Logged(record):
                    log(record)
                case Made():
                    return unpacked(process.blocks, message, descriptors, unpickles=True)
                case _:
                    return message

    def _bury(self, process: Process, ticket: int, error: BaseException) -> Exception:
        with self._lock:
            if self._is_closed:
                return ClosedError("the feed is stopped")
            is_first = process.ended is None
            ended = self._end(process)
            if is_first:
                self.num_deaths += 1
                self._num_stillborn[process.place] += not process.has_answered
            is_hopeless = self._num_stillborn[process.place] > MOST_STILLBORN
        if not isinstance(error, HungUp):
            return CallLost(f"the answer of process {process.pid} cannot be read: {error}")
        if is_first:
            logger.warning("process %d of the fetch function %s", ended.pid, ended.how)
        if is_hopeless:
            return CallLost(
                f"{MOST_STILLBORN} processes ended one after the other before one of them had "
                f"answered; the last one, process {ended.pid}, {ended.how}"
            )
        return Lost(ended, process.num_begun(ticket))

    # ---- what is told

    def stack(self, ident: int | None) -> str:
        """The Python stacks of the process that a thread waits for."""
        # Whoever has the lock may wait for a process to be started.
        if not self._lock.acquire(timeout=_LOOK_S):
            return "no process of the fetch function has started yet"
        try:
            asked = self._asked.get(ident or 0)
            if asked is None or asked[0].ended is not None:
                return ""
            process, ticket = asked
            # The thread's ticket may stand behind the one whose call does not return.
            others = [other for at, other in self._asked.values() if at is process]
            begun = (other for other in others if process.num_begun(other.number))
            ticket = next(begun, ticket)
            # Quick calls are asked for together, so it may be one after that which is waited for.
            num_done = process.num_begun(ticket.number) - 1
            call = f", call {ticket.first + num_done}" if num_done >= 0 else ""
            return f"process {process.pid}{call}:\n{process.zygote.look(process.pid)}"
        finally:
            self._lock.release()

    def counts(self) -> ExecutorCounts:
        """The processes that live, and those that do not any more."""
        with self._lock:
            alive = self._alive()
            return ExecutorCounts(
                processes=len(alive),
                busy=sum([one.num_waiting > 0 for one in alive]),
                restarts=self.num_deaths,
                bytes=sum([one.blocks.num_bytes for one in alive]),
            )

    def pids(self) -> list[int]:
        """The process ids of those that live."""
        with self._lock:
            return [one.pid for one in self._alive()]


def unpacked(
    blocks: Reader, made: Made, descriptors: list[int], *, unpickles: bool = False
) -> Made:
    """An answer with its chunks as arrays; of a child of this process pickles are read."""
    blocks.add(made.fresh, descriptors)
    blocks.learn([read_dtype(codec.unpack(dtype)) for dtype in made.dtypes])
    if not unpickles and any(isinstance(chunk, bytes) for chunk in made.chunks):
        raise ValueError("a pickle came from another host")
    roots = blocks.open(made.blocks)
    array = blocks.array
    chunks: Any = [
        pickles.load(chunk)
        if isinstance(chunk, bytes)
        else tuple([array(place, roots) for place in chunk])
        for chunk in made.chunks
    ]
    made.chunks = chunks
    # After the arrays have been made: they lie there no longer than they are referred to.
    blocks.drop(made.dropped)
    return made


def say(is_error: bool, text: str) -> None:
    """Print what a process has printed."""
    stream = sys.stderr if is_error else sys.stdout
    # It may be closed, or a pipe that nobody reads: no fault of the process, which goes on.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.write(text)
        stream.flush()


def log(record: bytes) -> None:
    """Log what a process has logged."""
    try:
        made = plain.read_record(record)
        to = logging.getLogger(made.name)
        if to.isEnabledFor(made.levelno):
            to.handle(made)
    except Exception as error:
        # Such as a class that only the process has; its answer is still to be read.
        logger.warning("a log record of a process cannot be read: %r", error)
