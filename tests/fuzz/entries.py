"""Everything that takes bytes from a stranger, or from a file: what is given to it, and the errors
by which it may refuse them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import msgpack
import numpy as np
import xxhash

import feeder
from feeder.checkpoint import format as checkpoints
from feeder.checkpoint.feed_meta import SNAPSHOT_ENTRY
from feeder.checkpoint.store import CheckpointStore
from feeder.errors import FeedError, ProtocolError
from feeder.service.client.remote import identity_of
from feeder.service.protocol import coding
from feeder.service.protocol.messages import Open, Opened
from feeder.state import codec
from feeder.state.snapshot import Snapshot
from feeder.workers.sources.extras import find
from fuzz.files import folder, run_command, sealed
from fuzz.inputs import mutated, nested, reshaped
from messages import EXAMPLES
from small import Seekable, make

_EPOCHS = 2


@dataclass(frozen=True)
class Entry:
    """One way in."""

    make: Callable[[Random], bytes]
    """Makes an input."""
    take: Callable[[bytes], object]
    """Gives it in."""
    refusals: tuple[type[Exception], ...] = (FeedError,)
    """How it may be refused."""


def _feed(**settings: Any) -> feeder.Coordinator:
    return make(Seekable(5, 3), names=["id"], num_worker_threads=2, epochs=_EPOCHS, **settings)


def _position() -> tuple[bytes, bytes]:
    """A snapshot with leftover rows, and its token."""
    with _feed() as coordinator:
        feed = coordinator["train"]
        batch = next(feed)
        return bytes(coordinator.snapshot()), batch.cut.token()


_SNAPSHOT, _TOKEN = _position()
_SNAPSHOT_AT, _TOKEN_AT = 36, 11


# ---- the codec, which cursors, headers and fingerprints go through

_CODED = [
    codec.pack(value)
    for value in (
        {"at": (1, [2, (3, "x")]), "big": 2**70, b"k": None, 1.5: True},
        [np.arange(6, dtype=">i4").reshape(2, 3), np.zeros(2, [("a", "<f4"), ("b", "<i2", (2,))])],
        ((((("deep",),),),),),
        {"source.kind": "arrays", "seed": 2**64 - 1, "names": ["x", "y"]},
    )
]


def _hostile(chance: Random) -> bytes:
    return nested(chance) if chance.random() < 0.3 else mutated(chance, _CODED)


def _take_coded(data: bytes) -> None:
    codec.pack(codec.unpack(data))


# ---- positions


def _sealed_token(body: bytes) -> bytes:
    return b"".join((_TOKEN[:3], xxhash.xxh3_64_digest(body), body))


_TOKEN_BODY = _TOKEN[_TOKEN_AT:]


def _make_token(chance: Random) -> bytes:
    kind = chance.random()
    if kind < 0.1:
        return mutated(chance, [_TOKEN])
    if kind < 0.3:
        return _sealed_token(nested(chance))
    if kind < 0.6:
        return _sealed_token(mutated(chance, [_TOKEN_BODY]))
    return _sealed_token(reshaped(chance, msgpack.unpackb(_TOKEN_BODY)))


_HEADER_BYTES = int.from_bytes(_SNAPSHOT[_SNAPSHOT_AT : _SNAPSHOT_AT + 4], "little")
_HEADER = _SNAPSHOT[_SNAPSHOT_AT + 4 : _SNAPSHOT_AT + 4 + _HEADER_BYTES]
_ROWS = _SNAPSHOT[_SNAPSHOT_AT + 4 + _HEADER_BYTES :]


def _sealed_snapshot(header: bytes) -> bytes:
    body = len(header).to_bytes(4, "little") + header + _ROWS
    numbers = _SNAPSHOT[8:12] + len(body).to_bytes(8, "little")
    return b"".join((_SNAPSHOT[:8], numbers, xxhash.xxh3_128_digest(numbers + body), body))


def _make_snapshot(chance: Random) -> bytes:
    kind = chance.random()
    if kind < 0.1:
        return mutated(chance, [_SNAPSHOT])
    if kind < 0.25:
        return _sealed_snapshot(nested(chance))
    if kind < 0.5:
        return _sealed_snapshot(mutated(chance, [_HEADER]))
    header = msgpack.unpackb(_HEADER)
    if kind < 0.75:
        # The settings that it says are those of this feed, so that its position is looked at.
        header[0][3] = _make_token(chance)
        return _sealed_snapshot(msgpack.packb(header))
    return _sealed_snapshot(reshaped(chance, header))


def _make_position(chance: Random) -> bytes:
    return _make_token(chance) if chance.random() < 0.4 else _make_snapshot(chance)


def _take_snapshot(data: bytes) -> None:
    snapshot = Snapshot.from_bytes(data)
    snapshot.describe()
    assert Snapshot.from_bytes(bytes(snapshot)).describe() == snapshot.describe()


def _resume(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", feeder.ReplayWarning)
        _feed(resume=data)


def _load(data: bytes) -> None:
    _feed().load_state_dict({"feeder": data})


# ---- files


def _checkpoint(entries: dict[str, Any]) -> bytes:
    return b"".join(map(bytes, checkpoints.encode(entries, {"step": 3})[0]))


_CHECKPOINT = _checkpoint(
    {SNAPSHOT_ENTRY: _SNAPSHOT, "x": np.arange(3), "s": np.zeros(2, "<f4,<i2")}
)
_CHECKPOINT_AT = 44


def _make_checkpoint(chance: Random) -> bytes:
    kind = chance.random()
    if kind < 0.1:
        return mutated(chance, [_CHECKPOINT])
    if kind < 0.3:
        return _checkpoint({SNAPSHOT_ENTRY: _make_snapshot(chance)})
    size = int.from_bytes(_CHECKPOINT[12:20], "little")
    header, data = _CHECKPOINT[_CHECKPOINT_AT:][:size], _CHECKPOINT[_CHECKPOINT_AT + size :]
    if kind < 0.5:
        header = nested(chance)
    elif kind < 0.75:
        header = mutated(chance, [header])
    else:
        header = reshaped(chance, msgpack.unpackb(header, strict_map_key=False))
    return sealed(header, data)


def _verify(data: bytes) -> None:
    place = folder("checkpoint")
    (place / "feed.000000").write_bytes(data)
    store = CheckpointStore(place)
    assert store.latest("none") is None
    store.verify("feed.000000")
    store.get("feed.000000")


def _inspect(data: bytes) -> None:
    path = folder("position") / "position"
    path.write_bytes(data)
    run_command("inspect", str(path))


def _make_file(chance: Random) -> bytes:
    return _make_checkpoint(chance) if chance.random() < 0.4 else _make_position(chance)


# ---- messages

_SAID = [coding.encode(message) for message in EXAMPLES]
_OPEN = next(message for message in EXAMPLES if isinstance(message, Open))
_OPENED = next(message for message in EXAMPLES if isinstance(message, Opened))


def _make_message(chance: Random) -> bytes:
    kind = chance.random()
    if kind < 0.1:
        return nested(chance)
    if kind < 0.5:
        return mutated(chance, _SAID)
    return reshaped(chance, msgpack.unpackb(chance.choice(_SAID), strict_map_key=False))


def _take_message(data: bytes) -> None:
    for from_consumer in (True, False):
        with contextlib.suppress(ProtocolError):
            coding.decode(data, from_consumer=from_consumer)
    coding.decode(data, from_consumer=True)


def _open_at(data: bytes) -> None:
    """A server is asked for a queue at a position."""
    fields = {**msgpack.unpackb(coding.encode(_OPEN)), "token": data}
    message = coding.decode(msgpack.packb(fields), from_consumer=True)
    assert isinstance(message, Open)
    assert message.token is not None
    _load(message.token)


def _make_fingerprint(chance: Random) -> bytes:
    if chance.random() < 0.5:
        return _hostile(chance)
    return reshaped(chance, _feed()["train"].streams[0].positions.fingerprint)


def _identify(data: bytes) -> None:
    opened = msgpack.unpackb(coding.encode(_OPENED))
    fields = {**opened, "name": "train", "number": 0, "token": _TOKEN, "fingerprint": data}
    message = coding.decode(msgpack.packb(fields), from_consumer=False)
    assert isinstance(message, Opened)
    assert len(identity_of(message).id.fingerprint) == 8


ENTRIES = {
    "codec": Entry(_hostile, _take_coded, (ValueError, TypeError)),
    "snapshot": Entry(_make_snapshot, _take_snapshot),
    "resume": Entry(_make_position, _resume),
    "state-dict": Entry(_make_position, _load),
    "inspect": Entry(_make_file, _inspect),
    "checkpoint": Entry(_make_checkpoint, _verify),
    "message": Entry(_make_message, _take_message),
    "open": Entry(_make_position, _open_at),
    "opened": Entry(_make_fingerprint, _identify),
}
if find("lmdb") is not None:
    # Not every place where the tests run has the extra `lmdb`.
    from fuzz import epochs

    def _make_in_folder(chance: Random) -> bytes:
        if chance.random() < 0.3:
            return epochs.BESIDE + _make_checkpoint(chance)
        return epochs.make(chance)

    ENTRIES |= {
        "part": Entry(epochs.make_part, epochs.take_part),
        "epochs": Entry(epochs.make, epochs.take),
        "command": Entry(_make_in_folder, epochs.take_by_command),
    }
