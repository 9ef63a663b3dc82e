"""Encodes messages, and decodes the bytes of a peer to a message or a `ProtocolError`.

A peer is hostile until its bytes have passed three steps: a large message is looked through without
making objects, msgpack makes plain values within bounds that hold before memory is taken, and
msgspec compares the values with the types of the message. Pure functions; any thread.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import msgspec

from feeder.errors import ProtocolError
from feeder.service.protocol.fields import (
    CONTROL_BYTES,
    MAX_ITEMS,
    MAX_TEXT,
    PROTOCOL_VERSION,
    ROWS_BYTES,
)
from feeder.service.protocol.messages import FROM_CONSUMER, FROM_SERVER, Message

# `Open`, the largest map, has 17 keys.
_MAX_KEYS = 32
# Of what a peer sent, an error's text repeats at most so many characters: logs stay readable.
_MAX_SHOWN = 200
# msgpack bounds bytes, the messages bound characters; a character has up to 4 bytes.
_MAX_UTF8_BYTES = 4
_MOST_BYTES = CONTROL_BYTES + ROWS_BYTES

_encoder = msgspec.msgpack.Encoder()

# Converted to once here, under the import lock: msgspec prepares a type at its first conversion,
# and two threads that do so at once may crash (0.22).
for _kind in (*FROM_CONSUMER.values(), *FROM_SERVER.values()):
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.convert({}, _kind)


def encode(message: Message) -> bytes:
    """The message as msgpack. Its fields are not checked: the other side does that."""
    return _encoder.encode(message)


def decode(
    data: bytes | memoryview, *, from_consumer: bool, max_bytes: int | None = None
) -> Message:
    """The message that a peer sent; raises `ProtocolError` for anything that is not one.

    `from_consumer` says which side the peer is, as each has messages of its own. Above `max_bytes`
    nothing is looked at; the default allows 64 KiB and a position with its leftover rows. From
    unknown peers a server's sockets accept less than that.
    """
    peer = "consumer" if from_consumer else "server"
    most = _MOST_BYTES if max_bytes is None else max_bytes
    num_bytes = data.nbytes if isinstance(data, memoryview) else len(data)
    if num_bytes > most:
        raise ProtocolError(f"{peer} sent {num_bytes} bytes, expected at most {most}")
    # Consumers trust their server, whose batches of many columns may well be larger.
    if from_consumer and num_bytes > CONTROL_BYTES:
        _check_rest(memoryview(data), peer)
    try:
        fields = msgpack.unpackb(
            data,
            object_pairs_hook=_refuse_duplicates,
            ext_hook=_refuse_extension,
            max_str_len=min(most, MAX_TEXT * _MAX_UTF8_BYTES),
            max_bin_len=most,
            max_array_len=MAX_ITEMS,
            max_map_len=_MAX_KEYS,
            max_ext_len=0,
        )
    # msgpack raises many kinds, from ValueError to RecursionError: all mean the same here.
    except Exception as error:
        what = _shown(error) or "not msgpack, or too deep"
        raise ProtocolError(f"{peer} sent {num_bytes} bytes that are no message: {what}") from error
    kind = _kind_of(fields, peer, FROM_CONSUMER if from_consumer else FROM_SERVER)
    try:
        # Without `builtin_types` a str would be taken for bytes in base64.
        return msgspec.convert(fields, kind, builtin_types=(bytes,))
    except Exception as error:
        raise ProtocolError(f"{peer} sent a bad {kind.__name__}: {_shown(error)}") from error


_FIXMAPS, _MAP16, _BINS = range(0x80, 0x90), 0xDE, {0xC4: 1, 0xC5: 2, 0xC6: 4}
"""First bytes of maps; and first bytes of binaries, each with the width of the length after it."""


def _check_rest(data: memoryview, peer: str) -> None:
    """Raise `ProtocolError` where a large message has more than 64 KiB beside its binaries.

    The only large field of a consumer is its position, which is a binary and becomes one object.
    Each byte of anything else may become an object, a hundred times as large.
    """
    at, rest, num = 1, 0, 0
    if data[0] in _FIXMAPS:
        num = data[0] - _FIXMAPS[0]
    elif data[0] == _MAP16:
        at, num = 3, int.from_bytes(data[1:3], "big")
    for _ in range(2 * min(num, _MAX_KEYS)):
        # A binary is stepped over by its length, everything else is skipped by msgpack, which
        # makes no objects and sees 64 KiB at most.
        if at < len(data) and data[at] in _BINS:
            head = at + 1 + _BINS[data[at]]
            at = head + int.from_bytes(data[at + 1 : head], "big")
            continue
        unpacker = msgpack.Unpacker()
        unpacker.feed(data[at : at + CONTROL_BYTES])
        try:
            unpacker.skip()
        except Exception:
            break
        at += unpacker.tell()
        rest += unpacker.tell()
    if at != len(data) or rest > CONTROL_BYTES:
        raise ProtocolError(
            f"{peer} sent {len(data)} bytes that are no message: expected a map with at most "
            f"{CONTROL_BYTES} bytes beside its position"
        )


def _kind_of(fields: Any, peer: str, known: dict[str, type[Message]]) -> type[Message]:
    if not isinstance(fields, dict):
        raise ProtocolError(f"{peer} sent a {type(fields).__name__}, expected a map")
    # `type` may be anything, even unhashable: only a str is looked up.
    name = fields.get("type")
    kind = known.get(name) if isinstance(name, str) else None
    if kind is None:
        what = repr(name) if isinstance(name, str) else type(name).__name__
        raise ProtocolError(
            f"{peer} sent a message of type {what[:_MAX_SHOWN]}, expected one of {', '.join(known)}"
        )
    # Before the fields are compared: a peer of another version is told the version, not a field.
    if name in ("Open", "Look", "Edit") and fields.get("version") != PROTOCOL_VERSION:
        version = repr(fields.get("version"))[:_MAX_SHOWN]
        raise ProtocolError(
            f"{peer} speaks version {version} of the protocol, expected {PROTOCOL_VERSION}; "
            "use the same feeder on both sides"
        )
    return kind


def _shown(error: Exception) -> str:
    """An error's text in one line of printable ASCII that starts in lower case: it may repeat what
    a hostile peer sent, and goes to logs and terminals."""
    text = ascii(str(error)[:_MAX_SHOWN])[1:-1].rstrip(".")
    return text[:1].lower() + text[1:]


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of a key that comes twice two readers may believe different values.
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key comes twice")
    return fields


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}, expected none")
