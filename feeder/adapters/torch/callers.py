"""Frameworks that do with a loader what its state cannot follow: their users are told the cure."""

from __future__ import annotations

import sys
import warnings
from typing import Any


def tell_saver(loader: Any) -> None:
    """Called by `state_dict`: warns of a Lightning trainer that keeps it by itself."""
    caller = sys._getframe(2).f_globals.get("__name__", "")
    if caller.endswith("pytorch.utilities.combined_loader") and not loader._is_kept:
        warnings.warn(
            "Lightning by itself loads no state of a loader at an epoch's end, takes a batch ahead "
            "of one without length, and keeps no generators: a resumed run may read other rows. "
            "Give the Trainer callbacks=[FeedCheckpoint()], from feeder.adapters.lightning",
            stacklevel=3,
        )
