"""The processes that come from a process, as /proc shows them, and their ends."""

from __future__ import annotations

import os
import select
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

WAIT_S = 15.0
"""How long a test waits for an end that has to come; it never takes that long."""


def descendants(pid: int) -> dict[int, int]:
    """Return the ids of all processes that a process and its children have started, each with the
    id of its parent; those of one moment, so that a process that ends meanwhile is no trouble."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        state, parent, *_ = text[text.rindex(")") + 1 :].split()
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, parents = {}, [pid]
    for parent in parents:  # it grows meanwhile
        found.update(dict.fromkeys(children.get(parent, ()), parent))
        parents += children.get(parent, ())
    return found


def forked(what: Callable[[], object]) -> int:
    """Fork, and let the child do something and end at once, with 0 where nothing was raised; the
    child's process id."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        what()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def status_of(pid: int) -> int:
    """Wait for the end of a child; its exit status, that of a signal below 0."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def shared_memory() -> set[str]:
    """The files of shared memory. feeder makes none that has a name, and whoever else runs on this
    machine may: semaphores of multiprocessing, and tensors of PyTorch."""
    names = os.listdir("/dev/shm")
    return {name for name in names if not name.startswith(("sem.", "torch_", "fuzz-"))}


class Ends:
    """Processes whose ends are waited for, whoever's children they are."""

    def __init__(self, stack: ExitStack, pids: Iterable[int]) -> None:
        self._pids: dict[int, int] = {}
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:  # it has ended already
                continue
            stack.callback(os.close, descriptor)
            self._pids[descriptor] = pid

    def wait(self, limit_s: float = WAIT_S) -> None:
        """Wait until all have ended; raises AssertionError where one has not."""
        left, until = dict(self._pids), time.monotonic() + limit_s
        poll = select.poll()
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        while left and time.monotonic() < until:
            for descriptor, _ in poll.poll(1000 * max(0.0, until - time.monotonic())):
                poll.unregister(descriptor)
                del left[descriptor]
        assert not left, f"processes {sorted(left.values())} live on"


@contextmanager
def ends_of(pids: Iterable[int]) -> Iterator[Ends]:
    """Watch processes that live, so that their ids cannot come to mean others."""
    with ExitStack() as stack:
        yield Ends(stack, pids)
