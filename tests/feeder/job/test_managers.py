"""What managers find, refuse and leave alone; each error says which file and what to do."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
import jobs
from crashes.failing import FailingFs
from feeder.checkpoint.store import CheckpointStore
from feeder.durable import Fs
from feeder.job import (
    CheckpointManager,
    Job,
    JobRunner,
    LocalSession,
    MetadataHandler,
    MultiNodeCheckpointManager,
)
from feeder.job.checkpoints.manifest import Manifest, Part
from jobs import NODES, NUM_EPOCHS, TOTALS
from watching import says

DB_TYPES = ["file", pytest.param("lmdb", marks=pytest.mark.needs("lmdb"))]


def manager_in(folder: Path, db_type: str = "file", **settings: Any) -> MultiNodeCheckpointManager:
    return MultiNodeCheckpointManager(folder, db_type, **settings)


def train(
    folder: Path, start: int | None = None, job: Job | None = None, db_type: str = "file",
    **settings: Any,
) -> tuple[int, int]:  # fmt: skip
    """Run the job of three nodes; returns its last epoch and a node's total."""
    return jobs.train(manager_in(folder, db_type), job, start, **settings)[:2]


def newest(folder: Path, db_type: str = "file") -> int | None:
    """Which epoch the job would go on from."""
    manager = manager_in(folder, db_type)
    manager.set_params(NODES)
    return manager.get_resume_from_epoch_id()


