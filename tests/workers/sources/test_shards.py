"""Tar shards, TFRecord files and JSON lines: any record at once, by an index that is made once."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import pickle  # noqa: TID251  (a source may be sent to other processes)
import shutil
import struct
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, jsonl, tfrecord, webdataset
from feeder.workers.sources.stores import offsets
from feeder.workers.sources.stores.example import parse_example
from needs import needs
from shards import example, field, ints, numbered, varint, write_tar, write_tfrecord
from stores import encoded, picture


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Two shards with 7 and 5 samples, and one without."""
    return [
        write_tar(tmp_path / "a.tar", numbered(0, 7)),
        write_tar(tmp_path / "b.tar", []),
        write_tar(tmp_path / "c.tar", numbered(7, 12), 7),
    ]


def test_samples_of_shards_are_found_one_by_one(shards: list[Path], tmp_path: Path) -> None:
    source = webdataset(tmp_path / "*.tar")
    assert len(source) == 12
    chunks = list(epoch_of(source, 5))
    assert list(chunks[0]) == ["npy", "cls", "meta.json.half"]
    assert [n for c in chunks for n in c["cls"].tolist()] == list(range(12))
    assert [row for c in chunks for row in c["npy"][:, 2].tolist()] == list(range(12))
    assert chunks[1]["meta.json.half"].tolist() == [2, 3, 3, 4, 4]
    assert source(call(2, 5))["cls"].tolist() == [10, 11]
    (label,) = webdataset(shards, ["cls"]).map(lambda r: r["cls"])(call(3, 3))
    assert label.tolist() == [9, 10, 11]


def test_members_are_decoded_by_their_keys(tmp_path: Path) -> None:
    needs("PIL")
    pixels = picture(5, 4, 1)
    sample = {"png": encoded(pixels, "PNG"), "txt": "né".encode(), "bin": b"\0\1", "cls": b"7"}
    shard = write_tar(tmp_path / "x.tar", [sample] * 2)
    columns = webdataset(shard, decoders={"bin": lambda data: len(data)})(call(0, 2))
    assert columns["png"].shape == (2, *pixels.shape)
    assert (columns["png"][0] == pixels).all()
    assert columns["txt"].tolist() == ["né", "né"]
    assert (columns["bin"].tolist(), columns["cls"].tolist()) == ([2, 2], [7, 7])


def test_an_index_is_made_once_and_again_for_another_file(
    shards: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "feeder")
    webdataset(shards)
    assert [r.message.rpartition(", ")[2] for r in caplog.records] == [
        "file 1 of 3", "file 2 of 3", "file 3 of 3",
    ]  # fmt: skip
    assert (tmp_path / ".a.tar.feeder-index").exists()
    caplog.clear()
    first = webdataset(shards)
    assert not caplog.records
    write_tar(shards[0], numbered(20, 29))
    assert len(webdataset(shards)) == 14
    assert [r.message for r in caplog.records] == [f"indexing {str(shards[0])!r}, file 1 of 3"]
    assert first.describe() != webdataset(shards).describe()
    # What is no index is made anew.
    (tmp_path / ".c.tar.feeder-index").write_bytes(b"\x93NUMPY nonsense")
    assert len(webdataset(shards)) == 14
    folder = tmp_path / "indexes"
    folder.mkdir()
    webdataset(shards, index=folder)
    assert len(list(folder.iterdir())) == 3


def test_an_index_of_which_any_byte_has_changed_is_none(tmp_path: Path) -> None:
    file, index = tmp_path / "x.jsonl", tmp_path / ".x.jsonl.feeder-index"
    file.write_text("10\n11\n12\n")
    source = pickle.loads(pickle.dumps(jsonl(file)))
    good = index.read_bytes()
    assert offsets.is_whole_index(str(index))
    for at in range(len(good)):
        index.write_bytes(good[:at] + bytes([good[at] ^ 2]) + good[at + 1 :])
        assert not offsets.is_whole_index(str(index)), at
    # The last byte is changed now: another process does not read by it, and a new source mends it.
    with pytest.raises(ConfigError, match="is another one now"):
        source(call(0, 3))
    assert jsonl(file)(call(0, 3))[0].tolist() == [10, 11, 12]
    assert index.read_bytes() == good


