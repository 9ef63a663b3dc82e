"""Caffe's LMDBs: raw and encoded images, labels, and records that are defective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import RecordError, caffe_lmdb
from protos import Datum
from stores import encoded, picture, write_lmdb


def raw(
    label: int | None, height: int = 2, width: int = 3, channels: int = 4, **fields: Any
) -> bytes:
    fields = {"data": bytes([(label or 0) % 256] * (height * width * channels)), **fields}
    datum = Datum(channels=channels, height=height, width=width, encoded=False, **fields)
    if label is not None:
        datum.label = label
    return bytes(datum.SerializeToString())


def file(label: int, data: bytes, **fields: Any) -> bytes:
    return bytes(Datum(data=data, label=label, **fields).SerializeToString())


def only_chunk(source: Any) -> Any:
    return source(call(0, 100))


def test_raw_pixels(tmp_path: Path) -> None:
    data = [bytes(range(i, i + 24)) for i in range(5)]
    path = write_lmdb(tmp_path / "db", [raw(i * 1000, data=data[i]) for i in range(5)])
    image, label = only_chunk(caffe_lmdb(path))
    assert image.dtype == np.uint8 and image.shape == (5, 2, 3, 4)
    assert label.dtype == np.int32 and label.tolist() == [0, 1000, 2000, 3000, 4000]
    assert [row.tobytes() for row in image] == data
    (image,) = only_chunk(caffe_lmdb(path, layout="CHW", label_available=False))
    assert image.shape == (5, 4, 2, 3) and [row.tobytes() for row in image] == data
    (label,) = only_chunk(caffe_lmdb(path, image_available=False))
    assert label.tolist() == [0, 1000, 2000, 3000, 4000]


def test_large_pixels_come_as_well_in_the_epochs_after_the_first(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 150, 150, 3), np.uint8)
    # Labels of one byte, two and three; those of one length, a mixture, and one with more to it.
    labels = [i * 3 for i in range(30)] + [100, 200, 20_000, -1, 5, 7, 300, 2, 1, 127]
    values = [
        raw(label, 150, 150, 3, data=image.tobytes())
        for label, image in zip(labels, pixels, strict=True)
    ]
    values[22] = raw(labels[22], 150, 150, 3, data=pixels[22].tobytes(), float_data=[1.0])
    source = caffe_lmdb(write_lmdb(tmp_path / "db", values))
    for epoch in range(3):
        for index in range(5):
            image, label = source(call(index, 8, epoch=epoch))
            assert label.tolist() == labels[index * 8 : index * 8 + 8]
            assert (image == pixels[index * 8 : index * 8 + 8]).all()


def test_large_records_of_other_sizes_do_not_fit_in_any_epoch(tmp_path: Path) -> None:
    values = [raw(i, 150, 150 + i // 20, 3) for i in range(40)]
    source = caffe_lmdb(write_lmdb(tmp_path / "db", values))
    for epoch in range(2):
        assert source(call(0, 20, epoch=epoch))[0].shape == (20, 150, 150, 3)
        assert source(call(1, 20, epoch=epoch))[0].shape == (20, 150, 151, 3)
        with pytest.raises(RecordError, match="key b'00000020'"):
            source(call(0, 40, epoch=epoch))


def test_labels_wrap_around_as_int32(tmp_path: Path) -> None:
    huge = raw(None) + b"\x28\xff\xff\xff\xff\x1f"
    path = write_lmdb(tmp_path / "db", [raw(-7), raw(2**31 - 1), huge])
    assert only_chunk(caffe_lmdb(path))[1].tolist() == [-7, 2**31 - 1, -1]


@pytest.mark.needs("PIL")
def test_image_files(tmp_path: Path) -> None:
    pixels = [picture(20, 30, i) for i in range(3)]
    values = [
        file(0, encoded(pixels[0], "PNG"), encoded=True),
        file(1, encoded(pixels[1], "PNG")),
        file(2, encoded(pixels[2]), encoded=True),
    ]
    path = write_lmdb(tmp_path / "db", values)
    image, label = only_chunk(caffe_lmdb(path))
    assert label.tolist() == [0, 1, 2] and image.shape == (3, 20, 30, 3)
    assert (image[0] == pixels[0]).all() and (image[1] == pixels[1]).all()
    assert np.abs(image[2].astype(int) - pixels[2]).mean() < 8
    small = only_chunk(caffe_lmdb(path, resize=(8, 9)))[0]
    assert small.shape == (3, 8, 9, 3)


def test_files_that_are_not_decoded(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [file(i, b"x" * (i + 1)) for i in range(4)])
    image, lengths, label = only_chunk(caffe_lmdb(path, decode=False, max_bytes=6))
    assert image.shape == (4, 6) and label.tolist() == [0, 1, 2, 3]
    assert lengths.tolist() == [1, 2, 3, 4]
    assert [row[:n].tobytes() for row, n in zip(image, lengths, strict=True)] == [
        b"x", b"xx", b"xxx", b"xxxx",
    ]  # fmt: skip
    assert not image[0, 1:].any()
    with pytest.raises(RecordError, match=r"b'00000001': the file has 2 bytes, .* has 1: give max"):
        only_chunk(caffe_lmdb(path, decode=False))
    longest_first = write_lmdb(tmp_path / "other", [file(i, b"x" * (4 - i)) for i in range(4)])
    source = caffe_lmdb(longest_first, decode=False, max_bytes=2, on_error="skip")
    image, lengths, label = only_chunk(source)
    assert label.tolist() == [2, 3] and lengths.tolist() == [2, 1] and source.skipped == 2
    assert image.tolist() == [[120, 120], [120, 0]]
    with pytest.raises(RecordError, match=r"b'00000002': the file has 3 bytes, max_bytes is 2"):
        only_chunk(caffe_lmdb(path, decode=False, max_bytes=2))


def test_what_the_flag_does_not_say_can_be_said(tmp_path: Path) -> None:
    unflagged = Datum(channels=1, height=2, width=2, data=b"abcd", label=1).SerializeToString()
    path = write_lmdb(tmp_path / "db", [unflagged])
    assert only_chunk(caffe_lmdb(path, encoded=False))[0].shape == (1, 2, 2, 1)
    assert only_chunk(caffe_lmdb(path, decode=False))[0].shape == (1, 4)
    flagged = write_lmdb(tmp_path / "flagged", [raw(1)])
    assert only_chunk(caffe_lmdb(flagged, encoded=True, decode=False))[0].shape == (1, 24)


DEFECTS = {
    "garbage": (b"\xff\xff\xff", "message ends within a varint"),
    "truncated": (raw(3)[:-30] + b"\x22\x18abc", r"field 4 ends at byte \d+, the message at \d+"),
    "empty": (b"", "the record has no label: give label_available=False"),
    "no label": (raw(None), "the record has no label: give label_available=False"),
    "no image": (
        Datum(label=1, encoded=False).SerializeToString(),
        "the record has no image: give image_available=False",
    ),
    "too few bytes": (raw(1, data=b"abc"), "the image has 3 bytes, expected 2 × 3 pixels of 4 ch"),
    "negative size": (
        raw(1, 1, 1, -1, data=b"abc"),
        "the image has 3 bytes, expected 1 × 1 pixels",
    ),
}


@pytest.mark.parametrize(("defect", "message"), DEFECTS.values(), ids=DEFECTS.keys())
def test_a_defective_record_is_named_or_skipped(
    tmp_path: Path, defect: bytes, message: str
) -> None:
    path = write_lmdb(tmp_path / "db", [raw(0), raw(1), defect, raw(3)])
    name = rf"{str(path)!r} at key b'00000002'"
    for _ in range(2):
        with pytest.raises(RecordError, match=rf"^{name}: {message}"):
            only_chunk(caffe_lmdb(path))
        source = caffe_lmdb(path, on_error="skip")
        assert only_chunk(source)[1].tolist() == [0, 1, 3] and source.skipped == 1
        assert [len(chunk[1]) for chunk in epoch_of(source, 1)] == [1, 1, 0, 1]


@pytest.mark.needs("PIL")
def test_a_corrupt_image_is_named_or_skipped(tmp_path: Path) -> None:
    good = encoded(picture(20, 30))
    values = [file(0, good), file(1, good[: len(good) // 2]), file(2, b"no image"), file(3, good)]
    path = write_lmdb(tmp_path / "db", values)
    with pytest.raises(RecordError, match=r"at key b'00000001': "):
        only_chunk(caffe_lmdb(path))
    source = caffe_lmdb(path, on_error="skip")
    image, label = only_chunk(source)
    assert label.tolist() == [0, 3] and len(image) == 2 and source.skipped == 2


def test_records_that_do_not_fit_each_other(tmp_path: Path) -> None:
    mixed = write_lmdb(tmp_path / "mixed", [raw(0), file(1, b"file")])
    with pytest.raises(
        RecordError,
        match=r"b'00000001': holds an image file, .* b'00000000' holds raw pixels \(2, 3, 4\)",
    ):
        only_chunk(caffe_lmdb(mixed, decode=False))
    shapes = write_lmdb(tmp_path / "shapes", [raw(0), raw(1), raw(2, 3, 2)])
    with pytest.raises(RecordError, match=r"b'00000002': holds raw pixels \(3, 2, 4\), .*0' holds"):
        only_chunk(caffe_lmdb(shapes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "WHC"}, r"layout is 'WHC', expected one of \('HWC', 'CHW'\)"),
        ({"image_available": False, "label_available": False}, "no column is left"),
        ({"image_available": 1}, "image_available is 1, expected True or False"),
        ({"encoded": "yes"}, "encoded is 'yes', expected True or False"),
        ({"max_bytes": 5}, "max_bytes is for files that are not decoded: give decode=False"),
        (
            {"decode": False, "max_bytes": 0},
            "max_bytes is 0, expected a whole number of at least 1",
        ),
        ({"decode": False, "resize": 5}, "resize is given, and decode is False: leave it out"),
        ({"image_available": False, "crop": 5}, "crop is given, and image_available is False"),
        ({"max_byte": 3}, "unknown option 'max_byte': did you mean 'max_bytes'"),
        ({"num_shards": 3}, "num_shards is 3, more than the 2 records"),
    ],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write_lmdb(tmp_path / "db", [raw(0), raw(1)])
    with pytest.raises(ConfigError, match=message):
        caffe_lmdb(path, **options)


def test_what_changes_the_rows_changes_the_description(tmp_path: Path) -> None:
    path = write_lmdb(tmp_path / "db", [raw(i) for i in range(4)])
    more = write_lmdb(tmp_path / "more", [raw(i) for i in range(5)])
    options: list[dict[str, Any]] = [
        {}, {"layout": "CHW"}, {"label_available": False}, {"max_bytes": 3}, {"encoded": True},
    ]  # fmt: skip
    seen = [str(caffe_lmdb(path, decode=False, **chosen).describe()) for chosen in options]
    seen += [str(caffe_lmdb(paths, decode=False).describe()) for paths in (more, [path, path])]
    assert len({*seen}) == len(seen)
    assert str(caffe_lmdb(path, decode=False).describe()) == seen[0]
