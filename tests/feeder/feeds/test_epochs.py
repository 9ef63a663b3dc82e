"""Loops over a feed: once, and one epoch at a time; in process and served."""

from __future__ import annotations

import gc
import pickle  # noqa: TID251  (users may send batches through it)
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.service.server.group import ConsumerGroup
from feeder.waking import OneShotEvent
from small import WAIT_S, Aside, Held, Pure, ids, make
from watching import CallsOf

pytestmark = pytest.mark.served

ROWS = 4
NUM_CALLS = 3


def in_process(stack: ExitStack, fetch: Callable[..., Any], settings: dict[str, Any]) -> Any:
    return stack.enter_context(make(fetch, **settings))["train"]


def on_device(stack: ExitStack, fetch: Callable[..., Any], settings: dict[str, Any]) -> Any:
    return in_process(stack, fetch, settings).on(0)


def served(stack: ExitStack, fetch: Callable[..., Any], settings: dict[str, Any]) -> Any:
    server = stack.enter_context(feeder.serve(lambda: make(fetch, **settings), "tcp://127.0.0.1:0"))
    return stack.enter_context(feeder.connect(server.addresses[0]))


Open = Callable[[ExitStack, Callable[..., Any], dict[str, Any]], Any]
all_readers = pytest.mark.parametrize("read", [in_process, on_device, served])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@all_readers
@pytest.mark.parametrize("batch_size", [4, 5])
def test_each_epoch_is_a_loop_of_its_own(stack: ExitStack, read: Open, batch_size: int) -> None:
    settings = {"epochs": 3, "batch_size": batch_size, "last_batch": "keep"}
    feed = read(stack, Pure(NUM_CALLS, ROWS), settings)
    found = [(epoch.number, [(b.epoch, b.index) for b in epoch]) for epoch in feed.epochs()]
    num = -(-NUM_CALLS * ROWS // batch_size)
    assert found == [(e, [(e, i) for i in range(num)]) for e in range(3)]
    with pytest.raises(feeder.ConfigError, match="is read once"):
        feed.epochs()


@all_readers
def test_what_a_loop_leaves_of_its_epoch_is_dropped(stack: ExitStack, read: Open) -> None:
    feed = read(stack, Pure(NUM_CALLS, ROWS), {"epochs": 2})
    found = []
    for epoch in feed.epochs():
        for batch in epoch:
            found.append((batch.epoch, batch.index))
            break
    assert found == [(0, 0), (1, 0)]


@all_readers
def test_epochs_begin_where_the_position_is(stack: ExitStack, read: Open) -> None:
    feed = read(stack, Pure(NUM_CALLS, ROWS), {"epochs": 2})
    first = next(feed)
    found = [[(b.epoch, b.index) for b in epoch] for epoch in feed.epochs()]
    assert (first.epoch, first.index) == (0, 0)
    assert found == [[(0, 1), (0, 2)], [(1, 0), (1, 1), (1, 2)]]


@pytest.mark.parametrize("read", [in_process, served])
def test_to_look_for_the_next_epoch_moves_no_position(stack: ExitStack, read: Open) -> None:
    feed = read(stack, Pure(NUM_CALLS, ROWS), {"epochs": 2})
    before = feed.state_dict()
    for epoch in feed.epochs():
        assert feed.state_dict() == before
        batches = list(epoch)
        resumed = in_process(stack, Pure(NUM_CALLS, ROWS), {"epochs": 2, "resume": before})
        assert ids(resumed)[: len(ids(batches))] == ids(batches)
        before = feed.state_dict()


@all_readers
@pytest.mark.parametrize(("batch_size", "last_batch"), [*product([4, 5], ["keep", "drop", "pad"])])
def test_the_last_batch_of_an_epoch_says_so(
    stack: ExitStack, read: Open, batch_size: int, last_batch: str
) -> None:
    settings = {"epochs": 2, "batch_size": batch_size, "last_batch": last_batch}
    feed = read(stack, Pure(NUM_CALLS, ROWS), settings)
    batches, said = [], []
    for batch in feed:
        batches.append(batch)
        said.append(batch.last_of_epoch)
    epochs = [batch.epoch for batch in batches]
    expected = [a != b for a, b in zip(epochs, [*epochs[1:], None], strict=True)]
    assert said == expected
    # Of batches that are kept it is still known.
    assert [batch.last_of_epoch for batch in batches] == expected


def test_to_ask_for_the_last_waits_for_no_more_than_the_next_batch(stack: ExitStack) -> None:
    fetch = Held(chunks_before=2)
    feed = in_process(stack, fetch, {"num_worker_threads": 1, "last_batch": "keep"})
    stack.callback(fetch.release)
    assert next(feed).last_of_epoch is False
    second = next(feed)
    assert fetch.entered.wait(WAIT_S)
    fetch.release()
    assert second.last_of_epoch is True


def test_a_batch_outlives_its_consumer(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = CallsOf(monkeypatch, (ConsumerGroup, "leave"), (ConsumerGroup, "lose"))
    server = stack.enter_context(
        feeder.serve(lambda: make(Pure(NUM_CALLS, ROWS)), "tcp://127.0.0.1:0")
    )
    batch = next(feeder.connect(server.addresses[0]))
    gc.collect()
    with pytest.raises(feeder.ClosedError, match="reader of epoch 0 is gone"):
        _ = batch.last_of_epoch
    # The queue is given back, though the batch is kept.
    calls.wait_until(lambda: not server._groups["train"].leases)
    with feeder.connect(server.addresses[0]) as other:
        assert next(other).index == 0


# ---- one batch


@all_readers
def test_a_batch_is_unpacked_by_its_arrays(stack: ExitStack, read: Open) -> None:
    batch = next(read(stack, Pure(NUM_CALLS, ROWS), {}))
    with pytest.raises(TypeError, match=r"write .* = batch\.arrays\(\)"):
        (_,) = batch
    with pytest.raises(TypeError, match=r"batch\.arrays\(\)"):
        _, *_ = batch
    assert [*batch.arrays()] == [*batch.values()]
    assert list(batch) == [*batch] == [name for name in batch] == [*dict(batch)]


@all_readers
def test_a_pickled_batch_has_its_arrays_and_its_position(stack: ExitStack, read: Open) -> None:
    feed = read(stack, Pure(NUM_CALLS, ROWS), {"batch_size": 5, "epochs": 2})
    batch = next(feed)
    copied = pickle.loads(pickle.dumps(batch))
    assert [*copied] == [*batch]
    assert all(map(np.array_equal, copied.arrays(), batch.arrays()))
    numbers = ("epoch", "index", "step", "rows")
    assert [getattr(copied, n) for n in numbers] == [getattr(batch, n) for n in numbers]
    assert copied.cut == batch.cut
    assert copied.cut.token() == batch.cut.token()
    assert pickle.loads(pickle.dumps(copied)).cut.token() == batch.cut.token()
    with pytest.raises(feeder.FeedError, match="ask the batch before it is"):
        _ = copied.last_of_epoch
    rest = in_process(
        stack, Pure(NUM_CALLS, ROWS), {"batch_size": 5, "epochs": 2, "resume": copied.cut}
    )
    assert ids(rest) == ids(feed)


def moved(data: Any) -> Any:
    """As libraries move what a loader gave to a device."""
    if isinstance(data, Mapping):
        return type(data)(OrderedDict((name, moved(data[name])) for name in data))
    return data + 1


@all_readers
def test_a_batch_is_moved_as_a_mapping(stack: ExitStack, read: Open) -> None:
    batch = next(read(stack, Pure(NUM_CALLS, ROWS), {}))
    there = moved(batch)
    assert type(there) is feeder.Batch
    assert {name: (there[name] == batch[name] + 1).all() for name in batch} == dict.fromkeys(
        batch, True
    )
    with pytest.raises(feeder.FeedError, match="has no place in a stream"):
        _ = there.cut
    assert pickle.loads(pickle.dumps(there)).keys() == batch.keys()


# ---- a feed is read once, and by one thread at a time: anything else raises


@all_readers
@pytest.mark.parametrize(("epochs", "said"), [(1, "its one epoch"), (2, "its 2 epochs")])
def test_a_loop_over_what_was_read_to_the_end_raises(
    stack: ExitStack, read: Open, epochs: int, said: str
) -> None:
    feed = read(stack, Pure(4, 4), {"epochs": epochs})
    counts = []
    with pytest.raises(feeder.ConfigError, match=rf"feed 'train' .*{said}.*epochs="):
        for _ in range(2):
            counts.append(sum(1 for _ in feed))
    assert counts == [4 * epochs]
    with pytest.raises(StopIteration):
        next(feed)


@all_readers
def test_a_second_thread_in_next_raises_and_loses_nothing(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, read: Open
) -> None:
    fetch = Held(chunks_before=1)
    settings = {"num_worker_threads": 1, "last_batch": "keep"}
    feed = read(stack, fetch, settings)
    stack.callback(fetch.release)
    first = next(feed)
    assert fetch.entered.wait(WAIT_S)
    calls = CallsOf(monkeypatch, (OneShotEvent, "wait"))
    waiting = Aside(lambda: list(feed))
    calls.wait_until(lambda: feed_is_read(feed))
    for _ in range(3):
        with pytest.raises(feeder.FeedError, match="another thread is in it"):
            next(feed)
    fetch.release()
    assert waiting.result() == []
    assert first.rows == 4
    with pytest.raises(StopIteration):
        next(feed)


def feed_is_read(feed: Any) -> bool:
    """Whether a thread is in `next`."""
    reader = feed if hasattr(feed, "_is_read") else feed.on(0)
    return bool(reader._is_read)
