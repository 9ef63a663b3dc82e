"""How many batches a feed, or its consumer, says there are, and how many come."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeds import make
from fetches import make_fetch
from small import Calls

pytestmark = pytest.mark.served

POLICIES = list(product(("keep", "drop", "pad", "carry"), ("uneven", "drop", "pad")))


def of_source(**settings: Any) -> feeder.Coordinator:
    source = feeder.sources.arrays(np.arange(1, 44), num_shards=2)
    return make(source, input_blob_names=["id"], epochs=3, **settings)


@pytest.mark.parametrize("rounds", ["stream", "epoch"])
@pytest.mark.parametrize(("last_batch", "last_round"), POLICIES)
def test_a_feed_of_a_source_has_a_length(last_batch: str, last_round: str, rounds: str) -> None:
    settings = {"last_batch": last_batch, "last_round": last_round}
    settings["rounds"] = "stream" if last_batch == "carry" else rounds

    def factory() -> feeder.Coordinator:
        return of_source(**settings)

    with (
        serving(factory, queues=2) as server,
        reading(server, queue=0, credit=64) as left,
        reading(server, queue=1, credit=64) as right,
    ):
        assert [len(left), len(right)] == [len([*left]), len([*right])]


def test_a_length_is_that_of_the_whole_stream_also_after_a_resume() -> None:
    with of_source() as coordinator:
        feed = coordinator["train"]
        whole = len(feed)
        taken = [next(feed) for _ in range(3)]
        state = coordinator.state_dict()
    with of_source(resume=state) as coordinator:
        feed = coordinator["train"]
        assert len(feed) == whole == len(taken) + len([*feed])


@pytest.mark.parametrize("settings", [{"epochs": None}, {}])
def test_a_length_that_nobody_knows_is_none(settings: dict[str, Any]) -> None:
    def factory() -> feeder.Coordinator:
        if settings:
            source = feeder.sources.arrays(np.arange(9))
            return make(source, input_blob_names=["id"], **settings)
        return make(make_fetch("pure", "ragged"))

    with (
        serving(factory) as server,
        reading(server) as consumer,
        pytest.raises(TypeError, match="not known"),
    ):
        len(consumer)
    with factory() as coordinator, pytest.raises(TypeError, match="not known"):
        len(coordinator["train"])


class Table(Calls):
    """A pure fetch function whose `rows` are something else."""

    def __init__(self) -> None:
        super().__init__(3, lambda call: [self.rows(4 * call.index, 4)])

    def rows(self, first: int, num: int) -> Any:
        return np.arange(first, first + num)


def test_rows_that_are_no_number_of_rows_do_no_harm() -> None:
    def factory() -> feeder.Coordinator:
        return make(Table(), input_blob_names=["id"], batch_size=4)

    with factory() as coordinator:
        feed = coordinator["train"]
        with pytest.raises(TypeError, match="not known"):
            len(feed)
        assert feed and len([*feed]) == 3
