"""Hostile bytes: values that are nested deeply, and values that were right before something in them
was changed. What is made depends on the random numbers alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgpack

_DEPTHS = (1, 4, 16, 31, 32, 33, 64, 200, 600, 3000)
_LEAVES = (b"\xc0", b"\x00", b"\xa1x", b"\x90", b"\x80", b"\xc4\x00", b"\xcb" + bytes(8), b"\xc1")
_BYTES = (0x00, 0x01, 0x7F, 0x80, 0x90, 0xA0, 0xC1, 0xC4, 0xC6, 0xC7, 0xC9, 0xD4, 0xDC, 0xDD, 0xDF,
          0xFF)  # fmt: skip


def nested(chance: Random) -> bytes:
    """A value in a value in a value: lists, maps, and tuples and arrays as the codec writes them,
    all of one kind or mixed."""
    wraps = _WRAPS if chance.random() < 0.5 else (chance.choice(_WRAPS),)
    heads, size = [chance.choice(_LEAVES)], 1
    for _ in range(chance.choice(_DEPTHS)):
        head = chance.choice(wraps)(size)
        heads.append(head)
        size += len(head)
    return b"".join(reversed(heads))


def _extension(code: int, inside: bytes) -> Callable[[int], bytes]:
    def head(size: int) -> bytes:
        size += len(inside)
        if size < 2**16:
            return b"\xc8" + size.to_bytes(2, "big") + bytes((code,)) + inside
        return b"\xc9" + size.to_bytes(4, "big") + bytes((code,)) + inside

    return head


_WRAPS: tuple[Callable[[int], bytes], ...] = (
    lambda size: b"\x91",
    lambda size: b"\x92\x01",
    lambda size: b"\x81\xa1k",
    _extension(1, b"\x91"),
    _extension(1, b"\x92\x01"),
    _extension(1, b""),
    _extension(2, b""),
    _extension(3, b"\x93\xa3<f4\x91\x01"),
    _extension(3, b"\x93\x91\x92\xa1a\xa3<f4\x91\x01"),
    _extension(3, b"\x91"),
    _extension(9, b""),
)


def mutated(chance: Random, examples: Sequence[bytes]) -> bytes:
    """An example in which one to four things were changed."""
    data = bytearray(chance.choice(examples))
    for _ in range(chance.randint(1, 4)):
        at, num = chance.randrange(len(data) + 1), chance.randrange(9)
        kind = chance.randrange(6)
        if kind == 0 and at < len(data):
            data[at] = chance.randrange(256)
        elif kind == 1 and at < len(data):
            data[at] = chance.choice(_BYTES)
        elif kind == 2:
            del data[at : at + num]
        elif kind == 3:
            data[at:at] = chance.randbytes(num)
        elif kind == 4:
            other = chance.choice(examples)
            start = chance.randrange(len(other) + 1)
            data[at : at + num] = other[start : start + chance.randrange(64)]
        else:
            del data[at:]
    return bytes(data)


def reshaped(chance: Random, example: Any) -> bytes:
    """An example, as a plain value, in which one or two values were replaced, as msgpack."""
    for _ in range(chance.randint(1, 2)):
        example = _replaced(chance, example)
    data: bytes = msgpack.packb(example)
    return data


def _replaced(chance: Random, value: Any) -> Any:
    inside = value if isinstance(value, (list, tuple, dict)) and chance.random() < 0.85 else ()
    if not inside:
        return chance.choice(_VALUES)(chance)
    if isinstance(value, dict):
        key = chance.choice(list(value))
        if chance.random() < 0.1:
            return {name: v for name, v in value.items() if name != key}
        return {**value, key: _replaced(chance, value[key])}
    at = chance.randrange(len(value))
    if chance.random() < 0.1:
        return [*value[:at], *value[at + 1 :]]
    return [*value[:at], _replaced(chance, value[at]), *value[at + 1 :]]


def _deep(chance: Random) -> Any:
    value: Any = chance.choice((None, 0, "x"))
    for _ in range(chance.choice((1, 30, 300))):
        value = [value] if chance.random() < 0.5 else {"k": value}
    return value


_VALUES: tuple[Callable[[Random], Any], ...] = (
    lambda chance: None,
    lambda chance: chance.choice(
        (True, False, 0, -1, 1, 255, 2**31, 2**63 - 1, 2**64 - 1, -(2**63))
    ),
    lambda chance: chance.choice((0.0, -1.5, 1e308, float("nan"), float("inf"))),
    lambda chance: chance.choice(("", "x", "\0", "<f4", "|V0", "|O", "(3,)f8", "f4,f8", "é" * 40)),
    lambda chance: chance.choice((b"", b"FT", bytes(8), bytes(24))),
    lambda chance: nested(chance),
    lambda chance: chance.choice(([], {}, [[]], [0, 0], {"": {}}, [2**62, 2**62], [-1])),
    _deep,
)
