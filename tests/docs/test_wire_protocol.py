"""The page on the wire protocol says how to speak it: the example's consumer, which knows no
feeder, reads from a server what the library reads, and the page's tables are those in force."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import zmq

import feeder
from conformance.served import serving
from docs.pages import ROOT, section, table
from feeder.devices.layout import ALIGNMENT
from feeder.service.memory.memfd import SLOTS_PER_ARENA
from feeder.service.net.security import MAX_REQUEST_BYTES
from feeder.service.protocol import messages as say
from feeder.service.protocol.batches import MAX_FRAME_BYTES, pieces
from parts import some
from small import make as make_feed

pytestmark = pytest.mark.process

PAGE = ROOT / "docs/design/wire-protocol.md"
READER = ROOT / "examples/formats/read_feed.py"
MESSAGES = {**say.FROM_CONSUMER, **say.FROM_SERVER}


def test_messages_and_arrays_have_the_fields_of_their_tables() -> None:
    kinds = {kind.__name__: kind for kind in MESSAGES.values()}
    for heading, kind in {**kinds, "A group of batches": say.Group, "A span": say.Span}.items():
        fields = [field.name for field in msgspec.structs.fields(kind)]
        assert [row[0] for row in table(section(PAGE, heading))] == fields, heading


def test_no_message_is_left_out_or_made_up() -> None:
    for heading, kinds in (("From the consumer", say.FROM_CONSUMER),
                           ("From the server", say.FROM_SERVER)):  # fmt: skip
        text = section(PAGE, heading)
        named = [line[5:] for line in text.splitlines() if line.startswith("#### ")]
        assert sorted(named) == sorted(kinds)


def test_the_numbers_are_those_in_force() -> None:
    text = PAGE.read_text()
    assert f"This is\nversion {say.PROTOCOL_VERSION}." in text
    assert f"at most {MAX_REQUEST_BYTES // 1024} KiB" in text
    assert f"lists have at most {say.MAX_ITEMS} items" in text
    assert f"texts {say.MAX_TEXT:,}" in text
    assert f"multiple of {ALIGNMENT} bytes" in text
    assert f"arena number · {SLOTS_PER_ARENA:,} + slot" in text
    assert f"at most {MAX_FRAME_BYTES // 2**20} MiB, otherwise" in text
    assert {len(part) for part in pieces([memoryview(bytes(MAX_FRAME_BYTES + 2**20))])} == {2**20}
    assert "frames of at most 1 MiB" in text


# ---- the example's consumer


@pytest.fixture(autouse=True, scope="module")
def zero_copy() -> None:
    """Have pyzmq start the thread that frees what is sent without a copy, which it keeps."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as a, context.socket(zmq.PAIR) as b:
        a.bind("inproc://zero-copy")
        b.connect("inproc://zero-copy")
        a.send(bytes(2**18), copy=False)
        b.recv()


@pytest.fixture(scope="module")
def reader_of_the_page() -> Callable[..., Any]:
    names: dict[str, Any] = {}
    exec(compile(READER.read_text(), READER, "exec"), names)
    return names["Reader"]


def plain(call: feeder.Call, calls: int = 31) -> list[np.ndarray]:
    if call.index == calls:
        raise StopIteration
    rows = 1 + 7 * call.index % 11
    return [call.rng.random((rows, 5), np.float32), np.full((3, rows), call.index, "<u2")]


def full_at_the_end(call: feeder.Call) -> list[np.ndarray]:
    """Epochs of 14 * 13 rows: what follows their last batch may be known only after it."""
    return plain(call, calls=30)


def large(call: feeder.Call) -> list[np.ndarray]:
    """Batches of several frames, and of several MiB."""
    if call.index >= 3:
        raise StopIteration
    rows = np.full((16, 50_000), call.index, np.float32)
    return [rows, np.zeros((2, 16), np.bool_)]


def ragged(call: feeder.Call) -> list[np.ndarray]:
    """Chunks whose shapes grow, so that there are several arenas."""
    if call.index >= 8:
        raise StopIteration
    rows, width = 3 + call.index % 2, 10 * 4**call.index
    return [np.full((rows, width), call.index, np.int16), np.ones((2, rows))]


def regular(call: feeder.Call) -> list[np.ndarray]:
    """Chunks that all have as many rows: where batches end is told by numbers."""
    if call.index >= 40:
        raise StopIteration
    return [np.full((5, 2), call.index), call.rng.random((3, 5))]


