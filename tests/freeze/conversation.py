"""A whole conversation of a consumer with a server that sends frames, as it went over the wire.

It is recorded between two sockets that pass everything on. The consumer's messages stand in the
order in which it sent them. Of several `Used` in a row only the last stands: their number is a
matter of time. The server's messages of each kind stand in their order; the kinds overtake each
other, and `Waiting` is left out, which comes or not. What differs from run to run is masked, by the
name of its field.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq

import feeder

MASKED = {
    "consumer": b"*" * 16,
    "generation": b"*" * 24,
    "receipt": b"*" * 8,
    "report": [0.0, 0.0, 0, 0],
    "who": "pid * on *",
    "boot_id": "*",
}
"""What stands in the record for the fields that are random, or tell times, processes and hosts."""
PLACES = slice(10, 15)
"""The fields of a group that say where its batches ended, by tokens or numbers: which of the two
is a matter of time. Both are among the messages, and every token is among the positions."""


def fetch(call: feeder.Call) -> list[np.ndarray]:
    if call.index == 5:
        raise StopIteration
    rows = 1 + 7 * call.index % 11
    return [np.arange(rows) + 100 * call.epoch + 20 * call.index, call.rng.random((2, rows))]


def make_feed() -> feeder.Coordinator:
    return feeder.init_data_input_workers(
        ["id", "vector"], fetch, 4, 1, batch_columns=[0, 1], epochs=2, seed=3, timeout=10.0,
        last_batch="pad", coordinator=feeder.Coordinator(),
    )  # fmt: skip


class Recorder:
    """Passes on what a consumer and a server say, in a thread of its own, and keeps it."""

    def __init__(self, context: zmq.Context[Any], address: str, server: str) -> None:
        self.said: dict[str, list[list[bytes]]] = {"consumer": [], "server": []}
        self._consumer, self._server = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        self._stopping, self._stop = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._stopping.bind("inproc://stop")
        self._stop.connect("inproc://stop")
        self._consumer.bind(address)
        self._server.connect(server)
        self._thread = threading.Thread(target=self._pass_on)
        self._thread.start()

    def _pass_on(self) -> None:
        poller, peer = zmq.Poller(), b""
        for socket in (self._consumer, self._server, self._stopping):
            poller.register(socket, zmq.POLLIN)
        while self._stopping not in (ready := dict(poller.poll())):
            if self._consumer in ready:
                peer, *frames = self._consumer.recv_multipart()
                self.said["consumer"].append(frames)
                self._server.send_multipart(frames)
            if self._server in ready:
                frames = self._server.recv_multipart()
                self.said["server"].append(frames)
                self._consumer.send_multipart([peer, *frames])

    def close(self) -> None:
        self._stop.send(b"")
        self._thread.join()
        for socket in (self._consumer, self._server, self._stopping, self._stop):
            socket.close(linger=0)


@contextmanager
def recording(folder: Path) -> Iterator[tuple[str, Recorder]]:
    """A served feed behind a recorder, and the recorder's address."""
    behind, before = f"ipc://{folder}/server", f"ipc://{folder}/recorder"
    with feeder.serve(make_feed, behind), zmq.Context() as context:
        recorder = Recorder(context, before, behind)
        try:
            yield before, recorder
        finally:
            recorder.close()


def read(address: str) -> None:
    """Read the feed to its end, with a snapshot after each batch: an answer to wait for."""
    with feeder.connect(address, plane="frames", credit=2, hold=1, timeout=10.0) as consumer:
        for _ in consumer:
            consumer.snapshot()


def written(frames: list[bytes]) -> list[str]:
    """A message and what follows it, with what differs between runs masked."""
    fields = msgpack.unpackb(frames[0])
    assert msgpack.packb(fields) == frames[0], "there are other bytes for the same message"
    fields |= {name: masked for name, masked in MASKED.items() if fields.get(name)}
    for group in fields.get("groups", ()):
        group[PLACES] = ["*"] * len(group[PLACES])
    message, *rest = msgpack.packb(fields), *frames[1:]
    return [fields["type"], message.hex(), *(frame.hex() for frame in rest)]


def last_of_each_run(said: list[list[str]], kind: str) -> list[list[str]]:
    """Leave out messages of a kind that are followed by another of it."""
    followed = zip(said, [*said[1:], [""]], strict=True)
    return [message for message, after in followed if not message[0] == after[0] == kind]


def make(folder: Path) -> dict[str, Any]:
    with recording(folder) as (address, recorder):
        read(address)
    consumer, server = (
        [written(frames) for frames in recorder.said[side]] for side in ("consumer", "server")
    )
    kinds = sorted({kind for kind, *_ in server} - {"Waiting"})
    return {
        "consumer": last_of_each_run(consumer, "Used"),
        "server": {kind: [message for message in server if message[0] == kind] for kind in kinds},
    }
