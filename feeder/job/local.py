"""A session whose nodes are threads of this process."""

from __future__ import annotations

import queue
from typing import Any

from feeder.job.definition import Job
from feeder.job.groups import TaskGroup
from feeder.job.host import NodeHost
from feeder.job.messages import Request
from feeder.job.session import STOP_DEADLINE_S, Session
from feeder.workers.fetch.threads import ThreadGroup
from feeder.workers.public import public

_Answers = queue.SimpleQueue[tuple[str, Any, BaseException | None]]


@public("feeder.job")
class LocalSession(Session):
    """Runs the tasks of each node in a thread of this process; any function can be a task.

    Leaving it, or `close`, raises `StuckWorkerError` where a task does not end in time. The thread
    that uses the session owns its fields; nodes' threads put answers into one queue.
    """

    shares_memory = True

    def __init__(self) -> None:
        super().__init__()
        self._hosts: dict[str, NodeHost] = {}
        self._groups: dict[tuple[str, int], TaskGroup] = {}
        self._answers: _Answers = queue.SimpleQueue()
        self._threads = ThreadGroup()
        self._num_busy = 0

    def run(self, work: Any) -> Any:
        """Run a group of tasks, whether it is one of the job's or not, or what a checkpoint
        manager gave, and wait until it is done."""
        # Nodes are in this process, so any group can be found again by a key that is made up here.
        if isinstance(work, TaskGroup):
            work.key = work.key or ("group", len(self._groups))
            self._groups[work.key] = work
        return super().run(work)

    def _start(self, job: Job) -> None:
        # What nodes that were ended had still to say is for nobody.
        self._answers, self._num_busy = queue.SimpleQueue(), 0
        self._hosts = {node: NodeHost(node, job, self._group) for node in job.nodes()}

    def _group(self, key: tuple[str, int]) -> TaskGroup:
        return self._groups[key]

    def _send(self, node: str, request: Request) -> None:
        self._threads.start(f"node {node}", run_node, self._hosts[node], request, self._answers)
        self._num_busy += 1

    def _receive(self) -> tuple[str, Any, BaseException | None]:
        answer = self._answers.get()
        self._num_busy -= 1
        # A thread per request: when all have answered they have ended, and are let go of.
        if not self._num_busy:
            self._threads.close(STOP_DEADLINE_S)
        return answer

    def _stop(self) -> None:
        try:
            self._threads.close(STOP_DEADLINE_S)
        finally:
            for host in self._hosts.values():
                host.workspace.close()


def run_node(host: NodeHost, request: Request, answers: _Answers) -> None:
    """Let a node do one thing."""
    # BaseException: whatever a task raises, the session must not wait for ever.
    try:
        answers.put((host.node, host.answer(request), None))
    except BaseException as error:
        answers.put((host.node, None, error))
