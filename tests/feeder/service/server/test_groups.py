"""Groups of batches: the consumer makes of them the tokens that the server would have made."""

from __future__ import annotations

from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any
from weakref import ref

import pytest

from feeder.service.client.remote import Identity, token_of
from feeder.service.memory.arena import ArenaSlots, slot_of
from feeder.service.protocol.coding import decode, encode
from feeder.service.protocol.messages import Batches, Group
from feeder.service.server import delivery
from feeder.service.server.delivery import Grouping
from feeder.workers.pipeline import Pipeline
from feeder.workers.stream.batch import Batch
from feeds import make
from fetches import FORMS, PATTERNS, make_fetch

EPOCHS = 3
WAIT_S = 10.0
REGULAR = ("whole", "single", "small")
"""Patterns whose chunks all have as many rows."""


class Collecting:
    """A device queue that keeps what it is given."""

    waited_since = None

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.endings: SimpleQueue[Any] = SimpleQueue()

    def put(self, batches: list[Batch]) -> None:
        self.batches += batches

    def grow(self, capacity: int) -> None:
        """It keeps any number."""

    def finish(self, ending: Any) -> None:
        self.endings.put(ending)


def collect(form: str, pattern: str, **settings: Any) -> tuple[list[Batch], Grouping, Identity]:
    """All batches of a stream in slots of an arena, and what tells of them on either side."""
    fetch = make_fetch(form, pattern)
    coordinator = make(fetch, **{"epochs": EPOCHS, "max_buffered_batches": 1000, **settings})
    (stream,) = coordinator["train"].streams
    config, positions, queue = stream.config, stream.positions, Collecting()
    slots = ArenaSlots(1, lambda device, slot_bytes: 200)
    pipeline = Pipeline(
        config.stream, config.run, "train", [queue], slots, encode=positions.id.encode
    )
    pipeline.start()
    try:
        ending = queue.endings.get(timeout=WAIT_S)
    finally:
        pipeline.close()
        pipeline.join(WAIT_S)
    assert queue.batches and not isinstance(ending, Exception), ending
    grouping = Grouping(config.stream, 1, positions.id.encode, lambda place: place.cut().token())
    began = positions.id.decode(pipeline.start_cut.token(), EPOCHS)
    identity = Identity("train", 0, positions.fingerprint, EPOCHS, began)
    return queue.batches, grouping, identity


def grouped(grouping: Grouping, sequence: int, batches: list[Batch]) -> Iterable[Group]:
    slots = [slot_of(batch) for batch in batches]
    return grouping.groups(sequence, batches, slots, [0] * len(batches), shared=True)


def over_the_wire(groups: Iterable[Group]) -> tuple[Group, ...]:
    message = decode(encode(Batches(generation=bytes(24), groups=tuple(groups))),
                     from_consumer=False)  # fmt: skip
    assert isinstance(message, Batches)
    return message.groups


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("at_once", (1, 3, 100))
def test_the_places_of_a_group_are_those_of_its_batches(
    form: str, pattern: str, at_once: int
) -> None:
    batches, grouping, identity = collect(form, pattern)
    axes = tuple(identity.fingerprint["batch_columns"])
    tokens, told, sequence = [], [], 0
    while sequence < len(batches):
        part = batches[sequence : sequence + at_once]
        for group in over_the_wire(grouped(grouping, sequence, part)):
            assert group.sequence == len(tokens)
            tokens += [
                token_of(identity, group, at, axes, ref(batches[group.sequence + at]))
                for at in range(len(group.slots))
            ]
            told += [group.span is not None] * len(group.slots)
            first = batches[group.sequence]
            steps = [batch.step for batch in batches[group.sequence :][: len(group.slots)]]
            assert (group.epoch, group.index, group.rows) == (first.epoch, first.index, first.rows)
            assert steps == [group.step + i * group.stride for i in range(len(steps))]
        sequence += len(part)
    assert tokens == [batch.place.cut().token() for batch in batches]
    if pattern in REGULAR and form != "seek":
        # But for the rest of each epoch, and the batch before it where that is nothing.
        assert told.count(False) <= EPOCHS


@pytest.mark.parametrize("settings", ({"repeatable": False}, {"order": "arrival"}))
def test_what_cannot_be_told_in_numbers_has_tokens(settings: dict[str, Any]) -> None:
    batches, grouping, _ = collect("pure", "small", **settings)
    groups = tuple(grouped(grouping, 0, batches))
    assert all(group.span is None for group in groups)
    assert [token for group in groups for token in group.tokens] == [
        batch.place.cut().token() for batch in batches
    ]


def test_a_group_counts_no_more_chunks_of_a_span_than_a_message_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches, grouping, _ = collect("pure", "small")

    def most_chunks() -> int:
        groups = grouped(grouping, 0, batches)
        return max(number for group in groups if group.span for number in group.chunks)

    whole = most_chunks()
    monkeypatch.setattr(delivery, "MAX_CHUNKS", whole - 2)
    assert most_chunks() <= whole - 2


def test_all_slots_are_filled_and_handed_over() -> None:
    """Their number is fixed: copies need not wait until batches have been sent, as calls do."""
    batches, _, _ = collect("pure", "small", max_buffered_batches=2)
    assert len(batches) > 10
