"""Seats: the trainers that one feed has. A queue that is shared has one seat for each of its
replicas: the trainers that are given the same batches.

Seats are numbered queue by queue, from 0 on. If no queue is shared, a seat's number is its
queue's.
"""

from __future__ import annotations

from collections.abc import Iterable

from feeder.observe.humanize import some


def seat_of(queue: int, replica: int, replicas: int) -> int:
    """The seat of one replica of a queue."""
    return queue * replicas + replica


def seat_name(seat: int, replicas: int) -> str:
    """A seat in words."""
    if replicas == 1:
        return f"queue {seat}"
    return f"queue {seat // replicas}, replica {seat % replicas}"


def seat_names(seats: Iterable[int], replicas: int) -> str:
    """Several seats in words; of very many the first ones, and how many more there are."""
    if replicas == 1:
        return f"queue {some(map(str, seats), ', ')}"
    return some((seat_name(seat, replicas) for seat in seats), "; ")
