"""The assembler: runs of chunks in, batches of exactly the right rows out, each with its place. And
what the merge, from which the runs come, leaves out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeder.devices.slots import HostSlots, PrivateSlots
from feeder.workers.stream.assembler import Assembler
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.chunks import Schema
from feeder.workers.stream.merge import End, EpochEnd, Merge, MergedChunks
from feeder.workers.stream.position import Frame, Partitions, Span
from feeder.workers.stream.rounds import Turns
from feeder.workers.stream.spec import StreamSpec
from needs import needs_counts

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


@given(runs=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=8), max_size=5))
def test_rows_of_chunks_count_until_nobody_can_ask_for_them(runs: list[list[int]]) -> None:
    """Against the bounds of chunks and batches: a chunk counts as long as it is taken in part, and
    then as long as the batch does in whose midst it ended."""
    stage = Stage()
    ends = np.cumsum([num for run in runs for num in run]).tolist()
    rows = grown = kept = 0
    for run in runs:
        for batch in stage.add(run):
            assert batch is not None
            first, rows = rows, rows + batch.rows
            grown += stage.assembler.settle()[0]
            kept += batch.kept_rows
            # The chunk that the batch before ended in, if it ends here.
            cut = [
                (begin, end) for begin, end in pairwise([0, *ends]) if begin < first < end <= rows
            ]
            assert batch.kept_rows == sum(end - begin for begin, end in cut)
            assert rows - grown + kept == max(end for end in [0, *ends] if end <= rows)


def test_cuts_differ_where_a_chunk_was_cut_elsewhere() -> None:
    (first, _), (again,) = Stage().run([3, 9]), Stage().run([3, 2])
    assert first["id"].tolist() == again["id"].tolist()
    assert again.cut.leftover is None
    assert first.cut != again.cut


def is_copied(change: Any) -> bool:
    """Add one chunk of exactly a batch, made so; returns whether the batch is a copy of it."""
    stage = Stage(names=("id",), axes=(0,))
    kept: list[Any] = []
    array = change(np.arange(1, 6), kept)
    lies_at = array.ctypes.data
    arranged = stage.schema.arrange([(array,)])
    del array
    span = Span(stage.position, (0,), (0,), [5], (None,))
    run = MergedChunks(span, list(arranged.columns), arranged.rows)
    del arranged
    (batch,) = stage.assembler.add(run)
    assert batch["id"].tolist() == [1, 2, 3, 4, 5]
    assert not batch["id"].flags.writeable
    return batch["id"].ctypes.data != lies_at


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
    assert is_copied(change)


@needs_counts
def test_a_chunk_that_nobody_else_can_see_is_passed_on() -> None:
    assert not is_copied(lambda array, kept: array)


@pytest.mark.parametrize("arrival", [False, True])
def test_rows_beyond_the_end_are_counted_out(arrival: bool) -> None:
    partitions = Partitions(num_partitions=1, pure=True, arrival=arrival)
    spec = make_spec(pure=True, names=("id",), axes=(0,))
    merge = Merge(
        partitions, Schema(spec.names, spec.axes), partitions.origin(), spec, prints=None,
        first_partition=None,
    )  # fmt: skip
    merge.push([(0, 0, 0, [], None, End(None))])
    merge.push([(0, 0, number, [(np.zeros(number),)], None, None) for number in (1, 3)])
    # Some are the end as well, and the first of the next epoch may be here already.
    merge.push([(0, 0, 4, [], None, End(None)), (0, 1, 0, [(np.zeros(3),)], None, None)])
    assert isinstance(merge.next(), EpochEnd)
    merge.push([(0, 0, 2, [(np.zeros(2),)], None, None)])
    run = merge.next()
    assert isinstance(run, MergedChunks)
    merge.push([(0, 1, 1, [], None, End(None))])
    assert isinstance(merge.next(), EpochEnd)
    assert (merge.discarded_rows, merge.num_held) == (6, 0)


def test_a_position_has_the_cursor_after_the_end_of_an_epoch() -> None:
    spec = make_spec(names=("id",), axes=(0,), cursor=len, seek=max)
    merge = Merge(
        LANES, Schema(spec.names, spec.axes), LANES.origin(), spec, prints=None,
        first_partition=None,
    )  # fmt: skip
    merge.push([(0, 0, 0, [(np.zeros(3),)], [b"before"], End(b"after"))])
    run, end = merge.next(), merge.next()
    assert isinstance(run, MergedChunks)
    assert isinstance(end, EpochEnd)
    assert (run.span.position(1).marks, end.position.marks) == ((b"before",), (b"after",))
