"""A source as a pure fetch function: calls in any order and thread, the epoch's end, cursors."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import chain
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import feeder
from calls import call, epoch_of
from feeder.workers.errors import ResumeError
from feeder.workers.sources import RecordError, Source, arrays
from feeder.workers.sources.orders.windowed import Window
from feeder.workers.stream.batch import Call

SHUFFLES: dict[str, dict[str, Any]] = {
    "none": {},
    "feeder": {"random_shuffle": True},
    "dali": {"random_shuffle": True, "order": "dali", "initial_fill": 50},
    "dali after epoch": {"shuffle_after_epoch": True, "order": "dali"},
    "dali compound": {"shuffle_after_epoch": "compound", "order": "dali"},
}
each_shuffle = pytest.mark.parametrize("shuffle", SHUFFLES.values(), ids=SHUFFLES.keys())


def rows(source: Source, batch_size: int, epoch: int) -> list[list[int]]:
    return [labels.tolist() for (labels,) in epoch_of(source, batch_size, epoch)]


@each_shuffle
@pytest.mark.parametrize("pad", [False, True])
def test_an_epoch_is_the_same_call_by_call_in_any_order(shuffle: dict[str, Any], pad: bool) -> None:
    def make() -> Source:
        return arrays(np.arange(1000), num_shards=3, pad_last_batch=pad, **shuffle)

    epochs = [rows(make(), 32, epoch) for epoch in range(3)]
    source = make()
    for epoch, index in [(2, 3), (0, 0), (2, 10), (0, 5), (1, 9), (1, 0), (2, 4)]:
        (labels,) = source(call(index, 32, epoch))
        assert labels.tolist() == epochs[epoch][index]


@each_shuffle
def test_calls_of_many_threads_have_the_same_answers(shuffle: dict[str, Any]) -> None:
    wanted = rows(arrays(np.arange(20_000), **shuffle), 16, 0)
    source = arrays(np.arange(20_000), **shuffle)
    got: dict[int, list[int]] = {}

    def read(first: int) -> None:
        for index in range(first, len(wanted), 4):
            (labels,) = source(call(index, 16))
            got[index] = labels.tolist()

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[index] for index in range(len(wanted))] == wanted


@each_shuffle
def test_a_fresh_source_goes_on_with_the_cursor_of_any_call(shuffle: dict[str, Any]) -> None:
    source = arrays(np.arange(9_000), num_shards=2, seed=5, **shuffle)
    epochs = [rows(source, 100, epoch) for epoch in range(2)]
    for epoch in range(2):
        for index in range(0, len(epochs[epoch]), 7):
            cursor = source.cursor(call(index, 100, epoch))
            fresh = arrays(np.arange(9_000), num_shards=2, seed=5, **shuffle)
            following = call(index + 1, 100, epoch)
            if index + 1 == len(epochs[epoch]):
                following = call(0, 100, epoch + 1)
            fresh.seek(following, cursor)
            if following.epoch < 2:
                (labels,) = fresh(following)
                assert labels.tolist() == epochs[following.epoch][following.index]


def test_cursors_are_small_and_change_seldom() -> None:
    source = arrays(np.arange(100_000), random_shuffle=True, order="dali", seed=1)
    cursors = [source.cursor(call(index, 256)) for index in range(0, 390, 5)]
    assert max(map(len, cursors)) <= 64 + 4 * 1024
    assert len(set(cursors)) == 1 + 100_000 // 4096
    for shuffle in ("none", "feeder", "dali after epoch"):
        assert arrays(np.arange(1000), **SHUFFLES[shuffle]).cursor(call(5, 32)) == b""


def test_a_cursor_spares_the_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Source:
        return arrays(np.arange(300_000), random_shuffle=True, order="dali", seed=1)

    source = make()
    # Sixteen calls make a block, so one of these ends just before a checkpoint.
    wanted = {index: source(call(index, 256))[0].tolist() for index in range(1000, 1017)}
    cursors = {index: source.cursor(call(index - 1, 256)) for index in wanted}
    steps: list[int] = []
    walk = Window.walk

    def counting(window: Window, count: int) -> NDArray[np.int64]:
        steps.append(count)
        return walk(window, count)

    monkeypatch.setattr(Window, "walk", counting)
    for index, rows in wanted.items():
        steps.clear()
        fresh = make()
        fresh.seek(call(index, 256), cursors[index])
        assert fresh(call(index, 256))[0].tolist() == rows
        assert sum(steps) == 4096


def test_seek_refuses_what_is_no_cursor() -> None:
    source = arrays(np.arange(100), random_shuffle=True, order="dali")
    with pytest.raises(ResumeError, match="cursor has 3 bytes"):
        source.seek(call(0, 10), b"abc")


def test_the_feeds_seed_is_taken_where_the_options_name_none() -> None:
    source = arrays(np.arange(100), random_shuffle=True)
    with_seed = arrays(np.arange(100), random_shuffle=True, seed=7)
    first = source(call(0, 50, seed=7))[0].tolist()
    assert first == with_seed(call(0, 50, seed=1))[0].tolist()
    assert first != source(call(0, 50, seed=1))[0].tolist()


def test_the_end_of_an_epoch() -> None:
    source = arrays(np.arange(10))
    assert rows(source, 4, 0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for index in (3, 4, 1000):
        with pytest.raises(StopIteration):
            source(call(index, 4))


def test_a_small_shard_may_give_a_batch_of_repeats() -> None:
    source = arrays(np.arange(10), num_shards=3, pad_last_batch=True)
    assert rows(source, 3, 0) == [[0, 1, 2], [2, 2, 2]]
    assert rows(source, 3, 2) == [[6, 7, 8], [9, 9, 9]]
    assert (source.epoch_size, source.epoch_size_padded, source.rows(0, 3)) == (10, 12, 6)


class Fragile:
    """Records of which some cannot be read, and are left out."""

    kind = "fragile"
    skipped = 3

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 10

    def name(self, index: int) -> str:
        return f"record {index}"

    def read(self, indices: NDArray[np.int64], call: Call) -> Mapping[str, NDArray[Any]] | None:
        good = [index for index in indices.tolist() if index not in self.bad]
        return {"x": np.array(good, np.int16).reshape(-1, 1)} if good else None

    def describe(self) -> dict[str, Any]:
        return {}


def test_a_call_without_a_sound_record_has_no_rows() -> None:
    source = Source(Fragile({4, 5, 6, 7}))
    chunks = [chunk["x"] for chunk in epoch_of(source, 4)]  # type: ignore[call-overload]
    assert [chunk.shape for chunk in chunks] == [(4, 1), (0, 1), (2, 1)]
    assert {chunk.dtype for chunk in chunks} == {np.dtype(np.int16)}
    assert source.skipped == 3


def test_a_first_call_without_a_sound_record_has_no_rows_either() -> None:
    for index in (0, 1):
        chunk = Source(Fragile({0, 1, 2, 3, 4, 5}))(call(index, 3))
        assert chunk["x"].shape == (0, 1) and chunk["x"].dtype == np.int16  # type: ignore[call-overload]


def test_a_source_without_a_sound_record_is_an_error() -> None:
    with pytest.raises(RecordError, match=r"record 4: defective, and so is every other record$"):
        Source(Fragile(set(range(10))))(call(1, 4))


def test_a_source_says_what_it_is() -> None:
    assert repr(arrays(np.arange(3))) == (
        "<Source source='arrays', size=3, shard_id=0, num_shards=1, stick_to_shard=False, "
        "pad_last_batch=False, shuffle='none', columns=['0: <i8[]']>"
    )


@each_shuffle
@pytest.mark.parametrize("shards", [{}, {"num_shards": 3}, {"num_shards": 3, "shard_id": 2}])
@pytest.mark.parametrize("stick", [False, True])
def test_a_source_that_carries_keeps_its_calls_in_step_with_batches(
    shuffle: dict[str, Any], shards: dict[str, int], stick: bool
) -> None:
    stick = stick and "shuffle_after_epoch" not in shuffle  # They exclude each other.
    source = arrays(np.arange(1000), stick_to_shard=stick, **shards, **shuffle)
    carrying, taken = source.carrying(), 0
    for epoch in range(7):
        chunks = rows(carrying, 32, epoch)
        assert list(chain(*chunks)) == list(chain(*rows(source, 32, epoch)))
        for chunk in chunks[:-1]:
            taken += len(chunk)
            assert taken % 32 == 0
        taken += len(chunks[-1])
        with pytest.raises(StopIteration):
            carrying(call(len(chunks), 32, epoch))


def test_a_source_that_carries_knows_how_far_it_is_without_counting() -> None:
    carrying = arrays(np.arange(1000), num_shards=3).carrying()
    epoch = 3 * 10**12 + 1
    before = 10**12 * 1000 + 333
    assert len(rows(carrying, 32, epoch)[0]) == 32 - before % 32


def test_padded_epochs_are_in_step_already() -> None:
    source = arrays(np.arange(100), num_shards=3, pad_last_batch=True)
    for epoch in range(4):
        assert rows(source.carrying(), 16, epoch) == rows(source, 16, epoch)


def test_an_epoch_may_be_smaller_than_what_the_batch_before_lacks() -> None:
    carrying = arrays(np.arange(5)).carrying()
    assert [rows(carrying, 16, epoch) for epoch in range(4)] == [
        [[0, 1, 2, 3, 4]],
        [[0, 1, 2, 3, 4]],
        [[0, 1, 2, 3, 4]],
        [[0], [1, 2, 3, 4]],
    ]


def test_a_source_that_carries_goes_on_with_the_cursor_of_any_call() -> None:
    def make() -> Source:
        return arrays(np.arange(9_001), **SHUFFLES["dali"]).carrying()

    source = make()
    chunks = rows(source, 100, 1)
    for index in range(0, len(chunks) - 1, 7):
        fresh = make()
        fresh.seek(call(index + 1, 100, 1), source.cursor(call(index, 100, 1)))
        (labels,) = fresh(call(index + 1, 100, 1))
        assert labels.tolist() == chunks[index + 1]


def test_two_feeds_of_one_source_may_carry_and_not() -> None:
    source = arrays(np.arange(10))
    carrying = source.carrying()
    assert [len(chunk) for chunk in rows(source, 4, 1)] == [4, 4, 2]
    assert [len(chunk) for chunk in rows(carrying, 4, 1)] == [2, 4, 4]
    assert source.describe() == carrying.describe() and source.records is carrying.records


@pytest.mark.parametrize("options", [{}, SHUFFLES["dali"]], ids=["sequential", "windowed"])
def test_a_feed_that_carries_resumes_at_every_batch(options: dict[str, Any]) -> None:
    def make(resume: Any = None) -> feeder.Coordinator:
        source = arrays(np.arange(43), **options)
        return feeder.init_data_input_workers(
            ["id"], source, 8, 2, epochs=4, last_batch="carry", resume=resume,
            coordinator=feeder.Coordinator(),
        )  # fmt: skip

    with make() as coordinator:
        batches = [(batch["id"].tolist(), batch.cut.token()) for batch in coordinator["train"]]
    assert [len(rows) for rows, _ in batches] == [8] * 21 + [4]
    for i, (_, token) in enumerate(batches):
        with make(token) as coordinator:
            rest = [batch["id"].tolist() for batch in coordinator["train"]]
        assert rest == [rows for rows, _ in batches[i + 1 :]]
