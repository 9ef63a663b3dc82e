"""Folders of images: the list, decoding, random crops and flips that belong to the record."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from calls import call, epoch_of
from feeder.workers.errors import ConfigError
from feeder.workers.sources import (
    RecordError,
    decode_image,
    extras,
    image_folder,
    parquet,
    pictures,
)
from feeder.workers.sources.pictures import Decoder, ResizedCrop
from needs import needs
from stores import encoded, picture

needs("PIL")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label in range(3):
        (tmp_path / f"class{label}").mkdir()
        for i in range(4):
            data = encoded(picture(20, 24, 10 * label + i))
            (tmp_path / f"class{label}" / f"{i}.jpg").write_bytes(data)
    return tmp_path


def test_the_list_is_sorted_byte_by_byte(tmp_path: Path) -> None:
    files = [
        ".c/h.bmp", "Z/z.webp", "Z/ü.jpg", "a/10.jpg", "a/2.jpg", "a/9.PNG", "b/X.JPG", "b/x.jpg",
    ]  # fmt: skip
    for i, file in reversed(list(enumerate(files))):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        kind = {".PNG": "PNG", ".webp": "WEBP", ".bmp": "BMP"}.get(path.suffix, "JPEG")
        path.write_bytes(encoded(picture(8, 8, i), kind))
    (tmp_path / "0 empty").mkdir()
    (tmp_path / "a" / "note.txt").write_text("no image")
    (tmp_path / "a" / "inner").mkdir()
    (tmp_path / "top.jpg").write_bytes(encoded(picture(8, 8)))
    source = image_folder(tmp_path)
    names = [source.records.name(i) for i in range(len(source))]
    assert names == [repr(str(tmp_path / file)) for file in files]
    assert source.records.classes == (".c", "0 empty", "Z", "a", "b")  # type: ignore[attr-defined]
    image, label = source(call(0, 20))
    assert label.dtype == np.int32 and label.tolist() == [0, 2, 2, 3, 3, 3, 4, 4]
    assert image.dtype == np.uint8 and image.shape == (8, 8, 8, 3)


names = st.sampled_from(["a", "a-b", "B", "é", ".h", "b.jpg", "c.PNG", "d.txt"])
trees = st.recursive(
    st.just({}), lambda inner: st.dictionaries(names, st.none() | inner, max_size=4), max_leaves=9
)


def write_tree(folder: Path, tree: Any) -> None:
    folder.mkdir()
    for name, inner in tree.items():
        if inner is None:
            (folder / name).touch()
        else:
            write_tree(folder / name, inner)


@given(st.dictionaries(names, trees, min_size=1, max_size=3))
def test_folders_of_a_class_are_looked_into(tree: Any) -> None:
    """In the order of torchvision's `ImageFolder`, which is that of `sorted(os.walk(...))`."""
    with TemporaryDirectory() as name:
        root = Path(name) / "root"
        write_tree(root, tree)
        # A link to a folder is one of them.
        (Path(name) / "other").mkdir()
        (Path(name) / "other" / "l.jpg").touch()
        (root / next(iter(tree)) / "link").symlink_to(Path(name) / "other")
        wanted = [
            (os.path.join(folder, file), label)
            for label, one in enumerate(sorted(tree, key=os.fsencode))
            for folder, _, files in sorted(os.walk(root / one, followlinks=True))
            for file in sorted(files)
            if file.lower().endswith((".jpg", ".png"))
        ]
        source = image_folder(root)
        records: Any = source.records
        assert [records.name(i) for i in range(len(source))] == [repr(path) for path, _ in wanted]
        assert records._labels.tolist() == [label for _, label in wanted]


def test_a_file_that_can_be_read_later_is_not_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failures = Path.read_bytes, iter([1, 1, 1])

    def failing(path: Path) -> bytes:
        if path.name == "2.jpg" and next(failures, 0):
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    source = image_folder(folder, on_error="skip")
    assert len(source(call(0, 12))[0]) == 12 and source.skipped == 0


