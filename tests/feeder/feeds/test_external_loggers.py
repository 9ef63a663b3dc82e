"""External loggers: given the statistics now and then and at the stop, whatever they do."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

import feeder
from small import Pure, ids, make


class Trouble(Exception):
    pass


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
