"""A batch on the host as a GPU takes it: all columns in one piece of pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder.devices.cuda.driver import Driver, Found
from feeder.devices.layout import Forms, Layout, lay_out
from feeder.errors import ConfigError
from feeder.workers.stream.chunks import Columns

Arrays = tuple[NDArray[Any], ...]

_ON_GPUS = frozenset(map(np.dtype, "?bhilqBHILQefdFD"))
"""The dtypes that GPUs have arrays of. Of other packages' types NumPy's codes may be the same."""

ON_HOST = np.dtype("V1")
"""Bytes that no GPU has arrays of: a column of this dtype stays on the host, as NumPy's."""


class Packed(tuple[NDArray[Any], ...]):
    """The arrays of a batch, which know where they lie.

    Whoever has copied them calls `give_back` and forgets them: their memory may be written
    again. Never changed after it is made; once it is queued, the copier's thread alone reads it.
    """

    region: object
    """What the memory is part of; it lives at least as long as this."""
    address: int
    """Where the memory begins."""
    layout: Layout | Forms
    """How the columns lie in it."""
    rows: int
    """The rows that it is laid out for."""
    length: int
    """The rows that it holds, the first ones."""
    on_host: dict[int, NDArray[Any]]
    """The columns that stay on the host, by number: copies, for the memory is written again. The
    layout is that of the other columns."""
    give_back: Callable[[], None]
    """Says that the memory is not needed any more."""


def pack(
    arrays: Arrays,
    *,
    region: object,
    address: int,
    layout: Layout,
    rows: int,
    length: int,
    give_back: Callable[[], None],
) -> Packed:
    """Arrays with what is known of their memory."""
    packed = Packed(arrays)
    packed.region = region
    packed.on_host = {
        i: arrays[i].copy() for i, place in enumerate(layout.places) if place.dtype == ON_HOST
    }
    if packed.on_host:
        moved = tuple(place for place in layout.places if place.dtype != ON_HOST)
        layout = Layout(moved, layout.num_bytes)
    packed.address, packed.layout, packed.rows, packed.length = address, layout, rows, length
    packed.give_back = give_back
    return packed


class Made(Packed):
    """What a function made of a batch, which lies where its library has put it."""

    found: list[Found]
    """Its arrays on the device, in the order of the layout's places."""

    @property
    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Where each array begins, and in a slot, and its bytes, if it has any."""
        for found, place in zip(self.found, self.layout.places, strict=True):
            if found.form.num_bytes:
                yield found.address, place[-1], found.form.num_bytes

    @classmethod
    def of(cls, driver: Driver, columns: tuple[Any, ...]) -> Made:
        """The arrays that a function returned; what is none of the device stays where it is. Raises
        `ValueError` for an array of another device."""
        made = cls()
        looked = [driver.find(value) for value in columns]
        made.found = [one for one in looked if one is not None]
        made.on_host = {i: columns[i] for i, one in enumerate(looked) if one is None}
        made.layout = lay_out(one.form for one in made.found)
        made.region, made.address, made.length = None, 0, 0
        return made


def check_dtypes(device: str, columns: Columns) -> None:
    """Raise `ConfigError` where a GPU has no arrays of a column's dtype."""
    for column in columns:
        # Before any copy: an error in the middle of a stream would come after batches that were
        # good.
        if column.dtype not in _ON_GPUS and column.dtype != ON_HOST:
            raise ConfigError(
                f"column {column.name!r} has dtype {column.dtype}, of which {device!r} has no "
                "arrays; expected booleans, integers, or real or complex numbers of at most 8 "
                "bytes each: convert it in the fetch function, or feed it to 'cpu'"
            )


def joined(on_device: tuple[Any, ...], on_host: dict[int, Any]) -> tuple[Any, ...]:
    """The columns of both, in order; those of the host by number."""
    others = iter(on_device)
    num = len(on_device) + len(on_host)
    return tuple(on_host[i] if i in on_host else next(others) for i in range(num))
