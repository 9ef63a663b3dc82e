"""`feeder doctor`: say what this machine lacks, or a server, and what to do."""

from __future__ import annotations

import argparse
import fcntl
import mmap
import os
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from feeder.cli import gpus
from feeder.cli.arguments import address
from feeder.cli.finding import Finding, ok, problem, warning
from feeder.errors import ConfigError
from feeder.ranks import NO_LAUNCHER, LauncherNumber, node_of, num_nodes, queue_of
from feeder.service.net.addresses import check_connects, check_private, parse, private_path
from feeder.service.net.keys import ClientKeys
from feeder.service.net.security import (
    Security,
    Socket,
    check_zmq,
    connect,
    read_event,
    refusal_of,
    unwatch,
    watch,
)

# ---- Asking a server for an answer, without taking a queue or a batch


# Enough for a handshake over a slow line, and short enough to wait for.
ANSWER_S = 2.0
SILENCE = "nobody listens there"


def why_not(text: str, keys: Path | None) -> str | None:
    """Why nobody answers at an address, within 2 s; None where a server does.

    It greets the server as a consumer does, keys and all, and opens no queue. Raises `ConfigError`
    where the address or the keys are wrong.
    """
    address = parse(text)
    check_connects([address])
    with Security(None if keys is None else ClientKeys.from_directory(keys)) as security:
        curve = security.encrypts(address)
        dealer = security.make_dealer(1, max_message_bytes=1024, curve=curve)
        monitor = watch(dealer)
        try:
            connect(dealer, address)
            return _greet(monitor)
        finally:
            unwatch(dealer, monitor)


def _greet(monitor: Socket) -> str | None:
    """Follow a connection until it stands, is refused with a reason, or 2 s have passed."""
    ends = time.monotonic() + ANSWER_S
    reason = SILENCE
    while (left_s := ends - time.monotonic()) > 0 and monitor.poll(int(left_s * 1000) + 1):
        event = read_event(monitor)
        if event is None:
            continue  # An event of a kind that says nothing here.
        if event.kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return None
        if (refusal := refusal_of(event)) is not None:
            reason = str(refusal)
            # Without detail it may be that the server was faster to hang up: ask it again.
            if event.kind != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                return reason
        elif event.kind == zmq.EVENT_CONNECTED and reason == SILENCE:
            reason = "somebody listens there, but does not answer as a server does"
    return f"{reason} ({ANSWER_S:g} s waited)"


MIN_PYTHON, MIN_NUMPY = (3, 11), (2, 0)
# A server needs a descriptor for each connection and a few for each arena.
MIN_DESCRIPTORS, GOOD_DESCRIPTORS = 256, 1024
# One for the trainer, one for what feeds it.
GOOD_CPUS = 2
# Larger than the caches, and the best of a few: the others were disturbed.
COPIED_BYTES, COPIES = 32 << 20, 5
# A machine that copies less by one thread has other load, or no feed of it can be quick.
GOOD_COPY_GBS = 2.0
FUTURE_WRITE = 0x10
"""The seal F_SEAL_FUTURE_WRITE, which Python does not name; Linux 5.1 or newer."""


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "doctor",
        description="Look at what feeder needs of this machine, and whether a server answers at "
        "each ADDR; one line each, and what to do. The exit status is 1 where there is a problem.",
    )
    add = parser.add_argument
    add("addresses", metavar="ADDR", nargs="*", type=address, help="of a server")
    add("--keys", metavar="DIR", type=Path, help="of feeder keygen, for servers with keys")


def main(arguments: argparse.Namespace) -> int:
    """Print what was found; 1 where it has a problem."""
    levels = set()
    for finding in findings(arguments.addresses, arguments.keys):
        print(finding, flush=True)
        levels.add(finding.level)
    return int("problem" in levels)


def findings(addresses: Sequence[str], keys: Path | None) -> Iterator[Finding]:
    """Look at the machine, then at the servers."""
    for check in CHECKS:
        yield check()
    for text in addresses:
        yield check_server(text, keys)


def check_python() -> Finding:
    """Is Python new enough?"""
    text = f"python {platform.python_version()} on {platform.system()} {platform.release()}"
    if sys.version_info < MIN_PYTHON:
        return problem(text, "install Python 3.11 or newer")
    if sys.platform != "linux":
        return problem(text, "feeder runs on Linux")
    return ok(text)


def check_numpy() -> Finding:
    """Is NumPy new enough?"""
    text = f"numpy {np.__version__}"
    if tuple(map(int, np.__version__.split(".")[:2])) < MIN_NUMPY:
        return problem(text, 'pip install "numpy>=2.0"')
    return ok(text)


