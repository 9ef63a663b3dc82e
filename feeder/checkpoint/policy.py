"""When the position of a coordinator's feeds is stored, and where."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from feeder.checkpoint.store import CheckpointStore
from feeder.errors import ConfigError
from feeder.settings import Seconds, check
from feeder.workers.public import public

KEEP = 3
"""Checkpoints that stay where a path is given for a store."""


@public("feeder")
@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Where the position of a coordinator's feeds is stored, and when without being asked.

    It is given to ``Coordinator(checkpoints=...)``. All is written by a thread of its own; nothing
    is paused for it. The end of a stream is stored too, where anything is without being asked.
    """

    store: CheckpointStore | str | os.PathLike[str]
    """The store, or its path or URL: then the newest three stay."""
    every_batches: Annotated[int, Meta(ge=1, description="a whole number from 1 on")] | None = None
    """Number of batches of each feed after which its position is stored: exactly there, so that
    nodes that do the same steps are cut at the same ones. With several devices at the end of that
    round."""
    every_s: Seconds | None = None
    """Seconds after which it is stored, where batches were handed out in between."""
    on_sigterm: bool = False
    """Whether it is stored when the process is told to end, which then takes its course; a second
    signal does not wait for it. The coordinator has to be started in the main thread."""
    on_save_error: Annotated[
        str, Literal["warn", "raise"], Meta(description="'warn' or 'raise'")
    ] = "warn"
    """What a failed save means: "warn" is a line in the log and a count, and feeding goes on;
    "raise" ends the feeds with the error in place of their next batch. Only what input and output
    can do counts; anything else ends them in any case."""

    def __post_init__(self) -> None:
        if not isinstance(self.store, CheckpointStore):
            if not isinstance(self.store, (str, os.PathLike)):
                raise ConfigError(
                    f"checkpoints is {self.store!r}, expected a CheckpointStore, a path or a URL, "
                    "or a Checkpointing"
                )
            # Frozen: made once, here, so that a policy names its store from the start.
            object.__setattr__(self, "store", CheckpointStore(self.store, keep=KEEP))
        given = {name: getattr(self, name) for name in self.__slots__}
        for name, value in check(Checkpointing.__init__, given).items():
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, checkpoints: object) -> Checkpointing:
        """The policy that `checkpoints=` means: a policy itself, or a store, a path or a URL."""
        return checkpoints if isinstance(checkpoints, cls) else cls(checkpoints)  # type: ignore[arg-type]

    @property
    def place(self) -> CheckpointStore:
        """The store."""
        assert isinstance(self.store, CheckpointStore)
        return self.store
