"""What a run of a feed gave: a digest of its batches, and one of the positions after each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from feeder import Coordinator
from feeds import deal, note
from freeze.pairwise import Case, name_of


def digest(data: bytes) -> str:
    """How a golden file tells many bytes in a few."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def told(coordinator: Coordinator) -> dict[str, Any]:
    """Run the only feed of a coordinator to its end."""
    (name,) = coordinator
    with coordinator:
        taken = [(batch.epoch, note(batch), batch.cut.token()) for batch in deal(coordinator[name])]
    # After the last batch of an epoch a token may know already that the epoch is over, or not yet.
    tokens = [token for (epoch, _, token), (later, *_) in pairwise(taken) if epoch == later]
    return {
        "batches": len(taken),
        "digest": digest(repr([batch for _, batch, _ in taken]).encode()),
        "tokens": digest(b"".join(tokens)),
    }


def all_told(
    make: Callable[..., Coordinator], cases: list[Case], folder: Path
) -> dict[str, dict[str, Any]]:
    return {name_of(case): told(make(folder, **case)) for case in cases}
