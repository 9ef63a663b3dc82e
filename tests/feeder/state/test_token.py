"""Tokens whose digest is right, and that are none all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import xxhash

import feeder
from conformance.served import serving
from small import Counted, Pure, make

NAME, NUMBER, FINGERPRINT, EPOCH, INDEX, STEP, POSITION, LEFTOVER, DEALING = range(9)
TURN, LIVE, CALLS, ROWS, MARKS, DONE = range(1, 7)


def pure(**settings: Any) -> feeder.Coordinator:
    return make(Pure(50), epochs=None, num_worker_threads=2, **settings)


def ring(**settings: Any) -> feeder.Coordinator:
    return make(Counted(50), epochs=None, num_worker_threads=2, **settings)


def fields_of(factory: Callable[..., feeder.Coordinator]) -> list[Any]:
    """Of the token after seven batches of four rows in chunks of three."""
    with factory() as coordinator:
        for _ in range(7):
            batch = next(coordinator["train"])
        fields: list[Any] = msgpack.unpackb(batch.cut.token()[11:])
    return fields


def token_of(fields: Any, version: int = 3) -> bytes:
    body = msgpack.packb(fields)
    return b"FT" + bytes((version,)) + xxhash.xxh3_64_digest(body) + body


def put(*path: int, value: Any) -> Callable[[list[Any]], None]:
    def change(fields: list[Any]) -> None:
        for at in path[:-1]:
            fields = fields[at]
        fields[path[-1]] = value

    return change


WRONG: dict[str, Callable[[list[Any]], None]] = {
    "too short": lambda fields: fields.__delitem__(-1),
    "too long": lambda fields: fields.append(0),
    "a name that is none": put(NAME, value=[1]),
    "a short fingerprint": put(FINGERPRINT, value=b"x"),
    "a negative epoch": put(EPOCH, value=-1),
    "a negative index": put(INDEX, value=-4),
    "a step that is no whole number": put(STEP, value=1.5),
    "no position": put(POSITION, value=None),
    "a turn of no partition": put(POSITION, TURN, value=50),
    "no partition that lives": put(POSITION, LIVE, value=b"\0"),
    "partitions that live and are none": put(POSITION, LIVE, value=b"\xff"),
    "calls below none": put(POSITION, CALLS, 0, value=-1),
    "calls far from the leftover": lambda fields: put(
        POSITION, CALLS, value=[2**62] * len(fields[POSITION][CALLS])
    )(fields),
    "calls of more partitions": put(POSITION, CALLS, value=[10] * 100),
    "no calls": put(POSITION, CALLS, value=[]),
    "rows that are text": put(POSITION, ROWS, value="rows"),
    "marks that are numbers": put(POSITION, MARKS, value=[7, 7]),
    "done that is no list": put(POSITION, DONE, value=7),
    "a leftover of no partition": put(LEFTOVER, 0, value=77),
    "a leftover of more than there is": put(LEFTOVER, 2, value=99),
    "a leftover of no rows": put(LEFTOVER, 3, value=0),
    "a leftover that is none": put(LEFTOVER, value=[1, 2]),
    "no dealing": put(DEALING, value=None),
    "dealt to no queue": put(DEALING, 1, value=0),
    "dealt from before the start": put(DEALING, 0, value=-1),
    "batches of no rows": put(DEALING, 2, value=0),
    "fewer than no rounds skipped": put(DEALING, 3, value=-1),
    "epochs that are none": put(DEALING, 4, value=-1),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("factory", [pure, ring])
def test_a_token_that_is_none_is_a_named_error(
    factory: Callable[..., feeder.Coordinator], change: Callable[[list[Any]], None]
) -> None:
    fields = fields_of(factory)
    assert fields[LEFTOVER] is not None
    change(fields)
    with pytest.raises(feeder.SnapshotFormatError, match="token cannot be read: "):
        factory(resume=token_of(fields))


@pytest.mark.parametrize("body", [7, None, "abcdefgh", {"a": 1}, [None] * 8])
@pytest.mark.parametrize("version", [1, 2, 3])
def test_nor_are_other_values(body: Any, version: int) -> None:
    with pytest.raises(feeder.SnapshotFormatError, match="token cannot be read: "):
        pure(resume=token_of(body, version))


@pytest.mark.parametrize("version", [1, 2])
def test_an_older_token_has_no_dealing(version: int) -> None:
    fields = fields_of(pure)
    with pytest.raises(feeder.SnapshotFormatError, match="token cannot be read: "):
        pure(resume=token_of(fields, version))
    del fields[DEALING]
    with pure(resume=token_of(fields, version)) as coordinator:
        assert next(coordinator["train"]).step == 7


def test_a_position_of_other_partitions_does_not_fit() -> None:
    fields = fields_of(ring)
    fields[POSITION] = [0, 0, b"\1", [10], [30], [None], []]
    fields[LEFTOVER] = None
    with pytest.raises(feeder.ResumeError, match="one of 1 workers, expected 2"):
        ring(resume=token_of(fields))


@pytest.mark.served
def test_a_server_tells_who_brings_one_and_its_log_is_quiet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fields = fields_of(pure)
    fields[POSITION] = 7
    with serving(pure) as server:
        for _ in range(20):
            with pytest.raises(feeder.SnapshotFormatError, match="token cannot be read: "):
                feeder.connect(server.addresses[0], resume=token_of(fields))
    assert "Traceback" not in caplog.text and len(caplog.records) < 5