def test_the_reader_of_dali_looks_into_no_folder(folder: Path) -> None:
    flat = image_folder(folder)
    (folder / "class1" / "inner").mkdir()
    (folder / "class1" / "inner" / "x.jpg").touch()
    assert len(image_folder(folder, order="dali")) == len(flat) == 12
    assert len(image_folder(folder)) == 13
    assert image_folder(folder).describe() != flat.describe()
    (folder / "class1" / "inner" / "again").symlink_to(folder / "class1")
    with pytest.raises(ConfigError, match=r"inner/again' is a link to a folder that it lies in"):
        image_folder(folder)


@pytest.mark.parametrize("decoder", ["simplejpeg", "pillow"])
def test_pixels(folder: Path, decoder: Any) -> None:
    needs("simplejpeg" if decoder == "simplejpeg" else "PIL")
    image, _ = image_folder(folder, decoder=decoder)(call(0, 12))
    for i in range(12):
        wanted = picture(20, 24, i // 4 * 10 + i % 4)
        assert np.abs(image[i].astype(int) - wanted).mean() < 8


def test_grey_and_transparent_images_become_rgb(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "a").mkdir()
    for i, mode in enumerate(["L", "LA", "P", "RGBA", "1", "CMYK"]):
        suffix = "jpg" if mode == "CMYK" else "png"
        Image.fromarray(picture(8, 8)).convert("RGB").convert(mode).save(
            tmp_path / f"a/{i}.{suffix}"
        )
    Image.fromarray(picture(8, 8)).convert("L").save(tmp_path / "a" / "7.jpg")
    rows, _ = image_folder(tmp_path)(call(0, 10))
    assert rows.shape == (7, 8, 8, 3)


def test_sizes(folder: Path) -> None:
    shapes = {
        (("resize", (5, 7)),): (5, 7),
        (("resize", 10),): (10, 12),
        (("crop", 8),): (8, 8),
        (("crop", (20, 24)),): (20, 24),
        (("resize", 40), ("crop", (30, 35))): (30, 35),
    }
    for options, (height, width) in shapes.items():
        image, _ = image_folder(folder, **dict(options))(call(0, 3))  # type: ignore[arg-type]
        assert image.shape == (3, height, width, 3)


def test_a_crop_without_chance_is_of_the_middle(folder: Path) -> None:
    whole, _ = image_folder(folder)(call(0, 3))
    part, _ = image_folder(folder, crop=(10, 12))(call(0, 3))
    assert (part == whole[:, 5:15, 6:18]).all()


def test_random_crops_and_flips_are_parts_of_the_image(folder: Path) -> None:
    whole, _ = image_folder(folder)(call(0, 1))
    parts = {
        (top, left, step): whole[0][top : top + 18, left : left + 20][:, ::step].tobytes()
        for top in range(3)
        for left in range(5)
        for step in (1, -1)
    }
    source = image_folder(folder, crop=(18, 20), random_crop=True, random_flip=True)
    seen = set()
    for epoch in range(100):
        image, _ = source(call(0, 1, epoch))
        seen.add(next(place for place, part in parts.items() if part == image[0].tobytes()))
    assert {top for top, _, _ in seen} == {0, 1, 2} and {left for _, left, _ in seen} == set(
        range(5)
    )
    assert {step for _, _, step in seen} == {1, -1}


def test_draws_belong_to_the_record(folder: Path) -> None:
    def shift(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.float32]:
        return image.astype(np.float32) + np.float32(rng.normal())

    chance: dict[str, Any] = {"random_flip": True, "crop": 9, "random_crop": True}

    def rows(epoch: int, feed_seed: int, batch_size: int, **order: Any) -> dict[bytes, bytes]:
        """By the image without chance, what became of it."""
        source = image_folder(folder, transform=shift, **chance, **order)
        plain = image_folder(folder, **order)
        became = {}
        for index in range(12 // batch_size):
            which = call(index, batch_size, epoch, feed_seed)
            for image, row in zip(plain(which)[0], source(which)[0], strict=True):
                became[image.tobytes()] = row.tobytes()
        return became

    first = rows(0, 1, 4)
    assert len(set(first.values())) == 12
    assert first == rows(0, 1, 3, random_shuffle=True)
    assert first == rows(0, 1, 12, random_shuffle=True, seed=9)
    assert all(first[image] != row for image, row in rows(1, 1, 4).items())
    assert all(first[image] != row for image, row in rows(0, 2, 4).items())


@given(
    st.tuples(st.integers(8, 200), st.integers(8, 200)), st.integers(4, 40), st.integers(0, 99),
    st.sampled_from(["simplejpeg", "pillow"]), st.tuples(st.floats(0.05, 0.5), st.floats(0.5, 1)),
)  # fmt: skip
def test_a_random_part_is_pillows(
    size: tuple[int, int], side: int, seed: int, decoder: Any, scale: tuple[float, float]
) -> None:
    needs("simplejpeg")
    image, data = extras.load("PIL.Image", "images"), encoded(picture(*size, seed))
    with image.open(BytesIO(data)) as opened:
        whole = opened.convert("RGB")
    crop = ResizedCrop(side, side + 2, scale, (0.5, 2), draft=False)
    top, left, height, width = crop.part(*size, np.random.default_rng(seed))
    assert 0 <= top <= size[0] - height and 0 <= left <= size[1] - width
    wanted = whole.crop((left, top, left + width, top + height))
    wanted = wanted.resize((side + 2, side), image.Resampling.BILINEAR)
    made = crop(data, Decoder(decoder), np.random.default_rng(seed))
    np.testing.assert_array_equal(made, np.asarray(wanted))
    # With a draft, which is a half, a quarter or an eighth, as Pillow's own.
    near = [
        replace(crop, draft=True)(data, Decoder(name), np.random.default_rng(seed)).astype(int)
        for name in ("simplejpeg", "pillow")
    ]
    assert near[0].shape == made.shape
    assert all(abs(one - made).mean() < 12 for one in near)


def test_images_of_different_sizes(folder: Path) -> None:
    path = folder / "class0" / "2.jpg"
    path.write_bytes(encoded(picture(30, 24)))
    message = rf"^{str(path)!r}: image is uint8\[30, 24, 3\], .*0\.jpg' has uint8\[20, 24, 3\]: "
    message += "the rows of a batch must be alike: give a resize or a crop$"
    with pytest.raises(RecordError, match=message):
        image_folder(folder)(call(0, 4))
    assert image_folder(folder, resize=(20, 24))(call(0, 4))[0].shape == (4, 20, 24, 3)
    with pytest.raises(RecordError, match=r"the image has 20 × 24 pixels, fewer than the crop"):
        image_folder(folder, crop=25)(call(0, 1))


@pytest.mark.parametrize("decoder", ["simplejpeg", "pillow"])
def test_files_that_cannot_be_read(folder: Path, decoder: Any) -> None:
    needs("simplejpeg" if decoder == "simplejpeg" else "PIL")
    paths = [folder / "class0" / f"{i}.jpg" for i in range(4)]
    options = {"decoder": decoder}
    source = image_folder(folder, **options)
    skipping = image_folder(folder, on_error="skip", **options)
    paths[1].write_bytes(paths[1].read_bytes()[:300])
    paths[2].unlink()
    for index, message in [(1, ""), (2, "No such file or directory$")]:
        with pytest.raises(RecordError, match=rf"^{str(paths[index])!r}: {message}"):
            source(call(index, 1))
    assert [len(image) for image, _ in epoch_of(skipping, 4)] == [2, 4, 4]
    assert skipping.skipped == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": 0}, "resize is 0, expected a whole number of at least 1"),
        ({"resize": (1, 2, 3)}, r"resize is \(1, 2, 3\), expected a number or \(height, width\)"),
        ({"crop": (0, 5)}, "crop is 0, expected a whole number of at least 1"),
        ({"crop": 2.5}, "crop is 2.5, expected a whole number of at least 1"),
        ({"random_crop": True}, "random_crop is given without crop"),
        ({"scale": (0.5, 1)}, "scale is given without random_resized_crop"),
        ({"random_resized_crop": 8, "crop": 4}, "random_resized_crop and crop are given"),
        ({"random_resized_crop": 8, "scale": (0.5, 2)}, r"scale is \(0.5, 2\), expected"),
        ({"random_resized_crop": 8, "ratio": 2}, r"ratio is 2, expected \(least, most\)"),
        ({"random_flip": 1}, "random_flip is 1, expected True or False"),
        ({"transform": 3}, "transform is 3, expected a function of"),
        (
            {"decoder": "gif"},
            r"decoder is 'gif', expected one of \('auto', 'simplejpeg'",
        ),
        ({"crop": "ab"}, r"crop is 'ab', expected a number or \(height, width\) in pixels"),
        ({"random_flp": True}, "unknown option 'random_flp': did you mean 'random_flip'"),
        ({"xyz": 5}, "unknown option 'xyz': expected decoder, resize, .*, shard_id"),
        ({"on_error": None}, "on_error is None, expected one of"),
    ],
)
def test_bad_options(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        image_folder(folder, **options)


def test_folders_without_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist, expected a folder of class folders"):
        image_folder(tmp_path / "missing")
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ConfigError, match="is not a folder, expected a folder of class folders"):
        image_folder(tmp_path / "file")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "note.txt").write_text("no image")
    with pytest.raises(ConfigError, match="holds no images: expected files such as"):
        image_folder(tmp_path)


