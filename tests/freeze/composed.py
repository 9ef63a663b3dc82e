"""Streams of sources that are put together: mixtures, packing, and each step, in every order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import feeder
import steps
from feeder import sources
from freeze.pairwise import Case, pairwise
from freeze.runs import all_told
from freeze.sources import POLICIES

BATCH_SIZE = 6
SCHEDULES: dict[str, Any] = {
    "none": (),
    "cut": [(33, {"a": 1, "b": 1}), (60, {"a": 3, "c": 2})],
    "early": [(1, {"c": 1, "b": 2.5})],
}
EVEN: dict[str, dict[str, Any]] = {
    "rounded": {"temperature": 2.0},
    "rounded, without end": {"temperature": 2.0, "on_exhausted": "repeat"},
    "rounded, cut": {"temperature": 2.0, "schedule": SCHEDULES["cut"]},
    "cut often": {
        "schedule": [(5 * i, {"a": 1, "b": 0.01 * i, "c": 0.02}) for i in range(1, 30)],
        "on_exhausted": "repeat",
    },
    "first one, then another": {
        "schedule": [(40, {"b": 1, "c": 2}), (80, {"a": 1})], "on_exhausted": "repeat",
    },
}  # fmt: skip
"""Mixtures of the second format."""
PACKED = ["tokens", "segment_ids", "positions", "loss_mask"]
STEPS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "pack": (steps.packed, PACKED),
    "pack, long left out": (
        lambda: sources.pack(steps.numbers(num=60).map(steps.ragged), 5, 16, "drop"), PACKED,
    ),
    "zip": (steps.zipped, ["x", "u"]),
    "concat": (
        lambda: steps.numbers().concat(steps.numbers(100, 9).shuffle(3), steps.numbers(200, 4)),
        ["x"],
    ),
    "filter": (steps.filtered, ["x", "u"]),
    "repeat": (lambda: steps.numbers().shuffle().map(steps.jitter).repeat(2), ["x", "u"]),
    "chain": (steps.chained, ["x", "u"]),
    "mix of a mix": (lambda: sources.mix({
        "m": (steps.mixture(on_exhausted="stop"), 3),
        "n": (steps.numbers(7000).map(steps.jitter), 1),
    }), ["x", "u"]),
    "mix, packed in windows of its own": (lambda: steps.packed(seed=8), PACKED),
}  # fmt: skip
ORDERS: dict[str, Callable[[Any], Any]] = {
    "its own": lambda source: source,
    "shard": lambda source: source.shard(1, 3),
    "shard, padded": lambda source: source.shard(2, 3, stick_to_shard=True, pad_last_batch=True),
    "shuffle": lambda source: source.shuffle(),
    "shuffle in windows": lambda source: source.shuffle(5, 4),
    "shard of a shuffle": lambda source: source.shuffle(2).shard(0, 2),
}
"""What comes after the step."""


def make_mix(
    folder: Path, on_exhausted: Any, schedule: str, temperature: float, order: str, **settings: Any
) -> feeder.Coordinator:
    """The mixture in its first format, in which older positions go on."""
    mixture = steps.mixture(
        on_exhausted=on_exhausted, schedule=SCHEDULES[schedule], temperature=temperature
    )
    made = ORDERS[order](mixture)
    return run(made.as_it_was() or made, ["x", "u"], **settings)


def make_even(folder: Path, mixture: str, order: str) -> feeder.Coordinator:
    return run(ORDERS[order](steps.mixture(**EVEN[mixture])), ["x", "u"])


def make_step(folder: Path, step: str, order: str, **settings: Any) -> feeder.Coordinator:
    make_source, names = STEPS[step]
    made = ORDERS[order](make_source())
    return run(made.as_it_was() or made, names, **settings)


def run(source: Any, names: list[str], **settings: Any) -> feeder.Coordinator:
    return feeder.init_data_input_workers(
        names, source, BATCH_SIZE, epochs=3, seed=7, timeout=10.0,
        coordinator=feeder.Coordinator(), **settings,
    )  # fmt: skip


def may_be_mixed(case: Case) -> bool:
    """Of weights that are no whole numbers a block is larger than these sources."""
    return case["temperature"] == 1 or case["on_exhausted"] != "stop"


def may_follow(case: Case) -> bool:
    """How many rows a window makes is not known: a shard of windows cannot be padded."""
    return "pack" not in case["step"] or case["order"] != "shard, padded"


def make(folder: Path) -> dict[str, Any]:
    mixtures = pairwise({
        "on_exhausted": ["drop", "stop", "repeat"], "schedule": [*SCHEDULES],
        "temperature": [1.0, 2.0], "order": [*ORDERS], **POLICIES,
    }, may_be_mixed)  # fmt: skip
    others = pairwise({"step": [*STEPS], "order": [*ORDERS], **POLICIES}, may_follow)
    even = pairwise({"mixture": [*EVEN], "order": [*ORDERS]})
    return {
        **all_told(make_mix, mixtures, folder),
        **all_told(make_step, others, folder),
        **all_told(make_even, even, folder),
    }
