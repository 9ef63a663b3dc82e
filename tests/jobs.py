"""Jobs for tests, made anew in every process that has a node of theirs.

The first is that of Caffe2's checkpoint test: each node reads the rows 0 to 9, three in an epoch,
and adds them to a total that starts at 100.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import feeder
import feeder.job.host
from feeder.job import (
    CheckpointManager,
    Job,
    JobRunner,
    LocalSession,
    MultiNodeCheckpointManager,
    Node,
    Reader,
    Task,
    TaskGroup,
    UploadTaskGroupBuilder,
    epoch_limiter,
)
from feeder.job.checkpoints import parts
from feeder.job.messages import Done, End, Request, decode_reply, encode, error_of
from feeder.job.ray_session import NodeActor
from feeder.job.session import Session
from feeder.state import codec

TOTALS = [103, 115, 136, 145]
"""What each epoch leaves."""
NUM_EPOCHS = len(TOTALS)
NODES = ["trainer_0", "trainer_1", "trainer_2"]
FOLDER = "FEEDER_TEST_FOLDER"
"""The variable that tells nodes in other processes where checkpoints and uploads are."""


def set_total(workspace: Any) -> None:
    workspace["total"] = np.array([100])


def add_rows(workspace: Any) -> None:
    workspace["rows"] = np.array(workspace["reader"].read(3))
    workspace["total"] += workspace["rows"].sum()


def is_read(workspace: Any) -> bool:
    return workspace["reader"].finished


def add_trainer(node: str) -> None:
    """Add a node that adds rows to the current job."""
    with Node(node):
        Job.current().add_object("reader", lambda: Reader(range(10)))
        with Job.current().init_group:
            Task(set_total)
        with Job.current().epoch_group:
            Task(add_rows)
        Job.current().add_stop_condition(is_read)


def make_job(*nodes: str) -> Job:
    with Job() as job:
        for node in nodes:
            add_trainer(node)
    return job


def make_single() -> Job:
    return make_job(NODES[0])


def make_three() -> Job:
    return make_job(*NODES)


class Trained(NamedTuple):
    """What a run of a job has come to."""

    last: int
    """Its last epoch."""
    total: int
    """Of the first node."""
    runner: JobRunner


def train(
    manager: CheckpointManager, job: Job | None = None, start: int | None = None, **settings: Any
) -> Trained:
    """Run the job of three nodes, or another one, in this process."""
    runner = JobRunner(job or make_three(), manager, start, **settings)
    with LocalSession() as session:
        last = runner.train(session)
        node = runner.job.nodes_to_checkpoint()[0]
        return Trained(last, int(session.fetch(node, ["total"])["total"][0]), runner)


# ---- groups


def make_marked() -> Job:
    """A job of three nodes whose groups leave their marks in an array, in their order."""

    def marks(mark: int) -> Callable[[Any], None]:
        def add_mark(workspace: Any) -> None:
            workspace["marks"] = np.append(workspace["marks"], mark)

        return add_mark

    def start(workspace: Any) -> None:
        workspace["marks"] = np.array([0])

    with Job() as job:
        for node in NODES:
            with Node(node):
                with job.init_group:
                    Task(start)
                Task(marks(1))
                Task(marks(2))
                with job.download_group:
                    Task(marks(3))
                with job.exit_group:
                    Task(marks(4))
    epoch_limiter(job, 2)
    return job


class CopyParts(UploadTaskGroupBuilder):
    """Copies the part of each node into a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.built: list[tuple[int, Any]] = []

    def build(self, epoch: int, checkpoint_manager: Any) -> TaskGroup:
        self.built.append((epoch, checkpoint_manager))

        def copy(source: str, target: str) -> Callable[[Any], Any]:
            return lambda workspace: shutil.copyfile(source, target)

        with TaskGroup() as group:
            for node in checkpoint_manager.nodes:
                source = checkpoint_manager.get_ckpt_db_name(node, epoch)
                Task(copy(source, os.path.join(self.folder, node)), node=node, name="copy")
        return group


def make_uploading() -> JobRunner:
    folder = os.environ[FOLDER]
    manager = MultiNodeCheckpointManager(f"{folder}/checkpoints")
    uploads = CopyParts(f"{folder}/uploads")
    return JobRunner(make_three(), manager, upload_task_group_builder=uploads)


# ---- failures


class Odd(Exception):
    """An error that is none of feeder's."""


