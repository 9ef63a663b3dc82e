"""Decoding image files to pixels: simplejpeg for JPEGs where it is installed, else Pillow."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.extras import find, load

DecoderName = Literal["auto", "simplejpeg", "pillow"]
Pixels: TypeAlias = NDArray[np.uint8]

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

    def check(self) -> None:
        """Raise a ConfigError where nothing that decodes is installed."""
        if self._simplejpeg is None:
            load("PIL.Image", "images")

    def __call__(self, data: bytes | memoryview) -> Pixels:
        """Decode a file.

        Raises:
            ValueError: it cannot be decoded.
            ConfigError: nothing that decodes it is installed.
        """
        if self._simplejpeg is not None and bytes(data[:2]) == _JPEG:
            return self._decode_jpeg(data)
        return decode_with_pillow(data)

    def _decode_jpeg(self, data: bytes | memoryview) -> Pixels:
        assert self._simplejpeg is not None
        if self._simplejpeg.decode_jpeg_header(data)[2] in ("CMYK", "YCCK"):
            return decode_with_pillow(data)
        # The slower and better transforms, which Pillow uses as well.
        pixels: Pixels = self._simplejpeg.decode_jpeg(
            data, colorspace="RGB", fastdct=False, fastupsample=False
        )
        return pixels


def decode_with_pillow(data: bytes | memoryview) -> Pixels:
    """Decode a file of any kind that Pillow knows."""
    image = load("PIL.Image", "images")
    try:
        with image.open(BytesIO(data)) as picture:
            return np.array(picture.convert("RGB"))
    except image.UnidentifiedImageError:
        # Its own message holds an address.
        raise ValueError("the image cannot be decoded: it is of no known kind") from None
    except (OSError, SyntaxError, image.DecompressionBombError) as error:
        raise ValueError(f"the image cannot be decoded: {error}") from error


def resize(pixels: Pixels, height: int, width: int) -> Pixels:
    """Scale an image, bilinear over the area that each new pixel covers."""
    if pixels.shape[:2] == (height, width):
        return pixels
    image = load("PIL.Image", "images")
    scaled = image.fromarray(pixels).resize((width, height), image.Resampling.BILINEAR)
    return np.asarray(scaled)


Transform: TypeAlias = Callable[[Pixels, np.random.Generator], NDArray[Any]]
