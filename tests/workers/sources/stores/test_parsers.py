"""The wire format reader and the parsers on it, against the protobuf package, and fuzzed."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feeder.workers.sources.stores import datum as datums
from feeder.workers.sources.stores.datum import Sample, SampleParser, parse_datum
from feeder.workers.sources.stores.example import parse_example
from feeder.workers.sources.stores.tensors import FLOAT, INT32, INT64, parse_tensors
from feeder.workers.sources.stores.wire import WireError, fields, packed_varints
from parts import examples
from protos import Datum, DecodeError, Example, TensorProtos

int32s = st.integers(-(2**31), 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
floats = st.floats(width=32, allow_nan=False)


@st.composite
def datum_bytes(draw: st.DrawFn) -> bytes:
    """Datums of all kinds, several one after the other: fields in any order, and twice."""
    parts = []
    for _ in range(draw(st.integers(1, 3))):
        message = Datum()
        for name in draw(st.sets(st.sampled_from(["channels", "height", "width", "label"]))):
            setattr(message, name, draw(int32s))
        if draw(st.booleans()):
            message.data = draw(st.binary(max_size=20))
        if draw(st.booleans()):
            message.encoded = draw(st.booleans())
        message.float_data.extend(draw(st.lists(floats, max_size=2)))
        parts.append(message.SerializeToString())
    return b"".join(parts)


@st.composite
def tensor_bytes(draw: st.DrawFn) -> bytes:
    message = TensorProtos()
    for _ in range(draw(st.integers(0, 3))):
        tensor = message.protos.add()
        tensor.dims.extend(draw(st.lists(int64s, max_size=3)))
        if draw(st.booleans()):
            tensor.data_type = draw(st.sampled_from([0, 1, 2, 3, 4, 10, 12, 15]))
        tensor.float_data.extend(draw(st.lists(floats, max_size=3)))
        tensor.int32_data.extend(draw(st.lists(int32s, max_size=3)))
        tensor.int64_data.extend(draw(st.lists(int64s, max_size=3)))
        tensor.double_data.extend(draw(st.lists(st.floats(allow_nan=False), max_size=2)))
        tensor.string_data.extend(draw(st.lists(st.binary(max_size=5), max_size=2)))
        if draw(st.booleans()):
            tensor.byte_data = draw(st.binary(max_size=5))
    return bytes(message.SerializeToString())


@st.composite
def damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """Bytes with some changed, cut out or put in."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        kind = draw(st.sampled_from(["cut", "put", "change", "field"]))
        if kind == "cut":
            del data[at : at + draw(st.integers(1, 4))]
        elif kind == "put":
            data[at:at] = draw(st.binary(min_size=1, max_size=12))
        elif kind == "field":
            # Any field number and wire type, groups among them.
            data[at:at] = bytes([draw(st.integers(0, 127))]) + draw(st.binary(max_size=4))
        elif at < len(data):
            data[at] ^= draw(st.integers(1, 255))
    return bytes(data)


def is_like(ours: Any, theirs: Any, data: bytes) -> bool:
    """Whether both parsers say the same. The package lets pass a field numbered 0 within a group,
    which the format forbids; ours does not."""
    return ours == theirs or (ours is None and b"\0" in data and has_group(data))


def has_group(data: bytes) -> bool:
    return any(octet & 7 == 3 for octet in data)


def ours_of_datum(data: bytes) -> dict[str, Any] | None:
    try:
        datum = parse_datum(data)
    except WireError:
        return None
    found = datum._asdict()
    found["data"] = data[found.pop("start") : found.pop("stop")]
    return found


def theirs_of_datum(data: bytes) -> dict[str, Any] | None:
    try:
        message = Datum.FromString(data)
    except DecodeError:
        return None
    names = ("channels", "height", "width", "data")
    found = {name: getattr(message, name) for name in names}
    for name in ("label", "encoded"):
        found[name] = getattr(message, name) if message.HasField(name) else None
    return found


@given(datum_bytes())
def test_datums(data: bytes) -> None:
    assert ours_of_datum(data) == theirs_of_datum(data) != None  # noqa: E711


@settings(max_examples=examples(1000))
@given(damaged(datum_bytes()) | st.binary(max_size=30))
def test_damaged_datums(data: bytes) -> None:
    assert is_like(ours_of_datum(data), theirs_of_datum(data), data)


def ours_of_tensors(data: bytes) -> list[dict[str, Any]] | None:
    try:
        return [
            {
                "type": tensor.data_type,
                "dims": list(tensor.dims),
                "octets": bytes(tensor.octets or b""),
                "strings": [bytes(string) for string in tensor.strings],
                "numbers": tensor.numbers().tobytes() if is_numeric(tensor.data_type) else b"",
            }
            for tensor in parse_tensors(memoryview(data))
        ]
    except WireError:
        return None


def theirs_of_tensors(data: bytes) -> list[dict[str, Any]] | None:
    try:
        message = TensorProtos.FromString(data)
    except DecodeError:
        return None
    numbers = {
        FLOAT: lambda tensor: np.array(tensor.float_data, np.float32),
        INT32: lambda tensor: np.array(tensor.int32_data, np.int32),
        INT64: lambda tensor: np.array(tensor.int64_data, np.int64),
    }
    return [
        {
            "type": tensor.data_type,
            "dims": list(tensor.dims),
            "octets": tensor.byte_data,
            "strings": list(tensor.string_data),
            "numbers": (
                numbers[tensor.data_type](tensor).tobytes() if is_numeric(tensor.data_type) else b""
            ),
        }
        for tensor in message.protos
    ]


