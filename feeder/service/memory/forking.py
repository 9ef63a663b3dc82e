"""What a forked child keeps of its parent (the batches it looks at) and what it closes (sockets).

A slot of shared memory is the server's, which writes it again once the consumer has let go of it.
A child is no consumer, so it would see other rows and no error. Therefore the child puts copies
where the slots were before anything else, and until it has, or is dead, its parent reports no slot
as free.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import select
import socket
import stat
import threading
import weakref
from typing import Any, Protocol

from feeder.workers import forks  # noqa: F401  # its hook comes before the ones of this module

logger = logging.getLogger("feeder")

_COPY_S = 10.0
"""How long a child may take to copy. Some milliseconds for 20 MB; a child that does nothing for so
long is stopped, and the parent's own trainer would stand still behind it."""
_BLIND_S = 1.0
"""How long the child is taken to need where no descriptor is left for a pipe that would say so."""
# Of Linux' mman.h; Python's `mmap` cannot map at a given address, so it has no name for it.
_MAP_FIXED = 0x10


class Lent(Protocol):
    """Memory of a server's that this process looks at."""

    def freeze(self, why: object) -> None:
        """Report no slot as free until `thaw` is called with the same reason. From any thread."""

    def thaw(self, why: object) -> None:
        """End the freeze of that reason. From any thread."""

    def copy_for_child(self) -> None:
        """In the child: put copies where the memory is that the child looks at."""


class _Fork:
    """A fork under way: a pipe whose other end the child holds until it is ready, or dead.

    Made and used by the thread that forks, under `_fork_lock`; afterwards its own thread waits for
    the pipe. `freeze` is called by any thread that lends something meanwhile.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self._lent: list[Lent] = []
        self._is_over = False
        self._ends: tuple[int, ...] = ()

    def freeze_all(self, lent: list[Lent]) -> None:
        """Freeze all that is lent, before the fork."""
        # No pipe where nothing is lent: most programs that fork have no consumer.
        if lent:
            with contextlib.suppress(OSError):
                self._ends = os.pipe()
        for each in lent:
            self.freeze(each)

    def freeze(self, lent: Lent) -> None:
        """Freeze one; also what is lent while the fork is under way, by the hooks of others."""
        # In this order: `_is_over` is set before the thawing begins, so whichever of the two
        # threads comes second thaws it.
        self._lent.append(lent)
        lent.freeze(self)
        if self._is_over:
            lent.thaw(self)

    def finish_in_parent(self) -> None:
        """Wait for the child in a thread of its own, so that the trainer goes on."""
        if not self._lent:
            self._is_over = True
            if not self._lent:  # Looked at again: something may have been lent just then.
                return
        if self._ends:
            # Now only the child has the other end, so the pipe ends when the child is done or dead.
            os.close(self._ends[1])
        try:
            threading.Thread(target=self._wait, name="feeder fork", daemon=True).start()
        except RuntimeError:
            self._wait()  # No thread can be started.

    def finish_in_child(self) -> None:
        """Say that the child has its copies, by closing its end of the pipe."""
        for descriptor in self._ends:
            os.close(descriptor)

    def _wait(self) -> None:
        poll = select.poll()
        if self._ends:
            # No events asked for: a hang-up is reported in any case, and nothing is ever written.
            poll.register(self._ends[0], 0)
            if not poll.poll(_COPY_S * 1000):
                logger.warning("a forked child did not copy the batches that it has in %.0f s: "
                               "they are written again under it", _COPY_S)  # fmt: skip
            os.close(self._ends[0])
        else:
            poll.poll(_BLIND_S * 1000)
        self._is_over = True
        for lent in self._lent:
            lent.thaw(self)


# All three belong to whichever thread changes them last: a registration is one operation on a
# dictionary, and readers copy first. Weak, so that a consumer that is forgotten is not kept.
_lent: weakref.WeakValueDictionary[int, Lent] = weakref.WeakValueDictionary()
_fork_lock = threading.RLock()
"""Held from before a fork until both ends of the pipe are where they belong: a child that another
thread forks in between would inherit the pipe, and keep it open for as long as it lives. Reentrant,
since a hook of another library may fork."""
_under_way: list[_Fork] = []


def register_lent(lent: Lent) -> None:
    """Keep memory right in forked children, for as long as it lives. From any thread."""
    _lent[id(lent)] = lent
    # After the registration: a fork that begins in between finds it there, and freezing it twice is
    # harmless.
    for fork in list(_under_way):
        fork.freeze(lent)


def unregister_lent(lent: Lent) -> None:
    """Forget memory that the server will not write again."""
    _lent.pop(id(lent), None)


def _all_lent() -> list[Lent]:
    # One copy of the references first: other threads register and unregister meanwhile.
    return [each for ref in _lent.valuerefs() if (each := ref()) is not None]


def _before_fork() -> None:
    """Called in the thread that is about to fork."""
    _fork_lock.acquire()
    # Listed before the freezing: what is lent from here on is frozen by whoever lends it.
    _under_way.append(fork := _Fork())
    fork.freeze_all(_all_lent())


def _after_fork_in_parent() -> None:
    """Called in the parent after the fork, or after it failed."""
    try:
        # An interrupt may have ended `_before_fork` ahead of the lock: then the last fork on the
        # list is another thread's, and so is the lock.
        if _under_way and _under_way[-1].thread == threading.get_ident():
            _under_way.pop().finish_in_parent()
    finally:
        with contextlib.suppress(RuntimeError):
            _fork_lock.release()


def _after_fork_in_child() -> None:
    global _fork_lock
    # The old one may be held by a thread that does not exist here.
    _fork_lock = threading.RLock()
    try:
        for each in _all_lent():
            # One that fails must not keep the others from it; and the parent waits for the pipe.
            try:
                each.copy_for_child()
            except Exception:
                logger.exception("a forked child has no copy of what it looks at")
    finally:
        _lent.clear()
        while _under_way:
            _under_way.pop().finish_in_child()


# After the hook of `forks`: what consumers have given up by then need not be copied.
os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


def make_own(address: int, num_bytes: int, *, writable: bool = False) -> None:
    """Replace whole pages by a private copy at the same address. Raises `OSError`."""
    # By libc, since arrays know addresses: only at the same one do they see the copy.
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
    # As the mapping was: a write into a batch does in a child what it does in its parent.
    if not writable:
        libc.mprotect(address, num_bytes, mmap.PROT_READ)


# ---- What a forked child of a server must close: sockets that say that the server lives.
#
# A fetch function may fork, as `multiprocessing` does. The child inherits the listening sockets,
# which would block a restart at the same address, and the consumers' connections, which would not
# break when the server is killed. ZeroMQ does not name its descriptors, so they are found by the
# addresses that they are bound to.


def close_sockets(places: set[Any]) -> None:
    """Close the sockets that are bound at ports of TCP and at paths of unix sockets."""
    # A server keeps some descriptors free, so there is one for the listing.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
        except OSError:
            continue  # It was the listing's own descriptor, closed by now.
        sock = socket.socket(fileno=descriptor)
        is_ours = _place(sock) in places
        sock.detach()
        if is_ours:
            os.close(descriptor)


def _place(sock: socket.socket) -> Any:
    try:
        name = sock.getsockname()
    except OSError:
        return None
    return name[1] if isinstance(name, tuple) else name
