"""What one lease says to its server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from feeder.service.client.lease import ClientLease
from feeder.service.protocol import messages as say


def test_a_snapshot_is_asked_for_once_a_batch_of_this_lease_was_handed_out() -> None:
    """Behind a batch of an earlier lease the server may not know the rows that are left."""
    said: list[say.Message] = []
    opened: Any = SimpleNamespace(generation=bytes(24), credit=4, lease_s=30.0)
    data_path: Any = SimpleNamespace(lends=False, take_released=lambda: ())
    lease = ClientLease(
        opened, None, data_path, 3, said.append, lambda: say.Report(0.0, 0.0, 0, 0)  # type: ignore[arg-type]
    )  # fmt: skip
    assert not lease.ask_snapshot(2, b"")
    assert said == []
    assert lease.ask_snapshot(4, b"receipt.")
    used, asked = said
    assert isinstance(used, say.Used) and used.sequence == 1
    assert isinstance(asked, say.Snapshot)
    assert (asked.sequence, asked.receipt) == (1, b"receipt.")
