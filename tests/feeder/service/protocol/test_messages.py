"""Messages go through the wire unchanged, and nothing but messages comes out of it."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from feeder import errors
from feeder.errors import ProtocolError
from feeder.service.protocol import coding
from feeder.service.protocol.coding import decode, encode
from feeder.service.protocol.fields import TOKEN_BYTES
from feeder.service.protocol.messages import (
    FROM_CONSUMER,
    FROM_SERVER,
    MAX_ITEMS,
    Fault,
    Message,
    Open,
    Opened,
)
from messages import COLUMN, EXAMPLES, GROUP, TOLD, G
from watching import around

BY_NAME = {type(message).__name__: message for message in EXAMPLES}
EACH = pytest.mark.parametrize("message", EXAMPLES, ids=BY_NAME)


def comes_from_consumer(message: Message) -> bool:
    return type(message).__name__ in FROM_CONSUMER


def refused(data: bytes, *, from_consumer: bool, max_bytes: int | None = None) -> str:
    """What the refusal says; it is of the project's form."""
    with pytest.raises(ProtocolError) as caught:
        decode(data, from_consumer=from_consumer, max_bytes=max_bytes)
    text = str(caught.value)
    assert text[0].islower() and not text.endswith(".") and text.isprintable()
    assert len(text) < 600
    return text


def changed(name: str, /, **fields: Any) -> bytes:
    """A good message as msgpack with other fields."""
    return msgpack.packb({**msgspec.to_builtins(BY_NAME[name], builtin_types=(bytes,)), **fields})


def group(at: int, value: Any) -> bytes:
    """Two groups, the first with another field."""
    fields = list(msgspec.to_builtins(GROUP, builtin_types=(bytes,)))
    other = msgspec.to_builtins(TOLD, builtin_types=(bytes,))
    return changed("Batches", groups=[[*fields[:at], value, *fields[at + 1 :]], other])


def told(at: int, value: Any) -> bytes:
    """A group with a span, with another field."""
    fields = list(msgspec.to_builtins(TOLD, builtin_types=(bytes,)))
    return changed("Batches", groups=[[*fields[:at], value, *fields[at + 1 :]]])


def span(at: int, value: Any) -> bytes:
    """A group whose span has another field."""
    fields = list(msgspec.to_builtins(TOLD.span, builtin_types=(bytes,)))
    return told(11, [*fields[:at], value, *fields[at + 1 :]])


def column(**fields: Any) -> bytes:
    """A spec whose column has other fields."""
    return changed("Spec", columns=[{**msgspec.to_builtins(COLUMN), **fields}])


def test_every_message_has_an_example() -> None:
    assert {*FROM_CONSUMER, *FROM_SERVER} == set(BY_NAME)
    assert not set(FROM_CONSUMER) & set(FROM_SERVER)


@EACH
def test_what_is_sent_arrives(message: Message) -> None:
    """As plain msgpack with exactly the keys of its kind."""
    data = encode(message)
    got = decode(memoryview(data), from_consumer=comes_from_consumer(message))
    assert type(got) is type(message)
    assert got == message
    fields = msgpack.unpackb(data)
    # What has a default is left out where it has that value.
    told = [
        field.name for field in msgspec.structs.fields(message)
        if field.required or getattr(message, field.name) != field.default
    ]  # fmt: skip
    assert list(fields) == ["type", *told]
    assert fields["type"] == type(message).__name__


@EACH
def test_the_other_side_may_not_send_it(message: Message) -> None:
    name, of_consumer = type(message).__name__, comes_from_consumer(message)
    text = refused(encode(message), from_consumer=not of_consumer)
    peer = "server" if of_consumer else "consumer"
    assert text.startswith(f"{peer} sent a message of type {name!r}, expected one of ")


@EACH
def test_every_key_must_be_there_once_and_no_other(message: Message) -> None:
    name, side = type(message).__name__, comes_from_consumer(message)
    fields = msgpack.unpackb(encode(message))
    for key in fields:
        refused(msgpack.packb({k: v for k, v in fields.items() if k != key}), from_consumer=side)
    text = refused(changed(name, extra=1), from_consumer=side)
    assert text.startswith(f"{name_of_peer(side)} sent a bad {name}: object contains unknown")
    packer = msgpack.Packer()
    twice = packer.pack_map_pairs([*fields.items(), ("type", name)])
    assert "a key comes twice" in refused(twice, from_consumer=side)


