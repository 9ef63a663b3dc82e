"""Sessions: they run the work of a job on its nodes, wherever those are."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from feeder.errors import ClosedError, ConfigError, StuckWorkerError
from feeder.job.checkpoints.parts import Operation
from feeder.job.definition import Job
from feeder.job.groups import TaskGroup
from feeder.job.messages import Begin, Evaluate, Fetch, Plan, Request, RunTasks
from feeder.workers.public import public

STOP_DEADLINE_S = 5.0
"""How long `close` waits for what still runs."""

logger = logging.getLogger("feeder")


@public("feeder.job")
class Session(ABC):
    """Runs one job: each node has a workspace, and does one thing at a time; nodes work at once.

    When a task raises or a node dies, `run` raises that, without waiting for the other nodes,
    which may be waiting for this one; the session can then only be closed. Anything else that
    fails, as a save may, is raised when all nodes have done their part, and the session goes on.

    One thread uses it and owns its fields; leaving its `with` block closes it.
    """

    shares_memory = False
    """Whether its nodes are in this process."""

    def __init__(self) -> None:
        self.workspace: dict[str, Any] = {}
        """Entries loaded into this process by `JobRunner.load_blobs_from_checkpoints`."""
        self._job: Job | None = None
        self._broken: BaseException | None = None
        self._closed = False

    # ---- used

    def open(self, job: Job) -> None:
        """Make the nodes of a job ready, with empty workspaces. Done again for the same job, it
        empties them."""
        self._check_usable()
        if self._job is None:
            self._start(job)
            self._job = job
            # A function that makes another job on a node would run other tasks under the same
            # names.
            self._check_plans(self._ask({node: Plan() for node in job.nodes()}), job.plan())
        if self._job is not job:
            raise ConfigError("the session is of another job; make a session for each")
        self._ask({node: Begin() for node in job.nodes()})

    def restart(self) -> None:
        """End all nodes, whatever they do, and make them anew, with empty workspaces: also after a
        node has failed. Raises `StuckWorkerError` where a node does not end."""
        job = self._opened()
        if self._closed:
            self._check_usable()
        # All of them: the others have done a part of what failed, or wait for who did.
        self._stop()
        self._job, self._broken = None, None
        self.open(job)

    def run(self, work: TaskGroup | Operation) -> Any:
        """Run a group of tasks, or what a checkpoint manager gave, on all its nodes, and wait
        until it is done."""
        if isinstance(work, TaskGroup):
            return self._run_group(work)
        for request in work.requests.values():
            url = getattr(request, "url", "")
            if url.startswith("memory:") and not self.shares_memory:
                raise ConfigError(
                    f"{url!r} is in the memory of one process, and the nodes of this session have "
                    "processes of their own: name a folder or an object store"
                )
        return work.settle(self._ask(work.requests))

    def evaluate(self) -> bool:
        """Whether any stop condition of the job holds now."""
        nodes = dict.fromkeys(node for node, _ in self._opened().stop_conditions)
        answers = self._ask({node: Evaluate() for node in nodes})
        return any(any(held) for held in answers.values())

    def fetch(self, node: str, names: Sequence[str]) -> dict[str, Any]:
        """Copies of arrays of a node's workspace, by their names."""
        answer: dict[str, Any] = self._ask({node: Fetch(names=list(names))})[node]
        return answer

    def close(self) -> None:
        """End all nodes. What still runs is given `STOP_DEADLINE_S` seconds; harmless when done
        before."""
        if not self._closed:
            self._closed = True
            self._stop()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except StuckWorkerError as stuck:
            if error is None:
                raise
            logger.error("%s", stuck)

    def _check_plans(self, plans: Mapping[str, Any], expected: Any) -> None:
        for node, plan in plans.items():
            if plan != expected:
                self._broken = ConfigError(
                    f"node {node!r} has made another job, {plan!r}, expected {expected!r}; make "
                    "it in one function, which does the same in every process"
                )
                raise self._broken

    # ---- asked of all nodes at once

    def _run_group(self, group: TaskGroup) -> None:
        if group.key is None:
            raise ConfigError(
                "the group is not one of the job's, so that a node cannot find it; put its tasks "
                "into one of the job's groups"
            )
        self._ask({node: RunTasks(key=group.key) for node in group.used_nodes()})

    def _ask(self, requests: Mapping[str, Request]) -> dict[str, Any]:
        """The answer of each node. Raises the first error."""
        self._check_usable()
        job = self._opened()
        for node in requests:
            if node not in job.nodes():
                raise ConfigError(f"the job has no node {node!r}, expected one of {job.nodes()!r}")
        # After an exception, an interrupt too, answers may still be under way: they would be taken
        # for those of the next request.
        try:
            answers, error = self._exchange(requests)
        except BaseException as fatal:
            self._broken = fatal
            raise
        if error is not None:
            raise error
        return {node: answers[node] for node in requests}

    def _exchange(
        self, requests: Mapping[str, Request]
    ) -> tuple[dict[str, Any], BaseException | None]:
        """The answer of each node, and the first error. Raises at once where a task has failed or a
        node is gone: the other nodes are not waited for."""
        answers: dict[str, Any] = {}
        first: BaseException | None = None
        for node, request in requests.items():
            self._send(node, request)
        while len(answers) < len(requests):
            node, answer, error = self._receive()
            answers[node] = answer
            # The tasks of other nodes may wait for this one's, in a collective operation for
            # example: to wait for them would be for ever. A save that fails is waited out on all
            # nodes.
            if error is not None and isinstance(requests[node], RunTasks):
                raise error
            first = first or error
        return answers, first

    def _opened(self) -> Job:
        if self._job is None:
            raise ConfigError("the session has no job yet; open it: session.open(job)")
        return self._job

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("the session is closed; make a new one")
        if self._broken is not None:
            raise ClosedError(
                "a node of the session has failed; make a new one, and resume from the last "
                "checkpoint"
            ) from self._broken

    # ---- where nodes are

    @abstractmethod
    def _start(self, job: Job) -> None:
        """Make the nodes of a job."""

    @abstractmethod
    def _send(self, node: str, request: Request) -> None:
        """Ask something of a node; do not wait for its answer."""

    @abstractmethod
    def _receive(self) -> tuple[str, Any, BaseException | None]:
        """Wait for the next answer of any node that was asked: node, answer, and error. Raises
        where a node is gone."""

    @abstractmethod
    def _stop(self) -> None:
        """End all nodes."""
