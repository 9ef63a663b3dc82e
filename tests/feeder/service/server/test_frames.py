"""Frames that come other than they were sent: refused, counted, and asked for again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import zmq

import feeder
from conformance.served import reading, serving
from feeder.service.client import lease as client_lease
from feeder.service.net.connection import Connection
from feeder.service.protocol.batches import pieces
from feeder.service.server import delivery
from small import Calls, make

pytestmark = pytest.mark.served

STEPS = 5
ROWS = 4
ROW_ITEMS = 2
NAMES = ("x", "y", "z")
"""Of 64 bytes each: a batch is 192 bytes, which go in three frames."""


def frame(data: bytes) -> zmq.Frame:
    return zmq.Frame(data, copy=True)


def flip(frames: list[Any]) -> None:
    data = bytearray(frames[1].buffer)
    data[5] ^= 1
    frames[1] = frame(bytes(data))


def drop(frames: list[Any]) -> None:
    del frames[-1]


def drop_all(frames: list[Any]) -> None:
    frames.clear()


def shorten(frames: list[Any]) -> None:
    frames[-1] = frame(frames[-1].bytes[:-1])


def lengthen(frames: list[Any]) -> None:
    frames[-1] = frame(frames[-1].bytes + b"!")


def repeat(frames: list[Any]) -> None:
    frames.append(frames[-1])


def swap(frames: list[Any]) -> None:
    frames[0], frames[1] = frames[1], frames[0]


def columns(step: int) -> tuple[np.ndarray, ...]:
    first = np.arange(ROWS * ROW_ITEMS).reshape(ROWS, ROW_ITEMS) + 100 * step
    return tuple(first + 1000 * i for i in range(len(NAMES)))


fetch = Calls(STEPS, lambda call: columns(call.index))


@pytest.mark.parametrize(
    ("spoil", "checksum", "says"),
    [
        (flip, "full", "batch 2 is corrupt"),
        (flip, "sampled", "batch 2 is corrupt"),
        (swap, "full", "batch 2 is corrupt"),
        (swap, "sampled", "batch 2 is corrupt"),
        (drop, "off", "frames hold {without_last} bytes, expected 192"),
        (drop_all, "full", "frames hold 0 bytes, expected 192"),
        (shorten, "full", "frames hold 191 bytes, expected 192"),
        (lengthen, "off", "frames hold 193 bytes, expected 192"),
        (repeat, "full", "frames hold {with_another} bytes, expected 192"),
    ],
)
@pytest.mark.parametrize(
    ("frame_bytes", "last_bytes", "least_bytes"), [(64, 64, 0), (80, 32, 0), (64, 64, 10_000)],
    ids=["looked at", "copied, as columns are cut", "copied, as it is small"],
)  # fmt: skip
def test_a_spoiled_batch_is_refused_and_comes_again(
    spoil: Callable[[list[Any]], None], checksum: str, says: str,
    frame_bytes: int, last_bytes: int, least_bytes: int,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    receive, seen = Connection.receive, 0
    says = says.format(without_last=192 - last_bytes, with_another=192 + last_bytes)

    def receive_spoiled(wire: Connection) -> Iterator[tuple[Any, list[Any]]]:
        nonlocal seen
        for data, frames in receive(wire):
            if frames:
                assert len(frames) == 3
                if seen == 2:
                    spoil(frames)
                seen += 1
            yield data, frames

    monkeypatch.setattr(Connection, "receive", receive_spoiled)
    monkeypatch.setattr(delivery, "pieces", partial(pieces, max_bytes=frame_bytes))
    monkeypatch.setattr(client_lease, "_LARGE_BYTES", least_bytes)
    with (
        serving(make(fetch, NAMES, ROWS)) as server,
        reading(server, plane="frames", checksum=checksum) as consumer,
    ):
        for step, batch in enumerate(consumer):
            assert batch.step == step
            assert all(
                np.array_equal(*pair) for pair in zip(batch.arrays(), columns(step), strict=True)
            )
        assert step == STEPS - 1
        stats = consumer.stats()
    assert stats["reconnects"] == 1
    assert stats["checksum_failures"] == ("corrupt" in says)
    assert sum(says in message for message in caplog.messages) == 1


@pytest.mark.parametrize(("scheme", "rows"), [("tcp", 40_000), ("tcp", 1000), ("ipc", 40_000)])
def test_positions_that_no_server_takes_are_told_of_once(
    caplog: pytest.LogCaptureFixture, scheme: str, rows: int
) -> None:
    """Of what cannot be fetched again the leftover rows go with each position."""

    def factory() -> feeder.Coordinator:
        fetch = lambda call: [np.full(rows, call.index)]  # noqa: E731
        return make(fetch, ["x"], 2 * rows // 5, epochs=None, repeatable=False)

    with serving(factory, scheme) as server, reading(server) as consumer:
        for _ in range(6):
            next(consumer)
        num_bytes = len(consumer.state_dict()["feeder"])
    told = [line for line in caplog.messages if "could not go on when this server is lost" in line]
    assert len(told) == ((scheme, rows) == ("tcp", 40_000))
    assert (num_bytes > 2**17) == (rows == 40_000)
    assert all("use a unix socket or keys" in line for line in told)


def test_who_wants_shared_memory_gets_no_frames_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*offer: Any) -> None:
        raise OSError("no socket there")

    monkeypatch.setattr(client_lease, "attach", refuse)
    with serving(make(fetch, NAMES, ROWS)) as server:
        with reading(server) as consumer:
            assert consumer.plane == "frames"
        with (
            pytest.raises(feeder.TransportError, match="no shared memory to this server: no sock"),
            reading(server, plane="shared") as consumer,
        ):
            next(consumer)
