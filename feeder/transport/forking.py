"""What a forked child keeps of the batches that its parent was looking at.

A slot of shared memory is the server's, which writes it again once the consumer has let go of it:
the child is no consumer, and would see that. So the child first of all puts copies where the slots
were, and until it has, or is dead, its parent tells of no slot that it is free.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import select
import threading
import weakref
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger("feeder")

_COPY_S = 10.0
"""How long a child may take."""
_MAP_FIXED = 0x10


class Lent(Protocol):
    """Memory of a server's that is looked at."""

    @property
    def num_leased(self) -> int:
        """Slots that are."""

    def freeze(self, why: object) -> None:
        """Tell of none that it is free, until it is told to thaw; from any thread."""

    def thaw(self, why: object) -> None:
        """The contrary."""

    def keep(self) -> None:
        """Have what is looked at lie in this process's own memory, where it was."""


class Owner(Protocol):
    """Who hands it out."""

    @property
    def lent(self) -> Lent | None:
        """What it hands out, where that is a server's memory."""

    def fork(self) -> None:
        """This is a forked child: it hands out no more, and has let go of what it did not."""


@dataclass(slots=True, eq=False)
class _Fork:
    """A fork under way. The child has the other end of the pipe until it is ready, or dead."""

    lent: list[Lent]
    reads: int
    writes: int

    def wait(self) -> None:
        """Wait for the child."""
        poll = select.poll()
        poll.register(self.reads, 0)
        if not poll.poll(_COPY_S * 1000):
            logger.warning("a forked child did not copy the batches that it has in %.0f s: they "
                           "are written again under it", _COPY_S)  # fmt: skip
        self.end()

    def end(self) -> None:
        """The child is ready."""
        os.close(self.reads)
        for lent in self.lent:
            lent.thaw(self)


_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()
_under_way: dict[int, _Fork] = {}
"""By the thread that forks."""


def enter(owner: Owner) -> None:
    """See to its memory in forked children, for as long as it is there."""
    _owners[id(owner)] = owner


def leave(owner: Owner) -> None:
    """What it handed out is not written again."""
    _owners.pop(id(owner), None)


def _those_here() -> list[Owner]:
    # At once: other threads make such, and end them.
    return [owner for ref in _owners.valuerefs() if (owner := ref()) is not None]


def _begin() -> None:
    """This thread is about to fork."""
    lent = [each for owner in _those_here() if (each := owner.lent) is not None]
    if lent := [each for each in lent if each.num_leased]:
        _under_way[threading.get_ident()] = fork = _Fork(lent, *os.pipe())
        for each in lent:
            each.freeze(fork)


def _end_in_parent() -> None:
    """It has forked, or could not."""
    fork = _under_way.pop(threading.get_ident(), None)
    if fork is not None:
        os.close(fork.writes)
        try:
            threading.Thread(target=fork.wait, name="feeder fork", daemon=True).start()
        except RuntimeError:
            fork.wait()  # No thread can be started.


def _end_in_child() -> None:
    for owner in _those_here():
        owner.fork()
    _owners.clear()
    fork = _under_way.get(threading.get_ident())
    try:
        for lent in () if fork is None else fork.lent:
            lent.keep()
    finally:
        # Those of other threads as well, whose children would be waited for until this one ends.
        for other in _under_way.values():
            os.close(other.reads)
            os.close(other.writes)
        _under_way.clear()


os.register_at_fork(before=_begin, after_in_parent=_end_in_parent, after_in_child=_end_in_child)


def make_own(address: int, num_bytes: int) -> None:
    """Put a copy of whole pages where they are. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    copy = ctypes.string_at(address, num_bytes)
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    if libc.mmap(address, num_bytes, prot, kind, -1, 0) != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    ctypes.memmove(address, copy, num_bytes)
    libc.mprotect(address, num_bytes, mmap.PROT_READ)
