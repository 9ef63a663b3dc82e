"""Feeds and their coordinator: made, started, stopped, and used at the wrong time."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.workers.stats import Waits
from small import WAIT_S, Counted, Pure, ids, make
from watching import says

PACKAGE = str(Path(feeder.__file__).parent)


def feeder_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("feeder ")]


USES: dict[str, Callable[[feeder.Coordinator], Any]] = {
    "next(feed)": lambda coordinator: next(coordinator["train"]),
    "for batch in feed": lambda coordinator: list(coordinator["train"]),
    "feed.on(0)": lambda coordinator: next(coordinator["train"].on(0)),
    "feed.on('cpu')": lambda coordinator: next(coordinator["train"].on("cpu")),
}
all_uses = pytest.mark.parametrize("use", USES.values(), ids=USES.keys())


@all_uses
def test_use_before_the_start_says_what_to_do(use: Callable[[feeder.Coordinator], Any]) -> None:
    coordinator = make(Pure())
    told = "feed 'train' is not started: use `with coordinator:` or coordinator.start()"
    with says(feeder.ClosedError, told):
        use(coordinator)
    with coordinator:
        assert next(coordinator["train"]).step == 0


@all_uses
@pytest.mark.parametrize("taken", [0, 1, 4], ids=["nothing", "a batch", "all"])
def test_use_after_the_stop_is_an_error(
    use: Callable[[feeder.Coordinator], Any], taken: int
) -> None:
    with make(Pure()) as coordinator:
        for _ in range(taken):
            next(coordinator["train"])
        if taken == 4:
            with pytest.raises(StopIteration):
                next(coordinator["train"])
    for _ in range(2):
        with pytest.raises(feeder.ClosedError, match=r"^(the feed|feed '\w+') is stopped$"):
            use(coordinator)


def ids_of_a_fresh_feed() -> list[int]:
    with make(Pure()) as coordinator:
        return ids(coordinator["train"])


def test_a_coordinator_is_true_whatever_feeds_it_has() -> None:
    """`coordinator or feeder.Coordinator()` would make another one of it."""
    coordinator = feeder.Coordinator()
    assert coordinator and not len(coordinator)
    with make(Pure(), coordinator=coordinator or feeder.Coordinator()):
        assert list(coordinator) == ["train"]
        coordinator.stop("train")
        assert coordinator and not len(coordinator)


def test_a_stopped_coordinator_is_not_started_or_added_to() -> None:
    with make(Pure()) as coordinator:
        pass
    with says(feeder.ClosedError, "the coordinator is stopped; make a new one, with resume="):
        coordinator.start()
    with pytest.raises(feeder.ClosedError, match=r"^the coordinator is stopped; make a new one"):
        make(Pure(), input_source_name="val", coordinator=coordinator)
    with pytest.raises(feeder.ClosedError):
        coordinator.__enter__()


def test_a_feed_whose_thread_never_began_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a tracer such as coverage ends a thread that begins (CPython 3.11)."""
    monkeypatch.setattr("feeder.workers.pipeline.run_enqueuer", lambda *_: None)
    told = "feed 'train' has lost the thread that makes batches"
    with make(Pure(), timeout=0.05) as coordinator, pytest.raises(feeder.FeedError, match=told):
        next(coordinator["train"])


def test_the_default_coordinator_is_one_until_it_is_stopped() -> None:
    def add(name: str) -> feeder.Coordinator:
        return feeder.init_data_input_workers(["id"], Pure(), 4, input_source_name=name)

    first = add("train")
    try:
        assert add("val") is first
        with pytest.raises(feeder.ConfigError):
            add("train")
    finally:
        assert first.stop() is True
    second = add("train")
    with second:
        assert second is not first
        assert list(second) == ["train"]
        assert ids(second["train"]) == ids_of_a_fresh_feed()


def test_a_feed_added_after_the_start_waits_for_the_next() -> None:
    with make(Pure()) as coordinator:
        next(coordinator["train"])
        make(Pure(2), input_source_name="val", coordinator=coordinator)
        with pytest.raises(feeder.ClosedError, match=r"^feed 'val' is not started: "):
            next(coordinator["val"])
        coordinator.start()
        assert ids(coordinator["val"]) == [1, 2, 3, 101, 102, 103]
        assert next(coordinator["train"]).step == 1


