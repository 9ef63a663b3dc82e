"""Figures made by hand."""

from __future__ import annotations

from typing import Any

from feeder.observe.figures import (
    ConsumerFigures,
    FeedFigures,
    Figures,
    QueueFigures,
    ServiceFigures,
    StoreFigures,
    WorkerFigures,
)


def worker(number: int = 0, **fields: Any) -> WorkerFigures:
    defaults = {
        "calls": 0, "rows": 0, "bytes": 0, "fetch_s": 0.0, "running_s": 0.0, "wait_s": 0.0,
        "errors": 0, "retries": 0, "nothings": 0,
    }  # fmt: skip
    return WorkerFigures(worker=number, **(defaults | fields))


def consumer(**fields: Any) -> ConsumerFigures:
    defaults = {
        "who": "pid 7 on host", "plane": "shared", "state": "streaming", "credit": 8,
        "in_flight": 0, "silent_s": 0.1,
    }  # fmt: skip
    return ConsumerFigures(**(defaults | fields))


def queue(number: int = 0, **fields: Any) -> QueueFigures:
    defaults = {
        "device": f"cpu:{number}", "batches": 0, "rows": 0, "bytes": 0, "waiting": 0,
        "capacity": 10, "wait_s": 0.0, "checked_s": 0.0, "corrupt": 0, "consumer": None,
    }  # fmt: skip
    fields = {"starved_s": fields.get("wait_s", 0.0), **fields}
    return QueueFigures(queue=number, **(defaults | fields))


def service(**fields: Any) -> ServiceFigures:
    defaults = {
        "opened": 1, "reopened": 0, "fenced": 0, "expired": 0, "rewinds": 0, "arena_bytes": 0
    }  # fmt: skip
    return ServiceFigures(**(defaults | fields))


def store(**fields: Any) -> StoreFigures:
    names = StoreFigures.__struct_fields__
    return StoreFigures(**({"wait_s": 0.0} | dict.fromkeys(names[1:], 0) | fields))


def feed(**fields: Any) -> FeedFigures:
    """A feed that has run for 100 s, with one worker and one queue unless told otherwise."""
    defaults = {
        "name": "train", "number": 0, "state": "running", "failure": "", "last_error": "",
        "missing": (), "age_s": 100.0, "position_age_s": 5.0, "batch_size": 32, "threads": 1,
        "batches": 0, "rows": 0, "bytes": 0, "idle_s": 0.0, "chunks_wait_s": 0.0,
        "room_wait_s": 0.0, "buffered_rows": 0, "buffered_bytes": 0, "limit_rows": 320,
        "workers": (worker(),), "queues": (queue(),), "service": None,
    }  # fmt: skip
    return FeedFigures(**(defaults | fields))


def figures(*feeds: FeedFigures, at_s: float = 0.0) -> Figures:
    return Figures(version="1.2.3", who="pid 5 on host", at_s=at_s, feeds=feeds)
