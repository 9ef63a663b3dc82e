"""What messages are made of: things that have no meaning alone."""

from __future__ import annotations

import math
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from feeder.service.protocol.fields import MAX_COUNT, Count, DType, Name, Seconds, Shape
from feeder.workers.stream.dtypes import is_name


class Report(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """What a consumer has seen since it last told."""

    waited_s: Seconds
    """Seconds for which its trainer waited for batches."""
    checked_s: Seconds
    """Seconds that checksums took."""
    corrupt: Count
    """Batches that came with bytes that were not sent."""
    positions: Count
    """Times that its position was asked for."""


_MOST_NAMED_BYTES = 16
"""No type of ml_dtypes has more. How many it has is not looked up: that would take the package,
and a consumer without it is to be told so by name."""


class ColumnSpec(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One column of a feed."""

    name: Name
    dtype: DType
    """As `numpy.dtype.str`; or the name of a type of ml_dtypes."""
    axis: Annotated[int, Meta(ge=0, le=31)]
    """The axis that is rows."""
    shape: Shape
    """The shape without that axis."""

    def __post_init__(self) -> None:
        item_bytes = _MOST_NAMED_BYTES if is_name(self.dtype) else self._find_item_bytes()
        if self.axis > len(self.shape):
            raise ValueError(f"axis is {self.axis}, expected at most {len(self.shape)}")
        if math.prod(self.shape) * item_bytes > MAX_COUNT:
            raise ValueError(f"a row of shape {self.shape!r} has more than {MAX_COUNT} bytes")

    def _find_item_bytes(self) -> int:
        try:
            dtype = np.dtype(self.dtype)
        except TypeError:
            raise ValueError(f"dtype is {self.dtype!r}, which numpy does not know") from None
        if dtype.str != self.dtype:
            raise ValueError(f"dtype is {self.dtype!r}, expected {dtype.str!r}")
        return dtype.itemsize


class Offer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a consumer on the same host may ask for the arenas."""

    path: Name
    """A unix socket."""
    nonce: Annotated[bytes, Meta(min_length=16, max_length=16)]
    """To be shown there, once."""