@pytest.mark.parametrize(("kind", "key", "alone"), [(Open, "replica", 0), (Opened, "replicas", 1)])
def test_where_no_queue_is_shared_nothing_is_said_of_replicas(
    kind: type[Message], key: str, alone: int
) -> None:
    (message,) = [one for one in EXAMPLES if type(one) is kind]
    assert getattr(message, key) == alone and key not in msgpack.unpackb(encode(message))
    got = decode(changed(kind.__name__, **{key: 3}), from_consumer=comes_from_consumer(message))
    assert getattr(got, key) == 3 and msgpack.unpackb(encode(got))[key] == 3


def name_of_peer(from_consumer: bool) -> str:
    return "consumer" if from_consumer else "server"


@EACH
def test_a_value_of_another_type_is_refused(message: Message) -> None:
    """Each field in turn gets a value of each type; what passes must come out as it went in."""
    name, side = type(message).__name__, comes_from_consumer(message)
    wrong: list[Any] = [True, 1.5, math.nan, "1", b"1", [], ["a"], [b"a"], {}, {"a": 1}, -1, 2**63]
    for key in BY_NAME[name].__struct_fields__:
        num_refused = 0
        for value in wrong:
            data = changed(name, **{key: value})
            try:
                got = decode(data, from_consumer=side)
            except ProtocolError:
                num_refused += 1
                continue
            there = msgspec.to_builtins(got, builtin_types=(bytes,))[key]
            assert type(there) is type(value) or isinstance(there, tuple), key
        assert num_refused >= len(wrong) - 2, key


def test_duplicate_keys_are_refused_at_every_depth() -> None:
    pack = msgpack.Packer().pack_map_pairs
    inner = pack([*msgspec.to_builtins(COLUMN).items(), ("name", "y")])
    data = changed("Spec", columns=["HERE"]).replace(msgpack.packb("HERE"), inner)
    assert "a key comes twice" in refused(data, from_consumer=False)


