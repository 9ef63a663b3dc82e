"""Checkpoint managers: of jobs with several nodes, and with one."""

from __future__ import annotations

import os
from collections.abc import Sequence

from feeder.job.checkpoints.metadata import MetadataHandler, StoreMetadata
from feeder.job.checkpoints.multinode import MultiNodeCheckpointManager
from feeder.job.checkpoints.places import check_node
from feeder.errors import ConfigError

__all__ = [
    "CheckpointManager",
    "MetadataHandler",
    "MultiNodeCheckpointManager",
    "StoreMetadata",
]


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
