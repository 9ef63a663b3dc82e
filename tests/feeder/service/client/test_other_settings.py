"""A server comes back with another setting, in the middle of an iteration: a trainer is told which
one, or goes on with every row of its own."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import pytest

import feeder
from served import Aside, outside, reading, serving
from small import Calls, make

pytestmark = pytest.mark.usefixtures("world")

ADDRESS = "ipc:///virtual/server"
CALLS, ROWS, EPOCHS = 14, 3, 2

Rows = list[list[int]]


def feed(*, dtype: str = "int64", width: int = 0, **settings: Any) -> feeder.Coordinator:
    """Rows with ids of their own in two epochs, 11 batches in each; positions lie within a chunk
    and, after three batches, between two."""

    def chunk(call: feeder.Call) -> Any:
        ids = np.arange(ROWS) + ROWS * (CALLS * call.epoch + call.index)
        return ids, np.zeros((ROWS, width) if width else ROWS, dtype)

    told = {"batch_size": 4, "epochs": EPOCHS, "names": ("id", "x"), "devices": 2} | settings
    return make(Calls(CALLS, chunk), **told)


@cache
def rows_meant() -> tuple[Rows, Rows]:
    """What each of two trainers is to get."""
    meant: tuple[Rows, Rows] = [], []
    with outside(), feed(devices=1) as whole:
        for batch in whole["train"]:
            meant[batch.step % 2].append([*batch["id"]])
    return meant


CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "queues": ({}, {"queues": 3}, r"\(queues: 2 then, 3 now\)"),
    "fewer queues": ({}, {"queues": 1}, r"\(queues: 2 then, 1 now\)"),
    "replicas": ({}, {"replicas": 2}, r"\(replicas: 1 then, 2 now\)"),
    "queues and replicas": (
        {},
        {"queues": 3, "replicas": 2},
        r"\(queues: 2 then, 3 now; replicas: 1 then, 2 now\)",
    ),
    "rounds": ({"rounds": "epoch"}, {}, r"\(rounds: left out then, 'epoch' now\)"),
    "last_round": ({"last_round": "drop"}, {}, r"\(last_round: 'uneven' then, 'drop' now\)"),
    "batch_size": ({"batch_size": 6}, {}, r"\(batch_size: 4 then, 6 now\)"),
    "global_batch_size": (
        {"batch_size": None, "global_batch_size": 6},
        {},
        r"\(batch_size: 4 then, left out now; global_batch_size: left out then, 6 now\)",
    ),
    "last_batch": ({"last_batch": "drop"}, {}, r"\(last_batch: 'keep' then, 'drop' now\)"),
    "seed": ({"seed": 7}, {}, r"\(seed: 0 then, 7 now\)"),
    "dont_rebatch": ({"dont_rebatch": True}, {}, r"\(dont_rebatch: False then, True now"),
    "version": ({"version": "5"}, {}, r"\(version: '' then, '5' now\)"),
    "fewer epochs": ({"epochs": 1}, {}, r"\(epochs: 2 then, 1 now\)"),
    "more epochs": ({"epochs": 3}, {}, r"\(epochs: 2 then, 3 now\)"),
    "no end": ({"epochs": None}, {}, r"\(epochs: 2 then, without end now\)"),
    "names": ({"names": ("id", "y")}, {}, r"\(names: \['id', 'x'\] then, \['id', 'y'\] now\)"),
}
"""What is another of the feed and of the server, and what the error tells."""

HARMLESS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "skip": ({"skip": 2}, {}),
    "skip of the server": ({}, {"skip": 2}),
    "threads": ({"num_threads": 3}, {}),
    "room": ({"max_buffered_batches": 3}, {}),
}
"""What deals no row otherwise to those who bring a position."""


def told_after(
    has_had: int, plane: str, of_feed: dict[str, Any], of_server: dict[str, Any]
) -> list[tuple[Rows, feeder.FeedError | None]]:
    """What each trainer has had in all, and its error, if a server with other settings comes after
    so many batches."""
    with ExitStack() as stack:
        with serving(feed, ADDRESS, lease=3) as server:
            trainers = [
                stack.enter_context(reading(ADDRESS, queue=queue, credit=1, plane=plane))
                for queue in range(2)
            ]
            had: list[Rows] = [[] for _ in trainers]
            for _ in range(has_had):
                for rows, trainer in zip(had, trainers, strict=True):
                    rows.append([*next(trainer)["id"]])
            server.kill()
        stack.enter_context(serving(partial(feed, **of_feed), ADDRESS, lease=3, **of_server))
        # Beyond the end if nobody tells them: of a feed without end, too.
        rests = [
            Aside(partial(read, rows, trainer)) for rows, trainer in zip(had, trainers, strict=True)
        ]
        return [(rows, rest.result()) for rows, rest in zip(had, rests, strict=True)]


def read(rows: Rows, trainer: feeder.Consumer) -> feeder.FeedError | None:
    try:
        rows.extend([*batch["id"]] for batch in islice(trainer, 40))
    except feeder.FeedError as error:
        return error
    return None


@pytest.mark.parametrize("plane", ["shared", "frames"])
@pytest.mark.parametrize("has_had", [0, 3, 8])
@pytest.mark.parametrize("change", CHANGES)
def test_each_trainer_is_told_what_is_another(change: str, has_had: int, plane: str) -> None:
    """Before the first batch, in the first epoch and in the second. What it has had is its own."""
    of_feed, of_server, told = CHANGES[change]
    found = told_after(has_had, plane, of_feed, of_server)
    for (rows, error), meant in zip(found, rows_meant(), strict=True):
        with pytest.raises(feeder.ResumeError, match=rf"deals the feed otherwise.*{told}"):
            raise error or AssertionError(f"it went on to row {rows[-1]}")
        assert rows == meant[: len(rows)]


@pytest.mark.parametrize("plane", ["shared", "frames"])
@pytest.mark.parametrize("has_had", [0, 3, 8])
@pytest.mark.parametrize("change", HARMLESS)
def test_what_deals_no_row_otherwise_is_not_seen(change: str, has_had: int, plane: str) -> None:
    found = told_after(has_had, plane, *HARMLESS[change])
    assert found == [(rows, None) for rows in rows_meant()]


@pytest.mark.parametrize("plane", ["shared", "frames"])
@pytest.mark.parametrize("has_had", [3, 8])
@pytest.mark.parametrize("change", [{"dtype": "int32"}, {"width": 2}])
def test_other_data_are_told(change: dict[str, Any], has_had: int, plane: str) -> None:
    """By the chunk before each position."""
    for (rows, error), meant in zip(
        told_after(has_had, plane, change, {}), rows_meant(), strict=True
    ):
        with pytest.raises(feeder.ResumeError, match=r"not deterministic|not of one stream"):
            raise error or AssertionError
        assert rows == meant[: len(rows)]
