"""Files of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import tokens


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "<i4", np.uint8])
def test_sequences(tmp_path: Path, dtype: Any) -> None:
    np.arange(103).astype(dtype).tofile(tmp_path / "a.bin")
    source = tokens(tmp_path / "a.bin", 10, dtype)
    chunks = [chunk for (chunk,) in epoch_of(source, 4)]
    assert len(source) == 10 and {chunk.dtype for chunk in chunks} == {np.dtype(dtype)}
    assert np.concatenate(chunks).tolist() == np.arange(100).reshape(10, 10).tolist()
    assert source.records.name(3) == f"{str(tmp_path / 'a.bin')!r} at token 30"


def test_inputs_and_targets_one_token_ahead(tmp_path: Path) -> None:
    np.arange(101, dtype=np.uint16).tofile(tmp_path / "a.bin")
    source = tokens(tmp_path / "a.bin", 11, np.uint16, stride=10)
    (rows,) = source(call(0, 10))
    assert len(source) == 10 and rows[:, 0].tolist() == list(range(0, 100, 10))
    assert (rows[:, 1:] == rows[:, :-1] + 1).all()
    for size, records in ((11, 1), (20, 1), (21, 2), (110, 10), (111, 11)):
        np.arange(size, dtype=np.uint16).tofile(tmp_path / "b.bin")
        assert len(tokens(tmp_path / "b.bin", 11, np.uint16, stride=10)) == records


def test_no_sequence_runs_from_one_file_into_the_next(tmp_path: Path) -> None:
    for i, size in enumerate((25, 7, 40)):
        (100 * i + np.arange(size, dtype=np.int64)).tofile(tmp_path / f"{i}.bin")
    paths = [tmp_path / f"{i}.bin" for i in range(3)]
    source = tokens(paths, 7, "i8", random_shuffle=True)
    (rows,) = source(call(0, 100))
    firsts = sorted(rows[:, 0].tolist())
    assert firsts == [0, 7, 14, 100, 200, 207, 214, 221, 228]
    assert source.records.name(4) == f"{str(paths[2])!r} at token 0"


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "i1"])
@pytest.mark.parametrize("as_type", ["int64", np.int32])
def test_tokens_of_another_type(tmp_path: Path, dtype: Any, as_type: Any) -> None:
    written = (np.arange(100) - 50).astype(dtype)
    written.tofile(tmp_path / "a.bin")
    (rows,) = tokens(tmp_path / "a.bin", 10, dtype, as_type=as_type)(call(0, 10))
    assert rows.dtype == np.dtype(as_type)
    assert rows.tolist() == written.reshape(10, 10).tolist()


def test_another_byte_order_is_no_other_type(tmp_path: Path) -> None:
    np.arange(100, dtype=">u2").tofile(tmp_path / "a.bin")
    given = [tokens(tmp_path / "a.bin", 10, ">u2", as_type=t) for t in (None, ">u2", "u2", "i8")]
    assert [source.describe().get("as_type") for source in given] == [None, None, None, "<i8"]


def test_what_is_no_file_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"x" * 1001)
    (tmp_path / "empty.bin").write_bytes(b"")
    (tmp_path / "folder.bin").mkdir()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("odd.bin", {}, "has 1001 bytes, which is no multiple of the 2 bytes of a uint16: give"),
        ("empty.bin", {}, "has 0 tokens, fewer than a sequence of 8"),
        ("odd.bin", {"dtype": "u1", "seq_len": 1002}, "has 1001 tokens, fewer than a sequence"),
        ("missing.bin", {}, "cannot be read: No such file or directory"),
        ("odd.bin", {"dtype": "f4"}, "dtype is float32, expected a type of whole numbers"),
        ("odd.bin", {"seq_len": 0}, "seq_len is 0, expected a whole number of at least 1"),
        ("odd.bin", {"seq_len": -5}, "seq_len is -5, expected a whole number of at least 1"),
        ("odd.bin", {"stride": 0}, "stride is 0, expected a whole number of at least 1"),
        ("odd.bin", {"dtype": "foo"}, "dtype is 'foo': data type 'foo' not understood"),
        ("odd.bin", {"dtype": 3}, "dtype is 3: Cannot interpret"),
        ("odd.bin", {"as_type": "f4"}, "as_type is float32, expected a type of whole numbers"),
        ("odd.bin", {"as_type": "foo"}, "as_type is 'foo': data type 'foo' not understood"),
        ("odd.bin", {"as_type": "i2"}, "as_type is int16, expected a type that holds every uint16"),
        ("folder.bin", {}, "cannot be read: Is a directory"),
        ([], {}, "no path is given"),
    ]
    for name, options, message in cases:
        path: Any = tmp_path / name if isinstance(name, str) else name
        with pytest.raises(ConfigError, match=message):
            tokens(path, **{"seq_len": 8, "dtype": np.uint16, **options})
