"""A session whose nodes are processes of this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from feeder.errors import ConfigError, FeedError, RemoteError
from feeder.job.definition import Job
from feeder.job.factories import check_factory
from feeder.job.messages import Done, End, Request, decode_reply, encode, error_of
from feeder.job.session import STOP_DEADLINE_S, Session
from feeder.state import codec
from feeder.workers.public import public

OUTPUT = "output.log"
"""The file in a node's folder that takes what it writes to stdout and stderr."""


@public("feeder.job")
class LocalHostSession(Session):
    """Runs each node in a process of its own, in a folder of its own.

    A node's process makes the job itself; over its pipe go names, numbers and arrays. It ends
    when this process does, however that ends.

    Args:
        factory: ``"MODULE:ATTR"``, a function without arguments that returns the `Job`, or the
            `JobRunner` with it. It is called once in each node's process.
        folder: Where each node gets its folder, called as the node is: the process works in it,
            and what it writes to stdout and stderr is in ``output.log``.
    """

    def __init__(self, factory: str, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._factory = check_factory(factory)
        self._folder = Path(folder).absolute()
        self._nodes: dict[str, NodeProcess] = {}
        # Nodes that have been asked and have not answered.
        self._asked: set[str] = set()

    @property
    def pids(self) -> dict[str, int]:
        """The process of each node."""
        return {node: process.pid for node, process in self._nodes.items()}

    def _start(self, job: Job) -> None:
        self._asked.clear()
        for node in job.nodes():
            self._nodes[node] = NodeProcess(self._factory, node, self._folder / node)

    def _send(self, node: str, request: Request) -> None:
        self._asked.add(node)
        self._nodes[node].send(request)

    def _receive(self) -> tuple[str, Any, BaseException | None]:
        pipes = {self._nodes[node].pipe: node for node in self._asked}
        node = pipes[wait(list(pipes))[0]]  # type: ignore[index]
        self._asked.remove(node)
        return node, *self._nodes[node].receive()

    def _stop(self) -> None:
        # All are asked before one is waited for, and share one deadline.
        end = time.monotonic() + STOP_DEADLINE_S
        for process in self._nodes.values():
            process.send(End())
        for process in self._nodes.values():
            process.wait_or_kill(max(0.0, end - time.monotonic()))


class NodeProcess:
    """The process of one node, owned by the thread that uses the session."""

    def __init__(self, factory: str, node: str, folder: Path) -> None:
        self.node = node
        self._output = folder / OUTPUT
        # Our copy of the node's end is closed in any case: else its end would never end ours.
        self.pipe, theirs = Pipe()
        with theirs:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                with self._output.open("ab") as output:
                    self._process = _start_process(factory, node, folder, theirs, output)
            except OSError as error:
                self.pipe.close()
                raise ConfigError(
                    f"node {node!r} cannot work in {str(folder)!r}: {error}; name another folder"
                ) from error

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, request: Request) -> None:
        """Ask something; one that is dead says so when its answer is read."""
        try:
            self.pipe.send_bytes(encode(request))
        except OSError:
            return  # Broken pipe: `receive` finds out how it died, which says more.

    def receive(self) -> tuple[Any, FeedError | None]:
        """Its answer, or the error in its place. Raises `RemoteError` where it is gone."""
        try:
            reply = decode_reply(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise self._death() from None
        if isinstance(reply, Done):
            return codec.unpack(reply.answer), None
        return None, error_of(reply, self.node)

    def wait_or_kill(self, deadline_s: float) -> None:
        """Wait for its end, which is enforced."""
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            # It is in a task. Nothing of it is lost: an epoch exists by its manifest alone.
            self._process.kill()
            self._process.wait()
        self.pipe.close()

    def _death(self) -> RemoteError:
        self._process.kill()  # whatever is left of it says nothing any more
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return RemoteError(
            f"node {self.node!r} ended with {how}; what it wrote is in {str(self._output)!r}"
        )


def _start_process(
    factory: str, node: str, folder: Path, pipe: Connection[Any, Any], output: Any
) -> subprocess.Popen[bytes]:
    # What can be imported here can be there, whatever folder it works in.
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", "feeder.job.child", factory, node, str(pipe.fileno())],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=[pipe.fileno()],
        start_new_session=True,  # an interrupt from the keyboard is this process's to answer
    )