def make_failing() -> Job:
    """A job of three nodes, one of which fails in its second epoch as often as the files
    ``raise-N`` and ``kill-N`` of its folder say, and in which another one waits for it."""
    job = make_three()

    def fail(workspace: Any) -> None:
        if workspace["total"][0] != TOTALS[1]:
            return
        for file in sorted(Path(os.environ[FOLDER]).glob("*-fail")):
            file.unlink()
            if file.name.startswith("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise Odd(f"at {file.name}")

    with job.epoch_group:
        Task(fail, node=NODES[1], name="fail")
    epoch_limiter(job, NUM_EPOCHS)
    return job


def make_raising() -> Job:
    """A job of three nodes, one of which raises in its second epoch."""
    job = make_three()

    def raise_later(workspace: Any) -> None:
        if workspace["total"] > 110:
            raise Odd("the second epoch is not for me")

    Task(raise_later, node=NODES[1], group=job.epoch_group)
    return job


class Stateless:
    """Cannot be saved: a bug in a user's code."""

    def state_dict(self) -> dict[str, Any]:
        raise Odd("no state to be had")

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def make_unsaveable() -> Job:
    job = make_three()
    job.add_object("stateless", Stateless, node=NODES[1])
    return job


def make_other() -> Job:
    """Another job than the one that a test makes: a task more."""
    job = make_three()
    Task(add_rows, node=NODES[1], group=job.epoch_group)
    return job


def make_nothing() -> None:
    return None


def make_killed(when: str) -> Job:
    """A job whose process of trainer_1 is killed before it saves epoch 3, or once its part is
    there and nobody has been told."""

    def save(request: parts.SavePart, *args: Any) -> parts.PartReceipt:
        mine = request.name == f"{NODES[1]}.3"
        if mine and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        receipt = parts.save_part(request, *args)
        if mine and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return receipt

    feeder.job.host.save_part = save
    return make_three()


def make_killed_before() -> Job:
    return make_killed("before")


def make_killed_after() -> Job:
    return make_killed("after")


# ---- feeds


def fetch(call: feeder.Call) -> list[np.ndarray]:
    """A few rows, each of which says which it is; the calls do not end with the batches."""
    if call.index == 40:
        raise StopIteration
    first = 7 * call.index
    return [np.arange(first, first + 7) + 1000 * call.epoch]


def make_feeds() -> feeder.Coordinator:
    return feeder.init_data_input_workers(
        ["x"], fetch, 4, epochs=None, coordinator=feeder.Coordinator()
    )


def taking(num_batches: int) -> Callable[[Any], None]:
    def take(workspace: Any) -> None:
        for batch in islice(workspace["feeds"]["train"], num_batches):
            rows = batch["x"].astype(np.uint64)
            workspace["digest"] = workspace["digest"] * np.uint64(31) + rows.sum()
            workspace["step"][:] = batch.step

    return take


def start_digest(workspace: Any) -> None:
    workspace["digest"] = np.array(17, np.uint64)
    workspace["step"] = np.array([-1])


def make_fed(counts: dict[str, int]) -> Job:
    """A job each of whose nodes takes so many batches of a feed in each of five epochs."""
    with Job() as job:
        for node, count in counts.items():
            with Node(node):
                job.add_object("feeds", make_feeds)
                with job.init_group:
                    Task(start_digest)
                Task(taking(count))
    epoch_limiter(job, 5)
    return job


def make_even() -> Job:
    return make_fed(dict.fromkeys(NODES, 3))


def make_uneven() -> Job:
    return make_fed({node: 3 + i for i, node in enumerate(NODES)})


def folder_of(path: Path) -> Path:
    """A folder for a test's checkpoints, and one beside it for uploads."""
    (path / "uploads").mkdir()
    return path


# ---- processes


def make_talking() -> Job:
    """A job each of whose nodes says where it works."""
    with Job() as job:
        for node in NODES:
            Task(lambda workspace: print(os.getcwd()), node=node)
    epoch_limiter(job, 1)
    return job


def make_stuck() -> Job:
    """A job one of whose nodes fails, while another waits without an end."""

    def fail(workspace: Any) -> None:
        raise Odd("one of us has to")

    with Job() as job:
        Task(fail, node=NODES[0])
        Task(lambda workspace: signal.pause(), node=NODES[1])
    epoch_limiter(job, 1)
    return job


# ---- nodes that are told by messages, in this process


class Actors(Session):
    """Nodes as the actors of a cluster, which starts one again that ends between two calls."""

    def __init__(self, factory: str = "jobs:make_three") -> None:
        super().__init__()
        self._factory = factory
        self.actors: dict[str, NodeActor] = {}
        self._replies: deque[tuple[str, bytes]] = deque()

    def start_again(self, node: str) -> None:
        """A node ends, and the cluster starts it again, with nothing in its workspace."""
        self.actors[node].answer(encode(End()))
        self.actors[node] = NodeActor(self._factory, node)

    def _start(self, job: Job) -> None:
        # Where one has failed nobody has taken the replies of others.
        self._replies.clear()
        self.actors = {node: NodeActor(self._factory, node) for node in job.nodes()}

    def _send(self, node: str, request: Request) -> None:
        self._replies.append((node, self.actors[node].answer(encode(request))))

    def _receive(self) -> tuple[str, Any, BaseException | None]:
        node, data = self._replies.popleft()
        reply = decode_reply(data)
        if isinstance(reply, Done):
            return node, codec.unpack(reply.answer), None
        return node, None, error_of(reply, node)

    def _stop(self) -> None:
        for node in self.actors:
            self.start_again(node)
