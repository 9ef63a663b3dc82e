"""The bytes of every message of the protocol, each with values that are its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack

from freeze.internals import FROM_CONSUMER, FROM_SERVER, decode, encode

VERSION = 5
LEASE = bytes(range(24))
SPAN = [
    False, 0, 1, [True, False], [3, 4], [6, 8], [b"m", None], [0, 1], [3, 4],
    [[[2, b"m"], [3, b"n"]], None], 2,
]  # fmt: skip
WITH_TOKENS = [0, 300, 2, 0, 1, 2, 2, [5], [2**64 - 1], None, [b"token"], None, [], [], []]
WITH_NUMBERS = [
    1, 301, 2, 1, 1, 2, 2, [6, 7], [0, 1], [[2], [2, 3]], [], SPAN, [3, 4], [0, 1], [0, 9],
]  # fmt: skip

MESSAGES: dict[str, list[dict[str, Any]]] = {
    "Open": [
        dict(
            version=VERSION, feed="train", queue=1, token=token, credit=8, hold=2, intent=intent,
            undecided=False, takeover=True, consumer=bytes(range(16)), attempt=3, ended=[0, 300],
            who="pid 7 on nodé", boot_id="boot", checksum=checksum,
        )
        for token, intent, checksum in [
            (None, "start", "auto"), (b"token", "rejoin", "off"), (b"", "start", "sampled"),
            (None, "start", "full"),
        ]
    ],
    "Attached": [
        dict(generation=LEASE, plane="shared", reason=""),
        dict(generation=LEASE, plane="frames", reason="another host"),
    ],
    "Used": [
        dict(
            generation=LEASE, sequence=70_000, pending=1, begun=True, slots=[1, 65_536 + 2],
            report=[0.5, 1e12, 0, 2**40],
        )
    ],
    "Snapshot": [dict(generation=LEASE, sequence=2, receipt=b"receipt")],
    "Bye": [dict(generation=LEASE)],
    "Look": [dict(version=VERSION, receipt=b"receipt")],
    "Edit": [
        dict(
            version=VERSION, feed="train", why="more cöde", weights=[["web", "1/3"], ["code", "2"]],
            batch_size=None, global_batch_size=512, seed=2**64 - 1,
        ),
        dict(
            version=VERSION, feed="", why="less", weights=[], batch_size=8, global_batch_size=None,
            seed=None,
        ),
    ],
    "Spec": [
        dict(
            generation=LEASE, batch_size=256,
            columns=[
                dict(name="id", dtype="<i8", axis=0, shape=[]),
                dict(name="imäge", dtype="|u1", axis=1, shape=[3, 224, 224]),
            ],
        )
    ],
    "Opened": [
        dict(
            generation=LEASE, credit=8, shared=shared, lease_s=30.0, length=length, name="train",
            number=1, fingerprint=b"fingerprint", epochs=epochs, token=b"token", writable=True,
        )
        for shared, length, epochs in [
            (dict(path="/run/feed.sock", nonce=bytes(range(16))), None, None), (None, 1000, 3),
        ]
    ],
    "Arena": [dict(generation=LEASE, number=1, slot_bytes=2**33, num_slots=64)],
    "Batches": [dict(generation=LEASE, groups=[WITH_TOKENS, WITH_NUMBERS])],
    "Waiting": [dict(generation=LEASE, queues=[0, 2], ended=[1])],
    "State": [
        dict(generation=LEASE, data=None, receipt=b"receipt"),
        dict(generation=LEASE, data=b"state", receipt=b"receipt"),
    ],
    "Seen": [dict(data=b"{}", receipt=b"receipt")],
    "Edited": [dict(feed="train", step=2**40)],
    "Fault": [
        dict(
            generation=LEASE, sequence=4, kind="FetchError", text="it failed",
            fields={"call": 1, "worker": -1, "feed": "train", "more": None}, note="Traceback",
        ),
        dict(generation=b"", sequence=None, kind="LeaseLost", text="", fields={}, note=""),
    ],
    "End": [dict(generation=LEASE, sequence=5, token=b"token")],
    "Farewell": [
        dict(generation=b"", reason="the server stops"), dict(generation=LEASE, reason="bye"),
    ],
}  # fmt: skip


def make(folder: Path) -> dict[str, Any]:
    return {
        name: [sent(name, fields).hex() for fields in MESSAGES.get(name, [])]
        for name in (*FROM_CONSUMER, *FROM_SERVER)
    }


def sent(name: str, fields: dict[str, Any]) -> bytes:
    """The message as feeder writes it, who has read it before from bytes of ours."""
    packed = msgpack.packb({"type": name, **fields})
    return encode(decode(packed, from_consumer=name in FROM_CONSUMER))
