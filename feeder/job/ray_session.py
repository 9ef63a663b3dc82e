"""A session whose nodes are actors on a Ray cluster."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from feeder.errors import FeedError, RemoteError
from feeder.job.definition import Job
from feeder.job.factories import MadeJob, check_factory
from feeder.job.host import NodeHost, failure
from feeder.job.messages import Done, End, Request, decode_reply, encode, error_of
from feeder.job.session import STOP_DEADLINE_S, Session
from feeder.state import codec
from feeder.workers.public import public
from feeder.workers.sources.extras import load

logger = logging.getLogger("feeder")

_TELL_S = 30.0
"""How often it is said that nodes wait for a place."""

# ---- The actor: one node of a job.


class NodeActor:
    """Makes the job when it is first asked for something, and does what it is asked. Ray calls it
    in one thread; where Ray starts it again, its workspace is gone and `NodeHost` says so."""

    def __init__(self, factory: str, node: str) -> None:
        self._factory = factory
        self._node = node
        self._host: NodeHost | None = None

    def answer(self, data: bytes) -> bytes:
        """A request and its reply, as bytes."""
        if self._host is None:
            try:
                made = MadeJob(self._factory)
            except Exception as error:
                return encode(failure(error))
            self._host = NodeHost(self._node, made.job, made.group)
        return self._host.answer_bytes(data)


_SPREAD = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
"""The options of a node's actor by default: no CPU of its own, and nodes spread over machines."""


@public("feeder.job")
class RaySession(Session):
    """Runs each node as an actor on a Ray cluster (extra `ray`).

    An actor makes the job itself; what goes to it and comes back is bytes: names, numbers and
    arrays. Where this process is not connected to a cluster yet it connects to `address`, and
    disconnects at the end. One thread uses a session and owns its fields, the actors included.

    Args:
        factory: ``"MODULE:ATTR"``, a function without arguments that returns the `Job`, or the
            `JobRunner` with it; the cluster's machines must be able to import it.
        address: The cluster's; None finds or starts one, as ``ray.init`` does.
        options: What each node asks of the cluster, by its name, as ``actor.options`` takes it:
            ``{"trainer_0": {"resources": {"rack_0": 1}}}``.
        placement_s: For how many seconds the cluster may have no place for a node.
    """

    def __init__(
        self,
        factory: str,
        address: str | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        placement_s: float = 300.0,
    ) -> None:
        super().__init__()
        self._ray = load("ray", "ray")
        self._factory = check_factory(factory)
        self._address = address
        self._options = dict(options or {})
        self._actors: dict[str, Any] = {}
        self._asked: dict[Any, str] = {}
        self._connected = False
        self._placement_s = placement_s

    def _start(self, job: Job) -> None:
        if not self._ray.is_initialized():
            self._ray.init(address=self._address, log_to_driver=False)
            self._connected = True
        # Actors find modules where this process does: a factory beside a script is not installed.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        environment = {"env_vars": {"PYTHONPATH": path}}
        actor_class = self._ray.remote(NodeActor)
        self._asked.clear()
        for node in job.nodes():
            options = {**_SPREAD, "runtime_env": environment, **self._options.get(node, {})}
            self._actors[node] = actor_class.options(**options).remote(self._factory, node)
        self._wait_for_places()

    def _wait_for_places(self) -> None:
        """Wait until the cluster has a place for every node. Raises `RemoteError` where it has
        none within `placement_s` seconds."""
        waiting = {actor.__ray_ready__.remote(): node for node, actor in self._actors.items()}
        ends = time.monotonic() + self._placement_s
        while waiting:
            left_s = ends - time.monotonic()
            done, _ = self._ray.wait(
                list(waiting), num_returns=len(waiting), timeout=max(0.0, min(_TELL_S, left_s))
            )
            for ready in done:
                del waiting[ready]  # One that failed says why at its first request.
            asked = {node: self._options.get(node, {}) for node in waiting.values()}
            if waiting and left_s <= 0:
                self._stop()
                raise RemoteError(
                    f"the cluster has had no place for nodes {sorted(asked)!r} for "
                    f"{self._placement_s:.0f} s, which ask for {asked!r}: add machines, or ask for "
                    "less"
                )
            if waiting:
                logger.warning("nodes %r wait for a place in the cluster", sorted(asked))

    def _send(self, node: str, request: Request) -> None:
        self._asked[self._actors[node].answer.remote(encode(request))] = node

    def _receive(self) -> tuple[str, Any, BaseException | None]:
        (done, *_), _ = self._ray.wait(list(self._asked))
        node = self._asked.pop(done)
        return node, *self._answer(node, done)

    def _answer(self, node: str, done: Any) -> tuple[Any, FeedError | None]:
        try:
            reply = decode_reply(self._ray.get(done))
        except self._ray.exceptions.RayError as error:
            raise RemoteError(f"node {node!r} is gone: {error}") from error
        if isinstance(reply, Done):
            return codec.unpack(reply.answer), None
        return None, error_of(reply, node)

    def _stop(self) -> None:
        ends = [actor.answer.remote(encode(End())) for actor in self._actors.values()]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=STOP_DEADLINE_S)
        # Killed in any case: one that hangs would hold its resources until the cluster ends.
        for actor in self._actors.values():
            self._ray.kill(actor)
        self._actors.clear()
        if self._connected:
            self._ray.shutdown()
