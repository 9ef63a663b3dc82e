"""The workers of a loader, as the trainer sees them: begun at once, asked in turn, replaced.

With the start method `fork` they are forked from the trainer as it is at that moment: nothing is
imported or pickled. The trainer has no thread for them: whoever iterates writes to their sockets
and reads from them, so no fork finds a lock of the loader's held. One more fork, the zygote, waits
to fork the successor of a worker that ended: by then the trainer may have threads. It also ends the
workers if the trainer is killed. With `spawn` and `forkserver` multiprocessing starts processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle  # noqa: TID251  # of what it raises
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from feeder.adapters.torch import child, transport
from feeder.adapters.torch.child import Begin, Fork, Forked, Gave, Job, Line, Read
from feeder.errors import ForkedError
from feeder.executors.blocks import Reader
from feeder.executors.forking import how_it_ended
from feeder.executors.wire import HungUp
from feeder.workers import forks

_logger = logging.getLogger("feeder")

_END_S = 5.0
"""How long a worker may take to end, as in PyTorch: it may be in the middle of a sample."""

MOST_DEATHS = 3
"""Memory may be short for a moment. A sample that ends its worker each time does so so often."""


class TimedOut(Exception):
    """A worker has not answered in time."""


class Worker:
    """One worker by its number: the process, what it was asked, and the memory that it sent. Owner:
    the thread that iterates."""

    def __init__(self, worker_id: int) -> None:
        self.id = worker_id
        self.asked: deque[Read] = deque()
        """What it has not answered; its successor is asked the same."""
        self.reader: tuple[int, bytes | None, bool] | None = None
        """Of an iterable: where it stands after the last answer that came."""
        self.has_ended = False
        """Whether its iterable has said that it has given all."""
        self.num_deaths = 0
        """Of processes, while the first of `asked` was."""
        self.pid = 0
        self.line: Line
        self.blocks = Reader()
        self._waiting: deque[tuple[Any, list[int]]] = deque()
        self.process: Any = None
        """multiprocessing's, if it has started the process."""
        self.is_of_zygote = False

    def connect(self, sock: socket.socket) -> None:
        """A process has begun."""
        self.line = Line(sock)
        self.blocks = Reader()
        self._waiting.clear()

    def send(self, message: Any) -> None:
        """Send a message; what comes meanwhile is kept: each end may wait for the other to read."""
        poll = select.poll()
        poll.register(self.line.sock, select.POLLIN | select.POLLOUT)
        while True:
            (_, events), *_ = poll.poll()
            if events & select.POLLIN:
                self._waiting.append(self.line.receive())
            elif events & select.POLLOUT:
                self.line.send(message)
                return
            else:
                raise HungUp("end of file")

    def buffers(self, answer: Gave) -> list[Any]:
        """The memory that an answer's places mean."""
        roots = self.blocks.open(answer.blocks)
        return [
            roots[place.block][place.offset : place.offset + place.shape[0]]
            for place in answer.places
        ]

    def receive(self) -> Gave:
        """The next answer, once there is one."""
        message: Gave
        message, descriptors = self._waiting.popleft() if self._waiting else self.line.receive()
        self.blocks.add(message.fresh, descriptors)
        self.blocks.drop(message.dropped)
        return message

    def hang_up(self) -> None:
        """Nothing that it has sent is wanted any more."""
        self.line.close()
        while self._waiting:
            for descriptor in self._waiting.popleft()[1]:
                os.close(descriptor)

    @property
    def has_answer(self) -> bool:
        """Whether one is here already."""
        return bool(self._waiting)


