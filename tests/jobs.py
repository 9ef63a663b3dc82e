"""The job of Caffe2's checkpoint test, and others: made anew in every process that has a node.

Each node reads the rows 0 to 9, three in an epoch, and adds them to a total that starts at 100.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from feeder.job import Job, JobRunner, Node, Reader, Task, TaskGroup, UploadTaskGroupBuilder

TOTALS = [103, 115, 136, 145]
"""What each epoch leaves."""
NUM_EPOCHS = len(TOTALS)
NODES = ["trainer_0", "trainer_1", "trainer_2"]


def set_total(workspace: Any) -> None:
    workspace["total"] = np.array([100])


def add_rows(workspace: Any) -> None:
    workspace["rows"] = np.array(workspace["reader"].read(3))
    workspace["total"] += workspace["rows"].sum()


def make_job(*nodes: str) -> Job:
    with Job() as job:
        for node in nodes:
            with Node(node):
                job.add_object("reader", lambda: Reader(range(10)))
                with Job.current().init_group:
                    Task(set_total)
                Task(add_rows)
                job.add_stop_condition(lambda workspace: workspace["reader"].finished)
    return job


def make_single() -> Job:
    return make_job(NODES[0])


def make_three() -> Job:
    return make_job(*NODES)
