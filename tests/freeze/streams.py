"""Streams of every form of fetch function under every policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from feeder import Coordinator
from feeds import make as make_feed
from fetches import FORMS, NEED_TWO_WORKERS, NUM_WORKERS, PATTERNS, make_fetch
from freeze.pairwise import Case, pairwise
from freeze.runs import all_told

SETTINGS: dict[str, list[Any]] = {
    "form": [*FORMS],
    "pattern": [*PATTERNS],
    "last_batch": ["keep", "drop", "pad", "carry"],
    "last_round": ["uneven", "drop", "pad"],
    "order": ["ticket", "arrival"],
    "repeatable": [True, False],
    "dont_rebatch": [False, True],
    "devices": [1, 2],
    "num_threads": [1, 2, 5],
}


def may_be(case: Case) -> bool:
    """A function that is put back by calls must be repeatable; chunks of any size have no last
    batch; and chunks arrive in one order only where one thread fetches them for one worker."""
    return (
        (case["repeatable"] or case["form"] != "replay")
        and (not case["dont_rebatch"] or case["last_batch"] == "keep")
        and (case["order"] == "ticket" or comes_in_one_order(case))
    )


def comes_in_one_order(case: Case) -> bool:
    return case["num_threads"] == 1 and case["pattern"] not in NEED_TWO_WORKERS


def make_case(folder: Path, form: str, pattern: str, order: str, **settings: Any) -> Coordinator:
    num_workers = 1 if order == "arrival" else NUM_WORKERS
    return make_feed(
        make_fetch(form, pattern), order=order, num_worker_threads=num_workers, epochs=3, seed=5,
        **settings,
    )  # fmt: skip


def make(folder: Path) -> dict[str, Any]:
    return all_told(make_case, pairwise(SETTINGS, may_be), folder)