@pytest.fixture(params=DB_TYPES)
def db_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a job that is done, by the type of database; made when they are asked for."""
    return {}


@pytest.fixture
def trained(
    tmp_path: Path, db_type: str, trained_once: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:  # fmt: skip
    """A folder with a job that is done."""
    if db_type not in trained_once:
        made = tmp_path_factory.mktemp(f"trained-{db_type}")
        assert train(made, db_type=db_type) == (NUM_EPOCHS, TOTALS[-1])
        trained_once[db_type] = made
    shutil.copytree(trained_once[db_type], tmp_path, dirs_exist_ok=True)
    return tmp_path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---- the newest


def test_the_newest_that_is_whole_is_found_and_damaged_ones_are_named(
    trained: Path, db_type: str, caplog: pytest.LogCaptureFixture
) -> None:
    flip(trained / "trainer_1.4", 60)
    (trained / "trainer_2.3").unlink()
    flip(trained / "manifests/trainer_0.g1.2", 50)
    assert newest(trained, db_type) == 1
    for file in ("trainer_1.4", "trainer_2.3", "trainer_0.g1.2"):
        assert str(trained) in caplog.text and file in caplog.text
    assert train(trained, db_type=db_type) == (NUM_EPOCHS, TOTALS[-1])


@pytest.mark.parametrize("db_type", ["file"], indirect=True)
def test_where_none_is_whole_nothing_is_begun_anew(trained: Path, db_type: str) -> None:
    for epoch in range(NUM_EPOCHS + 1):
        flip(trained / f"trainer_0.{epoch}", 60)
    told = (
        f"none of the 5 epochs of nodes {NODES!r} in {str(trained)!r} is whole; move them away to "
    )
    with says(feeder.CheckpointError, told + "begin anew, or name another place"):
        train(trained, db_type=db_type)


def test_a_limit_that_was_raised_lets_a_finished_job_go_on(tmp_path: Path) -> None:
    for limit, ends in ((1, (1, TOTALS[0])), (1, (1, TOTALS[0])), (3, (3, TOTALS[2]))):
        job = jobs.make_three()
        feeder.job.epoch_limiter(job, limit)
        assert train(tmp_path, job=job) == ends
    manager = manager_in(tmp_path)
    manager.set_params(NODES)
    assert [manager.finished_by(epoch) for epoch in range(4)] == ["", "limit", "", "limit"]
    assert train(tmp_path) == (NUM_EPOCHS, TOTALS[-1])
    assert manager.finished_by(4) == "condition"


def test_a_finished_job_runs_no_further_epoch_and_finds_that_out_by_itself(
    trained: Path, db_type: str
) -> None:
    job, ran = jobs.make_three(), []
    feeder.job.Task(ran.append, node=NODES[0], group=job.epoch_group)
    assert train(trained, job=job, db_type=db_type) == (NUM_EPOCHS, TOTALS[-1])
    assert ran == []


# ---- a job that was put back to an earlier epoch stays so, whenever it is killed


class Killed(Exception):
    """The process ends here."""


@pytest.mark.parametrize(
    ("start", "db_type"),
    [
        *((start, "file") for start in range(NUM_EPOCHS + 1)),
        pytest.param(2, "lmdb", marks=pytest.mark.needs("lmdb")),
    ],
)
def test_that_a_job_was_put_back_is_not_forgotten_before_the_first_save(
    tmp_path: Path, start: int, db_type: str
) -> None:
    def kill(workspace: Any) -> None:
        raise Killed

    assert train(tmp_path, db_type=db_type) == (NUM_EPOCHS, TOTALS[-1])
    before = sorted(os.listdir(tmp_path / "manifests"))
    if start < NUM_EPOCHS:
        job = jobs.make_three()
        feeder.job.Task(kill, node=NODES[1], group=job.epoch_group)
        with pytest.raises(Killed):
            train(tmp_path, start, job, db_type=db_type)
    assert newest(tmp_path, db_type) == start
    if start < NUM_EPOCHS:
        assert sorted(os.listdir(tmp_path / "manifests")) == [*before, f"trainer_0.g2.{start}"]
    last, _, runner = jobs.train(manager_in(tmp_path, db_type))
    assert (last, runner.resume_from_epoch) == (NUM_EPOCHS, start)


def test_that_a_job_was_put_back_is_noted_before_anything_is_loaded(tmp_path: Path) -> None:
    class Dying(MultiNodeCheckpointManager):
        def load(self, *arguments: Any) -> Any:
            raise Killed

    train(tmp_path)
    with pytest.raises(Killed):
        jobs.train(Dying(tmp_path), start=1)
    assert newest(tmp_path) == 1


def test_what_cannot_be_noted_is_told_or_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path)
    failing = FailingFs("fsync", 1, errno.ENOSPC)
    monkeypatch.setattr("feeder.checkpoint.store.Fs", lambda: failing)
    with pytest.raises(feeder.CheckpointError, match="free some space"):
        train(tmp_path, 1, on_save_error="raise")
    failing = FailingFs("fsync", 1, errno.ENOSPC)
    last, _, runner = jobs.train(manager_in(tmp_path), start=1)
    assert (last, runner.failed_saves) == (NUM_EPOCHS, [])
    assert "it cannot be noted that the job was put back to epoch 1; until its next" in caplog.text
    monkeypatch.setattr("feeder.checkpoint.store.Fs", Fs)
    assert newest(tmp_path) == NUM_EPOCHS


# ---- bad input


def initiated(nodes: Sequence[str]) -> MultiNodeCheckpointManager:
    manager = manager_in(Path("unused"))
    manager.init(nodes)
    manager.init(nodes)
    return manager


NO_NODES = ("", "..", "a/b", "trainer:0", "x" * 41, ".hidden", 3)
REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *(
        (
            lambda prefix=prefix: MultiNodeCheckpointManager(prefix), feeder.CheckpointError,
            "db_prefix is .*, expected a path or a URL",
        ) for prefix in ("", "a/../b", "..", "a\0b", 7, None)
    ),
    *(
        (
            lambda prefix=prefix: manager_in(Path("unused")).set_params(NODES, path_prefix=prefix),
            feeder.CheckpointError, "path_prefix is ",
        ) for prefix in ("", "../b/", "a\0b")
    ),
    *(
        (
            lambda node=node: initiated([node]), feeder.ConfigError,
            "node is called .*, expected 1 to 40 of",
        ) for node in NO_NODES
    ),
    (lambda: CheckpointManager("unused", "a/b"), feeder.ConfigError, "node is called"),
    (lambda: manager_in(Path("unused"), "minidb"), feeder.ConfigError,
     r"db_type is 'minidb', expected one of \('file'"),
    (lambda: initiated(["a", "a"]), feeder.ConfigError, "one or more, none of them twice"),
    (lambda: initiated([]), feeder.ConfigError, "expected one or more"),
    (lambda: manager_in(Path("unused")).save(1), feeder.ConfigError, "no nodes yet; call set_par"),
    (lambda: CheckpointManager("unused", "one").init(["a", "b"]), feeder.ConfigError,
     r"is for one node, got \['a', 'b'\]"),
    (lambda: initiated(["a", "b"]).init(["a"]), feeder.ConfigError,
     r"is of nodes \['a', 'b'\], not \['a'\]"),
    (lambda: initiated(["a"]).get_ckpt_db_name("c", 1), feeder.ConfigError, "no node 'c' here, e"),
    (lambda: initiated(["a"]).write_checkpoint_metadata(3), feeder.CheckpointError,
     "epoch 3 is not saved on all nodes"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "error", "told"), REFUSED)
def test_what_is_wrong_is_refused(ask: Callable[[], Any], error: Any, told: str) -> None:
    with pytest.raises(error, match=told):
        ask()


def test_an_lmdb_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(feeder.ConfigError, match=r"'s3://bucket/prefix' cannot hold LMDBs"):
        MultiNodeCheckpointManager("s3://bucket/prefix", "lmdb")
    with pytest.raises(feeder.ConfigError, match=r"'s3://bucket' cannot hold LMDBs"):
        manager_in(tmp_path).set_params(NODES, path_prefix="s3://bucket/run1-", path_type="lmdb")


@pytest.mark.parametrize("db_type", ["file"], indirect=True)
def test_an_epoch_that_is_not_there_is_named_with_those_that_are(
    trained: Path, db_type: str
) -> None:
    told = f"epoch 7 of nodes {NODES!r} is not complete in {str(trained)!r}, expected one of "
    with says(feeder.CheckpointError, told + "[0, 1, 2, 3, 4]"):
        train(trained, 7, db_type=db_type)


@pytest.mark.parametrize("nodes", [NODES[:2], [*NODES, "trainer_3"], ["trainer_2", "trainer_9"]])
@pytest.mark.parametrize("start", [None, 2])
def test_other_nodes_than_were_saved_are_refused(
    tmp_path: Path, nodes: list[str], start: int | None
) -> None:
    train(tmp_path)
    with pytest.raises(feeder.CheckpointError) as caught:
        train(tmp_path, start, jobs.make_job(*nodes))
    text = str(caught.value)
    assert f"manifests/trainer_0.g1.4' is of nodes {NODES!r}, this job has" in text
    assert text.endswith("run it with the same nodes, or keep its checkpoints in another place")


@pytest.mark.parametrize("db_type", ["file"], indirect=True)
def test_a_manifest_whose_part_is_missing_names_it(trained: Path, db_type: str) -> None:
    (trained / "trainer_1.2").unlink()
    told = (
        f"epoch 2 of {str(trained / 'manifests/trainer_0.g1.2')!r} is not whole: its part "
        f"{str(trained / 'trainer_1.2')!r} is missing; put that file back, or resume from another "
        "epoch"
    )
    with says(feeder.CheckpointError, told):
        train(trained, 2, db_type=db_type)


def test_a_part_that_is_exchanged_at_the_last_moment_is_not_loaded(
    trained: Path, db_type: str
) -> None:
    with LocalSession() as session:
        session.open(jobs.make_three())
        manager = manager_in(trained, db_type)
        manager.set_params(NODES)
        loading = manager.load(2)
        (trained / "trainer_1.3").rename(trained / "trainer_1.2")
        with pytest.raises(feeder.CheckpointError, match="is another than its manifest says"):
            session.run(loading)


def test_a_newer_manifest_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    part = Part(digest=b"0" * 16, num_bytes=1, steps={})
    made = Manifest(generation=2, epoch=5, finished_by="", parts=dict.fromkeys(NODES, part))
    with CheckpointStore(tmp_path) as store:
        store.put("manifests/trainer_0.g2.5", {}, meta=made.meta() | {"manifest": 2})
    for start in (None, 5):
        with pytest.raises(feeder.CheckpointError, match=r"g2.5' has version 2, expected 1; upd"):
            train(tmp_path, start)


@pytest.mark.parametrize(
    ("meta", "what"),
    [
        ({}, "generation"),
        ({"parts": {NODES[0]: {"digest": 3}}}, "Expected"),
        ({"parts": 7}, "Expected"),
        ({"parts": {}}, "length >= 1"),
        ({"generation": "1"}, "Expected"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path: Path, meta: dict[str, Any], what: str) -> None:
    whole = {"manifest": 1, "generation": 1, "epoch": 2, "finished_by": "", "parts": {}}
    with CheckpointStore(tmp_path) as store:
        store.put("manifests/trainer_0.g1.2", {}, meta=whole | meta if meta else {})
    with pytest.raises(feeder.CheckpointError, match="is no manifest of an epoch") as caught:
        train(tmp_path)
    assert what in str(caught.value) and "move it away" in str(caught.value)


def test_a_run_that_was_overtaken_saves_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Overtaken(MultiNodeCheckpointManager):
        def save(self, epoch: int) -> Any:
            if epoch == 2:
                assert train(tmp_path) == (NUM_EPOCHS, TOTALS[-1])
            return super().save(epoch)

    last, _, runner = jobs.train(Overtaken(tmp_path))
    assert (last, runner.failed_saves) == (NUM_EPOCHS, [2, 3, 4])
    assert "another run of nodes" in caplog.text and "end one of the two" in caplog.text
    assert train(tmp_path) == (NUM_EPOCHS, TOTALS[-1])


# ---- entries of several nodes


def test_of_two_runs_that_began_at_once_one_saves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Together(MultiNodeCheckpointManager):
        def load(self, *arguments: Any) -> Any:
            assert train(tmp_path, start=1) == (NUM_EPOCHS, TOTALS[-1])
            return super().load(*arguments)

    assert train(tmp_path) == (NUM_EPOCHS, TOTALS[-1])
    last, _, runner = jobs.train(Together(tmp_path), start=1)
    assert (last, runner.failed_saves) == (NUM_EPOCHS, [2, 3, 4])
    assert "another run of nodes" in caplog.text


def test_an_entry_that_is_not_there_is_named_with_those_that_are(
    trained: Path, db_type: str
) -> None:
    runner = JobRunner(jobs.make_three(), manager_in(trained, db_type))
    session = LocalSession()
    with pytest.raises(feeder.CheckpointError) as caught:
        runner.load_blobs_from_checkpoints(["trainer_0/total", "trainer_1/sum"], 2, session)
    there = [f"{node}/{entry}" for node in NODES for entry in ("state/reader", "total")]
    assert str(caught.value) == f"there is no entry 'trainer_1/sum', expected one of {there!r}"
    with pytest.raises(feeder.ConfigError, match=r"entry 'total' is in the parts of .* as in 't"):
        runner.load_blobs_from_checkpoints(["trainer_0/total", "total"], 2, session)
    assert session.workspace == {}


def test_an_entry_that_one_node_has_needs_no_node(tmp_path: Path) -> None:
    job = jobs.make_three()
    feeder.job.Task(
        lambda workspace: workspace.__setitem__("one", np.arange(3)),
        node=NODES[1], group=job.init_group,
    )  # fmt: skip
    train(tmp_path, job=job)
    session = LocalSession()
    runner = JobRunner(job, manager_in(tmp_path))
    assert runner.load_blobs_from_checkpoints(["one", "trainer_2/total"], 1, session)
    assert session.workspace["one"].tolist() == [0, 1, 2]
    assert session.workspace["trainer_2/total"].tolist() == [TOTALS[0]]


def test_names_and_entries_of_nodes_that_were_saved_by_jobs_of_their_own(
    tmp_path: Path, db_type: str
) -> None:
    manager = manager_in(tmp_path, db_type)
    manager.init(jobs.make_three().nodes_to_checkpoint())
    for node in NODES:
        assert manager.get_ckpt_db_name(node, 5) == f"{tmp_path}/{node}.5"
        own = manager_in(tmp_path, db_type)
        assert jobs.train(own, jobs.make_job(node)).last == NUM_EPOCHS
        # What the init group and add_object have made; not the rows that epochs add.
        assert own.blob_list() == {node: ["total", "state/reader"]}
    runner, session = JobRunner(jobs.make_three(), manager_in(tmp_path, db_type)), LocalSession()
    names = ["trainer_1/total", "trainer_2/total"]
    for epoch, expected in enumerate(TOTALS, start=1):
        assert runner.load_blobs_from_checkpoints(names, epoch, session) is True
        assert session.workspace == {name: np.array([expected]) for name in names}
        session.workspace.clear()
    assert runner.load_blobs_from_checkpoints(names, 5, session) is False
    assert session.workspace == {}


@pytest.mark.parametrize(
    "lose",
    [
        lambda folder: (folder / "trainer_2.2").unlink(),
        lambda folder: (folder / "manifests/trainer_0.g1.2").unlink(),
    ],
    ids=["part", "manifest"],
)
def test_nothing_is_loaded_where_one_part_is_missing(
    trained: Path, db_type: str, lose: Callable[[Path], None]
) -> None:
    lose(trained)
    session = LocalSession()
    runner = JobRunner(jobs.make_three(), manager_in(trained, db_type))
    assert runner.load_blobs_from_checkpoints(["trainer_0/total"], 2, session) is False
    assert session.workspace == {}


def test_entries_cannot_be_loaded_without_a_manager() -> None:
    with pytest.raises(feeder.ConfigError, match="has no checkpoint manager"):
        JobRunner(jobs.make_three()).load_blobs_from_checkpoints(["total"], 1, LocalSession())


# ---- elsewhere


def test_a_job_reads_elsewhere_and_saves_in_its_own_place(trained: Path, db_type: str) -> None:
    new = trained.parent / "new"
    manager = MultiNodeCheckpointManager(new, "file")
    manager.set_params(NODES, path_prefix=f"{trained}/", path_type=db_type)
    assert manager.get_resume_from_epoch_id() == NUM_EPOCHS
    for start, saved in ((2, [3, 4]), (None, [3, 4])):
        assert jobs.train(manager, start=start)[:2] == (NUM_EPOCHS, TOTALS[-1])
        assert [epoch for epoch in range(6) if (new / f"trainer_0.{epoch}").exists()] == saved
    assert all(map(manager.exists, range(5)))


# ---- who knows the last epoch


class Ledger:
    """A handler of a user's own: the five methods, and nothing of feeder's."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.epochs: list[int] = []
        self.accessible = True

    def set_params(
        self,
        db_prefix: str,
        db_type: str,
        node_names: Sequence[str],
        path_prefix: str | None,
        path_type: str | None,
    ) -> None:
        self.calls.append((db_prefix, db_type, list(node_names), path_prefix, path_type))

    def write(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def last_epoch(self, user_epoch: int | None = None) -> int | None:
        return self.epochs[-1] if self.epochs else user_epoch

    def cp_accessible(self, epoch: int | None = None) -> bool:
        return self.accessible

    def report(self, action: str, durations: Mapping[str, int]) -> None:
        self.calls.append((action, sorted(durations)))


def test_a_handler_of_the_users_own_is_told_and_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger: MetadataHandler = Ledger()
    manager = CheckpointManager(tmp_path, "only", "file", ledger)
    assert jobs.train(manager, jobs.make_single()).last == NUM_EPOCHS
    assert ledger.epochs == [0, 1, 2, 3, 4]
    assert ledger.calls[0] == (str(tmp_path), "file", ["only"], None, None)
    assert ledger.calls[-1] == ("checkpoint_save", [str(tmp_path / "only.4")])
    ledger.epochs, ledger.accessible = [2], False
    with caplog.at_level(logging.WARNING):
        last, _, runner = jobs.train(manager, jobs.make_single())
    assert (last, runner.resume_from_epoch, runner.failed_saves) == (NUM_EPOCHS, 2, [3, 4])
    assert caplog.text.count("cannot be written to") == 2
    assert caplog.text.count(f"{str(tmp_path / 'only.4')!r}") == 1


def test_a_handler_that_cannot_write_is_a_failed_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(Ledger):
        def write(self, epoch: int) -> None:
            raise (OSError(5, "gone") if epoch < 2 else ZeroDivisionError)

    runner = JobRunner(jobs.make_single(), CheckpointManager(tmp_path, "only", "file", Failing()))
    with LocalSession() as session, pytest.raises(ZeroDivisionError):
        runner.train(session)
    assert runner.failed_saves == [0, 1]
    assert "epoch 1 cannot be noted: [Errno 5] gone" in caplog.text


def test_a_stray_manifest_of_another_job_does_not_stop_this_one(tmp_path: Path) -> None:
    """It may be of a newer version, or senseless: its own job names it."""
    train(tmp_path)
    with feeder.CheckpointStore(tmp_path, writer="another") as store:
        store.put("manifests/other.g1.4", {}, meta={"manifest": 99, "what": "a newer version"})
        store.put("manifests/third.g1.2", {}, meta={"manifest": 1, "generation": "senseless"})
    assert newest(tmp_path) == NUM_EPOCHS


def test_what_is_only_verified_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    with feeder.CheckpointStore(tmp_path) as store:
        store.put("large", {"x": np.zeros(64 * 2**20, np.uint8)})
    tracemalloc.start()
    try:
        store.verify("large")
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()