def test_a_class_that_cannot_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refuse(path: Path) -> Any:
        if path.name == "class1":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=r"class1' cannot be read: Permission denied$"):
        image_folder(folder)


def test_a_folder_named_as_an_image_is_none_and_a_broken_link_is_one(folder: Path) -> None:
    (folder / "class1" / "5.jpg").mkdir()
    (folder / "class1" / "6.jpg").symlink_to(folder / "class0" / "0.jpg")
    source = image_folder(folder)
    assert len(source) == 13 and source.records.name(8) == repr(str(folder / "class1" / "6.jpg"))
    assert source(call(8, 1))[1].tolist() == [1]
    (folder / "class0" / "0.jpg").unlink()
    with pytest.raises(RecordError, match=r"6\.jpg': No such file or directory"):
        image_folder(folder)(call(7, 1))


def test_a_file_of_no_known_kind(folder: Path) -> None:
    for data in (b"", b"no image"):
        (folder / "class0" / "0.jpg").write_bytes(data)
        with pytest.raises(RecordError, match=r"0\.jpg': the image cannot be decoded: it is of no"):
            image_folder(folder)(call(0, 1))


def test_without_a_decoder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find", lambda package: None)
    monkeypatch.setattr("feeder.workers.sources.pictures.find", lambda package: None)
    with pytest.raises(ConfigError, match=r"Pillow is not installed: pip install 'feedworks\[im"):
        image_folder(folder)
    with pytest.raises(ConfigError, match="simplejpeg is not installed"):
        image_folder(folder, decoder="simplejpeg")