class Team:
    """The workers of one loop, or of all loops of a loader whose workers persist. Owner: the thread
    that iterates; `close` from any."""

    def __init__(self, job: Job, method: str, context: Any) -> None:
        self._job, self._method, self._context = job, method, context
        self.workers = [Worker(worker_id) for worker_id in range(job.num_workers)]
        self._zygote: Line | None = None
        self._zygote_pid = 0
        self._is_forked = False
        # Loop, epoch and seed, as its workers were told.
        self._begin: tuple[int, int, int] = (0, 0, 0)
        self.is_closed = False
        forks.call_in_child(self.forget)
        try:
            for worker in self.workers:
                self._start(worker)
            if method == "fork":
                self._fork_zygote()
        except BaseException:
            self.close()
            raise

    # ---- processes

    def _start(self, worker: Worker) -> None:
        here, there = socket.socketpair()
        worker.connect(here)
        with there:
            if self._method == "fork":
                worker.pid = _fork(there, worker.id, self._job)
                return
            arguments = (there, worker.id, self._job)
            worker.process = self._context.Process(target=_spawned, args=arguments, daemon=True)
            try:
                worker.process.start()
            except (TypeError, AttributeError, pickle.PicklingError) as error:
                worker.process = None
                here.close()
                raise TypeError(
                    f"{transport.path_to_unpicklable(self._job._asdict(), '')} cannot be sent to a "
                    f"DataLoader worker process, which begins by {self._method!r}: {error}"
                ) from error
            worker.pid = worker.process.pid

    def _fork_zygote(self) -> None:
        here, there = socket.socketpair()
        trainer = os.getpid()
        workers = [os.pidfd_open(worker.pid) for worker in self.workers]
        self._zygote = Line(here)
        try:
            _flush()
            with there:
                self._zygote_pid = os.fork()
                if not self._zygote_pid:
                    _be_zygote(there.detach(), trainer, workers, self._job)
        finally:
            for descriptor in workers:
                os.close(descriptor)

    def _replace(self, worker: Worker) -> str:
        """Bury a worker that has ended, and start another one; returns how it ended."""
        how = self._bury(worker)
        if self._zygote is None:
            self._start(worker)
            return how
        self._zygote.send(Fork(worker.id, worker.pid if worker.is_of_zygote else 0))
        forked, descriptors = self._zygote.receive()
        if forked.error:
            raise RuntimeError(f"DataLoader worker {worker.id}: {forked.error}")
        if worker.is_of_zygote:
            how = how_it_ended(os.waitstatus_to_exitcode(forked.status))
        worker.pid, worker.is_of_zygote = forked.pid, True
        worker.connect(socket.socket(fileno=descriptors[0]))
        return how

    def _bury(self, worker: Worker) -> str:
        worker.hang_up()
        if worker.process is not None:
            worker.process.join(_END_S)
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            return how_it_ended(worker.process.exitcode)
        if worker.is_of_zygote:
            return "ended"  # The zygote knows how.
        status = _wait(worker.pid, _END_S)
        return "ended" if status is None else how_it_ended(os.waitstatus_to_exitcode(status))

    # ---- loops

    def begin(self, epoch: int, seed: int, readers: Sequence[Any], *, is_told: bool) -> None:
        """Begin a loop in all of them; what they were asked before is not waited for any more. They
        are told where to begin, or stand there by themselves."""
        self.check()
        self._begin = self._begin[0] + 1, epoch, seed
        for worker, reader in zip(self.workers, readers, strict=True):
            worker.asked.clear()
            worker.reader, worker.num_deaths = reader, 0
            worker.has_ended = reader is not None and reader[2]
            self._send(worker, Begin(*self._begin, reader if is_told else None))

    def ask(self, worker: Worker, told: Read) -> None:
        """Ask a worker for a batch."""
        worker.asked.append(told)
        self._send(worker, told)

    def _send(self, worker: Worker, message: Any) -> None:
        if isinstance(message, Read):
            message.freed = worker.blocks.freed()
        # One that has ended is noticed when its answer is read.
        with contextlib.suppress(HungUp):
            worker.send(message)

    def answer(self, worker: Worker, until: float | None) -> Gave:
        """The answer to the first thing that it was asked in this loop. Raises `TimedOut`, and
        `RuntimeError` if processes end again and again."""
        self.check()
        while True:
            try:
                self._await([worker], until)
                found = worker.receive()
            except HungUp:
                self._revive(worker)
                continue
            if found.loop != self._begin[0]:
                # Of a loop that was left; its memory goes back with the next thing asked.
                worker.blocks.open(found.blocks)
                continue
            worker.asked.popleft()
            worker.num_deaths = 0
            if worker.reader is not None:
                worker.has_ended = found.kind == child.END
                num = worker.reader[0] + (not worker.has_ended)
                worker.reader = num, found.state, found.is_done or worker.has_ended
            return found

    def first(self, workers: list[Worker], until: float | None) -> Worker:
        """Whichever of these workers has an answer first."""
        self.check()
        ready = self._await(workers, until)
        return next(worker for worker in workers if worker.id in ready)

    def _await(self, workers: list[Worker], until: float | None) -> set[int]:
        """Wait until one of them has something; returns which."""
        ready = {worker.id for worker in workers if worker.has_answer}
        if ready:
            return ready
        poll = select.poll()
        ids = {worker.line.sock.fileno(): worker.id for worker in workers}
        for descriptor in ids:
            poll.register(descriptor, select.POLLIN)
        left = None if until is None else max(0.0, until - time.monotonic()) * 1000
        found = poll.poll(left)
        if not found:
            raise TimedOut
        return {ids[descriptor] for descriptor, _ in found}

    def _revive(self, worker: Worker) -> None:
        pid, what = worker.pid, self.doing(worker)
        how = self._replace(worker)
        worker.num_deaths += 1
        if worker.num_deaths >= MOST_DEATHS:
            raise RuntimeError(
                f"DataLoader worker (pid(s) {pid}) exited unexpectedly: it {how}{what}; this "
                f"happened {worker.num_deaths} times in a row"
            )
        _warn_of_death(pid, how, what)
        self._send(worker, Begin(*self._begin, worker.reader))
        for told in worker.asked:
            self._send(worker, told)

    def doing(self, worker: Worker) -> str:
        """What a worker is asked for, for errors."""
        return _what(worker.asked[0], self._job) if worker.asked else ""

    # ---- end

    def check(self) -> None:
        """Raise in a forked child, and after the end."""
        if self._is_forked:
            raise ForkedError(
                "this iterator over a DataLoader was begun in the parent of this process, whose "
                "workers it reads from: begin a loop of its own here"
            )
        if self.is_closed:
            raise RuntimeError("the workers of this iterator over a DataLoader have ended")

    def close(self) -> None:
        """End all processes. Twice is once."""
        if self.is_closed or self._is_forked:
            return
        self.is_closed = True
        forks.call_no_more(self)
        if self._zygote is not None:
            # Without a word it would take this process for a dying one.
            with contextlib.suppress(HungUp):
                self._zygote.send(Fork(-1, 0))
            self._zygote.close()
        begun = [worker for worker in self.workers if worker.pid]
        for worker in begun:
            worker.hang_up()
        if self._zygote_pid:
            _wait(self._zygote_pid, _END_S)
        for worker in begun:
            self._bury(worker)

    def forget(self) -> None:
        """This process is a forked child: the sockets are its parent's."""
        self._is_forked = True
        for worker in self.workers:
            if worker.pid or hasattr(worker, "line"):
                worker.line.sock.close()
        if self._zygote is not None:
            self._zygote.sock.close()


