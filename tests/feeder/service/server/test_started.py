"""Serving the feeds of a coordinator that runs already: `with coordinator, feeder.serve(...)`."""

from __future__ import annotations

from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from small import Counted, Pure, Seekable, ids, make

pytestmark = pytest.mark.served


@pytest.mark.parametrize("fetch", [Pure, Seekable])
@pytest.mark.parametrize("taken", [0, 3])
def test_a_feed_that_runs_is_served_from_where_its_user_stands(fetch: Any, taken: int) -> None:
    whole = make(fetch(7, 3))
    with whole:
        expected = ids(whole["train"])
    with make(fetch(7, 3)) as coordinator:
        got = [int(row) for _ in range(taken) for row in next(coordinator["train"])["id"]]
        with serving(coordinator) as server, reading(server) as consumer:
            assert got + ids(consumer) == expected
        with pytest.raises(feeder.ClosedError):
            next(coordinator["train"])


def test_one_that_cannot_be_put_back_is_refused_and_runs_on() -> None:
    with make(Counted(7, 3)) as coordinator:
        with pytest.raises(feeder.ConfigError, match="is started already, and its fetch function"):
            feeder.serve(coordinator, "tcp://127.0.0.1:0")
        assert next(coordinator["train"]).step == 0


def test_a_factory_that_uses_the_coordinator_of_the_process_is_refused_at_once() -> None:
    """At the second connection it would find the feed of its first call there."""

    def made_without() -> feeder.Coordinator:
        return feeder.init_data_input_workers(["id"], Pure(), 4)

    for _ in range(2):
        with pytest.raises(feeder.ConfigError) as caught:
            feeder.serve(made_without, "tcp://127.0.0.1:0")
        assert str(caught.value) == (
            "'made_without' adds its feeds to the coordinator of the process, and is called again "
            "when a feed goes back: give init_data_input_workers coordinator=feeder.Coordinator()"
        )
