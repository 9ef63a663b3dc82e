"""Messages of a service, one of every kind."""

from __future__ import annotations

from feeder.service.protocol.messages import (
    PROTOCOL_VERSION,
    Arena,
    Attached,
    Batches,
    Bye,
    ColumnSpec,
    Edit,
    Edited,
    End,
    Farewell,
    Fault,
    Group,
    Look,
    Message,
    Offer,
    Open,
    Opened,
    Report,
    Seen,
    Snapshot,
    Span,
    Spec,
    State,
    Used,
    Waiting,
)

G = bytes(24)
COLUMN = ColumnSpec(name="x", dtype="<f4", axis=0, shape=(2, 3))
SPAN = Span(
    False, 0, 1, (True, False), (3, 4), (6, 8), (b"m", None), (0, 1), (3, 4),
    (((2, b"m"), (3, b"n")), None), 2,
)  # fmt: skip
GROUP = Group(0, 0, 0, 0, 1, 2, 2, (5,), (0,), None, (b"t",), None, (), (), ())
TOLD = Group(1, 0, 1, 1, 1, 2, 2, (6, 7), (0, 0), None, (), SPAN, (3, 4), (0, 1), (0, 9))
EXAMPLES: list[Message] = [
    Open(
        version=PROTOCOL_VERSION, feed="", queue=0, token=None, credit=0, hold=1,
        intent="start", undecided=True, takeover=False, who="pid 1", boot_id="", checksum="auto",
        ended=(), consumer=bytes(16), attempt=0,
    ),
    Attached(generation=G, plane="shared", reason=""),
    Used(
        generation=G, sequence=1, pending=0, begun=False, slots=(1, 2),
        report=Report(0.5, 0.0, 0, 1),
    ),
    Look(version=PROTOCOL_VERSION, receipt=b""),
    Seen(data=b"{}", receipt=b"r"),
    Edit(
        version=PROTOCOL_VERSION, feed="", why="more code", weights=(("web", "1/3"), ("code", "2")),
        batch_size=8, global_batch_size=None, seed=2**64 - 1,
    ),
    Edited(feed="train", step=7),
    Snapshot(generation=G, sequence=2, receipt=b""),
    Bye(generation=G),
    Opened(
        generation=G, credit=8,
        shared=Offer(path="/p", nonce=bytes(16)), lease_s=30.0, length=None, name="train",
        number=0, fingerprint=b"f", epochs=None, token=b"t", writable=False,
    ),
    Spec(generation=G, batch_size=2, columns=(COLUMN,)),
    Arena(generation=G, number=0, slot_bytes=64, num_slots=4),
    Batches(generation=G, groups=(GROUP, TOLD)),
    Waiting(generation=G, queues=(1,), ended=()),
    State(generation=G, data=b"s", receipt=b"r"),
    Fault(generation=b"", sequence=None, kind="LeaseLost", text="t", fields={"call": 1}, note=""),
    End(generation=G, sequence=3, token=b"t"),
    Farewell(generation=b"", reason="stop"),
]  # fmt: skip
