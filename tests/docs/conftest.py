"""What the pages call `data`, and a folder to do what they say in."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from docs.pages import ROOT
from protos import Datum, TensorProto, TensorProtos
from stores import write_lmdb

pytest.register_assert_rewrite("docs.story")


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small stores of every kind."""
    folder = tmp_path_factory.mktemp("pages") / "data"
    folder.mkdir()
    pixels = bytes(range(48))
    datum = partial(Datum, channels=3, height=4, width=4, data=pixels, encoded=False)
    write_lmdb(folder / "caffe", [datum(label=i).SerializeToString() for i in range(10)])
    image = TensorProto(data_type=3, dims=[4, 4, 3], byte_data=pixels)
    labels = [TensorProto(data_type=2, dims=[1], int32_data=[i]) for i in range(10)]
    protos = [TensorProtos(protos=[image, label]).SerializeToString() for label in labels]
    write_lmdb(folder / "caffe2", protos)
    shutil.copytree(ROOT / "docs/pictures", folder / "pictures")
    np.arange(1000, dtype=np.uint16).tofile(folder / "tokens.bin")
    np.save(folder / "x.npy", np.arange(6))
    return folder


@pytest.fixture
def scratch(data: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder but for `data`, whose path is short enough for sockets: pages are done there,
    and their servers are nobody else's."""
    with tempfile.TemporaryDirectory(prefix="feeder-page-") as name:
        folder = Path(name)
        shutil.copytree(data, folder / "data")
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        for rank in ("LOCAL_RANK", "SLURM_LOCALID", "RANK", "SLURM_PROCID"):
            monkeypatch.delenv(rank, raising=False)
        monkeypatch.setattr("feeder.api._default", None)
        yield folder
