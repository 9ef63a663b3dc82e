"""Metadata handlers: they are told which epochs there are, and asked which was the last."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Mapping, Sequence
from typing import Protocol

from feeder.errors import CheckpointError, ConfigError
from feeder.job.checkpoints.epochs import Epochs
from feeder.job.checkpoints.locations import CheckpointLocation, folder_location, stem_location
from feeder.job.checkpoints.manifest import Manifest
from feeder.workers.public import public

logger = logging.getLogger("feeder")


@public("feeder.job")
class MetadataHandler(Protocol):
    """Caffe2's five methods. A manager calls them from the thread that runs the job."""

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None,
        path_type: str | None,
    ) -> None:
        """What the checkpoints are of, and where; before anything else, and again at each run."""

    def write(self, epoch: int) -> None:
        """An epoch is complete on all nodes, durably. Raises `CheckpointError`."""

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """The epoch to resume from, None to begin anew; `user_epoch` is what the user asked for.
        Raises `CheckpointError`."""

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether an epoch can be loaded; with None, whether one can be saved."""

    def report(self, action: str, durations: Mapping[str, int]) -> None:
        """How many nanoseconds the part of each node took, by its database's name. `action` is
        "checkpoint_save", "checkpoint_load" or "checkpoint_partial_load"."""


@public("feeder.job")
class StoreMetadata:
    """The default handler: the manifests beside the parts say which epochs there are. Used by the
    thread that runs the job."""

    def __init__(self) -> None:
        self._locations: list[CheckpointLocation] = []
        self._node_names: list[str] = []

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None,
        path_type: str | None,
    ) -> None:
        """What the checkpoints are of, and where."""
        self._locations = [folder_location(db_prefix, db_type)]
        if path_prefix is not None:
            self._locations.append(stem_location(path_prefix, path_type or db_type))
        self._node_names = list(node_names)

    def write(self, epoch: int) -> None:
        """Nothing: the manifest is written already."""

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        """What the user asked for; else the newest epoch that is complete and whole, first where
        the job saves, then where it was told to read."""
        if user_epoch is not None:
            return user_epoch
        return self.newest()

    def newest(self, *, verify: bool = True, but: Container[int] = ()) -> int | None:
        """The newest epoch, as `Epochs.newest` has it."""
        # All are looked through before one is chosen: an error at the second must not be hidden by
        # what the first holds.
        own, *others = self._known_locations()
        found = [
            self._newest(own, verify=verify, but=but),
            *(Epochs(p, self._node_names).newest(verify=verify, but=but) for p in others),
        ]
        return next((manifest.epoch for manifest in found if manifest is not None), None)

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether an epoch is complete; with None, whether there is a folder to write into."""
        if epoch is None:
            folder = self._known_locations()[0].url
            return "://" in folder or _is_writable(folder)
        locations = self._known_locations()
        return any(Epochs(location, self._node_names).is_complete(epoch) for location in locations)

    def report(self, action: str, durations: Mapping[str, int]) -> None:
        """Log who took longest: that is what all the others waited for."""
        if durations:
            slowest = max(durations, key=lambda name: durations[name])
            logger.info(
                "%s: %d parts, the slowest %r in %.3f s",
                action, len(durations), slowest, durations[slowest] / 1e9,
            )  # fmt: skip

    def _known_locations(self) -> list[CheckpointLocation]:
        if not self._locations:
            raise ConfigError("the metadata handler knows no place yet; call set_params first")
        return self._locations

    def _newest(
        self, location: CheckpointLocation, *, verify: bool, but: Container[int]
    ) -> Manifest | None:
        try:
            return Epochs(location, self._node_names).newest(verify=verify, but=but)
        except CheckpointError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            # A folder that is not there holds nothing; a place that cannot be read may.
            logger.warning("there is nothing to resume from: %s", error)
            return None


def _is_writable(folder: str) -> bool:
    """Whether files can be made in a folder, or the folder itself, where it is not there yet."""
    there = folder if os.path.lexists(folder) else os.path.dirname(folder)
    return os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK)