BAD: dict[str, tuple[bytes, str]] = {
    "generation short": (changed("Bye", generation=bytes(23)), "length >= 24"),
    "generation long": (changed("Bye", generation=bytes(25)), "length <= 24"),
    "fault's generation": (changed("Fault", generation=bytes(8)), "has 8 bytes, expected 0 or 24"),
    "fault of no error": (changed("Fault", kind="SystemExit"), "regex"),
    "fault with a line end": (changed("Fault", kind="LeaseLost\n"), "regex"),
    "fault with a list": (changed("Fault", fields={"call": [1]}), "got `array`"),
    "negative queue": (changed("Open", queue=-1), ">= 0"),
    "huge queue": (changed("Open", queue=2**64 - 1), "<= 9223372036854775807"),
    "intent": (changed("Open", intent="steal"), "steal"),
    "long name": (changed("Open", who="x" * 1025), "length <= 1024"),
    "too many slots": (changed("Used", slots=[1] * (MAX_ITEMS + 1)), "max_array_len"),
    "negative wait": (changed("Used", report=[-1.0, 0.0, 0, 0]), ">= 0"),
    "endless wait": (changed("Used", report=[math.inf, 0.0, 0, 0]), "<= 1"),
    "wait that is no number": (changed("Used", report=[math.nan, 0.0, 0, 0]), ">= 0"),
    "short report": (changed("Used", report=[0.0, 0.0, 0]), "array"),
    "negative slot": (changed("Used", slots=[-1]), ">= 0"),
    "lease nan": (changed("Opened", lease_s=math.nan), "> 0.0"),
    "lease 0": (changed("Opened", lease_s=0.0), "> 0.0"),
    "nonce": (changed("Opened", shared={"path": "p", "nonce": bytes(15)}), "length >= 16"),
    "arena of no slots": (changed("Arena", num_slots=0), ">= 1"),
    "arena of many slots": (changed("Arena", num_slots=2**16 + 1), "<= 65536"),
    "no groups": (changed("Batches", groups=[]), "length >= 1"),
    "group of a map": (changed("Batches", groups=[{}]), "got `object`"),
    "group short": (changed("Batches", groups=[[1]]), "at least length 15"),
    "group long": (
        changed("Batches", groups=[[*msgspec.to_builtins(GROUP, builtin_types=(bytes,)), 0]]),
        "at most length 15",
    ),
    "group's stride": (group(4, 0), ">= 1"),
    "group of no batch": (group(7, []), "length >= 1"),
    "group's slot": (group(7, [-2]), ">= -1"),
    "frames with others": (group(7, [-1]), "expected it alone"),
    "group's checksum": (group(8, [-1]), ">= 0"),
    "too few checksums": (group(8, []), "of each of its 1 batches"),
    "group's shapes": (group(9, [[-1]]), ">= 0"),
    "group's ndim": (group(9, [[1] * 32]), "length <= 31"),
    "group's token": (group(10, ["t"]), "expected `bytes`"),
    "too many tokens": (group(10, [b"t", b"t"]), "of each of its 1 batches"),
    "neither tokens nor span": (group(10, []), "of each of its 1 batches"),
    "too few rows taken": (told(13, [1]), "of each of its 2 batches"),
    "no digests": (told(14, []), "of each of its 2 batches"),
    "tokens and chunks": (group(12, [1]), "of each of its 1 batches"),
    "no chunk": (group(12, [0]), ">= 1"),
    "very many chunks": (group(12, [2**20 + 1]), "<= 1048576"),
    "span of no partition": (span(3, []), "length >= 1"),
    "span of many partitions": (span(3, [True] * 65), "length <= 64"),
    "span's calls": (span(4, [1]), "of each of its 2 partitions"),
    "span's marks": (span(6, [None]), "of each of its 2 partitions"),
    "span's turn": (span(2, 2), "none of its 2"),
    "span without a ring": (span(7, []), "length >= 1"),
    "span's first calls": (span(8, [1]), "each partition of its ring"),
    "a long mark": (span(6, [bytes(257), None]), "length <= 256"),
    "many new marks": (span(9, [[[1, b""]] * 9, None]), "length <= 8"),
    "objects": (column(dtype="|O"), "regex"),
    "void": (column(dtype="|V8"), "regex"),
    "no byte order": (column(dtype="f4"), "regex"),
    "unknown size": (column(dtype="<i3"), "numpy does not know"),
    "bad unit": (column(dtype="<M8[parsec]"), "numpy does not know"),
    "other spelling": (column(dtype="<i1"), "expected '|i1'"),
    "dtype with a line end": (column(dtype="<f4\n"), "regex"),
    "ndim": (column(shape=[1] * 32), "length <= 31"),
    "axis": (column(axis=3), "expected at most 2"),
    "row overflows": (column(shape=[2**40, 2**40]), "more than"),
    "version": (changed("Open", version=9), "version 9 of the protocol, expected 5; use the same"),
    "version true": (changed("Open", version=True), "version True of the protocol"),
    "type of no message": (changed("Bye", type="Message"), "'Message', expected one of Open"),
    "type a list": (changed("Bye", type=["Bye"]), "type list, expected one of Open"),
    "a list": (msgpack.packb([1]), "sent a list, expected a map"),
    "nothing": (b"", "sent 0 bytes that are no message: unpack failed: incomplete input"),
    "two values": (b"\x01\x01", "extra data"),
    "reserved": (b"\xc1", "not msgpack, or too deep"),
    "integer key": (b"\x81\x01\x01", "not allowed for map key"),
    "bytes as key": (b"\x81\xc4\x01a\x01", "a message of type NoneType"),
    "no utf-8": (b"\x81\xa1\xff\x01", "utf-8"),
    "ext": (b"\x81\xa1a\xd4\x01a", "max_ext_len"),
    "empty ext": (b"\x81\xa1a\xc7\x00\x05", "extension type 5, expected none"),
    "list of 4 GiB": (b"\x81\xa1a\xdd\xff\xff\xff\xff", "max_array_len"),
    "bytes of 4 GiB": (b"\x81\xa1a\xc6\xff\xff\xff\xff", "incomplete input"),
    "60,000 deep": (b"\x91" * 60_000 + b"\x01", "not msgpack, or too deep"),
    "100,000 deep": (b"\x91" * 100_000 + b"\x01", "65536 bytes beside its position"),
    "large and no map": (b"\xc4\xff" + bytes(100_000), "65536 bytes beside its position"),
    "many lists": (
        changed("Bye", generation=["HERE"]).replace(
            msgpack.packb("HERE"), b"\xdc\x04\x00" + (b"\xdc\x04\x00" + b"\x90" * 1024) * 100
        ),
        "65536 bytes beside its position",
    ),
    "many fields": (
        b"\x82" + (b"\xa4type" + msgpack.packb(["x" * 60_000])) * 2,
        "65536 bytes beside its position",
    ),
    "more after a large position": (
        encode(BY_NAME["Open"])[:-1] + bytes(100_000), "65536 bytes beside its position"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("data", "says"), BAD.values(), ids=BAD)
def test_bad_input_is_a_protocol_error_that_says_what_is_wrong(data: bytes, says: str) -> None:
    try:
        name = msgpack.unpackb(data)["type"]
    except Exception:
        name = None
    from_server = isinstance(name, str) and name in FROM_SERVER
    assert says in refused(data, from_consumer=not from_server)


def test_good_borders_pass() -> None:
    """The refusals above are of the borders, not of the fields as such."""
    passes = {
        "Used": changed("Used", slots=[2**63 - 1] * MAX_ITEMS),
        "Fault": changed(
            "Fault", generation=G, fields={"call": None, "column": "x", "n": -(2**63)}
        ),
        "Batches": group(8, [2**64 - 1]),
        "Spec": column(dtype="<M8[25us]", axis=2, shape=[2**20, 2**20]),
        "End": changed("End", token=bytes(TOKEN_BYTES)),
        "Opened": changed("Opened", lease_s=30, shared=None),
    }
    for name, data in passes.items():
        assert type(decode(data, from_consumer=name in FROM_CONSUMER)).__name__ == name


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "ReplayWarning"])
def test_every_error_of_feeder_may_be_a_fault(name: str) -> None:
    got = decode(changed("Fault", kind=name), from_consumer=False)
    assert isinstance(got, Fault) and got.kind == name


