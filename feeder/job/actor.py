"""The node that a Ray actor is."""

from __future__ import annotations

from feeder.job.factories import MadeJob
from feeder.job.host import NodeHost, failure
from feeder.job.messages import encode


class NodeActor:
    """Makes the job when it is first asked for something, and does what it is asked."""

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