def is_numeric(data_type: int) -> bool:
    return data_type in (FLOAT, INT32, INT64)


@given(tensor_bytes())
def test_tensors(data: bytes) -> None:
    assert ours_of_tensors(data) == theirs_of_tensors(data) != None  # noqa: E711


@settings(max_examples=examples(1000))
@given(damaged(tensor_bytes()) | st.binary(max_size=30))
def test_damaged_tensors(data: bytes) -> None:
    assert is_like(ours_of_tensors(data), theirs_of_tensors(data), data)


@pytest.mark.parametrize("packed", [True, False])
def test_of_an_int32_the_low_32_bits_count(packed: bool) -> None:
    number = b"\x85\x80\x80\x80\x80\x20"  # 2**40 + 5
    field = b"\x22\x06" + number if packed else b"\x20" + number
    tensor = b"\x10\x02" + field
    data = b"\x0a" + bytes([len(tensor)]) + tensor
    assert ours_of_tensors(data) == theirs_of_tensors(data)
    (parsed,) = parse_tensors(memoryview(data))
    assert parsed.numbers().tolist() == [5]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80", "message ends within a varint"),
        (b"\x00", "field number is 0 at byte 1"),
        (b"\x0a\x05ab", "field 1 ends at byte 7, the message at 4"),
        (b"\x0d\x01", "field 1 ends at byte 5, the message at 2"),
        (b"\x0e", "wire type is 6 at byte 1"),
        (b"\x0c", "wire type is 4 at byte 1"),
        (b"\x0b\x14", "group 1 is ended by group 2 at byte 2"),
        (b"\x0b", "message ends within a varint"),
        (b"\x0b" * 200, "groups are nested more than 100 deep"),
        (b"\x08" + b"\xff" * 11, "varint has more than 10 bytes at byte 11"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=f"^{message}$"):
        list(fields(data))


def test_packed_varints_that_are_none() -> None:
    with pytest.raises(WireError, match="ends within a varint"):
        packed_varints(b"\x01\x80")
    with pytest.raises(WireError, match="more than 10 bytes"):
        packed_varints(b"\xff" * 10 + b"\x01")


def keep(datum: Any) -> Sample:
    if datum.height == 13:
        raise ValueError("unlucky")
    return Sample(datum.start, datum.stop, (datum.height,), datum.label or 0)


@settings(max_examples=examples(300))
@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 3), st.sampled_from([5, 13])), max_size=20
    ),
    st.lists(damaged(datum_bytes()), max_size=3),
    st.randoms(use_true_random=False),
)
def test_records_that_are_alike_are_parsed_like_the_others(
    labels: list[tuple[int, int, int]], others: list[bytes], random: Any
) -> None:
    values = [
        Datum(height=height, data=bytes([label % 256]) * size, label=label).SerializeToString()
        for label, size, height in labels
    ]
    values += others + [value[:-1] for value in values[:3] if value]
    parser = SampleParser(keep)
    for _ in range(3):
        random.shuffle(values)
        parsed = parser.parse([memoryview(value) for value in values])
        sound = zip(parsed.labels.tolist(), parsed.shapes, parsed.data, strict=True)
        for i, value in enumerate(values):
            try:
                wanted = keep(parse_datum(value))
            except ValueError as error:
                assert str(parsed.errors[i]) == str(error)
            else:
                data = value[wanted.start : wanted.stop]
                assert next(sound) == (wanted.label, wanted.shape, data)
        assert next(sound, None) is None


def test_the_memory_of_parsed_records_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datums, "_MAX_TAILS", 10)
    parser = SampleParser(keep)
    values = [
        memoryview(Datum(data=b"abc", label=label).SerializeToString()) for label in range(100, 200)
    ]
    for _ in range(2):
        assert parser.parse(values).labels.tolist() == list(range(100, 200))
        assert len(parser._alike.samples) <= 10


# ---- tf.train.Example

Features = dict[str, tuple[str, list[Any]] | None]
LISTS = {"bytes_list": st.binary(max_size=8), "float_list": floats, "int64_list": int64s}
features_of_examples = st.dictionaries(
    st.text(max_size=5),
    st.none()
    | st.sampled_from([*LISTS]).flatmap(
        lambda kind: st.tuples(st.just(kind), st.lists(LISTS[kind], max_size=4))
    ),
    max_size=5,
)


def example_of(features: Features) -> bytes:
    message = Example()
    message.features.SetInParent()
    for name, kind in features.items():
        entry = message.features.feature.add(key=name)
        entry.value.SetInParent()
        if kind is not None:
            values = getattr(entry.value, kind[0])
            values.SetInParent()
            values.value.extend(kind[1])
    return bytes(message.SerializeToString())


@settings(max_examples=examples(200))
@given(features_of_examples)
def test_examples(features: Features) -> None:
    made = parse_example(example_of(features))
    assert list(made) == sorted(features)
    for name, given_kind in features.items():
        kind, values = given_kind or ("float_list", [])
        if kind == "bytes_list":
            assert made[name] == (values[0] if len(values) == 1 else values)
        else:
            assert made[name].dtype == ("f4" if kind == "float_list" else "i8")
            assert made[name].tolist() == values


@settings(max_examples=examples(300))
@given(damaged(features_of_examples.map(example_of)) | st.binary(max_size=30))
def test_damaged_examples_are_read_or_refused_by_name(data: bytes) -> None:
    try:
        made = parse_example(data)
    except ValueError:
        return
    # Where both libraries read it, they read the same features.
    with contextlib.suppress(DecodeError):
        theirs = Example.FromString(data)
        assert {*made} >= {entry.key for entry in theirs.features.feature if entry.HasField("key")}