def test_nothing_above_what_is_allowed_is_looked_at() -> None:
    data = changed("Open", token=bytes(200_000))
    got = decode(data, from_consumer=True)
    assert isinstance(got, Open) and got.token == bytes(200_000)
    text = refused(data, from_consumer=True, max_bytes=len(data) - 1)
    assert text == f"consumer sent {len(data)} bytes, expected at most {len(data) - 1}"


def test_memory_that_cannot_be_read_is_a_protocol_error_too() -> None:
    with pytest.raises(ProtocolError, match="bytes that are no message: "):
        decode(memoryview(encode(BY_NAME["Bye"]))[::2], from_consumer=True)


def test_a_long_line_of_a_peer_is_cut_and_made_harmless() -> None:
    for data in (
        changed("Bye", **{"\n\x1b[31m" + "x" * 60_000: 1}),
        changed("Bye", type="\n\x1b[31m" + "x" * 60_000),
        changed("Open", version="\n\x1b[31m" + "x" * 60_000),
        changed("Open", intent="\u202e\ud7ff" + "x" * 60_000),
    ):
        text = refused(data, from_consumer=True)
        assert "\x1b" not in text and "\u202e" not in text


@pytest.mark.parametrize(
    "data",
    [
        b"\xdc\x04\x00" * 1000 + b"\x01",
        b"\x91" * 1000 + b"\xc0",
        b"\xdc\x04\x00" + (b"\xdc\x04\x00" + b"\x90" * 1024) * 120,
        b"\x81\xa1a\xc6\x7f\xff\xff\xff",
        b"\xde\x00\x20" * 1000,
    ],
    ids=["lists in lists", "deep", "many empty lists", "2 GiB declared", "maps in maps"],
)
def test_a_small_message_does_not_take_much_memory(data: bytes) -> None:
    assert len(data) <= 128 * 1024 + 64
    tracemalloc.start()
    try:
        refused(data, from_consumer=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 1024 * 1024


def test_a_large_position_may_be_in_a_map_of_either_size() -> None:
    message = msgspec.structs.replace(BY_NAME["Open"], token=bytes(200_000))
    data = encode(message)
    assert (data[0], len(msgpack.unpackb(data))) == (0xDE, 16)
    assert decode(data, from_consumer=True) == message
    fields = msgpack.unpackb(data)
    del fields["attempt"]
    small = msgpack.packb(fields)
    assert small[0] == 0x8F
    with pytest.raises(ProtocolError, match="missing required field `attempt`"):
        decode(small, from_consumer=True)


def test_every_type_is_known_before_a_thread_reads_one(monkeypatch: pytest.MonkeyPatch) -> None:
    known: list[type] = []
    around(monkeypatch, msgspec, "convert", before=lambda value, kind: known.append(kind))
    source = Path(coding.__file__).read_text()
    exec(compile(source, coding.__file__, "exec"), {"__name__": "coding"})
    assert set(known) == {*FROM_CONSUMER.values(), *FROM_SERVER.values()}
