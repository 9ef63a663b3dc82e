"""Feeds with several devices: dealt out from one stream, or made by one call each."""

from __future__ import annotations

import logging
import re
import threading
from functools import partial
from typing import Any

import pytest

import feeder
from parts import examples
from small import WAIT_S, Aside, Counted, Pure, chunk, ids, make
from watching import says


def test_a_feed_with_several_devices_is_taken_from_by_device() -> None:
    with make(Pure(8, 4), devices=("cpu:4", "cpu:7")) as coordinator:
        feed = coordinator["train"]
        assert feed.devices == ("cpu:4", "cpu:7")
        assert feed.on("cpu:7") is feed.on(1)
        assert [next(feed.on(device)).step for device in ("cpu:7", 0, 1, "cpu:4")] == [1, 0, 3, 2]
        told = "feed 'train' has 2 devices: take the batches of each from feed.on(device), one of "
        for take in (lambda: next(feed), lambda: iter(feed)):
            with says(feeder.ConfigError, told + "('cpu:4', 'cpu:7')"):
                take()


def take(device: feeder.DeviceFeed, num: int) -> list[int]:
    return [next(device).step for _ in range(num)]


@pytest.mark.parametrize("device", ["cpu", "cpu:2", 2, -1, None, 1.0], ids=repr)
def test_an_unknown_device_is_told_with_those_that_there_are(device: Any) -> None:
    told = (
        f"feed 'train' has no device {device!r}, expected one of ('cpu:0', 'cpu:1') or its number"
    )
    with says(feeder.ConfigError, told):
        make(Pure(), devices=2)["train"].on(device)


def call_per_device(*num_workers: int, fetches: list[Any] | None = None) -> feeder.Coordinator:
    """Call `init_data_input_workers` once per device under one name, as the original's users."""
    coordinator = feeder.Coordinator()
    fetches = fetches or [Counted() for _ in num_workers]
    for i, (num, fetch) in enumerate(zip(num_workers, fetches, strict=True)):
        make(fetch, num_worker_threads=num, devices=(f"cpu:{i}",), coordinator=coordinator)
    return coordinator


def rows_of(workers: range) -> list[int]:
    """Return the ids of `Counted()` served by these workers."""
    return [int(v) for call in range(5) for w in workers for v in chunk(w, call, 3)[0]]


def test_a_call_per_device_makes_a_stream_per_device_whose_worker_ids_count_on() -> None:
    coordinator = call_per_device(2, 1, 3)
    make(Counted(), input_source_name="val", coordinator=coordinator)
    assert coordinator.get_worker_ids() == [0, 1, 2, 3, 4, 5, 0, 1]
    with coordinator:
        feed = coordinator["train"]
        assert feed.devices == ("cpu:0", "cpu:1", "cpu:2")
        got = [ids(feed.on(device)) for device in range(3)]
        assert ids(coordinator["val"]) == rows_of(range(2))
    assert got == [rows_of(range(2)), rows_of(range(2, 3)), rows_of(range(3, 6))]


def test_a_snapshot_holds_the_streams_of_all_calls() -> None:
    def fetches() -> list[Any]:
        return [Pure(9), Pure(6)]

    with call_per_device(1, 1, fetches=fetches()) as coordinator:
        feed = coordinator["train"]
        taken = [[next(feed.on(0)) for _ in range(3)], [next(feed.on(1))]]
        snapshot, state = coordinator.snapshot(), coordinator.state_dict()
        rest = [ids(feed.on(device)) for device in range(2)]
    assert [len(batches) for batches in taken] == [3, 1]
    assert [(s.name, s.number, s.summary[2]) for s in snapshot.states] == [
        ("train", 0, 3), ("train", 1, 1),
    ]  # fmt: skip
    resumed = call_per_device(1, 1, fetches=fetches())
    resumed.load_state_dict(state)
    with resumed:
        assert [ids(resumed["train"].on(device)) for device in range(2)] == rest
    assert feeder.Snapshot.from_bytes(bytes(snapshot)).describe().count("\n") == 1


