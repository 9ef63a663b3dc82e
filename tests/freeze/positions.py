"""Tokens, snapshots and state dicts of feeds that stand at a fixed batch, as bytes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from feeder import Coordinator, init_data_input_workers
from feeds import make as make_feed
from fetches import BATCH_SIZE, COLUMNS, make_fetch
from freeze.sources import make_source

Make = Callable[[Path], Coordinator]


def of_form(form: str, folder: Path, **settings: Any) -> Coordinator:
    settings = {"epochs": 3, "seed": 5, "version": "7", **settings}
    return make_feed(make_fetch(form, "ragged"), **settings)


def of_two_feeds(folder: Path) -> Coordinator:
    coordinator = Coordinator()
    for name in ("train", "valid"):
        init_data_input_workers(
            [*COLUMNS], make_fetch("pure", "large"), BATCH_SIZE, 2, name, coordinator=coordinator
        )
    return coordinator


MADE: dict[str, Make] = {
    "pure": partial(of_form, "pure"),
    "pure, not repeatable": partial(of_form, "pure", repeatable=False),
    "pure, carry": partial(of_form, "pure", last_batch="carry"),
    "pure, arrival": partial(of_form, "pure", order="arrival", num_worker_threads=1),
    "pure, two devices": partial(of_form, "pure", devices=2),
    "pure, without an end": partial(of_form, "pure", epochs=None),
    "pure, not rebatched": partial(of_form, "pure", dont_rebatch=True),
    "seek": partial(of_form, "seek"),
    "seek, not repeatable": partial(of_form, "seek", repeatable=False),
    "replay": partial(of_form, "replay"),
    "two feeds": of_two_feeds,
    "arrays": partial(make_source, source="arrays", order="dali window"),
    "samples": partial(make_source, source="samples", order="shuffled"),
    "iterable": partial(make_source, source="iterable"),
}
STEPS = (0, 1, 5)
"""After so many batches: at the beginning, in an epoch, and in or beyond the next."""


def at(make: Make, folder: Path, step: int) -> dict[str, str]:
    with make(folder) as coordinator:
        tokens = {}
        for name in coordinator:
            feed = coordinator[name]
            devices = cycle([feed.on(i) for i in range(len(feed.devices))])
            for _ in range(step):
                tokens[f"token of {name}"] = next(next(devices)).cut.token().hex()
        snapshot, state = coordinator.snapshot(), coordinator.state_dict()
    return {
        **tokens,
        "snapshot": bytes(snapshot).hex(),
        **{f"state dict, {key!r}": value.hex() for key, value in state.items()},
    }


def make(folder: Path) -> dict[str, Any]:
    return {
        name: {f"{step} batches": at(make_one, folder, step) for step in STEPS}
        for name, make_one in MADE.items()
    }
