"""Positions that several servers of one stream store in one place, each for its own queues.

Each server writes a sequence of its own, whose name says which queues it is of. So none claims to
know more than it does: what all have used is worked out by whoever reads, and is the lowest of
them. The number of servers may change, so a queue may be in several sequences. Numbers say which is
newer: a server counts on from the largest that it finds. No clock is asked, since hosts have many.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from feeder.checkpoint.store import CheckpointStore, beside
from feeder.checkpoint.tolerate import skip_damaged
from feeder.errors import CheckpointError
from feeder.state.snapshot import Snapshot, StreamState
from feeder.state.token import start_of
from feeder.workers.stream.spec import Part

PREFIX = "queues-"
_WRITER = re.compile(rf"{PREFIX}(\d{{1,9}})-(\d{{1,9}})-of-(\d{{1,9}})")


def store_of(store: CheckpointStore, part: Part | None) -> CheckpointStore:
    """Where the server of these queues stores positions, of all where that is None; its numbers
    follow on all that are there."""
    if part is None:
        return beside(store, store.writer)
    return beside(store, f"{PREFIX}{part.first}-{part.stop - 1}-of-{part.num}")


def is_of_part(name: str) -> bool:
    """Whether a checkpoint is what a server of some queues has stored."""
    return _WRITER.fullmatch(name.rpartition(".")[0]) is not None


class Stored(NamedTuple):
    """The newest position of one server that is whole."""

    number: int
    part: Part
    name: str
    snapshot: Snapshot


class Lowest(NamedTuple):
    """What all queues have used, as far as servers have stored it."""

    snapshot: Snapshot
    where: str
    """Where that was found, for messages."""
    lacks: str
    """The queues of which nothing is stored, in words; empty if there are none."""


def find_lowest(store: CheckpointStore) -> Lowest | None:
    """The lowest of the positions that servers of some queues have stored, and perhaps one of all
    queues; None if no server of some queues has. Raises `CheckpointError`."""
    found = _newest(store)
    if not found:
        return None
    chosen: list[Stored] = []
    num, lacking = -1, set[int]()
    for one in sorted(found, key=lambda one: (-one.number, _steps(one.snapshot))):
        if not one.part.num:
            chosen.append(one)
            lacking = set()
            break
        # Of another number of queues, all of them: who has not stored yet since that number was
        # changed has used what is stored from before, and nothing more that is known.
        if one.part.num != num:
            num = one.part.num
            lacking = set(range(num))
        queues = lacking.intersection(range(one.part.first, one.part.stop))
        if queues:
            chosen.append(one)
            lacking -= queues
        if not lacking:
            break
    lacks = f"{min(lacking)} to {max(lacking)} of {num}" if lacking else ""
    states: dict[tuple[str, int], StreamState] = {}
    for one in chosen:
        for state in one.snapshot.states:
            known = states.setdefault((state.name, state.number), state)
            if start_of(state.token)[0] < start_of(known.token)[0]:
                states[state.name, state.number] = state
    where = ", ".join(sorted(store.path_of(one.name) for one in chosen))
    return Lowest(Snapshot(tuple(states.values())), where, lacks)


def _steps(snapshot: Snapshot) -> list[int]:
    return [start_of(state.token)[0] for state in snapshot.states]


def _newest(store: CheckpointStore) -> list[Stored]:
    """The newest of each server that is whole, if one of some queues is among them. One of all
    queues has a part of none."""
    by_part: dict[Part, dict[int, str]] = {}
    for name in {*store.file_names(PREFIX), *store.sequence_names()}:
        writer, _, digits = name.rpartition(".")
        fits = _WRITER.fullmatch(writer)
        if digits.isdigit() and (fits is not None or writer == store.writer):
            first, last, num = (0, -1, 0) if fits is None else map(int, fits.groups())
            by_part.setdefault(Part(first, last + 1, num), {})[int(digits)] = name
    if not any(part.num for part in by_part):
        return []
    found = []
    for part, names in by_part.items():
        for number in sorted(names, reverse=True):
            with skip_damaged():
                found.append(Stored(number, part, names[number], store.load(names[number])))
                break
        else:
            # Not as if there were none: a run must not begin anew in silence.
            raise CheckpointError(
                f"none of the checkpoints {sorted(names.values())!r} in {store.url!r} can be "
                "loaded; resume from another place, or remove them"
            )
    return found
