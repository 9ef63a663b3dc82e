"""What a test may not leave behind: threads, file descriptors, child processes, a silent logger.

A thread is joined. Everything else is looked at, again for up to a second where something seems to
be left: threads of C code cannot be joined, and one of Arrow's may let go of a file some time after
the file's last user. Reads /proc.
"""

from __future__ import annotations

import gc
import logging
import os
import struct
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils.garbage import gc as collector

import zygote
from costs import watch

JOIN_S = 10.0
"""How long a thread that has done its work may take to end, in seconds."""
_COLLECTIONS = 100
_LOOKS = 100
_BETWEEN_LOOKS_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this process holds at one moment."""

    threads: frozenset[threading.Thread]
    descriptors: Counter[str]
    """Open file descriptors, counted by what they point at."""
    children: frozenset[str]
    logger: tuple[object, ...]
    """What decides whether the log of feeder is heard."""


def held(apart_from: Collection[str] = ()) -> Held:
    """Return what this process holds now, without the descriptors of these numbers."""
    return Held(
        threads=_threads(),
        descriptors=_descriptors(apart_from),
        children=_children(),
        logger=_logger(),
    )


def left_behind(before: Held) -> list[str]:
    """Return a line for each thing that is held now and was not held before."""
    for thread in _threads() - before.threads:
        thread.join(JOIN_S)
    if lines := _difference(before, held()):
        # A reference cycle may keep a descriptor open: garbage is not a leak. Nor is memory that
        # ZeroMQ has sent and a thread of its own is about to let go of.
        with _collected() as apart_from:
            for _ in range(_LOOKS):
                gc.collect()
                if not (lines := _difference(before, held(apart_from))):
                    break
                threading.Event().wait(_BETWEEN_LOOKS_S)
    return lines


def _difference(before: Held, now: Held) -> list[str]:
    return [
        *sorted(f"thread {thread.name!r}" for thread in now.threads - before.threads),
        *sorted((now.descriptors - before.descriptors).elements()),
        *sorted(now.children - before.children),
        *([] if now.logger == before.logger else [f"a logger that is {now.logger}"]),
    ]


def _logger() -> tuple[object, ...]:
    logger = logging.getLogger("feeder")
    return logger.disabled, logger.propagate, logger.level, logging.root.manager.disable


@contextmanager
def _collected() -> Iterator[frozenset[str]]:
    """Wait until pyzmq's collector has read what it was told by now, as far as that goes: memory
    that was sent without a copy is told to it by ZeroMQ's threads.

    Gives the descriptor of the socket for this: ZeroMQ closes it some time after the socket, so a
    look that comes later may find it or not.
    """
    if not collector.refs:
        yield frozenset()
        return
    with collector.context.socket(zmq.PUSH) as push:
        push.connect(collector.url)
        for _ in range(_COLLECTIONS):
            if not collector.refs:
                break
            read = threading.Event()
            push.send(struct.pack("=Q", collector.store(None, read)))
            read.wait(JOIN_S)
        yield frozenset({str(push.getsockopt(zmq.FD))})


def _threads() -> frozenset[threading.Thread]:
    """Return the threads that Python started; one that C code started cannot be joined."""
    foreign = threading._DummyThread
    return frozenset(thread for thread in threading.enumerate() if not isinstance(thread, foreign))


def _descriptors(apart_from: Collection[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for descriptor in set(os.listdir("/proc/self/fd")).difference(apart_from):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
        counts[f"file descriptor of {target}"] += 1
    return counts


def _children() -> frozenset[str]:
    """Return the child processes, those that ended without being waited for included."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # there are none: the usual case, told without reading all of /proc
        return frozenset()
    if zygote.pid() and not watch.may_start:
        return frozenset()  # There is the zygote, and no test that may have started another.
    return frozenset(filter(None, map(_describe_child, Path("/proc").glob("[0-9]*/stat"))))


def _describe_child(stat: Path) -> str | None:
    if stat.parent.name == str(zygote.pid()):
        return None
    try:
        text = stat.read_text()
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile and was somebody else's
        return None
    name, (_, parent, *_) = text[: text.rindex(")") + 1], text[text.rindex(")") + 1 :].split()
    return f"child process {name}" if int(parent) == os.getpid() else None
