"""The assembler: runs of chunks in, batches of exactly the right rows out, each with its place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from feeder.devices.slots import HostSlots, PrivateSlots
from feeder.workers.spec import StreamSpec
from feeder.workers.stream.assembler import Assembler
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.chunks import Schema
from feeder.workers.stream.merge import MergedChunks
from feeder.workers.stream.position import Frame, Partitions, Position, Span
from feeder.workers.stream.rounds import Turns

LANES = Partitions(num_partitions=1, pure=False, arrival=False)


def make_spec(**settings: Any) -> StreamSpec:
    plain: dict[str, Any] = {
        "fetch": print, "pure": False, "cursor": None, "seek": None,
        "names": ("id", "image"), "axes": (0, 1),
        "batch_size": 5, "num_workers": 1, "first_worker_id": 0, "seed": 0, "epochs": 2,
        "last_batch": "keep", "last_round": "uneven", "order": "ticket", "dont_rebatch": False,
        "repeatable": True,
    }  # fmt: skip
    return StreamSpec(**{**plain, **settings})


class Stage:
    """An assembler and what feeds it: one worker whose calls give so many rows each."""

    def __init__(self, slots: Any = None, num_devices: int = 1, **settings: Any) -> None:
        self.spec = make_spec(**settings)
        self.schema = Schema(self.spec.names, self.spec.axes, ragged=self.spec.dont_rebatch)
        self.frame = Frame(LANES, lambda cut: b"", self.spec.epochs)
        self.assembler = Assembler(
            self.spec, self.frame, self.schema, slots or HostSlots(), num_devices=num_devices,
            epoch=0, index=0, step=0, turns=Turns(0), expected=None,
        )  # fmt: skip
        self.position = LANES.origin()
        self.next_id = 1

    def run(self, rows: list[int]) -> list[Batch]:
        """Add chunks of so many rows as one run; return the batches that it completes."""
        batches = list(self.add(rows))
        assert None not in batches
        return batches  # type: ignore[return-value]

    def add(self, rows: list[int]) -> Iterator[Batch | None]:
        chunks = []
        for num in rows:
            ids = np.arange(self.next_id, self.next_id + num)
            self.next_id += num
            chunks.append((ids, np.stack([ids, -ids])))
        arranged = self.schema.arrange(chunks)
        del chunks
        assert arranged.error is None
        span = Span(self.position, (0,), (self.position.calls[0],), rows, (None,))
        self.position = span.position(len(rows))
        return self.assembler.add(MergedChunks(span, list(arranged.columns), arranged.rows))

    def end_epoch(self) -> list[Batch]:
        self.position = LANES.next_epoch(self.position)
        return list(self.assembler.end_epoch(self.position))


def ids_of(batches: list[Batch]) -> list[list[int]]:
    for batch in batches:
        assert np.array_equal(batch["image"], np.stack([batch["id"], -batch["id"]]))
    return [batch["id"].tolist() for batch in batches]


def random_runs(chance: random.Random) -> Iterator[list[int]]:
    for _ in range(chance.randint(1, 12)):
        most = chance.choice([1, 3, 5, 12])
        yield [chance.choice([0, 1, 5, most]) for _ in range(chance.randint(1, 9))]


@pytest.mark.parametrize("slots", [HostSlots, PrivateSlots], ids=["host", "private"])
@pytest.mark.parametrize("seed", range(30))
def test_batches_are_the_rows_cut_at_every_fifth(seed: int, slots: Any) -> None:
    chance = random.Random(seed)
    stage = Stage(HostSlots() if slots is HostSlots else PrivateSlots())
    got = [batch for rows in random_runs(chance) for batch in stage.run(rows)]
    num = stage.next_id - 1
    assert ids_of(got) == [list(range(at, at + 5)) for at in range(1, num - num % 5 + 1, 5)]
    rest = ids_of(stage.end_epoch())
    assert rest == ([list(range(num - num % 5 + 1, num + 1))] if num % 5 else [])
    assert [batch.step for batch in got] == [batch.index for batch in got] == [*range(len(got))]


class RoutedSlots(PrivateSlots):
    """Slots that tell which device they were taken for."""

    passes = False

    def __init__(self) -> None:
        self.devices: dict[int, int] = {}
        self.taken: list[Any] = []

    def take_slot(self, device: int, columns: Any, rows: int) -> Any:
        slot = super().take_slot(device, columns, rows)
        self.taken.append(slot)  # Else another may be where it was.
        self.devices[id(slot.arrays[0])] = device
        return slot


@pytest.mark.parametrize("rounds", ["stream", "epoch"])
@pytest.mark.parametrize("seed", range(30))
def test_a_batch_lies_in_a_slot_of_its_own_device(seed: int, rounds: str) -> None:
    """Also after rows were dropped, and between chunks that are whole batches."""
    chance, slots = random.Random(seed), RoutedSlots()
    stage = Stage(slots, num_devices=3, last_batch="drop", epochs=None, rounds=rounds)
    for _ in range(20):
        batches = [
            batch
            for _ in range(chance.randint(1, 4))
            for batch in stage.run([chance.choice([2, 3, 5]) for _ in range(4)])
        ]
        for batch in batches:
            number = batch.step if rounds == "stream" else batch.index
            assert slots.devices[id(batch.arrays()[0])] == number % 3
        stage.end_epoch()
        if rounds == "epoch":
            stage.assembler.begin_round()


@pytest.mark.parametrize("seed", range(30))
def test_every_row_is_counted_out_again_and_none_is_kept_for_ever(seed: int) -> None:
    chance = random.Random(seed)
    stage = Stage(last_batch=chance.choice(["keep", "drop", "pad"]))
    added = handed_out = dropped = kept = 0

    def count(batches: list[Batch]) -> None:
        nonlocal handed_out, dropped, kept
        more, gone, *_ = stage.assembler.settle()
        kept += more
        assert kept >= 0
        dropped += gone
        handed_out += sum(batch.rows for batch in batches)
        kept -= sum(batch.kept_rows for batch in batches)

    for epoch in range(2):
        for rows in random_runs(chance):
            added += sum(rows)
            count(stage.run(rows))
        count(stage.end_epoch())
        assert (handed_out + dropped, kept) == (added, 0), f"epoch {epoch}"


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_names_the_chunk_that_the_batch_ended_in(seed: int) -> None:
    chance = random.Random(seed)
    stage = Stage()
    sizes, batches = [], []
    for rows in random_runs(chance):
        sizes += rows
        batches += stage.run(rows)
    for batch in batches:
        cut = batch.cut
        num_rows = 5 * (batch.step + 1)
        (calls,), (given,) = cut.position.calls, cut.position.rows
        assert given == sum(sizes[:calls])
        left = 0 if cut.leftover is None else cut.leftover.rows - cut.leftover.taken
        assert given - left == num_rows
        if cut.leftover is not None:
            assert (cut.leftover.call, cut.leftover.rows) == (calls - 1, sizes[calls - 1])
            assert 0 < cut.leftover.taken < cut.leftover.rows
            (ids, image) = batch.place.leftover_rows()
            assert ids.tolist() == list(range(num_rows + 1, given + 1))
            assert np.array_equal(image, np.stack([ids, -ids]))
        assert (cut.epoch, cut.index, cut.step) == (0, batch.index + 1, batch.step + 1)


@pytest.mark.parametrize(
    ("policy", "batches", "rows", "then"),
    [
        ("keep", [[1, 2, 3, 4, 5], [6, 7]], [5, 2], [8, 9, 10, 11, 12]),
        ("drop", [[1, 2, 3, 4, 5]], [5], [8, 9, 10, 11, 12]),
        ("pad", [[1, 2, 3, 4, 5], [6, 7, 7, 7, 7]], [5, 2], [8, 9, 10, 11, 12]),
        ("carry", [[1, 2, 3, 4, 5]], [5], [6, 7, 8, 9, 10]),
    ],
)
def test_the_end_of_an_epoch(
    policy: str, batches: list[list[int]], rows: list[int], then: list[int]
) -> None:
    stage = Stage(last_batch=policy)
    got = stage.run([3, 4]) + stage.end_epoch()
    assert ids_of(got) == batches
    assert [batch.rows for batch in got] == rows
    (after,) = stage.run([5]) if policy != "carry" else stage.run([3])
    assert ids_of([after]) == [then]
    assert (after.epoch, after.index) == (1, 0)
    assert stage.next_id == (13 if policy != "carry" else 11)


def test_what_is_carried_into_no_epoch_is_kept() -> None:
    stage = Stage(last_batch="carry", epochs=1)
    assert ids_of(stage.run([7]) + stage.end_epoch()) == [[1, 2, 3, 4, 5], [6, 7]]


@pytest.mark.parametrize("policy", ["keep", "drop", "pad", "carry"])
def test_the_cut_of_an_epochs_last_batch_is_the_start_of_the_next(policy: str) -> None:
    stage = Stage(last_batch=policy)
    (last,) = stage.run([5])
    assert (last.cut.epoch, last.cut.index) == (0, 1)  # nobody knows yet
    assert stage.end_epoch() == []
    assert (last.cut.epoch, last.cut.index, last.cut.step) == (1, 0, 1)
    assert not last.cut.finished
    (last,) = stage.run([5])
    stage.end_epoch()
    assert (last.cut.epoch, last.cut.index, last.cut.step, last.cut.finished) == (2, 0, 2, True)


def test_cuts_are_equal_where_the_places_are_whatever_the_runs_were() -> None:
    one, other = Stage(), Stage()
    in_one = one.run([3, 9, 8, 1])
    in_many = [batch for rows in (3, 9, 8, 1) for batch in other.run([rows])]
    assert [batch.cut for batch in in_one] == [batch.cut for batch in in_many]
    assert len({repr(batch.cut) for batch in in_one}) == len(in_one) == 4


def test_cuts_differ_where_a_chunk_was_cut_elsewhere() -> None:
    (first, _), (again,) = Stage().run([3, 9]), Stage().run([3, 2])
    assert first["id"].tolist() == again["id"].tolist()
    assert again.cut.leftover is None
    assert first.cut != again.cut


def test_each_chunk_is_a_batch_where_it_is_not_to_be_rebatched() -> None:
    stage = Stage(dont_rebatch=True)
    got = stage.run([3, 0, 7]) + stage.run([0]) + stage.run([1])
    assert ids_of(got) == [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11]]
    assert [batch.rows for batch in got] == [3, 7, 1]
    assert all(batch.cut.leftover is None for batch in got)
    assert stage.end_epoch() == []


def pass_a_batch(change: Any) -> tuple[int, int]:
    """Add one chunk of exactly a batch, made so; returns how many batches were copied, and how
    many were passed on."""
    stage = Stage(names=("id",), axes=(0,))
    kept: list[Any] = []
    arranged = stage.schema.arrange([(change(np.arange(1, 6), kept),)])
    span = Span(stage.position, (0,), (0,), [5], (None,))
    run = MergedChunks(span, list(arranged.columns), arranged.rows)
    del arranged
    (batch,) = stage.assembler.add(run)
    assert batch["id"].tolist() == [1, 2, 3, 4, 5]
    assert not batch["id"].flags.writeable
    return stage.assembler.settle()[3:]


def keep(array: Any, kept: list[Any]) -> Any:
    kept.append(array)
    return array


SHARED = {
    "kept by the fetch function": keep,
    "a view that it keeps": lambda array, kept: keep(array, kept)[:],
    "a view of what it kept": lambda array, kept: keep(np.arange(6), kept)[1:],
    "over other memory": lambda array, kept: np.frombuffer(array.tobytes(), array.dtype),
    "seen through a memoryview": lambda array, kept: (kept.append(memoryview(array)), array)[1],
    "not contiguous": lambda array, kept: np.repeat(array, 2)[::2],
}


@pytest.mark.parametrize("change", SHARED.values(), ids=SHARED.keys())
def test_a_chunk_that_somebody_else_can_see_is_copied(change: Any) -> None:
    assert pass_a_batch(change) == (1, 0)


def test_a_chunk_that_nobody_else_can_see_is_passed_on() -> None:
    assert pass_a_batch(lambda array, kept: array) == (0, 1)


class FewSlots(PrivateSlots):
    """Every other time no slot is free; remembers for which device it was waited."""

    passes = False

    def __init__(self) -> None:
        self.asked = 0
        self.waited: list[int] = []

    def take_slot(self, device: int, columns: Any, rows: int) -> Any:
        self.asked += 1
        return super().take_slot(device, columns, rows) if self.asked % 2 == 0 else None

    def wait_for_slot(self, device: int) -> None:
        self.waited.append(device)


@pytest.mark.parametrize("ragged", [False, True], ids=["rebatched", "each chunk"])
def test_where_no_slot_is_free_the_caller_is_asked_to_wait_and_nothing_is_lost(
    ragged: bool,
) -> None:
    rows = [5, 3, 0, 4, 11, 1, 5]
    plenty, few = Stage(RoutedSlots(), num_devices=2, dont_rebatch=ragged), FewSlots()
    scarce = Stage(few, num_devices=2, dont_rebatch=ragged)
    got: list[Batch] = []
    for batch in scarce.add(rows):
        if batch is None:
            assert len(got) % 2 == scarce.assembler.device
            scarce.assembler.wait_for_slot()
        else:
            got.append(batch)
    wanted = plenty.run(rows)
    assert ids_of(got) == ids_of(wanted)
    assert [batch.cut for batch in got] == [batch.cut for batch in wanted]
    assert few.asked == 2 * len(few.waited) and few.waited[:4] == [0, 1, 0, 1]
    assert scarce.assembler.settle() == plenty.assembler.settle()
    if not ragged:
        assert ids_of(scarce.end_epoch()) == ids_of(plenty.end_epoch())


def test_positions_of_an_empty_stream() -> None:
    stage = Stage()
    assert stage.end_epoch() == []
    place = stage.assembler.start_of(stage.position)
    assert (place.cut().epoch, place.cut().step, place.leftover_rows()) == (1, 0, ())
    assert isinstance(place.cut().position, Position)
