"""Files that an older feeder wrote are read by this one, and mean the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import feeder
import jobs
from conformance.golden import (
    FEED_STEP,
    FILES,
    META,
    entries,
    make_feed,
    train,
)
from feeder.checkpoint.format import CHECKPOINT_VERSION
from feeder.job import MultiNodeCheckpointManager
from feeder.state.token import TOKEN_VERSION
from small import ids

VERSIONS = sorted(path.name for path in FILES.iterdir())


def test_there_are_files_of_every_version() -> None:
    """Of checkpoints, and of the tokens in them."""
    assert ["v1", f"v{CHECKPOINT_VERSION}-token{TOKEN_VERSION}"] == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_arrays_and_bytes_come_back_bit_for_bit(version: str) -> None:
    loaded = feeder.CheckpointStore(FILES / version).get("arrays")
    assert loaded.meta == META
    assert list(loaded.entries) == list(entries())
    for name, wanted in entries().items():
        found = loaded.entries[name]
        if isinstance(wanted, np.ndarray):
            assert isinstance(found, np.ndarray)
            assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            assert found.tobytes() == wanted.tobytes()
        else:
            assert found == wanted


@pytest.mark.parametrize("name", ["store", "feed.snap"])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_feed_goes_on_where_it_stood(version: str, name: str) -> None:
    store = feeder.CheckpointStore(FILES / version)
    assert store.get(store.latest("feed.0") or "").meta == {
        "step": 10, "feeds": {"train[0]": FEED_STEP},
    }  # fmt: skip
    with make_feed() as undisturbed:
        wanted = ids(undisturbed["train"])[4 * FEED_STEP :]
    position = store.load() if name == "store" else FILES / version / name
    with make_feed(resume=position) as resumed:
        assert ids(resumed["train"]) == wanted


@pytest.mark.parametrize("db_type", ["file", pytest.param("lmdb", marks=pytest.mark.needs("lmdb"))])
@pytest.mark.parametrize("version", VERSIONS)
def test_a_job_goes_on_from_its_epochs(version: str, db_type: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FILES / version / db_type, tmp_path / "job")
    manager = MultiNodeCheckpointManager(folder, db_type)
    manager.set_params(jobs.NODES[: 1 if db_type == "lmdb" else 3])
    assert manager.get_resume_from_epoch_id() == 2
    assert train(folder, db_type) == (jobs.NUM_EPOCHS, jobs.TOTALS[-1])
