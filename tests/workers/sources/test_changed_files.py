"""Files that are others by now are named at a resume: cut, written anew, more or fewer of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

import feeder
from calls import call
from feeder.state.fingerprint import fingerprint_digest
from feeder.workers import sources
from feeder.workers.sources.stores.offsets import told_of_files
from needs import needs
from shards import example, ints, numbered, write_table, write_tar, write_tfrecord
from small import make as make_feed
from stores import encoded, picture

needs("pyarrow")

import pyarrow as pa  # noqa: E402


def label(record: Any) -> int:
    return int(record["n"].item() if hasattr(record["n"], "item") else record["n"])


def class_of(record: Any) -> int:
    return int(record["cls"])


def tar(path: Path, first: int) -> None:
    write_tar(path, numbered(first, first + 9))


def tfrecords(path: Path, first: int) -> None:
    write_tfrecord(path, [example({"n": ints(i)}) for i in range(first, first + 9)])


def lines(path: Path, first: int) -> None:
    path.write_text("".join(f'{{"n": {i}}}\n' for i in range(first, first + 9)))


def table(path: Path, first: int) -> None:
    write_table(path, pa.table({"n": range(first, first + 9)}), 4)


KINDS: dict[str, tuple[Callable[[Path, int], None], Callable[[Any], Any]]] = {
    "tar": (tar, lambda paths: sources.webdataset(paths).map(class_of)),
    "tfrecord": (tfrecords, lambda paths: sources.tfrecord(paths).map(label)),
    "jsonl": (lines, lambda paths: sources.jsonl(paths).map(label)),
    "parquet": (table, lambda paths: sources.parquet(paths).map(label)),
    "arrow": (table, lambda paths: sources.arrow(paths).map(label)),
}


def cut(path: Path, write: Any) -> None:
    os.truncate(path, path.stat().st_size * 6 // 10)


def written_anew(path: Path, write: Any) -> None:
    # As large, and as many records; a little later, as the clock of files is coarse.
    write(path, 501 if path.suffix != ".jsonl" else 5)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))


def added(path: Path, write: Any) -> None:
    write(path.with_name(f"bb{path.suffix}"), 900)


def removed(path: Path, write: Any) -> None:
    path.unlink()


CHANGES = {
    cut: r"[ /]b\.", written_anew: r"[ /]b\.", added: r"file bb\.\w+: None then",
    removed: r"file b\.\w+: '.*' then, None now",
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_has_changed_is_named_at_a_resume(
    kind: str, change: Callable[[Path, Any], None], tmp_path: Path
) -> None:
    write, read = KINDS[kind]
    for name, first in (("a", 100), ("b", 200), ("c", 300)):
        write(tmp_path / f"{name}.{kind}", first)

    def make(resume: Any) -> feeder.Coordinator:
        source = read(tmp_path / f"*.{kind}")
        return make_feed(source.shuffle(1), ["n"], resume=resume)

    with make(None) as made:
        next(made["train"])
        snapshot = made.snapshot()
    with make(snapshot) as made:
        assert next(made["train"]).step == 1
    change(tmp_path / f"b.{kind}", write)
    # What is no such file any more is refused when the source is made.
    with pytest.raises((feeder.ResumeError, feeder.ConfigError), match=CHANGES[change]) as told:
        make(snapshot)
    assert not any(f"{other}.{kind}" in str(told.value) for other in "ac")


def token_file(path: Path, first: int) -> None:
    np.arange(first, first + 36, dtype="uint16").tofile(path)


ORDERED = {**KINDS, "bin": (token_file, lambda paths: sources.tokens(paths, 4, "uint16"))}


@pytest.mark.parametrize("kind", ORDERED)
def test_files_in_another_order_are_other_records(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write, read = ORDERED[kind]
    paths = [tmp_path / f"{name}.{kind}" for name in "abc"]
    for path in paths:
        write(path, 100)

    def make(files: Any, resume: Any = None) -> feeder.Coordinator:
        return make_feed(read(files), ["n"], resume=resume)

    with make(paths) as made:
        token = next(made["train"]).cut.token()
        snapshot = made.snapshot()
    for position in (token, snapshot):
        with pytest.raises(
            feeder.ResumeError, match=r"other settings|file_order: '3 files, .* then"
        ):
            make(paths[::-1], position)
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in paths:
        shutil.copy(path, moved)
    with make([moved / path.name for path in paths], token) as made:
        assert next(made["train"]).step == 1
    # A position of before the field was there is good with any order, which is said.
    (state,) = snapshot.states
    fields = {name: v for name, v in state.fingerprint.items() if not name.endswith("file_order")}
    digest = fingerprint_digest(fields)
    older = token.replace(fingerprint_digest(state.fingerprint), digest)
    older = older[:3] + xxhash.xxh3_64_digest(older[11:]) + older[11:]
    with caplog.at_level("INFO", "feeder"):
        was = feeder.Snapshot((state._replace(fingerprint=fields, token=older),))
        for position in (older, was):
            with make(paths[::-1], position) as made:
                assert next(made["train"]).step == 1
    assert caplog.text.count("does not say which files there were in which order") == 2


def test_of_very_many_files_those_nearby_are_named() -> None:
    paths = [f"/data/{i:04}.tar" for i in range(1000)]
    told = ["9 records"] * 1000
    first = told_of_files(paths, told)
    assert len(first) == 4 and [*first][:2] == [
        "files 1 to 256, from 0000.tar", "files 257 to 512, from 0256.tar",
    ]  # fmt: skip
    changed = told_of_files(paths, [*told[:500], "8 records", *told[501:]])
    assert [name for name in first if first[name] != changed[name]] == [
        "files 257 to 512, from 0256.tar"
    ]
    more = told_of_files([*paths, "/data/1000.tar"], [*told, "9 records"])
    assert [name for name in more if more[name] != first.get(name)] == [
        "files 769 to 1024, from 0768.tar"
    ]
    assert told_of_files([f"/moved/{path[6:]}" for path in paths], told) == first
    # Files of one name in several folders.
    assert [*told_of_files(["a/x.tar", "b/x.tar"], ["1", "2"])] == [
        "files 1 to 1, from x.tar", "files 2 to 2, from x.tar",
    ]  # fmt: skip


def test_a_broken_picture_is_named_by_its_file_and_byte_or_left_out(tmp_path: Path) -> None:
    needs("PIL")
    samples = []
    for i in range(5):
        jpeg = encoded(picture(16, 16, i))
        png = encoded(picture(16, 16, i), "PNG")
        samples.append({"cls": b"%d" % i, "jpg": jpeg, "png": png})
    samples[1]["jpg"] = b"no picture"
    samples[2]["jpg"] = b"\xff\xd8\xff" + bytes(40)
    samples[3]["png"] = samples[3]["png"][:60]
    shard = write_tar(tmp_path / "x.tar", samples)
    data = shard.read_bytes()
    for i, key in ((1, "jpg"), (2, "jpg"), (3, "png")):
        at = data.index(samples[i][key])
        with pytest.raises(
            sources.RecordError, match=rf"x\.tar' at byte \d+: member '{key}' at byte {at}: "
        ):
            sources.webdataset(shard)(call(i, 1))
    source = sources.webdataset(shard, on_error="skip")
    assert [n for i in range(5) for n in source(call(i, 1))["cls"].tolist()] == [0, 4]
    assert source.skipped >= 3


def test_a_bug_in_a_decoder_is_noted(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "x.tar", [{"bin": b"abc"}])
    with pytest.raises(KeyError) as caught:
        sources.webdataset(shard, decoders={"bin": {}.__getitem__})(call(0, 1))
    assert caught.value.__notes__[0] == "in member 'bin' at byte 512"
    assert caught.value.__notes__[1].startswith("while reading '/")
