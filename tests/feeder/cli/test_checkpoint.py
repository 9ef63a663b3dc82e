"""The command `feeder checkpoint`, and the checkpoints of `feeder serve`."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import feeder
import jobs
from commands import end, folder, serving
from crashes.positions import snapshot_at
from feeder import cli
from feeder.checkpoint.store import CheckpointStore
from feeder.job import MultiNodeCheckpointManager
from feeder.service.client import machine

__all__ = ["folder"]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CheckpointStore]:
    """A folder with three checkpoints of a feed and one of somebody else."""
    with CheckpointStore(tmp_path / "run") as store:
        for step in range(3):
            store.save(snapshot_at(step), step=10 * step)
        store.put(
            "job/node.7", {"rows": np.zeros((2, 3), np.float32), "text": b"ab"}, meta={"e": 7}
        )
    yield store


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    """Run the command; return its exit status, its lines, and what it said of errors."""
    status = cli.main(["checkpoint", *words])
    told = capsys.readouterr()
    return status, told.out.splitlines(), told.err


def damage(store: CheckpointStore, name: str) -> None:
    path = Path(store.path_of(name))
    path.write_bytes(path.read_bytes()[:-1])


def test_list_says_what_is_there_from_old_to_new(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(store, "feed.00000001")
    status, lines, _ = run(capsys, "list", store.url)
    size = len(bytes(snapshot_at(0)))
    assert status == 0
    assert lines[0] == (f"feed.00000000  1 entry, {size} bytes; step 0, feeds {{'train[0]': 0}}")
    assert lines[1].startswith("feed.00000001  checkpoint ")
    assert " is damaged: it has " in lines[1]
    assert lines[2].endswith("; step 20, feeds {'train[0]': 2}")
    assert lines[3:] == ["job/node.7  2 entries, 26 bytes; e 7"]


def test_of_nothing_nothing_is_listed_or_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "list", str(tmp_path)) == (0, [f"no checkpoints in {tmp_path}"], "")
    assert run(capsys, "prune", str(tmp_path), "--keep=1")[:2] == (0, ["0 removed, 0 left"])


def test_verify_reads_all_and_fails_where_one_is_damaged(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines, _ = run(capsys, "verify", store.url)
    assert (status, lines[-1]) == (0, "4 of 4 checkpoints are whole")
    receipt = store.verify("job/node.7")
    assert lines[3] == (
        f"whole    job/node.7  {receipt.num_bytes} bytes, xxh3 {receipt.digest.hex()}"
    )
    damage(store, "job/node.7")
    Path(store.path_of("feed.00000001")).write_bytes(b"\0" * 100)
    status, lines, _ = run(capsys, "verify", store.url)
    assert (status, lines[-1]) == (1, "2 of 4 checkpoints are whole")
    assert [line.split()[0] for line in lines[:-1]] == ["whole", "DAMAGED", "whole", "DAMAGED"]
    assert run(capsys, "verify", store.url, "feed.00000002")[0] == 0
    assert run(capsys, "verify", store.url, "job/node.7")[0] == 1


@pytest.mark.parametrize("db_type", ["file", pytest.param("lmdb", marks=pytest.mark.needs("lmdb"))])
def test_verify_reads_the_parts_that_a_manifest_means(
    db_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = MultiNodeCheckpointManager(tmp_path, db_type)
    jobs.train(manager)
    status, lines, _ = run(capsys, "verify", str(tmp_path))
    assert (status, lines[-1].split(" of ")[1]) == (0, f"{len(lines) - 1} checkpoints are whole")
    with CheckpointStore(tmp_path) as store:
        store.put("of-somebody", {}, meta={"manifest": "theirs"})
    (tmp_path / "trainer_1.2").unlink()
    shutil.copy(tmp_path / "trainer_0.1", tmp_path / "trainer_0.3")
    for part in tmp_path.glob("trainer_?.4"):
        part.unlink()
    status, lines, _ = run(capsys, "verify", str(tmp_path))
    told = [line for line in lines if line.startswith("DAMAGED")]
    assert status == 1
    assert [line.split()[1][-5:] for line in told] == [".g1.2", ".g1.3", ".g1.4"]
    assert "trainer_1.2' is missing" in told[0]
    assert "trainer_0.3' is another than it says" in told[1]


def test_show_says_what_is_in_one(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines, _ = run(capsys, "show", store.url, "job/node.7")
    assert status == 0
    assert lines[0].startswith(f"{store.url}/job/node.7: ")
    assert lines[1:] == [
        "  e: 7", "  entry 'rows': float32 [2, 3], 24 bytes", "  entry 'text': bytes, 2 bytes",
    ]  # fmt: skip
    status, lines, _ = run(capsys, "show", store.url, "feed.00000002")
    assert lines[1:3] == ["  step: 20", "  feeds: {'train[0]': 2}"]
    assert lines[-1] == (
        "train[0]: next is epoch 0, batch 2 (step 2), 40 rows left over, token of 10 bytes"
    )


def test_show_takes_the_newest_that_is_whole(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    store.remove("job/node.7")
    damage(store, "feed.00000002")
    assert run(capsys, "show", store.url)[1][0].startswith(f"{store.url}/feed.00000001: ")
    for number in range(2):
        damage(store, f"feed.0000000{number}")
    status, lines, told = run(capsys, "show", store.url)
    assert (status, lines, told) == (1, [], f"feeder: no checkpoint in {store.url} is whole\n")


def test_prune_removes_the_oldest_of_one_sequence_alone(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    with CheckpointStore(store.url, writer="other") as other:
        other.save(snapshot_at(1))
        other.save(snapshot_at(2))
    status, lines, _ = run(capsys, "prune", store.url, "--keep", "1")
    assert status == 0
    assert lines == [
        f"removed {store.url}/feed.00000000", f"removed {store.url}/feed.00000001",
        "2 removed, 1 left",
    ]  # fmt: skip
    left = ["feed.00000002", "job/node.7", "other.00000000", "other.00000001"]
    assert store.names() == left
    assert run(capsys, "prune", store.url, "--keep=1", "--writer=other")[1][-1] == (
        "1 removed, 1 left"
    )


def test_prune_never_removes_the_newest_that_is_whole(
    store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(store.path_of("feed.00000002"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    status, lines, _ = run(capsys, "prune", store.url, "--keep", "1")
    assert (status, lines[-1]) == (0, "1 removed, 2 left")
    assert store.find()[0] == "feed.00000001"
    damage(store, "feed.00000001")
    status, lines, told = run(capsys, "prune", store.url, "--keep", "1")
    assert (status, lines) == (1, [])
    assert "can be loaded, 2 files of that name are damaged" in told
    assert len(store.names("feed.")) == 2


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        ("verify {} none", 1, "there is no checkpoint '{}/none'; the newest there are ['job/"),
        ("list {}/no", 1, "there is no folder '{}/no/'; name one that "),
        ("show {}/no", 1, "there is no folder '{}/no/'; name one that "),
        ("prune file://{}/no --keep=1", 1, "there is no folder '{}/no/'; name one that "),
        ("list {}/job/node.7", 1, "Not a directory; put a folder there, not a file"),
        ("list http://x", 2, "'http://x' cannot be the place of checkpoints"),
        ("prune {} --keep=1 --writer=a/b", 2, "writer is 'a/b', expected"),
        ("verify {} ../other", 1, "'../other' cannot be the name of a checkpoint"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(
    words: str, status: int, told: str, store: CheckpointStore, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(3):
        store.remove(f"feed.0000000{number}")
    ended, lines, said = run(capsys, *words.format(store.url).split())
    assert (ended, lines) == (status, [])
    assert said.startswith("feeder: ")
    assert told.format(store.url) in said
    assert not os.path.exists(f"{store.url}/no")


# ---- served


@pytest.mark.process
def test_a_server_goes_on_where_its_consumers_were(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_FAREWELL_S", 10.0)
    steps: list[int] = []
    for num in (15, 15, 15):
        words = ["--checkpoint-dir", "run", "--keep=2", "--resume", "latest"]
        with serving("make", *words) as (process, _):
            with feeder.connect() as consumer:
                steps += [batch.step for _, batch in zip(range(num), consumer, strict=False)]
            assert end(process, signal.SIGTERM) == ""
    assert steps == list(range(40))
    with CheckpointStore(folder / "run") as store:
        assert store.names() == ["feed.00000001", "feed.00000002"]
    with serving("make", "--resume", "run/feed.00000001"), feeder.connect() as consumer:
        assert next(consumer).step == 30


@pytest.mark.parametrize("db_type", ["file", pytest.param("lmdb", marks=pytest.mark.needs("lmdb"))])
def test_prune_removes_the_oldest_epochs_but_for_the_newest_that_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], db_type: str
) -> None:
    manager = MultiNodeCheckpointManager(tmp_path, db_type)
    jobs.train(manager)
    told = f"of nodes {jobs.NODES!r}"
    place = str(tmp_path)
    status, lines, _ = run(capsys, "prune", place, "--keep=3", "--epochs")
    assert (status, lines) == (
        0, [f"removed epoch 0 {told}", f"removed epoch 1 {told}", f"2 removed, 3 left {told}"],
    )  # fmt: skip
    (tmp_path / "trainer_1.4").unlink()
    _, lines, _ = run(capsys, "prune", place, "--keep=1", "--epochs")
    assert lines == [f"removed epoch 2 {told}", f"1 removed, 2 left {told}"]
    assert (manager.get_resume_from_epoch_id(), manager.exists(3)) == (3, True)
    assert sorted(path.name for path in tmp_path.glob("trainer_*")) == [
        "trainer_0.3", "trainer_0.4", "trainer_1.3", "trainer_2.3", "trainer_2.4",
    ]  # fmt: skip
