"""Dtypes as plain values, from which the same dtype can be made again.

A dtype is NumPy's text of it (`numpy.dtype.str`); one of ml_dtypes, of which NumPy's text says no
more than that it has so many bytes, is its name there ("bfloat16"); a structured one is a list of
its fields as `numpy.dtype.descr` has it, with names in place of such texts, and with a mark in
front where its rows are `numpy.record`.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import numpy as np

from feeder.workers.errors import ConfigError

_PACKAGE = "ml_dtypes"

_RECORD = ("", "record")
"""Stands before the fields of a structure whose rows are `numpy.record`."""

Fields = str | list[Any]
"""A dtype as a plain value."""


def write_dtype(dtype: np.dtype[Any]) -> Fields:
    """A dtype as a plain value. Raises `TypeError` for one that would not be read back as it is."""
    # A structure of `numpy.record` and one without are equal, and so would be one entry.
    return _write_plain(dtype) if dtype.names is None else _write(dtype)


def _write(dtype: np.dtype[Any]) -> Fields:
    why = ""
    try:
        fields = _fields_of(dtype)
        # Tried out and not deduced: NumPy knows more kinds of dtypes than a list of ours would.
        if dtype.itemsize and read_dtype(fields) == dtype:
            return fields
    except (TypeError, ValueError) as error:
        why = f" ({error})"
    raise TypeError(
        f"dtype {dtype} would not be read back as it is{why}; expected a type of NumPy or of "
        "ml_dtypes with at least one byte, or a structure of these whose fields follow each other "
        "without overlap, as numpy.lib.recfunctions.repack_fields makes it"
    )


_write_plain = lru_cache(_write)


def read_dtype(fields: Fields) -> np.dtype[Any]:
    """The reverse of `write_dtype`. Raises `ConfigError` where ml_dtypes is needed and is not
    installed, and what NumPy raises for what is no dtype."""
    if isinstance(fields, str):
        return _named(fields) if is_name(fields) else np.dtype(fields)
    names: list[str] = []
    titles, formats, offsets, end = [], [], [], 0
    is_record = bool(fields) and tuple(fields[0]) == _RECORD
    for name, of, *shape in fields[is_record:]:
        field = read_dtype(of)
        # A field that is an array of its own.
        field = np.dtype((field, shape[0])) if shape else field
        if name != "":  # Else it is a gap.
            title, name = name if isinstance(name, tuple) else (None, name)
            names.append(name)
            titles.append(title)
            formats.append(field)
            # Offsets follow from the order: write_dtype refuses fields that overlap or are out of
            # order.
            offsets.append(end)
        end += field.itemsize
    read = np.dtype(
        {"names": names, "titles": titles, "formats": formats, "offsets": offsets, "itemsize": end}
    )
    return np.dtype((np.record, read)) if is_record else read


def is_name(text: str) -> bool:
    """Whether the text of a dtype is a name of ml_dtypes: NumPy's begin with the byte order."""
    return text[:1].isalpha()


def is_nameless(fields: Fields) -> bool:
    """Whether fields hold a type of ml_dtypes that was written without its name, as positions of
    version 1 were before names were written: such types alone have a byte order and V, or W, or
    are floats of one byte."""
    if isinstance(fields, str):
        return fields[1:2] == "W" or fields[1:] == "f1" or fields[:2] in ("<V", ">V")
    return any(is_nameless(of) for _, of, *_ in fields)


def _fields_of(dtype: np.dtype[Any]) -> Fields:
    if dtype.names is None:
        return dtype.name if dtype.type.__module__ == _PACKAGE else dtype.str
    # Its rows have their fields as attributes; NumPy's `==` does not tell it from one without.
    fields: list[Any] = [_RECORD] if dtype.type is np.record else []
    end = 0
    for name in dtype.names:
        field, offset, *title = dtype.fields[name]  # type: ignore[index]
        # Such a dtype could be written, but not read back from a list of fields in order.
        if offset < end:
            raise ValueError("its fields overlap or are out of order")
        _add_gap(fields, offset - end)
        inner, shape = field.subdtype or (field, ())
        key = (*title, name) if title else name
        fields.append((key, _fields_of(inner), shape) if shape else (key, _fields_of(inner)))
        end = offset + field.itemsize
    # A gap at the end too: with it the item size is the same.
    _add_gap(fields, dtype.itemsize - end)
    return fields


def _add_gap(fields: list[Any], num_bytes: int) -> None:
    if num_bytes:
        fields.append(("", f"|V{num_bytes}"))


def _named(name: str) -> np.dtype[Any]:
    try:
        # Imported only where it is needed: the engine depends on numpy and xxhash alone.
        package = importlib.import_module(_PACKAGE)
    except ModuleNotFoundError:
        raise ConfigError(
            f"dtype {name!r} is one of ml_dtypes, which is not installed: pip install ml-dtypes"
        ) from None
    kind = getattr(package, name, None)
    if isinstance(kind, type) and issubclass(kind, np.generic):
        return np.dtype(kind)
    raise ConfigError(f"dtype {name!r} is none that the installed ml_dtypes has: update it")
