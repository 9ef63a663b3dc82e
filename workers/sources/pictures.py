"""From image files to rows of one shape: decode, resize, crop, flip, and the user's own step.

One decoder does not do: simplejpeg is quick and reads JPEGs alone, Pillow reads all kinds. Their
pixels may differ in the last bits, so which of them decodes is part of the fingerprint, and a
position is not resumed with another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.fetch.seeding import RECORD_SEEDS
from feeder.workers.public import public
from feeder.workers.sources.arguments import check_names, flag, whole
from feeder.workers.sources.extras import find, load
from feeder.workers.sources.orders.options import ORDER_NAMES, OrderOptions
from feeder.workers.stream.batch import Call

# ---- Decoding image files to pixels: simplejpeg for JPEGs where it is installed, else Pillow.


DecoderName = Literal["auto", "simplejpeg", "pillow"]
ImageMode = Literal["RGB", "unchanged"]
Pixels: TypeAlias = NDArray[np.uint8]

_logger = logging.getLogger("feeder")

_JPEG = b"\xff\xd8"


class Decoder:
    """Turns an image file into pixels, uint8 of (height, width, 3), RGB. Any thread; the GIL is
    let go while a file is decoded."""

    def __init__(self, name: DecoderName) -> None:
        if name not in get_args(DecoderName):
            raise ConfigError(f"decoder is {name!r}, expected one of {get_args(DecoderName)!r}")
        self._simplejpeg = None if name == "pillow" else find("simplejpeg")
        if name == "simplejpeg":
            self._simplejpeg = load("simplejpeg", "images")
        self.name = "pillow" if self._simplejpeg is None else "simplejpeg"
        """Which one decodes JPEGs. Their pixels may differ, so it belongs to the fingerprint."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By its name: a module cannot be pickled.
        return Decoder, (self.name,)

    def check(self) -> None:
        """Raise a ConfigError where nothing that decodes is installed."""
        if self._simplejpeg is None:
            load("PIL.Image", "images")

    def __call__(self, data: bytes | memoryview, factor: int = 1) -> Pixels:
        """Decode a file; a JPEG to a 2nd, 4th or 8th of its size.

        Raises:
            ValueError: it cannot be decoded.
            ConfigError: nothing that decodes it is installed.
        """
        if self._simplejpeg is not None and bytes(data[:2]) == _JPEG:
            return self._decode_jpeg(data, factor)
        return decode_with_pillow(data, factor)

    def _decode_jpeg(self, data: bytes | memoryview, factor: int) -> Pixels:
        assert self._simplejpeg is not None
        height, width, space, _ = self._simplejpeg.decode_jpeg_header(data)
        if space in ("CMYK", "YCCK"):
            return decode_with_pillow(data, factor)
        least = (-(-height // factor), -(-width // factor)) if factor > 1 else (0, 0)
        # The slower and better transforms, which Pillow uses as well.
        pixels: Pixels = self._simplejpeg.decode_jpeg(
            data, colorspace="RGB", fastdct=False, fastupsample=False,
            min_height=least[0], min_width=least[1],
        )  # fmt: skip
        return pixels

    def size_of(self, data: bytes | memoryview) -> tuple[int, int]:
        """Height and width of a file, which is not decoded. Raises ValueError."""
        if self._simplejpeg is not None and bytes(data[:2]) == _JPEG:
            height, width, *_ = self._simplejpeg.decode_jpeg_header(data)
            return height, width
        with _open(data) as picture:
            return picture.height, picture.width


@public("feeder.sources")
def decode_image(
    file: Any, decoder: DecoderName = "auto", *, mode: ImageMode = "RGB", upright: bool = False
) -> NDArray[Any]:
    """An image file as pixels: uint8 of (height, width, 3), RGB. For `map`, of columns that hold
    image files, as Hugging Face's `datasets` writes them, and for `decoders` of tar shards.

    Args:
        file: Its bytes, or a mapping of "bytes" and "path" of which one may be None.
        decoder: "simplejpeg", "pillow", or "auto": simplejpeg for JPEGs if it is installed.
        mode: "RGB"; or "unchanged": what the file holds, as masks and depth need it. That is
            (height, width) of whole numbers with 8, 16 or 32 bits, floats or bools; of a palette
            the numbers of the colours; or with an axis of 2 to 4 channels. By Pillow.
        upright: Whether the image is turned as its EXIF data say. By Pillow.

    Raises:
        ValueError: it cannot be decoded. (OSError: the path cannot be read.)
        ConfigError: nothing that decodes it is installed.
    """
    data, path = (
        (file.get("bytes"), file.get("path")) if isinstance(file, Mapping) else (file, None)
    )
    if data is None and path is not None:
        data = Path(path).read_bytes()
    if isinstance(data, np.ndarray) and data.dtype == np.uint8:
        data = data.tobytes()
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise ValueError(f"is {type(data).__name__}, expected the bytes of an image file")
    if mode not in get_args(ImageMode):
        raise ConfigError(f"mode is {mode!r}, expected one of {get_args(ImageMode)!r}")
    made = Decoder(decoder)
    if mode == "RGB" and not flag("upright", upright):
        return made(bytes(data))
    with _open(bytes(data)) as picture:
        if upright:
            picture = load("PIL.ImageOps", "images").exif_transpose(picture)
        pixels = _rgb(picture) if mode == "RGB" else np.array(picture)
    return pixels.astype(pixels.dtype.newbyteorder("="), copy=False)


def decode_with_pillow(data: bytes | memoryview, factor: int = 1) -> Pixels:
    """Decode a file of any kind that Pillow knows; a JPEG to a 2nd, 4th or 8th of its size."""
    with _open(data) as picture:
        if factor > 1:
            picture.draft("RGB", (-(-picture.width // factor), -(-picture.height // factor)))
        return _rgb(picture)


def _rgb(picture: Any) -> Pixels:
    if picture.mode[0] in "IF":
        _tell_of_depth(picture.mode)
    return np.array(picture.convert("RGB"))


@cache
def _tell_of_depth(mode: str) -> None:
    _logger.warning(
        "images of more than 8 bits (mode %r of Pillow) become RGB, in which all above 255 is "
        "white: sources.decode_image(file, mode='unchanged') has their values", mode,
    )  # fmt: skip


@contextmanager
def _open(data: bytes | memoryview) -> Iterator[Any]:
    """A file, as Pillow opens it; what fails is a ValueError."""
    image = load("PIL.Image", "images")
    try:
        with image.open(BytesIO(data)) as picture:
            yield picture
    except image.UnidentifiedImageError:
        # Its own message holds an address.
        raise ValueError("the image cannot be decoded: it is of no known kind") from None
    except (OSError, SyntaxError, image.DecompressionBombError) as error:
        raise ValueError(f"the image cannot be decoded: {error}") from error


def resize(pixels: Pixels, height: int, width: int, box: tuple[float, ...] | None = None) -> Pixels:
    """Scale an image, or what lies in a box of it (left, top, right, bottom), bilinear over the
    area that each new pixel covers."""
    if box is None and pixels.shape[:2] == (height, width):
        return pixels
    image = load("PIL.Image", "images")
    scaled = image.fromarray(pixels).resize((width, height), image.Resampling.BILINEAR, box)
    return np.asarray(scaled)


@dataclass(frozen=True, slots=True)
class ResizedCrop:
    """A random part of an image, scaled to one size: torchvision's `RandomResizedCrop`, whose draws
    have the same distribution and whose pixels of one part are the same."""

    height: int
    width: int
    scale: tuple[float, float]
    ratio: tuple[float, float]
    draft: bool

    def part(self, height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
        """Which part of an image: top, left, height, width."""
        low, high = map(math.log, self.ratio)
        for _ in range(10):
            area = height * width * rng.uniform(*self.scale)
            ratio = math.exp(rng.uniform(low, high))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                return int(rng.integers(height - h + 1)), int(rng.integers(width - w + 1)), h, w
        # The largest part in the middle whose ratio is allowed.
        w = min(width, round(height * self.ratio[1]))
        h = min(height, round(width / self.ratio[0]))
        return (height - h) // 2, (width - w) // 2, h, w

    def __call__(
        self, data: bytes | memoryview, decoder: Decoder, rng: np.random.Generator
    ) -> Pixels:
        """The pixels of a file's part."""
        if not self.draft:
            pixels = decoder(data)
            height, width = pixels.shape[:2]
            top, left, h, w = self.part(height, width, rng)
            return resize(pixels[top : top + h, left : left + w], self.height, self.width)
        height, width = decoder.size_of(data)
        top, left, h, w = self.part(height, width, rng)
        # As small as it may be decoded with a pixel for each that is wanted.
        factor = next((f for f in (8, 4, 2) if h >= f * self.height and w >= f * self.width), 1)
        pixels = decoder(data, factor)
        y, x = pixels.shape[0] / height, pixels.shape[1] / width
        upper, lower, first, last = top * y, (top + h) * y, left * x, (left + w) * x
        row, column = int(upper), int(first)
        inner = pixels[row : math.ceil(lower), column : math.ceil(last)]
        box = first - column, upper - row, last - column, lower - row
        return resize(inner, self.height, self.width, box)

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        return {
            "random_resized_crop": [self.height, self.width], "scale": list(self.scale),
            "ratio": list(self.ratio), "draft": self.draft,
        }  # fmt: skip


Transform: TypeAlias = Callable[[Pixels, np.random.Generator], NDArray[Any]]


class PictureOptions(OrderOptions, total=False):
    """Keyword arguments of sources that decode images, beside the order options.

    They apply in the order in which they stand here. Random draws come from
    `call.rng_for(record)`: they depend on the seed, the epoch and the record alone.
    """

    decoder: DecoderName
    """What decodes JPEGs: "simplejpeg", "pillow", or "auto", the first that is installed."""
    resize: int | tuple[int, int] | None
    """Pixels of the shorter side, or (height, width) (None: leave the size)."""
    crop: int | tuple[int, int] | None
    """Side, or (height, width), of the part to cut out (None: all)."""
    random_crop: bool
    """Whether the part lies anywhere, else in the middle (False)."""
    random_resized_crop: int | tuple[int, int] | None
    """In place of these: a random part of the image, scaled to this side, or (height, width), as
    torchvision's `RandomResizedCrop` does it (None)."""
    scale: tuple[float, float]
    """The least and the most share of the image that such a part has (0.08, 1)."""
    ratio: tuple[float, float]
    """Its least and its most width to height (3/4, 4/3)."""
    draft: bool
    """Whether JPEGs of which a part is made smaller are decoded at a half, a 4th or an 8th of their
    size, if that leaves a pixel for each. It is quicker; pixels differ a little (False)."""
    random_flip: bool
    """Whether every other image is mirrored, left to right (False)."""
    transform: Transform | None
    """A last step of your own, `transform(image, rng)`, which returns an array (None)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """Checked picture options."""

    decoder: Decoder
    resize: int | tuple[int, int] | None
    crop: tuple[int, int] | None
    random_crop: bool
    random_flip: bool
    transform: Transform | None
    resized_crop: ResizedCrop | None = None

    def decode(self, data: bytes | memoryview, call: Call, record: int) -> NDArray[Any]:
        """The row that an image file becomes.

        Raises:
            ValueError: it cannot be decoded, or is smaller than the part to cut out.
        """
        is_random = self.random_crop or self.random_flip or self.transform is not None
        rng = call.rng_for(record) if is_random or self.resized_crop is not None else None
        if self.resized_crop is not None and rng is not None:
            pixels = self.resized_crop(data, self.decoder, rng)
        else:
            pixels = self._resized(self.decoder(data))
        if self.crop is not None:
            pixels = self._cropped(pixels, *self.crop, rng if self.random_crop else None)
        if self.random_flip and rng is not None and rng.random() < 0.5:
            pixels = _mirrored(pixels)
        if self.transform is None or rng is None:
            return pixels
        RECORD_SEEDS.seed(call, record)
        return np.asarray(self.transform(pixels, rng))

    def _resized(self, pixels: Pixels) -> Pixels:
        if self.resize is None:
            return pixels
        if not isinstance(self.resize, int):
            return resize(pixels, *self.resize)
        height, width = pixels.shape[:2]
        shorter = min(height, width)
        return resize(
            pixels, round(height * self.resize / shorter), round(width * self.resize / shorter)
        )

    def _cropped(
        self, pixels: Pixels, height: int, width: int, rng: np.random.Generator | None
    ) -> Pixels:
        spare = pixels.shape[0] - height, pixels.shape[1] - width
        if min(spare) < 0:
            raise ValueError(
                f"the image has {pixels.shape[0]} × {pixels.shape[1]} pixels, fewer than the crop "
                f"of {height} × {width}: give a resize, or a smaller crop"
            )
        top, left = (s // 2 for s in spare) if rng is None else rng.integers(0, np.add(spare, 1))
        return pixels[top : top + height, left : left + width]

    def fingerprint_fields(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        return {
            "decoder": self.decoder.name,
            "resize": list(self.resize) if isinstance(self.resize, tuple) else self.resize,
            "crop": None if self.crop is None else list(self.crop),
            "random_crop": self.random_crop,
            "random_flip": self.random_flip,
            "transform": self.transform is not None,
            **({} if self.resized_crop is None else self.resized_crop.describe()),
        }


def _mirrored(pixels: Pixels) -> Pixels:
    """An image from right to left. A pixel at a time: byte by byte it takes as long as half of the
    decoding (2026-11-28)."""
    return np.ascontiguousarray(pixels.view("V3")[:, ::-1]).view(np.uint8)


def take_pictures(options: PictureOptions) -> tuple[Pictures, OrderOptions]:
    """Check the picture options; the order options that are left.

    Raises:
        ConfigError: an option has a value that it cannot have, or a package is missing.
    """
    check_names(options, (*PICTURE_NAMES, *ORDER_NAMES))
    own = {name: options.get(name) for name in PICTURE_NAMES if name in options}
    transform = own.get("transform")
    if transform is not None and not callable(transform):
        raise ConfigError(f"transform is {transform!r}, expected a function of (image, rng)")
    scale, part = own.get("resize"), own.get("crop")
    if scale is not None:
        load("PIL.Image", "images")
    # Random steps draw from `call.rng_for(record)`: they belong to the record, whichever thread or
    # call reads it.
    random_crop = flag("random_crop", own.get("random_crop", False))
    if random_crop and part is None:
        raise ConfigError("random_crop is given without crop, the size of the part")
    pictures = Pictures(
        decoder=Decoder(own.get("decoder", "auto")),  # type: ignore[arg-type]
        resize=None if scale is None else _size("resize", scale),
        crop=None if part is None else _pair("crop", part),
        random_crop=random_crop,
        random_flip=flag("random_flip", own.get("random_flip", False)),
        transform=transform,
        resized_crop=_resized_crop(own),
    )
    rest: Any = {name: value for name, value in options.items() if name not in PICTURE_NAMES}
    return pictures, rest


def _resized_crop(own: dict[str, Any]) -> ResizedCrop | None:
    size = own.get("random_resized_crop")
    others = [name for name in ("scale", "ratio", "draft") if name in own]
    if size is None:
        if others:
            raise ConfigError(f"{others[0]} is given without random_resized_crop")
        return None
    for name in ("resize", "crop", "random_crop"):
        if own.get(name):
            raise ConfigError(f"random_resized_crop and {name} are given, expected one of the two")
    load("PIL.Image", "images")
    height, width = _pair("random_resized_crop", size)
    scale, ratio = (_range(name, own.get(name, default)) for name, default in _RANGES.items())
    return ResizedCrop(height, width, scale, ratio, flag("draft", own.get("draft", False)))


_RANGES = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)}


def _range(name: str, value: Any) -> tuple[float, float]:
    try:
        low, high = map(float, value)
    except (TypeError, ValueError):
        low = high = math.nan
    if not 0 < low <= high < math.inf or (name == "scale" and high > 1):
        raise ConfigError(f"{name} is {value!r}, expected (least, most) such as {_RANGES[name]}")
    return low, high


ONE_SIZE = ": give a resize or a crop"
"""What brings images to one size."""

PICTURE_NAMES = tuple(name for name in PictureOptions.__annotations__ if name not in ORDER_NAMES)


def _size(name: str, value: object) -> int | tuple[int, int]:
    return _pair(name, value) if isinstance(value, Sequence) else whole(name, value, 1)


def _pair(name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, Sequence):
        return (whole(name, value, 1),) * 2
    if isinstance(value, str) or len(value) != 2:
        raise ConfigError(f"{name} is {value!r}, expected a number or (height, width) in pixels")
    return whole(name, value[0], 1), whole(name, value[1], 1)
