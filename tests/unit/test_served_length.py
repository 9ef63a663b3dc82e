"""How many batches a consumer says there are, and how many come."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeds import make
from fetches import make_fetch

POLICIES = list(product(("keep", "drop", "pad", "carry"), ("uneven", "drop", "pad")))


@pytest.mark.parametrize(("last_batch", "last_round"), POLICIES)
def test_a_feed_of_a_source_has_a_length(last_batch: str, last_round: str) -> None:
    def factory() -> feeder.Coordinator:
        source = feeder.sources.arrays(np.arange(1, 44), num_shards=2)
        return make(
            source, input_blob_names=["id"], epochs=3, last_batch=last_batch,
            last_round=last_round,
        )  # fmt: skip

    with (
        serving(factory, queues=2) as server,
        reading(server, queue=0, credit=64) as left,
        reading(server, queue=1, credit=64) as right,
    ):
        assert [len(left), len(right)] == [len([*left]), len([*right])]


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
