"""Tar shards: the samples that the library of their layout gives."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import epoch_of
from feeder.workers.sources import webdataset
from feeder.workers.sources.arguments import list_files
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
    write_tar(tmp_path / "a.tar", samples[:6])
    write_tar(tmp_path / "b.tar", samples[6:], 6)
    pattern, keys = f"{tmp_path}/{{a..b}}.tar", [*samples[0], "__key__", "__url__"]
    write_tar(tmp_path / "c.tar", samples)
    theirs = list(library.WebDataset(pattern, shardshuffle=False).decode("rgb8"))
    assert len(theirs) == len(samples)
    ours = [
        {name: column[i] for name, column in chunk.items()}
        for chunk in epoch_of(webdataset(pattern, keys, decoders={"bin": bytes_of}), 4)
        for i in range(len(chunk["cls"]))
    ]
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine["png"] == its["png"]).all() and mine["png"].dtype == its["png"].dtype
        assert (mine["cls"], mine["txt"]) == (its["cls"], its["txt"])
        assert mine["npy"].tolist() == its["npy"].tolist()
        assert (mine["meta.json.half"], mine["meta.json.of.n"]) == (its["meta.json"]["half"], 1)
        assert mine["bin"].tobytes() == its["bin"]
        assert (mine["__key__"], mine["__url__"]) == (its["__key__"], its["__url__"])


@given(st.lists(st.sampled_from([
    *("{00..03}", "{3..1}", "{a,b}", "{1,{2,3}}", "{0..10..5}", "{,x}", "x", "-", "{1}", "{}"),
    *("{-1..1}", "{01..3}", "{5..1..2}", "{a,b{1..2}c}", "{-05..5..5}", "{{1..2}}", ","),
    *("{a..c}", "{f..b..2}", "{A..B}"),
]), max_size=4).map("".join))  # fmt: skip
def test_braces_name_what_its_own_name(pattern: str) -> None:
    import braceexpand

    found = list_files(f"no such folder/{pattern}", "a file")
    assert found == list(braceexpand.braceexpand(f"no such folder/{pattern}"))


def picture(seed: int) -> bytes:
    from PIL import Image

    file = BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def bytes_of(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)
