"""Arrays in memory and in files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, arrays


def test_columns_by_place(tmp_path: Path) -> None:
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for column in (x, tmp_path / "x.npy", str(tmp_path / "x.npy"), mapped):
        chunks = list(epoch_of(arrays(column, y), 4))
        assert [len(chunk) for chunk in chunks] == [2, 2]
        assert np.concatenate([chunk[0] for chunk in chunks]).tolist() == x.tolist()
        assert np.concatenate([chunk[1] for chunk in chunks]).tolist() == y.tolist()


def test_columns_by_name(tmp_path: Path) -> None:
    named = {"x": np.arange(6), "y": np.arange(12).reshape(6, 2)}
    np.savez(tmp_path / "both.npz", **named)
    for given in (named, tmp_path / "both.npz"):
        chunk: Any = arrays(given, random_shuffle=True)(call(0, 6))
        assert sorted(chunk["x"].tolist()) == list(range(6))
        assert (chunk["y"][:, 0] == 2 * chunk["x"]).all()


def test_rows_that_lie_together_are_not_copied() -> None:
    x = np.arange(100)
    assert np.shares_memory(arrays(x)(call(1, 10))[0], x)
    scattered = arrays(x, random_shuffle=True)(call(1, 10))[0]
    assert not np.shares_memory(scattered, x)
    padded = arrays(x, pad_last_batch=True)(call(3, 30))[0]
    assert padded.tolist() == [*range(90, 100), *[99] * 20]


def test_a_function_that_writes_to_its_record_changes_no_array(tmp_path: Path) -> None:
    def change(row: Any) -> Any:
        row += 1
        return row

    def keep(row: Any) -> bool:
        row += 1
        return True

    x = np.zeros((6, 2))
    np.save(tmp_path / "x.npy", x)
    for source in (arrays(x), arrays(tmp_path / "x.npy")):
        for changing in (source.map(change), source.filter(keep)):
            with pytest.raises(RecordError, match=r"row 0: .* read-only"):
                changing(call(0, 6))
    # Rows that do not lie together are copies.
    assert (arrays(x, random_shuffle=True).map(change)(call(0, 6))[0] == 1).all()
    assert x.flags.writeable and not x.any() and not np.load(tmp_path / "x.npy").any()


UNREADABLE = [
    "empty.npy", "half.npy", "folder.npy",
    "empty.npz", "objects.npz", "half.npz", "flipped.npz", "unpacked.npz",
]  # fmt: skip


def test_what_is_no_array(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    (tmp_path / "garbage.npy").write_bytes(b"garbage")
    (tmp_path / "garbage.npz").write_bytes(b"garbage")
    (tmp_path / "empty.npy").write_bytes(b"")
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "objects.npz", a=np.array([{}, 1], dtype=object))
    np.savez(tmp_path / "whole.npz", a=np.arange(1000))
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "flipped.npz").write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    np.savez_compressed(tmp_path / "packed.npz", a=np.arange(1000))
    packed = (tmp_path / "packed.npz").read_bytes()
    (tmp_path / "unpacked.npz").write_bytes(packed[:60] + b"\xff" * 40 + packed[100:])
    np.save(tmp_path / "whole.npy", np.arange(1000))
    shutil.copy(tmp_path / "whole.npy", tmp_path / "one.npz")
    (tmp_path / "half.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:4000])
    (tmp_path / "folder.npy").mkdir()
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((), "no array is given"),
        (({},), "no array is given"),
        (([1, 2],), "column 0 is list, expected an array or the path of one"),
        ((np.ma.array([1, 2]),), "column 0 is MaskedArray, expected an array or the path of one"),
        ((np.array(3),), r"column 0 is int64\[\], expected at least 1 axis"),
        ((np.array([None]),), r"column 0 is object\[1\]"),
        ((np.arange(3), np.arange(4)), "column 1 has 4 rows, column 0 has 3"),
        (({"a": np.arange(3), "b": np.arange(2)},), "column 'b' has 2 rows, column 'a' has 3"),
        ((tmp_path / "missing.npy",), "cannot be read as arrays"),
        ((tmp_path / "garbage.npy",), r"cannot be read as arrays: it is no \.npy file$"),
        ((tmp_path / "garbage.npz",), r"cannot be read as arrays: it is no \.npz file$"),
        ((tmp_path / "one.npz",), r"cannot be read as arrays: it is no \.npz file$"),
        ((tmp_path / "objects.npy",), "cannot be read as arrays"),
        *(((tmp_path / name,), rf"{name}' cannot be read as arrays: ") for name in UNREADABLE),
        ((tmp_path / "x.txt",), "is no .npy file, nor an .npz file alone"),
        ((np.arange(2), tmp_path / "x.npz"), "is no .npy file, nor an .npz file alone"),
    ]
    for given, message in cases:
        with pytest.raises(ConfigError, match=message):
            arrays(*given)
