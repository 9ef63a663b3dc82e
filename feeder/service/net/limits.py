"""How many descriptors a server may have. A consumer takes six; and where none is left for the next
connection to a unix socket, libzmq ends the process (`ipc_listener.cpp`, up to 4.3.5)."""

from __future__ import annotations

import resource

_WANTED = 65536
_IN_A_CROWD = 512


def raise_limit() -> None:
    """Let the process have as many descriptors as it may, up to 65,536, as the runtime of Go does:
    the limit that programs begin with is kept low for those that call select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def are_few_left(descriptor: int) -> bool:
    """Whether a descriptor that was just made is of the last eighth, or the last 512: the lowest
    that is free is taken, so about as many are in use. ZeroMQ accepts some hundreds of connections
    before a thread that waits for the interpreter learns of the first."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    kept = max(limit // 8, min(_IN_A_CROWD, limit // 2))
    return limit != resource.RLIM_INFINITY and descriptor >= limit - kept
