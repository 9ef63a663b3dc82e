"""Damaged Arrow and Parquet files: a named error or valid rows, and never the end of a process."""

from __future__ import annotations

import os
import pickle  # noqa: TID251  (a source may be sent to other processes)
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parts
from calls import call
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, arrow, parquet
from needs import needs
from shards import write_table

needs("pyarrow")

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from pyarrow import feather  # noqa: E402

import damaged_child  # noqa: E402
from damaged_child import NAMED, SAME  # noqa: E402

WORDS = pa.array(["aa", "bbb", "cccc", "ddddd"])
OFFSETS = np.array([0, 2, 5, 9, 14], np.int32).tobytes()
COLUMNS = {
    "number": pa.array(range(20), pa.int32()),
    "fixed": pa.array([[i, -i] for i in range(20)], pa.list_(pa.int16(), 2)),
    "flag": pa.array([i % 3 == 0 for i in range(20)]),
    "string": pa.array(["é" * (i % 4) for i in range(20)]),
    "large": pa.array([b"z" * (i % 5) for i in range(20)], pa.large_binary()),
    "list": pa.array([list(range(i % 4)) for i in range(20)], pa.list_(pa.int64())),
    "struct": pa.array([{"a": i, "t": str(i)} for i in range(20)]),
    "category": pa.DictionaryArray.from_arrays(pa.array([i % 4 for i in range(20)]), WORDS),
}


def write(path: Path, columns: dict[str, Any], damage: dict[int, bytes] | None = None) -> None:
    """Write batches of seven rows, with other bytes at some places."""
    write_table(path, pa.table(columns), 7)
    if damage:
        data = bytearray(path.read_bytes())
        for place, octets in damage.items():
            at = place % len(data)
            data[at : at + len(octets)] = octets[: len(data) - at]
        path.write_bytes(data)


def write_beyond(path: Path, column: Any, **sound: Any) -> None:
    """Write a column whose second offset leads far outside, and others."""
    write(path, {"x": column, **sound})
    at = path.read_bytes().index(OFFSETS) + 8
    write(path, {"x": column, **sound}, {at: np.int32(2**30).tobytes()})


BEYOND = {
    "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 3, 2, 1]), WORDS),
    "string": WORDS,
}


@pytest.mark.parametrize("kind", BEYOND)
@pytest.mark.parametrize("ending", ["arrow", "stream"])
def test_a_damaged_batch_is_named_with_its_file_and_cure(
    kind: str, ending: str, tmp_path: Path
) -> None:
    path = tmp_path / f"x.{ending}"
    write_beyond(path, BEYOND[kind])
    told = rf"x\.{ending}', record batch 0: the file is damaged: .*; write or copy it anew"
    for _ in range(2):
        with pytest.raises(RecordError, match=told):
            arrow(path).map(lambda row: len(row["x"]))(call(0, 4))


def test_columns_that_are_not_read_may_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    write_beyond(path, WORDS, n=pa.array(range(4)))
    assert arrow(path, ["n"])(call(0, 4))["n"].tolist() == [0, 1, 2, 3]


def test_a_text_of_a_parquet_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": ["word"] * 3}), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"word", b"wor\xff"))
    with pytest.raises(RecordError, match=r"x\.parquet', row group 0: the file is damaged: .*UTF8"):
        parquet(path).map(lambda row: len(row["x"]))(call(0, 3))


def test_a_process_validates_anew_what_another_has_validated(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    write(path, {"x": WORDS})
    source = arrow(path)
    source.map(lambda row: len(row["x"]))(call(0, 4))
    path.write_bytes(path.read_bytes().replace(b"bbb", b"bb\xff"))
    there = pickle.loads(pickle.dumps(source))
    with pytest.raises(
        RecordError, match=r"x\.arrow', record batch 0: the file is damaged: .*UTF8"
    ):
        there.map(lambda row: len(row["x"]))(call(0, 4))


def test_a_compressed_file_with_a_length_beyond_all_memory_is_named(tmp_path: Path) -> None:
    path, table, frame = tmp_path / "x.arrow", pa.table({"x": range(100)}), b"\x04\x22\x4d\x18"
    feather.write_feather(table, path, compression="lz4")
    sizes = [np.int64(size).tobytes() + frame for size in (800, 2**54)]
    path.write_bytes(path.read_bytes().replace(*sizes))
    with pytest.raises(ConfigError, match=r"x\.arrow' cannot be read: malloc"):
        arrow(path)


class Reader:
    """A process that reads files, and another one after one has ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def answer(self, path: Path) -> str:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, damaged_child.__file__],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        line = process.stdout.readline()
        return line.rstrip("\n") if line else f"the process ended: {self.close()}"

    def close(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        with process:
            assert process.stdin is not None
            process.stdin.close()
            return process.wait(30)


octets = st.binary(min_size=1, max_size=1) | st.sampled_from(
    [np.int32(number).tobytes() for number in (-1, 1, 3, 2**20, 2**30)]
)


@pytest.mark.process
def test_damaged_files_give_a_named_error_or_valid_rows(tmp_path: Path) -> None:
    answers = Counter[str]()

    @settings(max_examples=400 if parts.is_full else 150, derandomize=True, database=None)
    @given(
        st.sampled_from(["arrow", "stream", "parquet"]),
        st.lists(st.sampled_from([*COLUMNS]), min_size=1, max_size=3, unique=True),
        st.dictionaries(st.integers(0, 2**14), octets, max_size=4),
    )
    def check(ending: str, names: list[str], damage: dict[int, bytes]) -> None:
        path = tmp_path / f"x.{ending}"
        write(path, {name: COLUMNS[name] for name in names}, damage)
        answer = reader.answer(path)
        answers[answer] += 1
        assert answer in (SAME, NAMED)

    reader = Reader()
    try:
        check()
    finally:
        reader.close()
    assert min(answers[SAME], answers[NAMED]) > 20, answers


@pytest.mark.process
@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view(), pa.list_(pa.string_view())])
def test_what_stands_at_a_null_ends_no_process(kind: Any, tmp_path: Path) -> None:
    path, word = tmp_path / "x.arrow", "a word of more than twelve bytes"
    rows = [[word, None]] * 3 if "list" in str(kind) else [word, None, word]
    write(path, {"x": pa.array(rows, kind)})
    # A view of a null: its length, four bytes, its buffer and its place. It is not validated.
    data = path.read_bytes()
    at = data.index(word[:4].encode(), data.index(len(word).to_bytes(4, "little")) + 4) + 12
    assert data[at : at + 16] == bytes(16)
    path.write_bytes(data[:at] + b"\x20\0\0\xff" * 4 + data[at + 16 :])
    code = (
        "import sys, numpy as np; from feeder.workers.sources import arrow\n"
        "from feeder.workers.stream.batch import Call\n"
        "made = arrow(sys.argv[1]).samples(np.arange(3), Call(0, 0, 0, 3, 0))\n"
        "print([[str(one) for one in np.atleast_1d(row['x'])] for row in made])"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("more than twelve") == (3 if "list" in str(kind) else 2)
