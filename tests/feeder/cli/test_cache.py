"""`feeder cache` says what is there, and removes what is asked, and nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from far_child import key_of
from feeder.cli import main
from feeder.workers.sources.far.folder import NEVER, Claim, Folder

INDEX = f"{'0' * 16}.x.feeder-index"


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A cache with three blocks of two objects."""
    folder = Folder(str(tmp_path / "cache"), 1 << 20)
    now = time.time()
    for number, name, due in ((1, "s3://b/x#0", now + 60), (2, "s3://b/x#1", NEVER),
                              (3, "s3://b/y#0", now - 60)):  # fmt: skip
        claim = folder.claim(key_of(number), 5000, name, due)
        assert isinstance(claim, Claim)
        claim.write(bytes(5000))
    folder.close()
    indexes = Path(folder.path, "indexes")
    indexes.mkdir()
    for name in (INDEX, "notes.txt"):
        (indexes / name).write_bytes(b"bytes")
    return folder.path


def test_what_is_there_is_listed(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "list", path]) == 0
    first, second, blocks, indexes = capsys.readouterr().out.splitlines()
    assert first.startswith("s3://b/x: 2 blocks, 16.4 kB, needed in ")
    assert second.startswith("s3://b/y: 1 blocks, 8.19 kB, was needed ")
    assert (blocks, indexes) == ("3 blocks, 24.6 kB", "1 indexes, 5 B")


def test_what_is_needed_last_goes_first(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "prune", path, "--to", "16384"]) == 0
    assert main(["cache", "list", path]) == 0
    told = capsys.readouterr().out
    assert "removed 1 blocks" in told
    assert "s3://b/x: 1 blocks" in told
    assert main(["cache", "prune", path, "--to", "0"]) == 0
    assert capsys.readouterr().out == "removed 2 blocks\n"
    # Indexes go if that is said, and nothing else that lies there.
    assert main(["cache", "prune", path, "--to", "0", "--indexes"]) == 0
    assert capsys.readouterr().out == "removed 0 blocks\nremoved 1 indexes\n"
    assert [one.name for one in Path(path, "indexes").iterdir()] == ["notes.txt"]


def test_what_is_damaged_is_named_and_goes(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path(path, "blocks", key_of(2)[:2], key_of(2))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert main(["cache", "verify", path]) == 1
    assert capsys.readouterr().out == (
        f"s3://b/x#1 was damaged, and is removed\nthe index {INDEX} was damaged, and is removed\n"
        "2 blocks are whole\n"
    )
    assert main(["cache", "verify", path]) == 0


def test_other_folders_are_let_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["cache", "prune", str(tmp_path), "--to", "0"]) == 2
    assert "is no cache of feeder's" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