def test_a_device_that_lags_does_not_hold_up_the_stream_of_another_call() -> None:
    fetches = [Pure(400), Pure(5)]
    with call_per_device(1, 1, fetches=fetches) as coordinator:
        assert len(ids(coordinator["train"].on(0))) == 1200
        assert len(ids(coordinator["train"].on(1))) == 15


SLOW_FETCH = r"no batch for \d+ s: feed 'train' waits for its fetch function"


class Signal(logging.Handler):
    """Tells the test that a line has been logged, and that one has that tells of a device."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.logged = threading.Event()
        self.told_device = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.logged.set()
        if self.lines[-1].endswith("to take a batch"):
            self.told_device.set()


@pytest.fixture
def signal() -> Any:
    handler = Signal()
    logger = logging.getLogger("feeder")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.mark.parametrize("max_buffered_batches", [1, 2, 7, 100])
def test_the_wait_for_a_device_that_does_not_take_names_it(
    max_buffered_batches: int, signal: Signal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feeder.devices.host._SLOW_S", 0.05)
    settings = {"devices": ("cpu:4", "cpu:7"), "max_buffered_batches": max_buffered_batches}
    with make(Pure(1000, 4), **settings) as coordinator:
        feed = coordinator["train"]
        taker = Aside(lambda: [batch.step for batch in feed.on("cpu:4")])
        assert signal.told_device.wait(WAIT_S)
        told = r"no batch for \d+ s: feed 'train' waits for \['cpu:7'\] to take a batch"
        assert re.fullmatch(told, signal.lines[-1])
        assert [batch.step for batch in feed.on("cpu:7")] == list(range(1, 1000, 2))
        assert taker.result() == list(range(0, 1000, 2))


@pytest.mark.parametrize("last_round", ["uneven", "drop", "pad"])
@pytest.mark.parametrize("max_buffered_batches", [1, 7, 100])
def test_a_device_that_is_read_to_its_end_before_the_next_raises_after_the_timeout(
    max_buffered_batches: int, last_round: str
) -> None:
    settings: dict[str, Any] = {
        "devices": 2, "max_buffered_batches": max_buffered_batches, "last_round": last_round,
        "timeout": 0.2,
    }  # fmt: skip
    with make(Pure(1000, 4), **settings) as coordinator:
        feed, steps = coordinator["train"], list[int]()
        with pytest.raises(feeder.FeedError, match=r"'cpu:1'.* took none for 0.2 s: .*in turns"):
            for batch in feed.on(0):
                steps.append(batch.step)
        # Nothing is lost: it goes on when the other is read.
        second = Aside(lambda: [batch.step for batch in feed.on(1)])
        steps += [batch.step for batch in feed.on(0)]
        assert steps == list(range(0, 1000, 2))
        assert second.result() == list(range(1, 1000, 2))


def test_a_fetch_function_that_gives_nothing_is_logged_again_and_again(
    signal: Signal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feeder.devices.host._SLOW_S", 0.02)

    def fetch(call: feeder.Call) -> Any:
        return chunk(0, call.index, 4) if len(signal.lines) >= 3 else None

    with make(fetch) as coordinator:
        assert next(coordinator["train"]).step == 0
    for line in signal.lines[:3]:
        assert re.fullmatch(SLOW_FETCH, line)


@pytest.mark.parametrize("ahead", [1, 5, 20])
def test_one_thread_may_take_from_the_devices_in_any_order(ahead: int) -> None:
    """As far as the bound lets one device run ahead of the other."""
    for _ in range(examples(40)):
        with make(Pure(200, 4), devices=2, max_buffered_batches=2 * ahead + 2) as coordinator:
            feed = coordinator["train"]
            for step in range(0, 200 - 200 % (2 * ahead), 2 * ahead):
                for device in range(2):
                    got = Aside(partial(take, feed.on(device), ahead))
                    assert got.result() == [step + 2 * i + device for i in range(ahead)]
