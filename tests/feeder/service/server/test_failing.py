"""A served feed that fails: the server logs it once, and may end by itself then."""

from __future__ import annotations

import logging
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
import pytest

import feeder
import small
from conformance.served import reading, serving
from feeder.service.server import io_loop as serving_module
from feeder.service.server.delivery import Delivery
from feeder.service.server.group import ConsumerGroup
from feeds import make

pytestmark = pytest.mark.served

END_S = 20.0


def fail(call: feeder.Call) -> Any:
    if call.index == 2:
        raise OSError("the disk is gone")
    return [np.full(4, call.index)]


def failing(fetch: Any = fail, **settings: Any) -> feeder.Coordinator:
    return make(fetch, input_blob_names=["id"], batch_size=4, **settings)


def with_another(fetch: Any = fail, **settings: Any) -> feeder.Coordinator:
    """A feed that fails, and one that goes on for ever."""
    return failing(
        lambda call: [np.full(4, call.index)], epochs=None, input_source_name="other",
        coordinator=failing(fetch, **settings),
    )  # fmt: skip


def read_to_the_failure(consumer: feeder.Consumer) -> None:
    with pytest.raises(feeder.FetchError, match="the disk is gone"):
        list(consumer)


def failures(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def check_serving(server: feeder.Server) -> None:
    """Raise `ClosedError` where what was said until now has ended it: its I/O thread answers once
    more then, and no second time."""
    for _ in range(2):
        server.figures()


def test_a_server_ends_once_all_its_consumers_were_told_of_a_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Which is logged once."""
    with (
        serving(failing, queues=2, exit_when="acknowledged") as server,
        reading(server, queue=0) as left,
        reading(server, queue=1) as right,
    ):
        read_to_the_failure(left)
        left.close()
        check_serving(server)
        read_to_the_failure(right)
        assert server.wait(END_S)
        assert isinstance(server.failure, feeder.FetchError)
    (told,) = failures(caplog)
    assert told.startswith("feed 'train' has failed: worker ")
    assert "Traceback (most recent call last)" in told and "in fail" in told


def test_a_server_waits_for_nobody_who_is_not_there_after_a_failure() -> None:
    """The trainer that was told is gone, and it alone would have read the other feed."""
    with serving(with_another, exit_when="acknowledged") as server:
        with reading(server, feed="other") as other, reading(server, feed="train") as consumer:
            next(other)
            read_to_the_failure(consumer)
            consumer.close()
            check_serving(server)
        assert server.wait(END_S)
        assert isinstance(server.failure, feeder.FetchError)


def test_a_failure_is_forgotten_when_its_feed_is_begun_again() -> None:
    """Else the server would not wait for who comes back."""
    calls = count()

    def fail_once(call: feeder.Call) -> Any:
        if next(calls) == 0:
            raise OSError("the disk is gone")
        return [np.full(4, call.index)]

    def factory() -> feeder.Coordinator:
        return with_another(fail_once, epochs=None, num_worker_threads=1)

    with serving(factory, exit_when="acknowledged") as server:
        with reading(server, feed="other") as other:
            next(other)
            with reading(server, feed="train") as consumer:
                read_to_the_failure(consumer)
            with reading(server, feed="train") as consumer:
                next(consumer)
        check_serving(server)


def test_a_position_that_does_not_fit_ends_no_server() -> None:
    """It is the failure of who brought it; others are served."""
    with failing(lambda call: [np.full(5, call.index + 1000)], epochs=None) as other:
        next(other["train"])
        state = other.state_dict()
    with serving(failing, exit_when="acknowledged") as server:
        with pytest.raises(feeder.ResumeError), reading(server, resume=state) as consumer:
            next(consumer)
        check_serving(server)
        with reading(server) as consumer:
            read_to_the_failure(consumer)
        assert server.wait(END_S) and isinstance(server.failure, feeder.FetchError)


def test_a_fault_of_the_servers_own_reaches_who_asks_for_a_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(config: object, device: int) -> int:
        raise ZeroDivisionError("a bug")

    with serving(lambda: failing(lambda call: [np.full(4, call.index)], epochs=None)) as server:
        with monkeypatch.context() as patch:
            patch.setattr(serving_module, "num_batches", broken)
            with pytest.raises(feeder.RemoteError, match="ZeroDivisionError: a bug"):
                feeder.connect(server.addresses[0])
        with reading(server) as consumer:
            assert next(consumer).step == 0
    caplog.clear()  # The traceback that was logged holds the server.


def test_a_fault_of_the_servers_own_reaches_whom_it_sends_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: object) -> int:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Delivery, "_most", broken)
    with (
        serving(lambda: failing(lambda call: [np.full(4, call.index)], epochs=None)) as server,
        reading(server) as consumer,
        pytest.raises(feeder.RemoteError, match="ZeroDivisionError: a bug") as caught,
    ):
        next(consumer)
    for told in ("\n".join(caught.value.__notes__), caplog.text):
        assert "in broken" in told
    caplog.clear()  # The traceback that was logged holds the server.


WRONG: dict[str, tuple[Any, list[str], str]] = {
    "columns": (
        lambda call: [np.zeros(4)] * 1025, [f"c{i}" for i in range(1025)],
        "feed 'train' has 1025 columns, expected at most 1024",
    ),
    "a long name": (
        lambda call: [np.zeros(4)], ["x" * 1025],
        "column name 'x+' has 1025 characters, expected at most 1024",
    ),
    "a name that is no text": (
        lambda call: [np.zeros(4)], ["x\udc80"],
        r"column name 'x\\udc80' has 2 characters, .*UTF-8",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("fetch", "names", "told"), WRONG.values(), ids=WRONG)
def test_names_that_consumers_cannot_be_told_are_refused(
    fetch: Any, names: list[str], told: str
) -> None:
    with pytest.raises(feeder.ConfigError, match=told):
        feeder.serve(lambda: small.make(fetch, names), "tcp://127.0.0.1:0")


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.zeros((4, *[1] * 32)), "column 'id' has 32 axes beside the rows, expected at most 31"),
        (np.zeros(4, [("a", "i4")]), r"column 'id' has dtype .*, which cannot be served; give"),
    ],
)
def test_columns_that_consumers_cannot_be_told_are_an_error_of_the_feed(
    array: Any, told: str
) -> None:
    if array.ndim > 32 and np.lib.NumpyVersion(np.__version__) < "2.0.0":
        pytest.skip("NumPy 1 has no such arrays")
    with serving(lambda: small.make(lambda call: [array])) as server, reading(server) as consumer:
        for _ in range(2):
            with pytest.raises(feeder.ConfigError, match=told):
                next(consumer)


def test_a_server_whose_own_thread_fails_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(group: ConsumerGroup) -> None:
        raise ZeroDivisionError("a bug")

    with serving(lambda: failing(lambda call: [np.full(4, call.index)], epochs=None)) as server:
        monkeypatch.setattr(ConsumerGroup, "pump", broken)
        # It may have been given its queue before.
        with suppress(feeder.FeedError):
            feeder.connect(server.addresses[0], timeout=0.5).close()
        assert server.wait(END_S)
        assert "ZeroDivisionError: a bug" in str(server.failure)
    caplog.clear()


def test_more_queues_than_consumers_can_be_told_of_are_refused() -> None:
    with pytest.raises(feeder.ConfigError, match="has 1025 queues, expected at most 1024"):
        feeder.serve(lambda: small.make(lambda call: None), "tcp://127.0.0.1:0", queues=1025)
