"""Edits of a feed while it is served: the same as to stop, save and resume with `edit=`."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from feeder.service.server.editing import Change
from served import Server, outside, reading, serving

pytestmark = pytest.mark.usefixtures("world")

FIRSTS = {"web": 0, "code": 10_000, "books": 20_000}


def mixed(mode: Any = "drop", **weights: Any) -> Any:
    given = {
        name: (sources.arrays(np.arange(60) + FIRSTS[name]).shuffle(seed=1), weight)
        for name, weight in weights.items()
    }
    return sources.mix(given, on_exhausted=mode)


def feed(source: Any, resume: Any = None, **settings: Any) -> Any:
    if "global_batch_size" not in settings:
        settings.setdefault("batch_size", 4)
    return feeder.init_data_input_workers(
        ["x"], source, coordinator=feeder.Coordinator(), resume=resume, **settings
    )


def edit(server: Server, why: str = "because", seed: int | None = None, **given: Any) -> int:
    sizes = {k: given.pop(k) for k in [*given] if k.endswith("batch_size")}
    weights = {name: Fraction(weight) for name, weight in given.items()}
    step = server.group.edit(Change(weights, sizes, seed), why)
    server.notify()
    return step


def test_one_queue_goes_on_with_other_weights() -> None:
    with serving(lambda: feed(mixed(web=7, code=3))) as server, reading(
        server, plane="frames", credit=4
    ) as consumer:
        rows = [batch["x"].tolist() for batch in islice(consumer, 5)]
        step = edit(server, web=1, code=1)
        assert 5 <= step <= 9
        rows += [batch["x"].tolist() for batch in consumer]
    with outside(), feed(mixed(web=7, code=3)) as coordinator:
        plain = [batch["x"].tolist() for batch in islice(coordinator["train"], step)]
        state = coordinator.state_dict()
        with feed(mixed(web=1, code=1), state, edit="because") as other:
            plain += [batch["x"].tolist() for batch in other["train"]]
    assert rows == plain
