"""Caffe2's LMDBs: images, all types of labels, additional inputs, boxes, and defects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calls import call
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, caffe2_lmdb
from feeder.workers.sources.caffe2_layout import LABEL_TYPES
from protos import TensorProto, TensorProtos
from stores import encoded, picture, write_lmdb

FLOAT, INT32, BYTE, STRING, BOOL, INT64 = 1, 2, 3, 4, 5, 10


def record(*tensors: Any) -> bytes:
    return bytes(TensorProtos(protos=tensors).SerializeToString())


def pixels(fill: int, *dims: int) -> Any:
    return TensorProto(data_type=BYTE, dims=dims, byte_data=bytes([fill]) * int(np.prod(dims)))


def file(data: bytes) -> Any:
    return TensorProto(data_type=STRING, dims=[1], string_data=[data])


def floats(*numbers: float) -> Any:
    return TensorProto(data_type=FLOAT, dims=[len(numbers)], float_data=numbers)


def ints(*numbers: int) -> Any:
    return TensorProto(data_type=INT32, dims=[len(numbers)], int32_data=numbers)


def longs(*numbers: int) -> Any:
    return TensorProto(data_type=INT64, dims=[len(numbers)], int64_data=numbers)


def columns(tmp_path: Path, records: list[bytes], **options: Any) -> Any:
    path = write_lmdb(tmp_path / "db", records)
    return caffe2_lmdb(path, **options)(call(0, 100))


def test_raw_pixels_with_one_label(tmp_path: Path) -> None:
    records = [record(pixels(i, 2, 3, 4), ints(i - 1)) for i in range(3)]
    image, label = columns(tmp_path, records)
    assert image.shape == (3, 2, 3, 4) and image[:, 0, 0, 0].tolist() == [0, 1, 2]
    assert label.dtype == np.int32 and label.tolist() == [-1, 0, 1]


def test_pixels_without_channels(tmp_path: Path) -> None:
    (image,) = columns(tmp_path, [record(pixels(1, 2, 3))], label_type="none")
    assert image.shape == (1, 2, 3, 1)


@pytest.mark.needs("PIL")
def test_image_files(tmp_path: Path) -> None:
    image, label = columns(tmp_path, [record(file(encoded(picture(9, 8), "PNG")), floats(0.5))])
    assert (image[0] == picture(9, 8)).all()
    assert label.dtype == np.float32 and label.tolist() == [0.5]
    data, lengths, label = caffe2_lmdb(tmp_path / "db", decode=False, max_bytes=5000)(call(0, 1))
    assert data.shape == (1, 5000) and lengths[0] == len(encoded(picture(9, 8), "PNG"))


@pytest.mark.parametrize(
    ("label_type", "labels", "dtype", "wanted"),
    [
        ("single", [[ints(3)], [ints(4)]], np.int32, [3, 4]),
        ("single", [[longs(2**40)], [longs(-1)]], np.int64, [2**40, -1]),
        (0, [[floats(1.5)], [floats(2.5)]], np.float32, [1.5, 2.5]),
        ("multi_hot", [[ints(0, 2)], [ints()]], np.int32, [[1, 0, 1, 0], [0, 0, 0, 0]]),
        (1, [[floats(3)], [floats(3, 3)]], np.float32, [[0, 0, 0, 1], [0, 0, 0, 1]]),
        ("dense", [[floats(1, 2, 3)], [floats(4, 5, 6)]], np.float32, [[1, 2, 3], [4, 5, 6]]),
        (2, [[ints(1, 2)], [ints(3, 4)]], np.int32, [[1, 2], [3, 4]]),
        (
            "weighted",
            [[ints(1, 3), floats(0.5, 2)], [ints(), floats()]],
            np.float32,
            [[0, 0.5, 0, 2], [0, 0, 0, 0]],
        ),
        (
            3,
            [[ints(0), floats(-1)], [ints(1), floats(1)]],
            np.float32,
            [[-1, 0, 0, 0], [0, 1, 0, 0]],
        ),
    ],
)
def test_types_of_labels(
    tmp_path: Path, label_type: Any, labels: list[list[Any]], dtype: Any, wanted: Any
) -> None:
    sparse = {"num_labels": 4} if label_type in ("multi_hot", "weighted", 1, 3) else {}
    records = [record(pixels(0, 1, 1, 1), *tensors) for tensors in labels]
    _, label = columns(tmp_path, records, label_type=label_type, **sparse)
    assert label.dtype == dtype and label.tolist() == wanted


def test_additional_inputs_and_a_box(tmp_path: Path) -> None:
    records = [
        record(pixels(i, 1, 1, 1), ints(i), floats(i, i), longs(i, i, i), ints(i, 2, 3, 4))
        for i in range(3)
    ]
    _, label, first, second, box = columns(tmp_path, records, additional_inputs=2, bbox=True)
    assert first.dtype == np.float32 and first.shape == (3, 2)
    assert second.dtype == np.int64 and second.shape == (3, 3)
    assert box.dtype == np.int32 and box[:, 0].tolist() == label.tolist() == [0, 1, 2]


def test_additional_inputs_alone(tmp_path: Path) -> None:
    options = {"image_available": False, "label_type": "none", "additional_inputs": 1}
    (column,) = columns(tmp_path, [record(floats(1, 2)), record(floats(3, 4))], **options)
    assert column.tolist() == [[1, 2], [3, 4]]


DEFECTS: dict[str, tuple[bytes, str, dict[str, Any]]] = {
    "garbage": (b"\xff\xff", "message ends within a varint", {}),
    "empty": (b"", "has 0 tensors, expected 2", {}),
    "garbage inside": (b"\x0a\x01\xff", "message ends within a varint", {}),
    "label missing": (record(pixels(0, 1, 1)), "has 1 tensors, expected 2", {}),
    "two labels": (record(pixels(0, 1, 1), ints(1, 2)), "label has 2 numbers, expected 1", {}),
    "label of bools": (
        record(pixels(0, 1, 1), TensorProto(data_type=BOOL)),
        "label is of data type BOOL, expected FLOAT, INT32 or INT64",
        {},
    ),
    "label out of range": (
        record(pixels(0, 1, 1), ints(4)),
        "label 4 is none of 0 to 3",
        {"label_type": "multi_hot", "num_labels": 4},
    ),
    "label in between": (
        record(pixels(0, 1, 1), floats(0.5)),
        "label 0.5 is none of 0 to 3",
        {"label_type": "multi_hot", "num_labels": 4},
    ),
    "weights missing": (
        record(pixels(0, 1, 1), ints(1, 2), floats(1)),
        r"weights are float32\[1\], expected float32\[2\]",
        {"label_type": "weighted", "num_labels": 4},
    ),
    "weights of another type": (
        record(pixels(0, 1, 1), ints(1), ints(1)),
        r"weights are int32\[1\], expected float32\[1\]",
        {"label_type": "weighted", "num_labels": 4},
    ),
    "box of three": (
        record(pixels(0, 1, 1), ints(1), ints(1, 2, 3)),
        r"box is INT32\[3\], expected INT32\[4\]",
        {"bbox": True},
    ),
    "box of floats": (
        record(pixels(0, 1, 1), ints(1), floats(1, 2, 3, 4)),
        r"box is FLOAT\[4\], expected INT32\[4\]",
        {"bbox": True},
    ),
    "image of numbers": (record(ints(1), ints(1)), "image is of data type INT32, expected ST", {}),
    "image without a string": (
        record(TensorProto(data_type=STRING), ints(1)),
        "image is an empty STRING tensor",
        {},
    ),
    "image of another size": (
        record(TensorProto(data_type=BYTE, dims=[2, 2, 3], byte_data=b"abc"), ints(1)),
        r"image has 3 bytes, expected as many as \[2, 2, 3\] says",
        {},
    ),
    "image without dims": (
        record(TensorProto(data_type=BYTE, byte_data=b"abc"), ints(1)),
        r"image has 3 bytes, expected as many as \[\] says",
        {},
    ),
    "negative dims": (
        record(TensorProto(data_type=BYTE, dims=[-1, -1], byte_data=b"a"), ints(1)),
        r"image has 1 bytes, expected as many as \[-1, -1\] says",
        {},
    ),
}


@pytest.mark.parametrize(("defect", "message", "options"), DEFECTS.values(), ids=DEFECTS.keys())
def test_a_defective_record_is_named_or_skipped(
    tmp_path: Path, defect: bytes, message: str, options: dict[str, Any]
) -> None:
    label = [ints(1), floats(1)] if options.get("label_type") == "weighted" else [ints(1)]
    box = [ints(1, 2, 3, 4)] if options.get("bbox") else []
    good = record(pixels(0, 1, 1), *label, *box)
    path = write_lmdb(tmp_path / "db", [good, defect, good])
    with pytest.raises(RecordError, match=rf"^{str(path)!r} at key b'00000001': {message}"):
        caffe2_lmdb(path, **options)(call(0, 3))
    source = caffe2_lmdb(path, on_error="skip", **options)
    assert len(source(call(0, 3))[1]) == 2 and source.skipped == 1


def test_rows_that_do_not_fit_each_other(tmp_path: Path) -> None:
    records = [record(pixels(0, 1, 1), floats(1, 2)), record(pixels(0, 1, 1), floats(1, 2, 3))]
    message = r"b'00000001': label is float32\[3\], .* b'00000000' has float32\[2\]: the rows"
    with pytest.raises(RecordError, match=message):
        columns(tmp_path, records, label_type="dense")
    with pytest.raises(RecordError, match=r"b'00000001': label is float32\[\], .* has int32\[\]"):
        path = write_lmdb(
            tmp_path / "x", [record(pixels(0, 1, 1), label) for label in (ints(1), floats(1))]
        )
        caffe2_lmdb(path)(call(0, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_type": "many"}, r"label_type is 'many', expected one of \('single', 'multi_hot'"),
        ({"label_type": 5}, "label_type is 5, expected one of"),
        ({"label_type": "multi_hot"}, "label_type 'multi_hot' needs num_labels"),
        ({"label_type": "weighted", "num_labels": 0}, "num_labels is 0, expected a whole number"),
        ({"num_labels": 4}, "num_labels is given, and label_type is 'single'"),
        (
            {"additional_inputs": -1},
            "additional_inputs is -1, expected a whole number of at least 0",
        ),
        ({"bbox": 1}, "bbox is 1, expected True or False"),
        ({"image_available": False, "label_type": "none"}, "no column is left"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write_lmdb(tmp_path / "db", [record(pixels(0, 1, 1), ints(1))])
    with pytest.raises(ConfigError, match=message):
        caffe2_lmdb(path, **options)


def test_what_changes_the_rows_changes_the_description(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [record(pixels(0, 1, 1), ints(1))])
    seen = {str(caffe2_lmdb(path, label_type=label, num_labels=n).describe()) for label, n in zip(
        LABEL_TYPES, (None, 4, None, 4, None), strict=True)}  # fmt: skip
    assert len(seen) == len(LABEL_TYPES)
