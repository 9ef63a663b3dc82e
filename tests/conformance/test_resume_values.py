"""Rows left over travel by value, or are fetched again and compared with what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from feeder import Batch, ResumeError
from feeds import drain, make, running
from fetches import COLUMNS, FORMS, NUM_WORKERS, PATTERNS, make_fetch

ROWS_PER_CALL = 1000
"""How far apart the first ids of two calls are."""
CALLS_PER_EPOCH = 100


def stamped(form: str, pattern: str, stamp: int) -> Any:
    """Return a fetch function whose labels all are `stamp`: two of them do not agree on any row."""
    fetch = make_fetch(form, pattern)
    plain = fetch.make

    def make_stamped(*args: Any) -> dict[str, np.ndarray]:
        chunk = plain(*args)
        columns = chunk if isinstance(chunk, dict) else dict(zip(COLUMNS, chunk, strict=True))
        return columns | {"label": np.full_like(columns["label"], stamp)}

    fetch.make = make_stamped
    return fetch


def rows_of(batches: list[Batch]) -> list[tuple[int, int]]:
    """Return the id and the label of every row."""
    return [
        (int(row_id), int(label))
        for batch in batches
        for row_id, label in zip(batch["id"], batch["label"], strict=True)
    ]


def chunk_of(row_id: int) -> int:
    """Return a number that the rows of one call have in common."""
    return (row_id - 1) // ROWS_PER_CALL


@pytest.mark.parametrize(
    ("form", "pattern", "last_batch", "repeatable"),
    (("seek", "large", "keep", True), ("pure", "gaps", "carry", False)),
)
def test_rows_left_over_are_those_of_then(
    form: str, pattern: str, last_batch: str, repeatable: bool
) -> None:
    settings: dict[str, Any] = {"epochs": 2, "last_batch": last_batch, "repeatable": repeatable}
    with running(stamped(form, pattern, 1), **settings) as (coordinator, feed):
        first, taken = [], []
        for batch in feed:
            first.append(batch)
            taken.append([coordinator.snapshot(), bytes(coordinator.snapshot())])
            if not repeatable:
                taken[-1].append(coordinator.state_dict())
    held = 0
    for i, positions in enumerate(taken, 1):
        before, after = rows_of(first[:i]), rows_of(first[i:])
        cut_in = chunk_of(before[-1][0])
        wanted = [(row_id, 1 if chunk_of(row_id) == cut_in else 2) for row_id, _ in after]
        held += sum(label == 1 for _, label in wanted)
        for position in positions:
            with running(stamped(form, pattern, 2), resume=position, **settings) as (_, feed):
                assert rows_of(list(feed)) == wanted, i
    assert held


@pytest.mark.parametrize("form", ("seek", "pure"))
def test_a_bare_token_is_refused_where_rows_would_not_come_again(form: str) -> None:
    with running(make_fetch(form, "ragged"), repeatable=False) as (_, feed):
        tokens = [batch.cut.token() for batch in feed]
    for token in tokens[:-1]:
        with pytest.raises(ResumeError, match="repeatable=False"):
            make(make_fetch(form, "ragged"), resume=token, repeatable=False)


def where(form: str, pattern: str, row_id: int) -> tuple[int, int, bool]:
    """Return worker id and number of the call that gave a row, and whether more followed it."""
    worker, rest = divmod(row_id - 1, 10 * CALLS_PER_EPOCH * ROWS_PER_CALL)
    epoch, rest = divmod(rest, CALLS_PER_EPOCH * ROWS_PER_CALL)
    call, row = divmod(rest, ROWS_PER_CALL)
    script = PATTERNS[pattern]
    if form == "pure":
        sizes = [rows for w in range(NUM_WORKERS) for rows in script(w, epoch)]
        return call % NUM_WORKERS, call, row + 1 < sizes[call]
    earlier = sum(len(script(worker, e)) for e in range(epoch))
    return worker, earlier + call, row + 1 < script(worker, epoch)[call]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("pattern", "carrier"), (("ragged", "state dict"), ("large", "token")))
def test_rows_fetched_again_that_differ_are_named(form: str, pattern: str, carrier: str) -> None:
    with running(make_fetch(form, pattern), epochs=2) as (coordinator, feed):
        taken = [(b["id"][-1], b.cut.token(), coordinator.state_dict()) for b in feed]
    named = 0
    for row_id, token, state in taken:
        worker, call, straddles = where(form, pattern, int(row_id))
        if straddles:
            fetch = altered(form, pattern, int(row_id))
            with pytest.raises(
                ResumeError, match=rf"not deterministic: worker {worker}, call {call}\b"
            ):
                drain(fetch, resume=token if carrier == "token" else state, epochs=2)
            named += 1
    assert named


def altered(form: str, pattern: str, row_id: int, *, keep: int | None = None) -> Any:
    """Return a fetch function of which one call, the one that gives a row, has other labels; or
    where told to keep so many, fewer rows."""
    fetch = make_fetch(form, pattern)
    plain = fetch.make

    def make_altered(*args: Any) -> Any:
        chunk = plain(*args)
        columns = chunk if isinstance(chunk, dict) else dict(zip(COLUMNS, chunk, strict=True))
        if row_id not in columns["id"]:
            return chunk
        if keep is not None:
            return {name: column[:keep] for name, column in columns.items()}
        return columns | {"label": columns["label"] + 1}

    fetch.make = make_altered
    return fetch


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_ended", [False, True], ids=["fewer rows", "an end"])
def test_fewer_rows_than_before_are_named(form: str, is_ended: bool) -> None:
    with running(make_fetch(form, "large")) as (coordinator, feed):
        token = next(feed).cut.token()
        position = token if is_ended else coordinator.state_dict()
    fetch, told = altered(form, "large", 1, keep=12), "worker 0, call 0: 21 rows then, 12"
    if is_ended:
        fetch.script, told = lambda worker, epoch: (), "worker 0, call 0"
    with pytest.raises(ResumeError, match=f"not deterministic: {told}"):
        drain(fetch, resume=position)
