"""Runs the job of Caffe2's checkpoint test in a process of its own, and tells how it ended.

Arguments: "single" or "multi", the folder of checkpoints, the type of database, and the epoch to
resume from or "newest". A JSON line on stdout: the last epoch, the totals, and how many epochs ran.
"""

from __future__ import annotations

import json
import sys

import jobs
from feeder.job import (
    CheckpointManager,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Task,
)


def main(kind: str, folder: str, db_type: str, start: str) -> None:
    """Run it."""
    if kind == "single":
        job, manager = jobs.make_single(), CheckpointManager(folder, "only", db_type)
    else:
        job, manager = jobs.make_three(), MultiNodeCheckpointManager(folder, db_type)
    ran: list[str] = []
    Task(lambda workspace: ran.append("epoch"), node=jobs.NODES[0], group=job.epoch_group)
    with LocalSession() as session:
        resume = None if start == "newest" else int(start)
        last = JobRunner(job, manager, resume).train(session)
        totals = [int(session.fetch(node, ["total"])["total"][0]) for node in job.nodes()]
    json.dump({"last": last, "totals": totals, "ran": len(ran)}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