def test_one_feed_is_stopped_by_its_name() -> None:
    coordinator = make(Pure(50))
    make(Pure(50), input_source_name="val", coordinator=coordinator)
    with coordinator:
        next(coordinator["train"])
        position = coordinator["val"].state_dict()
        assert coordinator.stop("val") is True
        assert [name for name in feeder_threads() if " val " in name] == []
        with pytest.raises(feeder.ClosedError, match=r"^(the feed|feed '\w+') is stopped$"):
            next(coordinator["val"])
        assert coordinator["val"].state_dict() == position
        assert list(coordinator) == ["train"]
        assert ("val" in coordinator, len(coordinator)) == (False, 1)
        assert next(coordinator["train"]).step == 1
        coordinator.start()  # does not bring it back
        with pytest.raises(feeder.ClosedError):
            next(coordinator["val"])


@pytest.mark.parametrize("method", ["stop", "__getitem__"])
def test_an_unknown_name_is_told_with_those_that_there_are(method: str) -> None:
    coordinator = make(Pure())
    make(Pure(), input_source_name="val", coordinator=coordinator)
    with pytest.raises(KeyError) as caught:
        getattr(coordinator, method)("test")
    assert caught.value.args == ("no feed 'test', expected one of ['train', 'val']",)


class Trouble(Exception):
    pass


def test_what_init_fun_raises_reaches_the_user_and_nothing_is_started() -> None:
    trouble, calls = Trouble(), []

    def fail(feed: feeder.Feed, coordinator: feeder.Coordinator) -> None:
        raise trouble

    def fetch(call: feeder.Call) -> Any:
        calls.append(call)
        raise StopIteration

    coordinator = make(fetch)
    make(fetch, input_source_name="val", init_fun=fail, coordinator=coordinator)
    with pytest.raises(Trouble) as caught:
        coordinator.start()
    assert caught.value is trouble
    assert feeder_threads() == []
    assert coordinator.stop() is True
    assert calls == []


def test_init_fun_is_not_run_again_after_another_feeds_has_failed() -> None:
    ran = []

    def begin(feed: feeder.Feed, coordinator: feeder.Coordinator) -> None:
        ran.append(feed.name)

    def fail_once(feed: feeder.Feed, coordinator: feeder.Coordinator) -> None:
        ran.append(feed.name)
        if ran.count(feed.name) == 1:
            raise Trouble

    coordinator = make(Pure(), init_fun=begin)
    make(Pure(), input_source_name="val", init_fun=fail_once, coordinator=coordinator)
    with pytest.raises(Trouble):
        coordinator.start()
    with coordinator:
        assert ran == ["train", "val", "val"]


def test_an_error_in_one_feed_leaves_the_others_running() -> None:
    def fail(call: feeder.Call) -> Any:
        raise Trouble

    coordinator = make(fail)
    make(Pure(), input_source_name="val", coordinator=coordinator)
    with coordinator:
        with pytest.raises(feeder.FetchError):
            next(coordinator["train"])
        assert ids(coordinator["val"]) == ids_of_a_fresh_feed()


def test_of_nested_blocks_the_outermost_stops() -> None:
    coordinator = make(Pure(), epochs=None)
    make(Pure(), epochs=1, coordinator=coordinator, input_source_name="val")
    with coordinator:
        first = next(coordinator["train"])
        with coordinator, pytest.raises(KeyError, match="missing"):
            raise KeyError("missing")
        with coordinator:
            assert len(list(coordinator["val"])) == 4
        assert next(coordinator["train"]).step == first.step + 1
    with pytest.raises(feeder.ClosedError):
        next(coordinator["train"])


