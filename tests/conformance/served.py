"""How tests serve a feed from their own process."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import feeder
import feeds
from feeder import Batch, Consumer, Coordinator, Server, Snapshot
from feeder.service.client import lease as client_lease
from feeder.workers.stream import copying


class Transport(NamedTuple):
    """A way from a server to its consumers."""

    scheme: str
    plane: str


TRANSPORTS = {
    "shared": Transport("ipc", "shared"),
    "ipc": Transport("ipc", "frames"),
    "tcp": Transport("tcp", "frames"),
}
"""Every way, by its name."""


@contextmanager
def serving(feeds: Any, scheme: str = "ipc", **settings: Any) -> Iterator[Server]:
    """Serve at an address of its own for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="feeder-") as folder:
        address = f"ipc://{folder}/feed.sock" if scheme == "ipc" else "tcp://127.0.0.1:0"
        with feeder.serve(feeds, address, **settings) as server:
            yield server


@contextmanager
def reading(server: Server, **settings: Any) -> Iterator[Consumer]:
    """Connect to a server for as long as the context lasts."""
    with feeder.connect(server.addresses[0], **settings) as consumer:
        yield consumer


class Seen:
    """A served feed that looks like one in process, and like its coordinator."""

    def __init__(self, consumers: Sequence[Consumer]) -> None:
        self.consumers = list(consumers)
        self.devices = tuple(f"queue:{i}" for i in range(len(self.consumers)))

    def on(self, device: int | str) -> Consumer:
        return self.consumers[device if isinstance(device, int) else self.devices.index(device)]

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        (consumer,) = self.consumers
        return next(consumer)

    def state_dict(self) -> dict[str, bytes]:
        (consumer,) = self.consumers
        return consumer.state_dict()

    def snapshot(self) -> Snapshot:
        (consumer,) = self.consumers
        return consumer.snapshot()


@contextmanager
def served(
    transport: str, coordinator: Coordinator | Callable[[], Coordinator], *, num_queues: int = 1,
    resume: Any = None, **settings: Any,
) -> Iterator[Seen]:  # fmt: skip
    """Serve a feed, and connect a consumer to each of its queues, which goes on at `resume`, or
    at its own of a list; each on the device of its queue's number, where that is to be "cuda"."""
    scheme, plane = TRANSPORTS[transport]
    positions = resume if isinstance(resume, list) else [resume] * num_queues
    with ExitStack() as stack:
        if transport == "tcp":
            # Here what is done with large arrays alone is done with all.
            stack.enter_context(mock.patch.object(copying, "_KEPT_BYTES", 0))
            stack.enter_context(mock.patch.object(client_lease, "_LARGE_BYTES", 0))
        server = stack.enter_context(serving(coordinator, scheme, queues=num_queues))
        kind = settings.pop("device", "cpu")
        consumers = [
            stack.enter_context(
                reading(
                    server,
                    queue=queue,
                    plane=plane,
                    resume=position,
                    device=f"cuda:{queue}" if kind == "cuda" else "cpu",
                    **settings,
                )
            )
            for queue, position in enumerate(positions)
        ]
        assert {consumer.plane for consumer in consumers} == {plane}
        yield Seen(consumers)


def running_over(transport: str, **connected: Any) -> Callable[..., Any]:
    """Return `feeds.running` over a transport, with consumers that are connected so."""

    @contextmanager
    def running(
        fetch: Callable[..., Any], *, resume: Any = None, **settings: Any
    ) -> Iterator[tuple[Seen, Seen]]:
        coordinator = feeds.make(fetch, **settings)
        (name,) = coordinator
        num = len(coordinator[name].devices)
        with served(transport, coordinator, num_queues=num, resume=resume, **connected) as seen:
            yield seen, seen

    return running
