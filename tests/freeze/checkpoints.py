"""Every file of stores of checkpoints, and of jobs', as they are written from fixed positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import feeder
import jobs
from conformance.golden import make_feed, write, write_jobs
from feeder import sources
from feeder.job import JobRunner, LocalSession, MultiNodeCheckpointManager
from freeze.runs import digest


def contents(path: Path) -> Any:
    """A file's size and digest; of an LMDB, whose pages are not ours, those of what it holds.
    Of a lock and of a run's own file, which hold a process's id and a random one, less is told."""
    if path.suffix == ".lock":
        return "a lock"
    if path.parent.name == "runs":
        return [path.stat().st_size, "random"]
    if not is_lmdb(path):
        data = path.read_bytes()
        return [len(data), digest(data)]
    import lmdb

    with (
        lmdb.open(str(path), readonly=True, lock=False, subdir=False) as env,
        env.begin() as transaction,
    ):
        return {
            key.decode("utf-8", "backslashreplace"): [len(value), digest(value)]
            for key, value in transaction.cursor()
        }


def is_lmdb(path: Path) -> bool:
    return path.read_bytes()[16:20] == (0xBEEFC0DE).to_bytes(4, "little")


def write_sequence(folder: Path) -> None:
    """A store to which a feed is saved again and again, so that some are pruned."""
    with make_feed() as coordinator, feeder.CheckpointStore(folder) as store:
        for step in range(5):
            next(coordinator["train"])
            store.save(coordinator.snapshot(), step=step)
        store.retire(keep=2)


def write_fed_job(folder: Path) -> None:
    """A job whose nodes have feeds."""
    with LocalSession() as session:
        JobRunner(jobs.make_even(), MultiNodeCheckpointManager(folder)).train(session)


def write_transcripts(folder: Path) -> None:
    """The transcript of a feed with two devices that goes on from a position, edited."""
    state = None
    for size, edit in ((4, None), (3, "smaller")):
        with feeder.init_data_input_workers(
            ["x", "y"], sources.arrays(np.arange(60.0), np.arange(60)).shuffle(seed=1), size,
            devices=2, resume=state, edit=edit, transcript=folder, coordinator=feeder.Coordinator(),
        ) as coordinator:  # fmt: skip
            for step in range(4):
                next(coordinator["train"].on(step % 2))
            state = coordinator.state_dict()


def make(folder: Path) -> dict[str, Any]:
    for name in ("store", "jobs"):
        (folder / name).mkdir()
    write(folder / "store")
    write_sequence(folder / "sequence")
    write_jobs(folder / "jobs", "file", "lmdb")
    write_fed_job(folder / "fed")
    write_transcripts(folder / "transcripts")
    return {
        str(path.relative_to(folder)): contents(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