@pytest.mark.parametrize("nth", [1, 2, 4, 6])
def test_where_a_thread_cannot_be_started_none_is_left_and_nothing_hangs(
    monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    started, start = [], threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        started.append(thread)
        if len(started) == nth:
            raise RuntimeError("can't start new thread")
        start(thread)

    coordinator = make(Counted(), num_worker_threads=2)
    make(Counted(), num_worker_threads=2, coordinator=coordinator, input_source_name="val")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        coordinator.start()
    assert not feeder_threads()
    coordinator.start()
    for name in ("train", "val"):
        with pytest.raises(feeder.ClosedError):
            next(coordinator[name])


@contextlib.contextmanager
def interrupted(nth: int) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt where the nth function of feeder's own begins, which is where Python
    looks for signals; the names of the functions are put down."""
    begun: list[str] = []

    def trace(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        # An interrupt in a generator that is being closed is lost, and the block is entered. One
        # just after a file of the store was opened costs a descriptor, and no thread.
        is_ours = code.co_filename.startswith(PACKAGE) and code.co_name != "<genexpr>"
        is_ours = is_ours and not code.co_filename.endswith(("durable.py", "local.py"))
        if is_ours and len(begun) < nth:
            begun.append(code.co_qualname)
            if len(begun) == nth:
                raise KeyboardInterrupt

    before = sys.gettrace()
    gc.disable()  # An interrupt in a finaliser is lost, too.
    sys.settrace(trace)
    try:
        yield begun
    finally:
        sys.settrace(before)
        gc.enable()


def test_an_interrupt_anywhere_in_a_blocks_beginning_leaves_no_thread(tmp_path: Path) -> None:
    """Python has no block to leave where `__enter__` did not return."""
    nth = 0
    while True:
        nth += 1
        checkpoints = feeder.Checkpointing(tmp_path / "checkpoints", every_s=60)
        coordinator = feeder.Coordinator(checkpoints=checkpoints)
        make(Counted(), coordinator=coordinator)
        with interrupted(nth) as begun:
            try:
                coordinator.__enter__()
            except KeyboardInterrupt:
                entered = False
            else:
                entered = True
        if entered:
            break
        assert feeder_threads() == [], begun[-1]
        with pytest.raises(feeder.ClosedError):
            next(coordinator["train"])
    coordinator.stop()
    assert nth > 20


def test_what_cannot_begin_is_stopped_where_its_block_is_not_entered() -> None:
    def fail(feed: feeder.Feed, coordinator: feeder.Coordinator) -> None:
        raise Trouble

    first = feeder.init_data_input_workers(["id"], Pure(), 4, init_fun=fail)
    with pytest.raises(Trouble), first:
        pass
    # The cell of a notebook is mended, and run again.
    with feeder.init_data_input_workers(["id"], Pure(), 4) as second:
        assert second is not first
        assert ids(second["train"]) == ids_of_a_fresh_feed()


@pytest.fixture
def not_collected() -> Iterator[None]:
    """Nobody but the test collects: what it has collected is gone then."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("kept", ["nothing", "a cycle"])
def test_a_coordinator_that_is_dropped_without_a_stop_ends_its_threads(
    tmp_path: Path, kept: str, not_collected: None
) -> None:
    checkpoints = feeder.Checkpointing(tmp_path / "checkpoints", every_s=60)
    coordinator = feeder.Coordinator(checkpoints=checkpoints)
    make(Pure(), epochs=None, coordinator=coordinator)
    coordinator.start()
    threads = [t for t in threading.enumerate() if t.name.startswith("feeder ")]
    assert len(threads) >= 3
    if kept == "a cycle":
        coordinator.itself = coordinator  # type: ignore[attr-defined]
    del coordinator
    gc.collect()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("held", ["feed", "device", "iterator"])
def test_threads_go_on_while_somebody_may_ask_for_a_batch(held: str) -> None:
    coordinator = make(Pure(), epochs=None)
    coordinator.start()
    feed: Any = coordinator["train"]
    feed = {"feed": feed, "device": feed.on(0), "iterator": iter(feed)}[held]
    del coordinator
    gc.collect()
    assert [next(feed).step for _ in range(300)] == list(range(300))
    threads = [t for t in threading.enumerate() if t.name.startswith("feeder ")]
    del feed
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive(), thread.name


def test_a_feed_that_is_over_is_replaced_as_where_a_cell_is_run_again() -> None:
    with make(Pure()) as coordinator:
        first = ids(coordinator["train"])
        with pytest.raises(feeder.ConfigError, match="which is not started: to replace it"):
            make(Pure(), input_source_name="val", coordinator=coordinator)
            make(Pure(), input_source_name="val", coordinator=coordinator)
        make(Pure(), coordinator=coordinator)
        with pytest.raises(feeder.ConfigError, match="which is not started: to replace it"):
            make(Pure(), coordinator=coordinator)
        coordinator.start()
        next(coordinator["train"])
        with pytest.raises(feeder.ConfigError, match="feed 'train' already, which runs: to rep"):
            make(Pure(), coordinator=coordinator)
        assert ids(coordinator["train"]) == first[4:]
        make(Pure(), coordinator=coordinator)
        coordinator.start()
        assert ids(coordinator["train"]) == first


def test_figures_tell_how_far_the_epoch_is() -> None:
    source = feeder.sources.arrays(np.arange(20))
    coordinator = make(source, ["x"], 8, epochs=2)

    def told() -> Any:
        progress = coordinator.figures().feeds[0].progress
        assert progress is not None
        return progress.epoch, progress.batches, progress.length, progress.epochs

    with coordinator:
        seen = [told()]
        for _ in coordinator["train"]:
            seen.append(told())
        seen.append(told())
    assert [s[2:] for s in seen] == [(3, 2)] * 8
    # The end of an epoch is the start of the next, once it is known to be one.
    assert [s[:2] for s in seen[:3]] == [(0, 0), (0, 1), (0, 2)]
    assert seen[3][:2] in [(0, 3), (1, 0)]
    assert [s[:2] for s in seen[4:]] == [(1, 1), (1, 2), (1, 3), (1, 3)]


def test_the_waits_of_a_stopwatch_have_quantiles() -> None:
    waits = Waits()
    assert waits.quantile(0.99) == 0.0
    for number in range(200):
        waits.start(10.0)
        waits.stop(10.0 + (5.0 if number >= 196 else 0.001))
    assert 0.001 <= waits.quantile(0.5) <= 0.0012
    assert 0.001 <= waits.quantile(0.98) <= 0.0012
    assert 5.0 <= waits.quantile(0.99) <= 6.0


# ---- external loggers: given the statistics now and then and at the stop, whatever they do


class BrokenLog:
    def log(self, stats: dict[str, Any]) -> None:
        raise Trouble("the metrics are away")


def test_an_external_logger_that_raises_does_not_disturb_the_feed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feeder.feeds.stream._LOG_EVERY_S", 0.0)
    with caplog.at_level(logging.ERROR, logger="feeder"):
        with make(Pure(), external_loggers=[BrokenLog()]) as coordinator:
            assert len(ids(coordinator["train"])) == 15
        assert coordinator.stop() is True
    messages = {record.message for record in caplog.records}
    assert len(messages) == 1
    assert messages.pop().startswith("external logger <")
    assert all(record.exc_info and record.exc_info[0] is Trouble for record in caplog.records)


class Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def log(self, stats: dict[str, Any]) -> None:
        self.lines.append(stats)


def test_the_last_verdict_says_what_held_a_stopped_feed_up() -> None:
    log = Log()
    with make(Pure(), epochs=None, external_loggers=[log]) as coordinator:
        next(coordinator["train"])
    told = log.lines[-1]["verdict"]
    assert told.startswith("stopped (after ") and "; until then " in told


def test_statistics_are_logged_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    monkeypatch.setattr("feeder.feeds.stream._LOG_EVERY_S", 0.0)
    with make(Pure(), external_loggers=[log]) as coordinator:
        list(coordinator["train"])
        assert log.lines
    assert [line["batches"] for line in log.lines] == sorted(line["batches"] for line in log.lines)
    assert log.lines[-1]["rows"] == 15


class Quitter:
    """An external logger that ends the thread that it is called in, so many times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def log(self, stats: dict[str, Any]) -> None:
        self.times -= 1
        if self.times >= 0:
            raise SystemExit(1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("times", [1, 2])
def test_whatever_is_raised_while_batches_are_made_reaches_the_user(
    times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(worker_id: int, batch_size: int) -> Any:
        return [np.ones(1)]

    monkeypatch.setattr("feeder.feeds.stream._LOG_EVERY_S", 0.0)
    with (
        make(fetch, ["x"], 4, external_loggers=[Quitter(times)]) as coordinator,
        pytest.raises(feeder.FeedError, match="the enqueuer failed: SystemExit: 1"),
    ):
        list(coordinator["train"])
