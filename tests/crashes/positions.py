"""Small snapshots that say which they are."""

from __future__ import annotations

import numpy as np

from feeder.state.snapshot import Snapshot, StreamState


def snapshot_at(step: int, num_bytes: int = 40) -> Snapshot:
    """A snapshot of one feed that stands before batch `step`, with some rows left over."""
    return Snapshot(
        (
            StreamState(
                name="train",
                number=0,
                fingerprint={"seed": 1},
                token=b"FT" + step.to_bytes(8, "little"),
                columns=None,
                rows=(np.full(num_bytes, step % 251, np.uint8),),
                summary=(0, step, step, num_bytes),
            ),
        )
    )


def step_of(snapshot: Snapshot) -> int:
    """Which snapshot it is; sees to it that its rows are those it was made with."""
    (state,) = snapshot.states
    (rows,) = state.rows or ()
    step = state.summary[2]
    assert (rows == step % 251).all()
    assert state.token == b"FT" + step.to_bytes(8, "little")
    return step