def test_a_file_of_the_same_size_and_time_is_another_one(
    shards: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "feeder")
    first = webdataset(shards[0])
    status, reset = shards[0].stat(), False
    write_tar(shards[0], numbered(20, 27))
    # The clock of a file system has steps of some milliseconds.
    while shards[0].stat().st_ctime_ns == status.st_ctime_ns or not reset:
        os.utime(shards[0], ns=(status.st_atime_ns, status.st_mtime_ns))
        reset = True
    assert shards[0].stat().st_size == status.st_size
    assert webdataset(shards[0])(call(0, 7))["cls"].tolist() == list(range(20, 27))
    # A copy with its index and its time is the same one.
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("a.tar", ".a.tar.feeder-index"):
        shutil.copy2(tmp_path / name, folder / name)
    caplog.clear()
    copied = webdataset(folder / "a.tar")
    assert not caplog.records
    assert copied.describe() == webdataset(shards[0]).describe() != first.describe()


def test_a_folder_that_cannot_be_written_is_told_once(
    shards: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = webdataset(shards, index=tmp_path / "nowhere")
    (record,) = caplog.records
    assert "cannot be kept (No such file or directory)" in record.message
    assert source(call(0, 12))["cls"].tolist() == list(range(12))
    assert source.describe() == webdataset(shards).describe()


def test_an_index_is_for_all_who_may_read_the_folder(shards: list[Path], tmp_path: Path) -> None:
    webdataset(shards)
    (tmp_path / "mine").touch()
    assert (tmp_path / ".a.tar.feeder-index").stat().st_mode == (tmp_path / "mine").stat().st_mode


@pytest.mark.parametrize("num_bytes", [0, 5000, 2**26])
def test_many_shards_hold_few_descriptors(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offsets, "_INDEX_BYTES_KEPT", num_bytes)
    for i in range(150):
        (tmp_path / f"{i:03d}.jsonl").write_text(f"{2 * i}\n{2 * i + 1}\n")
    before = len(os.listdir("/proc/self/fd"))
    source = jsonl(tmp_path / "*.jsonl", random_shuffle=True)
    for same in (source, pickle.loads(pickle.dumps(source))):
        (rows,) = same(call(0, 300))
        assert sorted(rows.tolist()) == [*range(300)]
    # Two sources.
    assert len(os.listdir("/proc/self/fd")) - before <= (0 if num_bytes > 2**25 else 128)


def test_an_index_that_changes_while_a_source_reads_is_named(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offsets, "MAPS_KEPT", 1)
    monkeypatch.setattr(offsets, "_INDEX_BYTES_KEPT", 0)
    source = webdataset(shards, on_error="skip")
    wanted = [chunk["cls"].tolist() for chunk in epoch_of(source, 3)]
    there = pickle.loads(pickle.dumps(source))
    assert [chunk["cls"].tolist() for chunk in epoch_of(there, 3)] == wanted
    write_tar(shards[0], numbered(30, 37))
    webdataset(shards)
    for told in ("is another one now", "cannot be read"):
        # Another file's index, so that the first one is mapped anew.
        source(call(3, 3))
        with pytest.raises(ConfigError, match=rf"a\.tar\.feeder-index' of .*a\.tar' {told}.*anew"):
            source(call(0, 3))
        (tmp_path / ".a.tar.feeder-index").unlink(missing_ok=True)


def test_nothing_is_left_of_an_index_that_cannot_be_kept(
    shards: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(os.listdir(tmp_path))

    def full(file: Any, array: Any, **options: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    assert len(webdataset(shards)) == 12
    assert sorted(os.listdir(tmp_path)) == before


def add_member(tar: Any, name: str, data: bytes = b"7", headers: Any = ()) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.pax_headers = len(data), dict(headers)
    tar.addfile(member, io.BytesIO(data))


@pytest.mark.parametrize("sparse", ["", "/"])
def test_a_member_that_is_there_twice_is_named(sparse: str, tmp_path: Path) -> None:
    headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": "1"} if sparse else {}
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        add_member(tar, "a.cls")
        add_member(tar, "a.cls", headers=headers)
        add_member(tar, "b.cls")
    told = rf"x\.tar' at byte 512: .* members \['{sparse}cls', 'cls'\]"
    with pytest.raises(RecordError, match=told):
        webdataset(tmp_path / "x.tar")(call(0, 2))
    source = webdataset(tmp_path / "x.tar", on_error="skip")
    assert (source(call(0, 2))["cls"].tolist(), source.skipped) == ([7], 1)


def test_a_shard_without_its_end_is_named_wherever_it_is_cut(shards: list[Path]) -> None:
    """`tarfile` itself takes a broken header, and the end of the file, for the archive's end."""
    data = shards[0].read_bytes()
    with tarfile.open(shards[0]) as tar:
        heads, end = [member.offset for member in tar], tar.offset
    for at in [*heads[1:], end, heads[3] + 100, end + 100]:
        shards[0].write_bytes(data[:at])
        with pytest.raises(ConfigError, match=r"a\.tar': .*(truncated|no tar file)"):
            webdataset(shards, ["cls"])
    # As the error says: what is whole and has no end gets one.
    shards[0].write_bytes(data[:end] + bytes(1024))
    assert len(webdataset(shards, ["cls"])) > 0
    for at in heads[1:]:
        shards[0].write_bytes(data[: at + 100] + bytes([data[at + 100] ^ 1]) + data[at + 101 :])
        with pytest.raises(ConfigError, match=rf"a\.tar': at byte {at} of {len(data)} there is no"):
            webdataset(shards, ["cls"])
    shards[0].write_bytes(data * 2)
    told = rf"its tar file ends at byte {end}, and other bytes follow at {len(data)}: "
    with pytest.raises(ConfigError, match=told):
        webdataset(shards, ["cls"])


SPARSE = {
    "gnu": ["--format=gnu"],
    **{f"pax {v}": ["--format=pax", f"--sparse-version={v}"] for v in ("0.0", "0.1", "1.0")},
}
"""The ways in which GNU tar writes a file with holes."""


@pytest.mark.process
@pytest.mark.needs("tar")
@pytest.mark.parametrize("kind", SPARSE)
def test_sparse_members_are_what_was_written(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    shard, names = tmp_path / "x.tar", []
    (tmp_path / "é").mkdir()
    # More stretches of data than the first header of a member has room for, none, and no hole.
    for number, stretches in enumerate((1, 3, 30, 0, 2)):
        for key in ("bin", "cls", f"{'long.' * 8}bin"):
            names.append(f"é/{number}.{key}")
            with open(tmp_path / names[-1], "wb") as file:
                if key == "cls":
                    file.write(b"%d" % number)
                    continue
                for _ in range(stretches):
                    file.seek(int(rng.integers(1, 9)) * 8192, os.SEEK_CUR)
                    file.write(rng.bytes(int(rng.integers(1, 9000))))
                file.truncate(file.tell() + 40_000 * (number != 4))
    command = ["tar", "--sparse", *SPARSE[kind], "-C", tmp_path, "-cf", shard, "--no-recursion"]
    subprocess.run([*command, "é", *names], check=True)
    with tarfile.open(shard) as tar:
        assert sum(member.sparse is not None for member in tar) > 6
    # As GNU tar reads them: `tarfile` takes other names.
    wanted = {name: (tmp_path / name).read_bytes() for name in names}
    keys = ["bin", f"{'long.' * 8}bin", "cls"]
    found: dict[str, bytes] = {}

    def note(sample: dict[str, Any]) -> int:
        found.update({f"{sample['__key__']}.{key}": sample[key] for key in keys[:2]})
        return 0

    source = webdataset(shard, [*keys, "__key__"]).map(note)
    source(call(0, 5))
    assert found == {name: data for name, data in wanted.items() if not name.endswith(".cls")}
    # What the file holds no more is an error, and is named.
    with tarfile.open(shard) as tar:
        first = tar.getmembers()[1]
    with open(shard, "r+b") as file:
        file.seek(first.offset)
        file.write(bytes(512))
    with pytest.raises(
        RecordError, match=rf"x\.tar' at byte {first.offset}: member 'bin' at byte "
    ):
        source(call(0, 5))


def test_a_shard_may_have_keys_of_any_length(tmp_path: Path) -> None:
    keys = ["a" * 32, "a" * 33, "a" * 33 + "b", "cls"]
    shard = write_tar(tmp_path / "x.tar", [{key: key.encode() for key in keys[:3]}])
    assert webdataset(shard, on_error="skip")(call(0, 1)) == {k: [k.encode()] for k in keys[:3]}
    assert webdataset(shard, keys[1:2])(call(0, 1)) == {keys[1]: [keys[1].encode()]}
    with pytest.raises(RecordError, match="and no 'cls'"):
        webdataset(shard, keys)(call(0, 1))
    with pytest.raises(ConfigError, match=r"keys are \['/cls'\], expected names"):
        webdataset(shard, ["/cls"])


def test_a_shard_that_is_cut_while_it_is_read_is_named(shards: list[Path]) -> None:
    source = webdataset(shards)
    os.truncate(shards[0], 512)
    with pytest.raises(
        RecordError, match=r"a\.tar' at byte 512: the file ends at byte 512, the record at byte"
    ):
        source(call(0, 2))
    shards[0].unlink()
    with pytest.raises(RecordError, match=r"a\.tar' at byte 512: No such file"):
        source(call(0, 2))


def test_broken_samples_are_named_or_skipped(tmp_path: Path) -> None:
    samples = numbered(0, 6)
    del samples[1]["cls"]
    samples[3]["npy"] = b"nonsense"
    samples[4]["cls"] = b"four"
    shard = write_tar(tmp_path / "x.tar", samples)
    with pytest.raises(RecordError, match=r"x\.tar' at byte \d+: the sample has the members "
                       r"\['meta.json', 'npy'\], and no 'cls'"):  # fmt: skip
        webdataset(shard)(call(0, 3))
    with pytest.raises(RecordError, match=r"x\.tar' at byte (\d+): member 'npy' at byte \1: "):
        webdataset(shard)(call(3, 1))
    source = webdataset(shard, on_error="skip")
    assert [n for c in epoch_of(source, 2) for n in c["cls"].tolist()] == [0, 2, 5]
    assert source.skipped == 3


@given(st.lists(st.sampled_from(["", " ", "\t ", "1", " 2", "3 \t"]), max_size=9), st.booleans())
def test_lines_of_blanks_are_no_json(tmp_path_factory: Any, lines: list[str], ends: bool) -> None:
    path = tmp_path_factory.getbasetemp() / "blanks.jsonl"
    text = "\n".join(["0", *lines]) + "\n" * ends
    path.write_text(text)
    (rows,) = jsonl(path)(call(0, 99))
    assert rows.tolist() == [json.loads(line) for line in text.split("\n") if line.strip()]
    # As text they are lines.
    (rows,) = jsonl(path, len)(call(0, 99))
    assert rows.tolist() == [len(line) for line in text.split("\n") if line]


def test_keys_are_those_of_the_first_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [])
    write_tar(tmp_path / "b.tar", numbered(0, 3))
    assert len(webdataset(tmp_path / "*.tar")(call(0, 3))) == 3


WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda p: webdataset(p / "x.tar"), r"x\.tar' cannot be read: No such file"),
    "no fit": (lambda p: webdataset(p / "*.x"), r"\*\.x' fits no file, expected a tar shard"),
    "empty": (lambda p: webdataset(p / "b.tar"), r"b\.tar' holds no samples"),
    "empty, with keys": (lambda p: webdataset(p / "b.tar", ["a"]), r"b\.tar' holds no samples"),
    "keys": (lambda p: webdataset(p / "a.tar", "cls"), "keys are 'cls', expected names"),
    "decoder": (
        lambda p: webdataset(p / "a.tar", decoders={"cls": 5}),  # type: ignore[dict-item]
        r"decoders\['cls'\] is 5",
    ),
    "unknown decoder": (lambda p: webdataset(p / "a.tar", decoders={"x": int}), r"decoders\['x'\]"),
    "no tar": (lambda p: webdataset(p / "text"), "is no tar file"),
    "no tfrecord": (lambda p: tfrecord(p / "text"), "the record at byte 0 ends behind them"),
    "no records": (lambda p: tfrecord(p / "nothing"), "nothing' holds no records"),
    "no lines": (lambda p: jsonl(p / "nothing"), "nothing' holds no lines"),
    "decode": (lambda p: tfrecord(p / "text", 5), "decode is 5"),  # type: ignore[arg-type]
    "decode lines": (lambda p: jsonl(p / "text", 5), "decode is 5"),  # type: ignore[arg-type]
    "on_error": (lambda p: jsonl(p / "text", on_error="x"), "on_error is 'x'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_refused(name: str, shards: list[Path], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a line of text, long enough for a header\n" * 30)
    (tmp_path / "nothing").write_bytes(b"")
    make, message = WRONG[name]
    with pytest.raises(ConfigError, match=message):
        make(tmp_path)


def test_tfrecords(tmp_path: Path) -> None:
    records = [
        example({
            "n": ints(i, -i), "x": field(2, field(1, struct.pack("<2f", i, 0.5))),
            "s": field(1, field(1, b"ab")), "list": field(1, field(1, b"a") + field(1, b"b")),
        })
        for i in range(9)
    ]  # fmt: skip
    files = [
        write_tfrecord(tmp_path / "a.tfrecord", records[:4]),
        write_tfrecord(tmp_path / "b.tfrecord", records[4:]),
    ]
    columns = tfrecord(files)(call(0, 9))
    assert list(columns) == ["list", "n", "s", "x"]
    assert columns["n"].tolist() == [[i, -i] for i in range(9)]
    assert columns["x"].dtype == np.float32
    assert columns["x"][:, 0].tolist() == list(range(9))
    assert columns["s"].tolist() == [b"ab"] * 9
    (sizes,) = tfrecord(files, len)(call(0, 9))
    assert sizes.tolist() == [*map(len, records)]
    files[1].write_bytes(files[1].read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"b\.tfrecord': the file has \d+ bytes, and the record"):
        tfrecord(files)


def test_numbers_of_an_example_may_be_packed_or_not() -> None:
    single = field(3, varint(1 << 3) + varint(-5) + varint(1 << 3) + varint(6))
    floats = field(2, b"".join(varint(1 << 3 | 5) + struct.pack("<f", x) for x in (1, 2)))
    parsed = parse_example(example({"a": single, "b": floats, "c": b"", "d": field(3, b"")}))
    assert {name: value.tolist() for name, value in parsed.items()} == {
        "a": [-5, 6], "b": [1, 2], "c": [], "d": [],
    }  # fmt: skip
    with pytest.raises(ValueError, match="ends at byte"):
        parse_example(example({"a": ints(1)})[:-1])


def entry(name: str, data: bytes) -> bytes:
    return field(1, field(1, name.encode()) + field(2, data))


def test_a_sequence_example_has_its_feature_lists(tmp_path: Path) -> None:
    def record(i: int) -> bytes:
        lists = {
            "frames": [ints(i, j) for j in range(3)], "words": [field(1, field(1, b"ab"))] * 2,
            "uneven": [ints(*range(j)) for j in range(3)], "none": [],
        }  # fmt: skip
        steps = b"".join(entry(n, b"".join(field(1, f) for f in s)) for n, s in lists.items())
        return field(1, entry("id", ints(i))) + field(2, steps)

    path = write_tfrecord(tmp_path / "x.tfrecord", [record(i) for i in range(4)])
    seen: list[Any] = []
    columns = tfrecord(path).map(
        lambda sample: seen.append(sample) or (sample["id"], sample["frames"], sample["words"])
    )(call(0, 4))
    assert [*seen[0]] == ["frames", "id", "none", "uneven", "words"]
    assert [step.tolist() for step in seen[1]["uneven"]] == [[], [0], [0, 1]]
    assert seen[1]["none"] == []
    ids, frames, words = columns
    assert frames.dtype == np.int64 and words.tolist() == [[b"ab"] * 2] * 4
    assert frames.tolist() == [[[i, j] for j in range(3)] for i in range(4)]
    assert ids.tolist() == [[i] for i in range(4)]
    twice = field(1, entry("id", ints(1))) + field(2, entry("id", b""))
    with pytest.raises(ValueError, match=r"context and feature_lists both have \['id'\]"):
        parse_example(twice)


def test_messages_of_an_example_that_come_again_are_joined() -> None:
    parts = [entry("a", ints(1)), entry("a", ints(2)), field(1, field(2, ints(3)) * 2)]
    floats = field(2, field(1, struct.pack("<f", 5)))
    parts.append(entry("x", ints(7) + floats + floats))
    parsed = parse_example(b"".join(field(1, part) for part in parts))
    assert {name: value.tolist() for name, value in parsed.items()} == {
        "": [3, 3], "a": [2], "x": [5, 5],
    }  # fmt: skip


def test_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n": 0}\n\n{"n": 1}\r\n{"n": 2, "m": {"k": 5}}\n{"n"\n{"n": 4}')
    source = jsonl(path, on_error="skip").map(lambda record: record["n"])
    assert [n for (c,) in epoch_of(source, 2) for n in c.tolist()] == [0, 1, 2, 4]
    with pytest.raises(RecordError, match=r"x\.jsonl' at byte 44: "):
        jsonl(path)(call(3, 1))
    (texts,) = jsonl(path, bytes.decode).pad(30)(call(0, 5))
    assert texts.tolist() == ['{"n": 0}', '{"n": 1}', '{"n": 2, "m": {"k": 5}}', '{"n"', '{"n": 4}']
    assert json.loads(str(texts[2])) == {"n": 2, "m": {"k": 5}}


@given(
    st.lists(
        st.tuples(
            st.text("aé/", max_size=4).map(lambda t: t.strip("/").replace("//", "/")),
            st.sampled_from(["x", "y" * 120, "é" * 60]),
            st.sampled_from(["", "folder", "no key"]),
            st.integers(0, 1100),
        ),
        min_size=1, max_size=5,
    ),
    st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT]),
    st.booleans(),
)  # fmt: skip
def test_a_sample_tells_its_key_and_its_shard(
    tmp_path_factory: Any, samples: list[Any], kind: int, is_packed: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "keys.tar"
    wanted: list[str] = []
    with tarfile.open(path, "w:gz" if is_packed else "w", format=kind) as tar:
        for i, (folder, stem, before, size) in enumerate(samples):
            if kind == tarfile.USTAR_FORMAT:
                folder, stem = folder.replace("é", "a"), stem[:60].replace("é", "a")
            wanted.append(os.path.join(folder, f"{stem}{i}"))
            names = [f"{wanted[-1]}.{key}" for key in ("txt", "b.bin")]
            for name in [*(["nothing"] * (before == "no key")), *names]:
                add_member(tar, name, b"x" * size)
            if before == "folder":
                info = tarfile.TarInfo("folder.d")
                info.type = tarfile.DIRTYPE
                tar.addfile(info)
    source = webdataset(path, ["__url__", "txt", "__key__"])
    made = source.samples(np.arange(len(source)), call(0, 1))
    assert [one["__key__"] for one in made] == wanted
    assert {(*one, one["__url__"]) for one in made} == {("__url__", "txt", "__key__", str(path))}
