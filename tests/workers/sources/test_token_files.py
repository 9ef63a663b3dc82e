"""Files of tokens."""

from __future__ import annotations

import os
import pickle  # noqa: TID251  (a source may be sent to other processes)
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

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


@given(st.data())
def test_files_that_say_what_they_hold(tmp_path_factory: Any, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "tokens"
    dtype = data.draw(st.sampled_from(["<u2", ">u2", "<u4", "<i4", "<i8", "u1"]))
    array = np.arange(data.draw(st.integers(4, 40))).astype(dtype)
    kind = data.draw(st.sampled_from(["npy", "llm.c", "offset"]))
    options: dict[str, Any] = {}
    with open(path, "wb") as file:
        if kind == "npy":
            version = data.draw(st.sampled_from([(1, 0), (2, 0), (3, 0)]))
            np.lib.format.write_array(file, array, version)
        elif kind == "llm.c":
            assume(dtype in ("<u2", "<u4"))
            magic = (20240520, 1) if dtype == "<u2" else (20240801, 7)
            file.write(np.array([*magic, len(array), *[0] * 253], "<i4").tobytes())
            file.write(array.tobytes())
        else:
            options["offset"] = data.draw(st.integers(0, 9))
            file.write(bytes(options["offset"]) + array.tobytes())
    (rows,) = tokens(path, 2, dtype, **options)(call(0, 20))
    assert rows.tolist() == array[: len(array) // 2 * 2].reshape(-1, 2).tolist()
    # With offset=0 a file is all tokens.
    whole = path.read_bytes()
    if len(whole) % np.dtype(dtype).itemsize == 0:
        (rows,) = tokens(path, 2, dtype, offset=0)(call(0, 1))
        assert rows.tobytes() == whole[: rows.nbytes]


def test_a_header_that_says_something_else(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(20, dtype="u2"))
    np.save(tmp_path / "b.npy", np.zeros((4, 5), "u2"))
    (tmp_path / "c.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:150])
    head = np.array([20240520, 1, 10, *[0] * 253], "<i4").tobytes()
    (tmp_path / "d.bin").write_bytes(head + bytes(18))
    for name, dtype, told in (
        (
            "a.npy",
            "i4",
            r"a\.npy' is a \.npy file of uint16 and the shape \(20,\), expected one axis",
        ),
        ("b.npy", "u2", r"of uint16 and the shape \(4, 5\), .* read it with sources\.arrays"),
        ("c.npy", "u2", r"c\.npy' cannot be read as a \.npy file: "),
        (
            "d.bin",
            "u2",
            r"llm\.c with 10 tokens of uint16, and has 1042 bytes for .* write it anew",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            tokens(tmp_path / name, 2, dtype)
    with pytest.raises(ConfigError, match="offset is -1, expected a whole number of at least 0"):
        tokens(tmp_path / "a.npy", 2, "u2", offset=-1)


def test_a_position_depends_on_how_tokens_are_cut(tmp_path: Path) -> None:
    np.arange(20, dtype="u2").tofile(tmp_path / "a.bin")
    given: list[tuple[int, str, dict[str, Any]]] = [
        (2, "u2", {}), (3, "u2", {}), (2, "i2", {}), (2, "u2", {"stride": 1}),
        (2, "u2", {"offset": 2}),
    ]  # fmt: skip
    made = [tokens(tmp_path / "a.bin", n, dtype, **more).describe() for n, dtype, more in given]
    assert len({str(one) for one in made}) == 5 and made[-1]["offset"] == 2
    assert tokens(tmp_path / "a.bin", 2, "u2", offset=0).describe() == made[0]


def test_many_files_hold_few_descriptors(tmp_path: Path) -> None:
    for i in range(150):
        np.full(4, i, "u2").tofile(tmp_path / f"{i:03d}.bin")
    before = len(os.listdir("/proc/self/fd"))
    source = tokens(sorted(tmp_path.iterdir()), 2, "u2", random_shuffle=True)
    (rows,) = source(call(0, 300))
    assert sorted(rows[:, 0].tolist()) == sorted([*range(150)] * 2)
    assert len(os.listdir("/proc/self/fd")) - before <= 64
    # In another process they are mapped anew.
    data = pickle.dumps(source)
    assert len(data) < 20_000
    assert (pickle.loads(data)(call(0, 300))[0] == rows).all()
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ConfigError, match=r"\.bin' has 16 bytes of tokens, and had 8 when"):
        pickle.loads(data)(call(0, 300))


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
        ("folder.bin", {}, "is a folder without a file of tokens"),
        ([], {}, "no path is given"),
    ]
    for name, options, message in cases:
        path: Any = tmp_path / name if isinstance(name, str) else name
        with pytest.raises(ConfigError, match=message):
            tokens(path, **{"seq_len": 8, "dtype": np.uint16, **options})


def test_an_index_of_megatron_tells_the_dtype(tmp_path: Path) -> None:
    np.arange(12, dtype=np.int32).tofile(tmp_path / "x.bin")
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QB", 1, 4) + bytes(9))
    assert len(tokens(tmp_path / "x.bin", 3, "int32")) == 4
    with pytest.raises(ConfigError, match=r"tokens of int32, says .*x\.idx', and dtype is uint16"):
        tokens(tmp_path / "x.bin", 3, "uint16")
    assert len(tokens(tmp_path / "x.bin", 3, "uint16", offset=0)) == 8