class Cursors:
    """Workers of different length, with a cursor that does not change at every call."""

    seekable = True

    def __init__(self) -> None:
        self.at = {0: 0, 1: 0, 2: 0}
        if not self.seekable:
            self.cursor = self.seek = None  # type: ignore[assignment,method-assign]

    def __call__(self, worker_id: int, batch_size: int) -> list[np.ndarray]:
        if self.at[worker_id] == 10 + 9 * worker_id:
            self.at[worker_id] = 0
            raise StopIteration
        self.at[worker_id] += 1
        return [np.full((5, 2), self.at[worker_id]), np.full((3, 5), worker_id)]

    def cursor(self, worker_id: int) -> int:
        return self.at[worker_id]

    def seek(self, worker_id: int, cursor: int) -> None:
        self.at[worker_id] = cursor


class Replayed(Cursors):
    seekable = False


FEEDS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "kept": (plain, {"epochs": 2}),
    "full at the end": (full_at_the_end, {"epochs": 2}),
    "padded": (plain, {"last_batch": "pad"}),
    "not to be fetched again": (plain, {"repeatable": False}),
    "large": (large, {}),
    "regular": (regular, {"epochs": 2, "num_worker_threads": 3}),
    "with cursors": (Cursors, {"epochs": 2, "num_worker_threads": 3}),
    "by replay": (Replayed, {"epochs": 2, "num_worker_threads": 3}),
    "not batched": (ragged, {"dont_rebatch": True}),
}


def make(fetch: Callable[..., Any], **settings: Any) -> feeder.Coordinator:
    fetch = fetch() if isinstance(fetch, type) else fetch
    return make_feed(fetch, ["a", "b"], 13, batch_columns=[0, 1], **settings)


def unchecked(token: bytes) -> tuple[int, list[Any]]:
    """The version and the fields of a token without the last chunk, which is told only while the
    rows of the batch are in memory."""
    fields = msgpack.unpackb(token[11:])
    if fields[7] is not None and fields[7][2] == fields[7][3]:
        fields[7] = None
    return token[2], fields


CHECKSUMS = ("off", "sampled", "full")


@contextmanager
def read_by(
    reader: Callable[..., Any], server: feeder.Server, checksum: str = "full", **settings: Any
) -> Iterator[Any]:
    made = reader(server.addresses[0], checksum)
    try:
        made.open(**settings)
        yield made
    finally:
        made.close()


@pytest.mark.parametrize(
    ("name", "shared", "checksum"),
    [(name, *way) for name in FEEDS for way in some(name, (True, False), CHECKSUMS)],
)
def test_the_pages_consumer_reads_what_the_library_reads(
    name: str, shared: bool, checksum: str, reader_of_the_page: Callable[..., Any]
) -> None:
    fetch, settings = FEEDS[name]
    with make(fetch, **settings) as coordinator:
        wanted = list(coordinator["train"])
    with (
        serving(lambda: make(fetch, **settings)) as server,
        read_by(reader_of_the_page, server, shared=shared, checksum=checksum) as reader,
    ):
        assert (reader.unix is not None) == shared
        num = 0
        for (numbers, columns), batch in zip(reader, wanted, strict=True):
            assert numbers == (batch.epoch, batch.index, batch.step, batch.rows)
            for column, array in zip(columns.values(), batch.arrays(), strict=True):
                assert (column.dtype, column.shape) == (array.dtype, array.shape)
                assert column.tobytes() == array.tobytes()
            is_token = reader.token[:2] == b"FT"
            assert is_token == settings.get("repeatable", True)
            # After a full batch at the end of an epoch a cut has two names.
            may_end = batch.cut.index == 0 and batch.rows == 13
            if is_token and not may_end and num + 1 < len(wanted):
                assert unchecked(reader.token) == unchecked(batch.cut.token())
            num += 1
        assert num == len(wanted) > 2


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "frames"])
def test_the_pages_consumer_goes_on_from_a_token(
    shared: bool, reader_of_the_page: Callable[..., Any]
) -> None:
    with serving(lambda: make(plain)) as server:
        with read_by(reader_of_the_page, server, shared=shared) as reader:
            seen = [next(iter(reader))[1]["b"].tolist()]
            token = reader.token
        with read_by(reader_of_the_page, server, shared=shared, token=token) as reader:
            seen += [columns["b"].tolist() for _, columns in reader]
    with make(plain) as coordinator:
        assert seen == [batch["b"].tolist() for batch in coordinator["train"]]


def test_the_pages_consumer_is_told_an_error(reader_of_the_page: Callable[..., Any]) -> None:
    def fails(call: feeder.Call) -> list[np.ndarray]:
        raise OSError("the disk is away")

    with (
        serving(lambda: make(fails)) as server,
        read_by(reader_of_the_page, server) as reader,
        pytest.raises(RuntimeError, match=r"FetchError: .*the disk is away"),
    ):
        next(iter(reader))
