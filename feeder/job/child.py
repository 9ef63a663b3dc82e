"""The process of a node: it makes the job itself, and does what comes through its pipe.

Arguments: MODULE:ATTR, node, descriptor of the pipe. It ends when the pipe does.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

from feeder.job.factories import MadeJob
from feeder.job.host import NodeHost, failure
from feeder.job.messages import encode
from feeder.workers.fetch.threads import ThreadGroup

Requests = queue.SimpleQueue[bytes | None]


def main(factory: str, node: str, descriptor: str) -> None:
    """Serve until the pipe ends."""
    requests: Requests = queue.SimpleQueue()
    # Held while a request is done: the listener sees by it whether the process may end at once.
    busy = threading.Lock()
    with Connection(int(descriptor)) as pipe:
        ThreadGroup().start("listener", run_listener, pipe, requests, busy)
        host: NodeHost | None = None
        while (request := requests.get()) is not None:
            with busy:
                # At the first request, so that an error in making the job has an answer to be in.
                host = host or _make_host(factory, node, pipe)
                if host is None:
                    return
                pipe.send_bytes(host.answer_bytes(request))
                if host.ended:
                    return
        if host is not None:
            host.workspace.close()


def _make_host(factory: str, node: str, pipe: Connection[Any, Any]) -> NodeHost | None:
    """The node; None where the job cannot be made, which is the answer then."""
    try:
        made = MadeJob(factory)
        return NodeHost(node, made.job, made.group)
    except Exception as error:
        pipe.send_bytes(encode(failure(error)))
        return None


def run_listener(pipe: Connection[Any, Any], requests: Requests, busy: threading.Lock) -> None:
    """Hand on what comes, until the other side is gone; then nobody is left to work for."""
    try:
        while True:
            requests.put(pipe.recv_bytes())
    except (EOFError, OSError):
        pass
    # The runner is gone. A task in progress may run for hours and cannot be interrupted, and what
    # it does is for nobody: an epoch without a manifest does not exist.
    if not busy.acquire(blocking=False):
        os._exit(1)
    requests.put(None)
    busy.release()


if __name__ == "__main__":
    main(*sys.argv[1:])