def test_what_changes_the_rows_changes_the_description(folder: Path) -> None:
    options: list[dict[str, Any]] = [
        {}, {"resize": 5}, {"resize": (5, 5)}, {"crop": 5}, {"crop": 5, "random_crop": True},
        {"random_flip": True}, {"transform": lambda image, rng: image}, {"random_shuffle": True},
        {"random_resized_crop": 5}, {"random_resized_crop": 5, "draft": True},
        {"random_resized_crop": 5, "ratio": (1, 1)},
    ]  # fmt: skip
    seen = [str(image_folder(folder, **chosen).describe()) for chosen in options]
    os.rename(folder / "class0" / "0.jpg", folder / "class0" / "00.jpg")
    assert len({*seen, str(image_folder(folder).describe())}) == len(options) + 1


@pytest.mark.parametrize("decoder", ["pillow", "simplejpeg"])
def test_images_of_a_table_are_decoded_in_map(decoder: Any, tmp_path: Path) -> None:
    needs("pyarrow")
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = [encoded(picture(9, 7, i), kind) for i, kind in enumerate(["PNG", "JPEG", "PNG"])]
    (tmp_path / "x.png").write_bytes(files[2])
    rows = [{"bytes": files[0], "path": None}, {"bytes": files[1], "path": "gone"}]
    pq.write_table(pa.table({"image": rows, "label": [5, 6]}), tmp_path / "x.parquet")
    source = parquet(tmp_path / "x.parquet").map(
        lambda row: {"pixels": decode_image(row["image.bytes"], decoder), "label": row["label"]}
    )
    made = source(call(0, 2))
    assert made["pixels"].shape == (2, 9, 7, 3) and made["label"].tolist() == [5, 6]
    assert (made["pixels"][0] == picture(9, 7, 0)).all()
    by_path = decode_image({"bytes": None, "path": str(tmp_path / "x.png")}, decoder)
    assert (by_path == picture(9, 7, 2)).all()
    for file in (None, 5, {"bytes": None, "path": None}):
        with pytest.raises(ValueError, match="expected the bytes of an image file"):
            decode_image(file)
    for options, told in (({"mode": "L"}, "mode is 'L'"), ({"upright": 1}, "upright is 1")):
        with pytest.raises(ConfigError, match=told):
            decode_image(files[0], **options)


