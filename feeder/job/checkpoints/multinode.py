"""Checkpoint managers: the parts of all nodes, and the one step that makes them an epoch."""

from __future__ import annotations

import logging
import os
from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from feeder.errors import CheckpointError, ConfigError, ResumeError
from feeder.job.checkpoints.epochs import Epochs
from feeder.job.checkpoints.locations import (
    CheckpointLocation,
    check_node,
    folder_location,
    stem_location,
)
from feeder.job.checkpoints.manifest import Manifest, Part
from feeder.job.checkpoints.metadata import MetadataHandler, StoreMetadata
from feeder.job.checkpoints.partial import find_partial
from feeder.job.checkpoints.parts import (
    LoadPart,
    NoteEntries,
    Operation,
    PartReceipt,
    SavePart,
)  # fmt: skip
from feeder.job.checkpoints.timeline import Timeline
from feeder.workers.public import public

logger = logging.getLogger("feeder")

SAVE, LOAD, PARTIAL_LOAD = "checkpoint_save", "checkpoint_load", "checkpoint_partial_load"
"""The actions that are reported."""


@public("feeder.job")
class MultiNodeCheckpointManager:
    """Saves and loads the workspaces of a job's nodes, an epoch at a time.

    Each node writes its part, ``<db_prefix>/<node>.<epoch>``, all at once; then one manifest is
    written, with the digest of every part, and only from then on the epoch exists. What `save`
    and `load` return is run by a session: ``session.run(manager.save(3))``.

    Args:
        db_prefix: A folder, as a path or ``file://`` URL, or (for "file") a place in an object
            store, which all nodes reach.
        db_type: "file", files of `CheckpointStore`; or "lmdb", an LMDB each (extra `lmdb`).
        metadata_handler: Who knows the last epoch; by default the manifests tell.
        keep: How many epochs stay in `db_prefix`: once one is committed, the oldest beyond them
            are removed, those of a line that the job was put back from first. None keeps all.

    One thread at a time uses it and owns its fields. Methods raise `CheckpointError`, which says
    which file and what to do, and `ConfigError` for settings that are wrong.
    """

    def __init__(
        self,
        db_prefix: str | os.PathLike[str],
        db_type: str = "file",
        metadata_handler: MetadataHandler | None = None,
        *,
        keep: int | None = None,
    ) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep is {keep!r}, expected a whole number from 1 on, or None")
        self._keep = keep
        self._location = folder_location(db_prefix, db_type)
        self._db_prefix = os.fspath(db_prefix)
        self._metadata_handler = metadata_handler or StoreMetadata()
        self._path_prefix: str | None = None
        self._path_type: str | None = None
        self._files: dict[str, str] = {}
        self._known: Timeline | None = None
        self._blobs: dict[str, list[str]] = {}
        # The epoch whose parts are all durable and wait for their manifest.
        self._saved: tuple[int, dict[str, PartReceipt]] | None = None
        self.reports: dict[str, dict[str, PartReceipt]] = {}
        """The receipts of the last save, load and partial load, by action and database name:
        bytes and nanoseconds of every part."""

    # ---- names

    @property
    def nodes(self) -> list[str]:
        """The nodes whose workspaces it saves."""
        return list(self._files)

    def get_ckpt_db_name(self, node_name: str, epoch: int) -> str:
        """Where the part of a node lies: ``<db_prefix>/<node>.<epoch>``."""
        if node_name not in self._files:
            raise ConfigError(f"no node {node_name!r} here, expected one of {self.nodes!r}")
        return os.path.join(
            self._db_prefix, self._location.part_name(self._files[node_name], epoch)
        )

    def _db_names(self, location: CheckpointLocation, epoch: int) -> dict[str, str]:
        """The names of the parts of an epoch in reports, by node."""
        if location is self._location:
            return {node: self.get_ckpt_db_name(node, epoch) for node in self._files}
        return {
            node: f"{location.url}/{location.part_name(f, epoch)}"
            for node, f in self._files.items()
        }

    def blob_list(self) -> dict[str, list[str]]:
        """The names of what is saved, by node; set by `init`, `save` and `load`."""
        return {node: list(names) for node, names in self._blobs.items()}

    def _file_names(self, nodes: Sequence[str]) -> dict[str, str]:
        """The name of each node in files."""
        return {node: check_node(node) for node in nodes}

    # ---- settings

    def set_params(
        self, nodes: Sequence[str], path_prefix: str | None = None, path_type: str | None = None
    ) -> None:
        """Say which nodes there are, and where else to read: `path_prefix` is what the names of
        the parts begin with there, folder and all, with nothing put between. An epoch that is not
        in `db_prefix` is looked for there; saves go into `db_prefix`."""
        self._files, self._known = self._checked_files(nodes), None
        self._path_prefix = path_prefix if path_prefix is not None else self._path_prefix
        self._path_type = path_type if path_type is not None else self._path_type
        self._metadata_handler.set_params(
            db_prefix=self._location.url,
            db_type=self._location.db_type,
            node_names=list(self._files.values()),
            path_prefix=self._path_prefix,
            path_type=self._path_type,
        )

    def cp_accessible(self, epoch: int | None = None) -> bool:
        """Whether an epoch can be loaded; with None, whether one can be saved."""
        return self._metadata_handler.cp_accessible(epoch)

    def get_resume_from_epoch_id(self, user_epoch: int | None = None) -> int | None:
        """The epoch to resume from: `user_epoch`, or the newest that is complete and whole; None
        where there is none yet."""
        return self._metadata_handler.last_epoch(user_epoch=user_epoch)

    def find_newest(self, but: Container[int] = ()) -> int | None:
        """The epoch to go on from, apart from those of `but`; None where there is none yet. Its
        parts are there; the nodes check their bytes when they load them."""
        handler = self._metadata_handler
        # The default one; what another one knows is its own affair.
        if type(handler).last_epoch is StoreMetadata.last_epoch:
            return cast("StoreMetadata", handler).newest(verify=False, but=but)
        epoch = handler.last_epoch()
        return None if epoch is None or epoch in but else epoch

    # ---- run by a session

    def init(
        self,
        nodes: Sequence[str],
        retrieve_from_epoch: int | None = None,
        path_prefix: str | None = None,
        path_type: str | None = None,
    ) -> Operation:
        """Begin a run: find out what there is to save, or that an epoch is there to be loaded. It
        may be called again, with the same nodes."""
        self.set_params(nodes)
        self._saved = None
        self._timeline().begin_run()
        if retrieve_from_epoch is not None:
            self._find(retrieve_from_epoch, path_prefix, path_type)
            return Operation(requests={}, settle=lambda answers: None)
        return Operation(
            requests={node: NoteEntries() for node in self._files}, settle=self._settle_init
        )

    def put_back(self, epoch: int) -> None:
        """Make an epoch of the past the one to go on from, durably: also a run that is killed
        before it saves anything leaves it so, and not what was saved after it. Call it after
        `init`, in this process. An epoch that is read elsewhere (`path_prefix`) is not noted.
        Raises `CheckpointError`, also where another run has taken over."""
        self._timeline().put_back(epoch)

    def save(self, epoch: int) -> Operation:
        """Write the parts of an epoch. It exists once `write_checkpoint_metadata` has run."""
        generation = self._timeline().take_back(epoch)
        self._saved = None
        requests = {
            node: SavePart(
                url=self._location.url,
                db_type=self._location.db_type,
                name=self._location.part_name(file, epoch),
                writer=file,
                meta={"node": file, "epoch": epoch, "generation": generation},
            )
            for node, file in self._files.items()
        }
        return Operation(requests=requests, settle=partial(self._settle_save, epoch))

    def write_checkpoint_metadata(self, epoch: int, finished_by: str = "") -> None:
        """Write the manifest: the one step that makes an epoch exist. `finished_by` says why the
        job is finished after it, where it is."""
        if self._saved is None or self._saved[0] != epoch:
            raise CheckpointError(f"epoch {epoch} is not saved on all nodes; save it first")
        parts = {
            self._files[node]: Part(digest=r.digest, num_bytes=r.num_bytes, steps=r.steps)
            for node, r in self._saved[1].items()
        }
        manifest = self._timeline().commit(epoch, finished_by, parts)
        try:
            manifest.check_steps(self._location.url)
        except ResumeError as error:
            logger.warning("what was saved cannot be resumed from: %s", error)
        try:
            self._metadata_handler.write(epoch=epoch)
        except OSError as error:
            raise CheckpointError(f"epoch {epoch} cannot be noted: {error}") from error
        if self._keep is not None:
            self._timeline().retire(self._keep)

    def load(
        self, epoch: int, path_prefix: str | None = None, path_type: str | None = None
    ) -> Operation:
        """Load an epoch into the workspaces of all nodes. Raises `ResumeError` where the nodes'
        feeds stand at different steps, and `CheckpointError` where a node's part lacks an array or
        object that the epoch before holds."""
        location, manifest = self._find(epoch, path_prefix, path_type)
        manifest.check_steps(location.url)
        before = Epochs(location, list(self._files.values())).before(epoch)
        requests = {
            node: LoadPart(
                url=location.url,
                db_type=location.db_type,
                name=location.part_name(file, epoch),
                digest=manifest.parts[file].digest,
                before=None if before is None else location.part_name(file, before),
            )
            for node, file in self._files.items()
        }
        return Operation(
            requests=requests, settle=partial(self._settle_load, self._db_names(location, epoch))
        )

    # ---- in this process

    def exists(self, epoch: int) -> bool:
        """Whether an epoch is complete on all nodes."""
        return self._timeline().is_complete(epoch)

    def finished_by(self, epoch: int) -> str:
        """Why the job was finished after an epoch; empty where it was not."""
        return self._find(epoch)[1].finished_by

    def load_blobs_locally(
        self, nodes: Sequence[str], blob_names: Sequence[str], epoch: int, session: Any
    ) -> bool:
        """Load entries of an epoch, of all nodes, into ``session.workspace`` of this process.

        Args:
            nodes: Whose parts to look into; each may have been saved by a job of its own.
            blob_names: ``<node>/<entry>``, or the name of an entry that only one of them has.
            epoch: The epoch.
            session: Where to put them, under the names as given.

        Returns:
            False, with nothing loaded, where the epoch is not complete for one of the nodes.
        """
        self._files = self._checked_files(nodes)
        found = find_partial(self._location, self._files, epoch)
        if found is None:
            return False
        entries, receipts = found.load(blob_names)
        session.workspace.update(entries)
        self._report(PARTIAL_LOAD, self._db_names(self._location, epoch), receipts)
        return True

    def report_checkpoint_stats(self, action_name: str) -> None:
        """Tell the metadata handler how long the last `action_name` took on each node."""
        receipts = self.reports.get(action_name, {})
        logger.info("%s: %d bytes in all", action_name, sum(r.num_bytes for r in receipts.values()))
        self._metadata_handler.report(
            action_name, {name: receipt.nanoseconds for name, receipt in receipts.items()}
        )

    # ---- what has become of requests

    def _settle_init(self, answers: Mapping[str, Any]) -> None:
        self._blobs = {node: list(names) for node, names in answers.items()}

    def _settle_save(self, epoch: int, answers: Mapping[str, Any]) -> None:
        receipts = _receipts(answers)
        self._blobs = {node: receipt.entries for node, receipt in receipts.items()}
        self._report(SAVE, self._db_names(self._location, epoch), receipts)
        self._saved = (epoch, receipts)

    def _settle_load(self, db_names: Mapping[str, str], answers: Mapping[str, Any]) -> None:
        receipts = _receipts(answers)
        self._blobs = {node: receipt.entries for node, receipt in receipts.items()}
        self._report(LOAD, db_names, receipts)

    def _report(
        self, action: str, db_names: Mapping[str, str], receipts: Mapping[str, PartReceipt]
    ) -> None:
        self.reports[action] = {db_names[node]: receipt for node, receipt in receipts.items()}

    # ---- where epochs are

    def _checked_files(self, nodes: Sequence[str]) -> dict[str, str]:
        nodes = list(nodes)
        if self._files and list(self._files) != nodes:
            raise ConfigError(
                f"the manager is of nodes {self.nodes!r}, not {nodes!r}; make another one"
            )
        if not nodes or len(set(nodes)) < len(nodes):
            raise ConfigError(f"nodes are {nodes!r}, expected one or more, none of them twice")
        return self._file_names(nodes)

    def _timeline(self) -> Timeline:
        if not self._files:
            raise ConfigError("the manager knows no nodes yet; call set_params or init first")
        if self._known is None:
            others = [self._elsewhere(self._path_prefix, self._path_type)]
            nodes = list(self._files.values())
            self._known = Timeline(self._location, [p for p in others if p is not None], nodes)
        return self._known

    def _elsewhere(
        self, path_prefix: str | None, path_type: str | None
    ) -> CheckpointLocation | None:
        if path_prefix is None:
            return None
        return stem_location(path_prefix, path_type or self._location.db_type)

    def _find(
        self, epoch: int, path_prefix: str | None = None, path_type: str | None = None
    ) -> tuple[CheckpointLocation, Manifest]:
        if location := self._elsewhere(path_prefix, path_type):
            return Timeline(location, [], list(self._files.values())).find(epoch)
        return self._timeline().find(epoch)


