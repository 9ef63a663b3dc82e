"""Reads snapshots, tokens and checkpoints without feeder, as docs/snapshot-format.md specifies
them, with msgpack and xxhash."""

import itertools
import struct
import zlib

import msgpack
import xxhash


def read_snapshot(data):
    """The streams of a snapshot; leftover rows as bytes, a list with one item per column."""
    if data[:8] != b"FEEDSNAP":
        raise ValueError("no snapshot")
    version, length = struct.unpack("<IQ", data[8:20])
    body = data[36:]
    if length != len(body) or xxhash.xxh3_128_digest(data[8:20] + body) != data[20:36]:
        raise ValueError("damaged")
    if version not in (1, 2, 3):
        raise ValueError("another version")
    (size,) = struct.unpack("<I", body[:4])
    packed, at = body[4 : 4 + size], 4 + size
    if version == 3:
        packed = zlib.decompress(packed)
    streams = []
    for name, number, fingerprint, token, columns, rows, *_ in msgpack.unpackb(
        packed, ext_hook=read_pairs
    ):
        held = None
        if rows is not None:
            held = []
            for dtype, shape, num_bytes in rows:
                held.append((read_dtype(dtype), shape, body[at : at + num_bytes]))
                at += num_bytes
        known = columns and [(c, axis, read_dtype(d), shape) for c, axis, d, shape in columns]
        streams.append(
            {
                "name": name,
                "number": number,
                "fingerprint": fingerprint,
                "columns": known,
                "rows": held,
                "token": read_token(token),
            }
        )
    return streams


def read_pairs(code, data):
    """Pairs of growing numbers, of which the steps are written."""
    size = data[0]
    steps = [int.from_bytes(data[i : i + size], "little") for i in range(1, len(data), size)]
    numbers = list(itertools.accumulate(steps))
    return [[a, b] for a, b in zip(numbers[::2], numbers[1::2], strict=True)]


def read_checkpoint(data):
    """The entries of a checkpoint, by name: dtype, shape and bytes; and what was added."""
    numbers, digest, at = data[8:28], data[28:44], 44
    version, header_size, data_size = struct.unpack("<IQQ", numbers)
    header = data[at : at + header_size]
    if data[:8] != b"FEEDCKPT" or len(data) != at + header_size + data_size:
        raise ValueError("no checkpoint, or a damaged one")
    if xxhash.xxh3_128_digest(numbers + header) != digest:
        raise ValueError("damaged")
    if version != 1:
        raise ValueError("another version")
    entries, at = {}, at + header_size
    listed, added = read_value(header)
    for name, dtype, shape, size, digest in listed:
        raw, at = data[at : at + size], at + size
        if xxhash.xxh3_128_digest(raw) != digest:
            raise ValueError("damaged")
        entries[name] = (dtype and read_dtype(dtype), shape, raw)
    return entries, added


def read_token(data):
    """The fields of a token, marks that are cursors as they are."""
    body = data[11:]
    if data[:2] != b"FT" or xxhash.xxh3_64_digest(body) != data[3:11]:
        raise ValueError("no token, or a damaged one")
    if data[2] not in (1, 2, 3):
        raise ValueError("another version")
    names = ("name", "number", "fingerprint", "epoch", "index", "step", "position", "leftover")
    names += ("dealing",) if data[2] == 3 else ()
    token = dict(zip(names, msgpack.unpackb(body), strict=True))
    names = ("epoch", "turn", "live", "calls", "rows", "marks", "done")
    position = dict(zip(names, token["position"], strict=True))
    bits = int.from_bytes(position["live"], "little")
    position["live"] = [bool(bits >> partition & 1) for partition in range(len(position["calls"]))]
    token["position"] = position
    if token["leftover"] is not None:
        names = ("partition", "call", "taken", "rows", "digest", "mark")
        token["leftover"] = dict(zip(names, token["leftover"], strict=True))
    if "dealing" in token:
        names = ("start", "num", "batch_size", "skipped", "epochs")
        token["dealing"] = dict(zip(names, token["dealing"], strict=True))
    return token


def read_dtype(field):
    """A text of NumPy's, or the fields of a structured dtype."""
    return field if isinstance(field, str) else read_value(field)


def read_value(data):
    """A value; arrays as (dtype, shape, bytes)."""
    return msgpack.unpackb(
        data, ext_hook=read_extension, strict_map_key=False, unicode_errors="surrogatepass"
    )


def read_extension(code, data):
    if code == 1:
        return tuple(read_value(data))
    return int(data) if code == 2 else tuple(read_value(data))


def fingerprint_digest(fingerprint):
    """What a token says of its feed's fingerprint."""
    fields = [
        msgpack.ExtType(1, msgpack.packb([name, value]))
        for name, value in sorted(fingerprint.items())
    ]
    return xxhash.xxh3_64_digest(msgpack.packb(fields))