@pytest.mark.parametrize(
    ("mode", "dtype", "suffix"),
    [
        ("L", np.uint8, "PNG"), ("P", np.uint8, "PNG"), ("1", np.bool_, "PNG"),
        ("I;16", np.uint16, "PNG"), ("I;16B", np.uint16, "TIFF"), ("I", np.int32, "TIFF"),
        ("F", np.float32, "TIFF"), ("LA", np.uint8, "PNG"), ("RGBA", np.uint8, "PNG"),
        ("CMYK", np.uint8, "JPEG"), ("L", np.uint8, "JPEG"),
    ],
)  # fmt: skip
def test_an_image_may_stay_what_it_is(
    mode: str, dtype: Any, suffix: str, caplog: pytest.LogCaptureFixture
) -> None:
    from PIL import Image, ImageOps

    pictures._tell_of_depth.cache_clear()
    values = np.random.default_rng(1).integers(0, 60_000, (6, 9)).astype(np.uint16)
    if mode[0] in "IF":
        made = Image.frombytes(
            mode, (9, 6), values.astype({"I;16B": ">u2"}.get(mode, dtype)).tobytes()
        )
    elif mode == "P":
        made = Image.fromarray((values % 5).astype(np.uint8), "P")
        made.putpalette([3 * k for k in range(15)])
    else:
        made = Image.fromarray(picture(6, 9)).convert("RGB").convert(mode)
    exif = Image.Exif()
    exif[0x0112] = 6
    stream = BytesIO()
    # Pillow turns TIFFs in any case.
    made.save(stream, suffix, **({} if suffix == "TIFF" else {"exif": exif}))
    there = Image.open(BytesIO(stream.getvalue()))
    for upright in (False, True):
        wanted = ImageOps.exif_transpose(there) if upright else there
        pixels = decode_image(stream.getvalue(), mode="unchanged", upright=upright)
        assert pixels.dtype == dtype
        assert np.array_equal(pixels, np.array(wanted))
        if not upright and (mode[0] in "IFP"):
            assert np.array_equal(pixels, values % 5 if mode == "P" else values)
        rgb = decode_image(stream.getvalue(), "pillow", upright=upright)
        assert np.array_equal(rgb, np.array(wanted.convert("RGB")))
    assert ("255 is white" in caplog.text) == (mode[0] in "IF")
