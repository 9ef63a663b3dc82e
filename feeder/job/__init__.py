"""Jobs: epochs of work over nodes, with a checkpoint after each.

`Job` says what is to be done, `JobRunner` does it, and a session says where: `LocalSession` in
threads, `LocalHostSession` in processes, `RaySession` (extra `ray`) on a Ray cluster.
"""

from __future__ import annotations

from feeder.job.checkpoints.multinode import (
    CheckpointManager,
    MetadataHandler,
    MultiNodeCheckpointManager,
    StoreMetadata,
)
from feeder.job.definition import Job, epoch_limiter
from feeder.job.groups import Node, Task, TaskGroup
from feeder.job.local import LocalSession
from feeder.job.processes import LocalHostSession
from feeder.job.ray_session import RaySession
from feeder.job.reader import Reader
from feeder.job.runner import JobRunner, UploadTaskGroupBuilder
from feeder.job.session import Session
from feeder.job.workspace import Workspace

__all__ = [
    "CheckpointManager",
    "Job",
    "JobRunner",
    "LocalHostSession",
    "LocalSession",
    "MetadataHandler",
    "MultiNodeCheckpointManager",
    "Node",
    "RaySession",
    "Reader",
    "Session",
    "StoreMetadata",
    "Task",
    "TaskGroup",
    "UploadTaskGroupBuilder",
    "Workspace",
    "epoch_limiter",
]
