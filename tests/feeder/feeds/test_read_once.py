"""A feed is read once, and by one thread at a time: anything else raises."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import feeder
from small import WAIT_S, Aside, Held, Pure, ids, make

pytestmark = pytest.mark.served

Open = Callable[[ExitStack, Callable[..., Any], dict[str, Any]], Any]


def in_process(stack: ExitStack, fetch: Callable[..., Any], settings: dict[str, Any]) -> Any:
    return stack.enter_context(make(fetch, **settings))["train"]


def on_device(stack: ExitStack, fetch: Callable[..., Any], settings: dict[str, Any]) -> Any:
    return in_process(stack, fetch, settings).on(0)


def served(stack: ExitStack, fetch: Callable[..., Any], settings: dict[str, Any]) -> Any:
    server = stack.enter_context(feeder.serve(lambda: make(fetch, **settings), "tcp://127.0.0.1:0"))
    return stack.enter_context(feeder.connect(server.addresses[0]))


all_readers = pytest.mark.parametrize("read", [in_process, on_device, served])


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


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
def test_a_loop_that_was_left_is_gone_on_with(stack: ExitStack, read: Open) -> None:
    feed = read(stack, Pure(4, 4), {})
    found = []
    for batch in feed:
        found.append(batch)
        if len(found) == 2:
            break
    found += list(feed)
    assert ids(found) == ids(in_process(stack, Pure(4, 4), {}))


@all_readers
def test_what_ends_with_its_last_batch_in_a_loop_by_hand_has_an_empty_loop_left(
    stack: ExitStack, read: Open
) -> None:
    """The end was not told yet."""
    feed = read(stack, Pure(2, 4), {})
    assert len([next(feed), next(feed)]) == 2
    assert list(feed) == []
    with pytest.raises(feeder.ConfigError):
        iter(feed)


@all_readers
def test_a_second_thread_in_next_raises_and_loses_nothing(stack: ExitStack, read: Open) -> None:
    fetch = Held(chunks_before=1)
    settings = {"num_worker_threads": 1, "last_batch": "keep"}
    feed = read(stack, fetch, settings)
    stack.callback(fetch.release)
    first = next(feed)
    assert fetch.entered.wait(WAIT_S)
    waiting = Aside(lambda: list(feed))
    for _ in range(int(WAIT_S / 0.001)):
        if feed_is_read(feed):
            break
        threading.Event().wait(0.001)
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


@all_readers
def test_many_threads_get_each_batch_once(stack: ExitStack, read: Open) -> None:
    """Each that is refused tries again."""
    feed = read(stack, Pure(200, 4), {})
    found: list[list[feeder.Batch]] = []

    def take() -> None:
        mine: list[feeder.Batch] = []
        found.append(mine)
        while True:
            try:
                mine.append(next(feed))
            except StopIteration:
                return
            except feeder.ConfigError:
                raise
            except feeder.FeedError:
                continue

    threads = [Aside(take) for _ in range(3)]
    for thread in threads:
        thread.result()
    assert sorted(ids(batch for mine in found for batch in mine)) == sorted(
        ids(in_process(stack, Pure(200, 4), {}))
    )
