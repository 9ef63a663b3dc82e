"""Tar shards: the samples that the library of their layout gives."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from calls import epoch_of
from feeder.workers.sources import webdataset
from needs import needs_framework

needs_framework("webdataset", "PIL")

from shards import npy, write_tar


# It leaves files for the collector to close.
@pytest.mark.filterwarnings("ignore")
def test_its_samples_in_its_order(tmp_path: Path) -> None:
    import webdataset as library

    samples = [
        {
            "png": picture(i), "cls": b"%d" % i, "txt": f"é {i:02}".encode(),
            "npy": npy(np.arange(i, i + 3)), "meta.json": b'{"half": %d, "of": {"n": 1}}' % (i / 2),
            "bin": bytes([i, 0, 255]),
        }
        for i in range(11)
    ]  # fmt: skip
    paths = [
        write_tar(tmp_path / "a.tar", samples[:6]),
        write_tar(tmp_path / "b.tar", samples[6:], 6),
    ]
    theirs = list(library.WebDataset([*map(str, paths)], shardshuffle=False).decode("rgb8"))
    assert len(theirs) == len(samples)
    ours = [
        {name: column[i] for name, column in chunk.items()}
        for chunk in epoch_of(webdataset(paths, decoders={"bin": bytes_of}), 4)
        for i in range(len(chunk["cls"]))
    ]
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine["png"] == its["png"]).all() and mine["png"].dtype == its["png"].dtype
        assert (mine["cls"], mine["txt"]) == (its["cls"], its["txt"])
        assert mine["npy"].tolist() == its["npy"].tolist()
        assert (mine["meta.json.half"], mine["meta.json.of.n"]) == (its["meta.json"]["half"], 1)
        assert mine["bin"].tobytes() == its["bin"]


def picture(seed: int) -> bytes:
    from PIL import Image

    file = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def bytes_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
