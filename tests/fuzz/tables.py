"""Random tables of Arrow, of every type that there is, and their rows as plain Python's."""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa

Rows = list[Any]


def whole(kind: Any) -> Callable[[Random], Any]:
    """Whole numbers of a type."""
    bits, signed = kind.bit_width, not str(kind).startswith("u")
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    return lambda rng: rng.choice([low, high, 0, rng.randint(low, high)])


def text(rng: Random) -> str:
    return "".join(rng.choices("a\0é€😀 ", k=rng.randrange(15)))


def octets(rng: Random) -> bytes:
    return bytes(rng.choices([0, 1, 255], k=rng.randrange(15)))


def moment(rng: Random) -> datetime.datetime:
    return datetime.datetime(1990, 1, 1) + datetime.timedelta(
        days=rng.randrange(20000), microseconds=rng.randrange(10**10)
    )


def real(width: int) -> Callable[[Random], Any]:
    """Numbers of so many bytes."""
    kind = np.dtype(f"f{width}").type
    return lambda rng: float(kind(rng.choice([0.0, math.inf, rng.uniform(-300, 300)])))


LEAVES: dict[Any, Callable[[Random], Any]] = {
    kind: whole(kind)
    for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(),
                 pa.uint32(), pa.uint64())
} | {
    pa.float16(): real(2), pa.float32(): real(4), pa.float64(): real(8),
    pa.bool_(): lambda rng: rng.random() < 0.5,
    pa.string(): text, pa.large_string(): text, pa.string_view(): text,
    pa.binary(): octets, pa.large_binary(): octets, pa.binary_view(): octets,
    pa.binary(3): lambda rng: bytes(rng.choices([0, 7, 255], k=3)),
    pa.decimal128(7, 2): lambda rng: decimal.Decimal(rng.randint(-999, 999)).scaleb(-2),
    pa.date32(): lambda rng: moment(rng).date(),
    pa.timestamp("us"): moment, pa.timestamp("ms", "UTC"): lambda rng: moment(rng).replace(
        microsecond=1000, tzinfo=datetime.UTC),
    pa.duration("us"): lambda rng: datetime.timedelta(microseconds=rng.randrange(10**12)),
    pa.time64("us"): lambda rng: moment(rng).time(),
    pa.time32("ms"): lambda rng: moment(rng).time().replace(microsecond=7000),
    pa.null(): lambda rng: None,
}  # fmt: skip
"""Values of each type that has no others in it."""
SIMPLE = [pa.int8(), pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.string()]
"""Types that every writer has."""


def a_type(rng: Random, depth: int = 2) -> Any:
    if not depth or rng.random() < 0.5:
        return rng.choice([*LEAVES])
    inner = a_type(rng, depth - 1)
    return rng.choice([
        pa.list_(inner), pa.large_list(inner), pa.list_view(inner), pa.list_(inner, 2),
        pa.struct([("a", inner)]),
        pa.struct([("a", inner), ("b", pa.int8())]), pa.map_(pa.string(), inner),
        pa.map_(pa.int16(), inner),
    ])  # fmt: skip


def a_value(rng: Random, kind: Any, nulls: float) -> Any:
    if rng.random() < nulls:
        return None
    if kind in LEAVES:
        return LEAVES[kind](rng)
    if pa.types.is_struct(kind):
        return {field.name: a_value(rng, field.type, nulls) for field in kind}
    if pa.types.is_map(kind):
        num = rng.randrange(3)
        keys = [i if kind.key_type == pa.int16() else text(rng) + str(i) for i in range(num)]
        return [(key, a_value(rng, kind.item_type, nulls)) for key in keys]
    num = kind.list_size if pa.types.is_fixed_size_list(kind) else rng.randrange(4)
    return [a_value(rng, kind.value_type, nulls) for _ in range(num)]


def a_table(rng: Random, kinds: list[Any] | None = None, nulls: float | None = None) -> Any:
    """A table of one to three columns."""
    num, nulls = rng.randint(1, 12), rng.choice([0, 0, 0.2]) if nulls is None else nulls
    columns = {}
    for i in range(rng.randint(1, 3)):
        kind = rng.choice(kinds) if kinds else a_type(rng)
        column = pa.array([a_value(rng, kind, nulls) for _ in range(num)], kind)
        if kind in (pa.string(), pa.int64()) and rng.random() < 0.3:
            column = column.dictionary_encode()
        columns["xyz"[i]] = column
    return pa.table(columns)


def rows_of(table: Any) -> Rows:
    """The rows of a table, with the fields of structs as columns."""
    columns: dict[str, Rows] = {}

    def add(name: str, kind: Any, values: Rows) -> None:
        if not pa.types.is_struct(kind) or not kind.num_fields:
            columns[name] = values
            return
        for field in kind:
            inner = [None if value is None else value[field.name] for value in values]
            add(f"{name}.{field.name}", field.type, inner)

    for name, column in zip(table.column_names, table.columns, strict=True):
        add(name, column.type, column.to_pylist())
    return [{name: columns[name][i] for name in columns} for i in range(table.num_rows)]


def plain(value: Any) -> Any:
    """A value without NumPy, of which bytes of a fixed size are arrays; NaN is equal to itself."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, datetime.datetime):
        return value.replace(tzinfo=None)  # all of them are in UTC
    if isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    if isinstance(value, dict):
        return {str(name): plain(value[name]) for name in sorted(value)}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value