# ---- forks


def _fork(there: socket.socket, worker_id: int, job: Job) -> int:
    """Fork a worker: its process id."""
    _flush()
    pid = os.fork()
    if not pid:
        child.main(there.detach(), worker_id, job)
    return pid


def _flush() -> None:
    """What waits to be printed would be printed by each fork."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _spawned(sock: socket.socket, worker_id: int, job: Job) -> None:
    child.main(sock.detach(), worker_id, job)


def _be_zygote(descriptor: int, trainer: int, workers: list[int], job: Job) -> None:
    """The body of the zygote: it has one thread, and nothing to do until a worker ends."""
    successors: set[int] = set()
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        line = Line(socket.socket(fileno=descriptor))
        parent = os.pidfd_open(trainer)
        poll = select.poll()
        poll.register(line.sock, select.POLLIN)
        poll.register(parent, select.POLLIN)
        with contextlib.suppress(HungUp):
            while parent not in {found for found, _ in poll.poll()}:
                told, _ = line.receive()
                if told.worker_id < 0:
                    return
                _fork_successor(line, told, job, successors)
        # The trainer is dying: a worker that is inside a sample would not see it.
        poll.unregister(line.sock)
        poll.poll()
        for worker in workers:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        for pid in successors:
            os.kill(pid, signal.SIGKILL)
        for pid in successors:
            os.waitpid(pid, 0)
        os._exit(0)


def _fork_successor(line: Line, told: Fork, job: Job, successors: set[int]) -> None:
    status = 0
    if told.ended:
        os.kill(told.ended, signal.SIGKILL)
        _, status = os.waitpid(told.ended, 0)
        successors.discard(told.ended)
    here, there = socket.socketpair()
    with here, there:
        try:
            pid = os.fork()
        except OSError as error:
            line.send(Forked(0, f"a process could not be started: {error}", status))
            return
        if not pid:
            here.close()
            line.sock.close()
            child.main(there.detach(), told.worker_id, job)
        successors.add(pid)
        line.send(Forked(pid, "", status), [here.fileno()])


def _wait(pid: int, seconds: float) -> int | None:
    """The wait status of a child that is to end; None if somebody else has waited for it."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        descriptor = -1
    try:
        if descriptor >= 0:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(seconds * 1000):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]
    except OSError:
        return None
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _what(reading: Read, job: Job) -> str:
    if job.is_iterable:
        return f" while it read batch {reading.number}"
    return (
        f" while it read samples {transport.name_samples(transport.read_indices(reading.indices))}"
    )


def _warn_of_death(pid: int, how: str, what: str) -> None:
    _logger.warning("DataLoader worker (pid %d) %s%s; another one reads them again", pid, how, what)