def check_pyzmq() -> Finding:
    """Has ZeroMQ what the service needs?"""
    missing = [name for name in ("curve", "ipc") if not zmq.has(name)]
    has = "with curve and ipc" if not missing else f"without {' and '.join(missing)}"
    text = f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()} {has}"
    cure = "install the wheel of pyzmq, which brings its own libzmq"
    try:
        check_zmq()
    except ConfigError:
        return problem(text, cure)
    if "ipc" in missing:
        return problem(text, cure)
    return warning(text, f"{cure}, to listen for other hosts") if missing else ok(text)


def check_memfd() -> Finding:
    """Can memory be shared with consumers of this host, and be sealed?"""
    cure = "batches go as frames, which is slower; it takes Linux 5.1 and no sandbox against it"
    try:
        descriptor = os.memfd_create("feeder-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        return warning(f"no shared memory, memfd_create failed ({error})", cure)
    try:
        os.posix_fallocate(descriptor, 0, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE):
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | FUTURE_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        return warning(f"shared memory cannot be sealed ({error.strerror})", cure)
    finally:
        os.close(descriptor)
    return ok("shared memory (memfd) with seals")


def check_descriptors() -> Finding:
    """May the process open enough files?"""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} file descriptors at most"
    if soft == resource.RLIM_INFINITY:
        return ok("file descriptors without limit")
    if soft >= GOOD_DESCRIPTORS:
        return ok(text)
    cure = f"ulimit -n {GOOD_DESCRIPTORS} (the hard limit is {hard})"
    return problem(text, cure) if soft < MIN_DESCRIPTORS else warning(text, cure)


def check_directory() -> Finding:
    """Is the directory of sockets this user's own?"""
    # Only looked at: a doctor that makes it would make it with the rights of who calls the doctor.
    path = private_path()
    if not os.path.lexists(path):
        parent = path.parent
        if not os.access(parent, os.W_OK | os.X_OK):
            cure = "set XDG_RUNTIME_DIR to a directory of your own"
            return problem(f"private directory {str(path)!r} cannot be made", cure)
        return ok(f"private directory {str(path)!r} is made by the first server")
    try:
        check_private(path)
    except ConfigError as error:
        return Finding(level="problem", text=str(error))
    return ok(f"private directory {str(path)!r}")


def check_cpus() -> Finding:
    """How many CPUs may the process use?"""
    count = len(os.sched_getaffinity(0))
    if count < GOOD_CPUS:
        return warning(f"{count} CPU", "fetching and training take turns; give the process 2")
    return ok(f"{count} CPUs")


def check_place() -> Finding:
    """Which queue and which shard would a trainer take here, and where do they come from?"""
    try:
        near, far = (queue_of(os.environ, is_near=is_near) for is_near in (True, False))
        node, nodes = node_of(os.environ), num_nodes(os.environ)
    except ConfigError as error:
        return problem(str(error), "correct this variable")
    return ok(
        f"a trainer here takes queue {near.number} of a server on this host ({_source(near)}), "
        f"queue {far.number} of a server elsewhere ({_source(far)}); this is node {node.number} "
        f"({_source(node)}) of {nodes.number} ({_source(nodes)})"
    )


def _source(number: LauncherNumber) -> str:
    """Where a number comes from: a launcher's variable, or the default."""
    return "by default" if number.variable == NO_LAUNCHER else f"from {number.variable}"


def check_copy() -> Finding:
    """How fast is memory copied by one thread? The best of a few."""
    source, target = np.ones(COPIED_BYTES, np.uint8), np.zeros(COPIED_BYTES, np.uint8)
    best = float("inf")
    for _ in range(COPIES):
        start = time.monotonic()
        np.copyto(target, source)
        best = min(best, time.monotonic() - start)
    speed = COPIED_BYTES / best / 1e9
    text = f"memory is copied at {speed:.1f} GB/s by one thread"
    if speed < GOOD_COPY_GBS:
        return warning(text, "no feed is faster; look for other load on this machine")
    return ok(text)


def check_server(text: str, keys: Path | None = None) -> Finding:
    """Does a server answer at an address? It is greeted; no queue is taken."""
    try:
        reason = why_not(text, keys)
    except ConfigError as error:
        return Finding(level="problem", text=str(error))
    if reason is None:
        return ok(f"a server answers at {text!r}")
    return problem(f"no server to read from at {text!r}", reason)


CHECKS: tuple[Callable[[], Finding], ...] = (
    check_python,
    check_numpy,
    check_pyzmq,
    check_memfd,
    check_descriptors,
    check_directory,
    gpus.check_cupy,
    gpus.check_gpus,
    gpus.check_memlock,
    gpus.check_path,
    check_cpus,
    check_place,
    check_copy,
)
