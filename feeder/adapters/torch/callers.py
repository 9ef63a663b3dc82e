"""Frameworks that do with a loader what its state cannot follow: their users are told the cure."""

from __future__ import annotations

import sys
import warnings
import weakref
from typing import Any

from feeder.errors import ConfigError


def note_reader(loader: Any) -> None:
    """Called where a loop begins: `save_state` of Accelerate warns of one that it does not keep."""
    if "accelerate.accelerator" in sys.modules:
        from feeder.adapters import accelerate

        accelerate.install()
        READ.add(loader)


READ: weakref.WeakSet[Any] = weakref.WeakSet()
"""Loaders that were read in a process with Accelerate."""


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
    if caller == "accelerate.checkpointing" and getattr(loader, "_is_copied", False):
        warnings.warn(
            "this loader was given to prepare(), and what came back is read in its place: its state"
            " says nothing. save_state saves what prepare() gives by itself",
            stacklevel=3,
        )


def tell_copier(loader: Any) -> None:
    """Called where a loader is asked how its processes begin: Accelerate does so to make another
    one of it. Raises `ConfigError` where that would lose a state that was loaded."""
    # In between are a comprehension and an adapter.
    frame: Any = sys._getframe(2)
    names = set()
    while frame is not None and frame.f_globals.get("__name__") == "accelerate.data_loader":
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    if not names:
        return
    resumed = loader._resumed
    if "skip_first_batches" in names and resumed is not None and resumed.begun is not None:
        raise ConfigError(
            f"skip_first_batches: the loader goes on behind the {resumed.num} batches that it had "
            "when its state was saved, without reading them: leave skip_first_batches out"
        )
    if "prepare_data_loader" in names and not loader._is_kept:
        warnings.warn(
            "prepare_data_loader makes a loader without a state of this one: use "
            "Accelerator.prepare, whose loader keeps it",
            stacklevel=4,
        )