def _receipts(answers: Mapping[str, Any]) -> dict[str, PartReceipt]:
    return {node: msgspec.convert(answer, PartReceipt) for node, answer in answers.items()}


# ---- The checkpoint manager of a job with one node


__all__ = [
    "CheckpointManager",
    "MetadataHandler",
    "MultiNodeCheckpointManager",
    "StoreMetadata",
]


@public("feeder.job")
class CheckpointManager(MultiNodeCheckpointManager):
    """Saves and loads the workspace of a job that has one node, under a name of its own:
    ``<db_prefix>/<node_name>.<epoch>``. Else it is a `MultiNodeCheckpointManager`.

    Args:
        db_prefix: A folder, or a place in an object store.
        node_name: What the node is called in files.
        db_type: "file" or "lmdb".
        metadata_handler: Who knows the last epoch; by default the manifests tell.
        keep: How many epochs stay; None keeps all.
    """

    def __init__(
        self,
        db_prefix: str | os.PathLike[str],
        node_name: str,
        db_type: str = "file",
        metadata_handler: MetadataHandler | None = None,
        *,
        keep: int | None = None,
    ) -> None:
        super().__init__(db_prefix, db_type, metadata_handler, keep=keep)
        self._node_name = check_node(node_name)

    def _file_names(self, nodes: Sequence[str]) -> dict[str, str]:
        if len(nodes) != 1:
            raise ConfigError(
                f"CheckpointManager is for one node, got {list(nodes)!r}; use "
                "MultiNodeCheckpointManager"
            )
        return {nodes[0]: self._node_name}
