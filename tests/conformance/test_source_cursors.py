"""A windowed shuffle goes on from its cursor, not by walking again through all that came before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from feeder import Batch, Coordinator, init_data_input_workers, sources
from feeder.workers.fetch.calls import MAX_BYTES
from feeder.workers.sources.orders.windowed import Window
from feeds import CARRIERS
from watching import around

pytestmark = pytest.mark.served

BATCH_SIZE, NUM_RECORDS, FILL = 16, 20_000, 100

WINDOW = {"order": "dali", "random_shuffle": True, "initial_fill": FILL}


class Numbers:
    """Records that are their own numbers, any number of them."""

    kind = "numbers"
    skipped = 0

    def __init__(self, size: int, rows: int | None = None) -> None:
        self.size, self.rows = size, rows

    def __len__(self) -> int:
        return self.size

    def name(self, index: int) -> str:
        return f"number {index}"

    def describe(self) -> dict[str, Any]:
        return {}

    def read(self, indices: np.ndarray, _call: Any) -> tuple[np.ndarray, ...]:
        rows = len(indices) if self.rows is None else self.rows * len(indices) // BATCH_SIZE
        return (np.resize(indices, rows),)


def feed(source: Any, resume: Any = None, **settings: Any) -> Coordinator:
    coordinator = Coordinator()
    init_data_input_workers(
        ["x"], source, BATCH_SIZE, coordinator=coordinator,
        resume=None if isinstance(resume, dict) else resume, **{"epochs": 3, **settings},
    )  # fmt: skip
    if isinstance(resume, dict):
        coordinator.load_state_dict(resume)
    return coordinator


def numbered(rows: int | None = None, **options: Any) -> sources.Source:
    return sources.Source(Numbers(NUM_RECORDS, rows), **{**WINDOW, **options})


def note_walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps at which walks begin from now on."""
    walked: list[int] = []
    around(monkeypatch, Window, "walk", before=lambda window, count: walked.append(window.step))
    return walked


@pytest.mark.parametrize("order", ["ticket", "arrival"])
@pytest.mark.parametrize("rows", [None, 13, 32], ids=["whole chunks", "leftovers", "two batches"])
# After 1,023 batches of half a chunk each, the cursor of the next call lies behind the leftover's.
@pytest.mark.parametrize("num_batches", [600, 1023, 1250, 1251])
@pytest.mark.parametrize("carry", CARRIERS.values(), ids=CARRIERS.keys())
def test_nothing_is_walked_again(
    carry: Callable[[Coordinator, Batch], Any],
    num_batches: int,
    rows: int | None,
    order: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"order": order, "num_worker_threads": 1, "num_threads": 1}
    with feed(numbered(rows), **settings) as coordinator:
        *_, batch = (next(coordinator["train"]) for _ in range(num_batches))
        position = carry(coordinator, batch)
        wanted = [next(coordinator["train"])["x"].tolist() for _ in range(3)]

    walked = note_walks(monkeypatch)
    with feed(numbered(rows), position, **settings) as coordinator:
        assert [next(coordinator["train"])["x"].tolist() for _ in range(3)] == wanted
    assert min(walked) > 0


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({}, 200, 400),
        ({"order": "feeder", "initial_fill": 100, "random_shuffle": False}, 0, 80),
        ({"initial_fill": 1024}, 1024, 4 * 1024 + 80),
    ],
    ids=["window of 100", "sequential", "window of 1024"],
)
def test_tokens_are_as_small_as_promised(options: Any, least: int, most: int) -> None:
    with feed(numbered(**options)) as coordinator:
        sizes = [len(next(coordinator["train"]).cut.token()) for _ in range(600)]
    assert least <= max(sizes) <= most
    assert sizes[0] < 80


def test_a_window_too_large_for_a_token_is_walked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"initial_fill": MAX_BYTES}
    with feed(numbered(**options), epochs=4) as coordinator:
        *_, batch = (next(coordinator["train"]) for _ in range(4000))
        token = batch.cut.token()
        wanted = next(coordinator["train"])["x"].tolist()
    assert len(token) < 80
    walked = note_walks(monkeypatch)
    with feed(numbered(**options), token, epochs=4) as coordinator:
        assert next(coordinator["train"])["x"].tolist() == wanted
    assert walked[0] == 0
