"""What holds for every order: each record once per epoch, shards make the whole, and a position is
reached at once as it is step by step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError, ResumeError
from feeder.workers.sources.orders import orders, windowed
from feeder.workers.sources.orders.orders import (
    Order,
    PermutedOrder,
    ReshuffledOrder,
    SequentialOrder,
    shuffled_list,
)
from feeder.workers.sources.orders.sharding import EpochsInTurn, Sharding
from feeder.workers.sources.orders.shuffles import shuffle_again
from feeder.workers.sources.orders.windowed import WindowedOrder

Make = Callable[[Sharding], Order]

ORDERS: dict[str, Make] = {
    "sequential": SequentialOrder,
    "permuted": lambda sharding: PermutedOrder(sharding, 3),
    "windowed 1": lambda sharding: WindowedOrder(sharding, 1, 3),
    "windowed 7": lambda sharding: WindowedOrder(sharding, 7, 3),
    "windowed 12": lambda sharding: WindowedOrder(sharding, 12, 3),
    "windowed 100": lambda sharding: WindowedOrder(sharding, 100, 3),
    "windowed list": lambda sharding: WindowedOrder(
        sharding, 7, 3, shuffled_list(sharding.num_records)
    ),
    "reshuffled": lambda sharding: ReshuffledOrder(sharding, 3, compound=False),
    "reshuffled compound": lambda sharding: ReshuffledOrder(sharding, 3, compound=True),
}
each_order = pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS.keys())


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    num_records = draw(st.integers(1, 60))
    num_shards = draw(st.integers(1, num_records))
    return Sharding(
        num_records=num_records,
        shard_id=draw(st.integers(0, num_shards - 1)),
        num_shards=num_shards,
        stick_to_shard=draw(st.booleans()),
    )


def whole_epoch(order: Order, epoch: int) -> list[int]:
    return order.indices(epoch, 0, order.sharding.length(epoch)).tolist()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a few steps, so that small orders have many, and more than are kept; windows of
    more than 8 slots are too large for a token, and one in fifty is not known after its walk."""
    monkeypatch.setattr(windowed, "MAX_BYTES", 21)
    monkeypatch.setattr(windowed, "_SPARE_ROUNDS", 4)
    monkeypatch.setattr(windowed, "_BLOCK", 8)
    monkeypatch.setattr(windowed, "_MAX_BLOCKS", 3)
    monkeypatch.setattr(windowed, "_MAX_CHECKPOINTS", 3)


@each_order
@given(sharding=shardings(), epoch=st.integers(0, 5))
def test_the_shards_of_an_epoch_make_the_whole(make: Make, sharding: Sharding, epoch: int) -> None:
    n, s, stick = sharding.num_records, sharding.num_shards, sharding.stick_to_shard
    shards = [
        Sharding(num_records=n, shard_id=i, num_shards=s, stick_to_shard=stick) for i in range(s)
    ]
    epochs = [whole_epoch(make(shard), epoch) for shard in shards]
    assert [*map(len, epochs)] == [shard.length(epoch) for shard in shards]
    assert sorted(record for records in epochs for record in records) == list(range(n))


@each_order
@given(sharding=shardings(), epoch=st.integers(0, 4), data=st.data())
def test_seek_to_k_equals_k_steps(
    make: Make, sharding: Sharding, epoch: int, data: st.DataObject
) -> None:
    stepped, length = make(sharding), sharding.length(epoch)
    records: list[int] = []
    for e in range(epoch):
        whole_epoch(stepped, e)
    for position in range(length):
        records += stepped.indices(epoch, position, position + 1).tolist()
    k = data.draw(st.integers(0, length - 1))
    by_cursor, by_position = make(sharding), make(sharding)
    by_cursor.seek(stepped.cursor(epoch, k))
    assert by_cursor.indices(epoch, k, length).tolist() == records[k:]
    assert by_position.indices(epoch, k, length).tolist() == records[k:]


@each_order
@given(sharding=shardings(), epoch=st.integers(0, 2), data=st.data())
def test_any_positions_give_the_records_that_stretches_do(
    make: Make, sharding: Sharding, epoch: int, data: st.DataObject
) -> None:
    records = np.array(whole_epoch(make(sharding), epoch))
    positions = st.lists(st.integers(0, len(records) - 1), min_size=1, max_size=12)
    at = np.array(data.draw(positions))
    assert make(sharding).at(epoch, at).tolist() == records[at].tolist()


@given(sharding=shardings())
def test_what_is_told_of_shards_is_what_their_bounds_say(sharding: Sharding) -> None:
    num, records = sharding.num_shards, np.arange(sharding.num_records)
    parts = [range(sharding.bound(shard), sharding.bound(shard + 1)) for shard in range(num)]
    assert [record for part in parts for record in part] == records.tolist()
    assert sharding.shards_of(records).tolist() == [k for k, part in enumerate(parts) for _ in part]
    residues = [sharding.residue(shard) for shard in range(num)]
    assert sorted(residues) == [*range(num)]
    assert [sum(records % num == residue) for residue in residues] == [*map(len, parts)]
    assert sharding.is_even == (len({sharding.length(epoch) for epoch in range(num)}) == 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_records": 0}, "holds no records"),
        ({"num_shards": 0}, "num_shards is 0"),
        ({"shard_id": -1}, "shard_id is -1, expected 0 to 2"),
        ({"shard_id": 3}, "shard_id is 3, expected 0 to 2"),
        ({"num_records": 2}, "more than the 2 records"),
    ],
)
def test_a_shard_that_cannot_be_is_refused(arguments: dict[str, Any], told: str) -> None:
    plain: dict[str, Any] = {"num_records": 3, "num_shards": 3}
    with pytest.raises(ConfigError, match=told):
        Sharding(**plain | arguments)


def in_turn(sizes: list[int]) -> EpochsInTurn:
    return EpochsInTurn(num_records=max(sizes), num_shards=len(sizes), sizes=tuple(sizes))


# No more sizes than the largest epoch has records.
TURNS = st.lists(st.integers(6, 9), min_size=1, max_size=5).map(in_turn)


@given(sharding=shardings() | TURNS, epoch=st.integers(0, 50))
def test_offsets_add_up(sharding: Sharding, epoch: int) -> None:
    lengths = [sharding.length(e) for e in range(epoch)]
    assert sharding.offset(epoch) == sum(lengths)
    for count in {sharding.offset(epoch), sharding.offset(epoch + 1) - 1}:
        assert sharding.epoch_at(count) == epoch


@given(sharding=shardings(), batch_size=st.integers(1, 9), epoch=st.integers(0, 5))
def test_padding_makes_epochs_of_equal_length(
    sharding: Sharding, batch_size: int, epoch: int
) -> None:
    longest = -(-sharding.num_records // sharding.num_shards)
    padded = Sharding(
        num_records=sharding.num_records,
        shard_id=sharding.shard_id,
        num_shards=sharding.num_shards,
        pad_last_batch=True,
    )
    rows = padded.rows(epoch, batch_size)
    assert rows % batch_size == 0 and 0 <= rows - longest < batch_size
    assert padded.epoch_size_padded == longest * sharding.num_shards
    assert sharding.rows(epoch, batch_size) == sharding.length(epoch)


def test_lists_are_made_once_for_two_feeds_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def shuffle_and_note(order: np.ndarray, seeds: list[int]) -> np.ndarray:
        made.extend(seed >> 32 for seed in seeds)
        return shuffle_again(order, seeds)

    monkeypatch.setattr(orders, "shuffle_again", shuffle_and_note)
    order = ReshuffledOrder(Sharding(num_records=10), 3, compound=True)
    for epoch in (0, 9, 0, 9, 1, 10, 1, 10, 2):
        assert len(set(whole_epoch(order, epoch))) == 10
    assert made == [*range(1, 11), 2, 11, 3]


def test_orders_of_any_size_cost_no_list() -> None:
    sharding = Sharding(num_records=10**12, num_shards=3, shard_id=2)
    for order in (SequentialOrder(sharding), PermutedOrder(sharding, 1)):
        far = sharding.length(7) - 5
        records = order.indices(7, far, far + 5)
        assert len(set(records.tolist())) == 5 and records.min() >= 0 and records.max() < 10**12
        assert order.cursor(7, far) == b""


def test_a_cursor_of_another_order_is_refused() -> None:
    sharding = Sharding(num_records=100)
    cursor = ORDERS["windowed 7"](sharding).cursor(2, 50)
    with pytest.raises(ResumeError, match="for an order that needs none"):
        SequentialOrder(sharding).seek(cursor)
    with pytest.raises(ResumeError, match="not a window of initial_fill 100"):
        ORDERS["windowed 100"](sharding).seek(cursor)
    with pytest.raises(ResumeError, match="that this order never has"):
        WindowedOrder(Sharding(num_records=30), 7, 3).seek(cursor)


@pytest.mark.parametrize("spare", [16, -2], ids=["known", "not known"])
def test_a_window_too_large_for_a_token_is_found_from_an_earlier_step(
    spare: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windowed, "_SPARE_ROUNDS", spare)
    walked: list[int] = []
    walk = windowed.Window.walk

    def walk_and_note(window: windowed.Window, count: int) -> NDArray[np.int64]:
        walked.append(window.step)
        return walk(window, count)

    order = WindowedOrder(Sharding(num_records=70), 12, 3)
    for epoch in range(5):
        whole_epoch(order, epoch)
    cursor, wanted = order.cursor(4, 50), order.indices(4, 50, 70).tolist()
    step, state, width = windowed._HEADER.unpack(cursor)
    assert len(cursor) == 13 and width == 0 and 0 < step < 320 and step % 16 == 0
    resumed = WindowedOrder(Sharding(num_records=70), 12, 3)
    monkeypatch.setattr(windowed.Window, "walk", walk_and_note)
    resumed.seek(cursor)
    assert resumed.indices(4, 50, 70).tolist() == wanted
    assert resumed.cursor(4, 50) == cursor
    assert (min(walked) == step) is (spare > 0)
    for wrong in (step + 8, 1 << 62):
        with pytest.raises(ResumeError, match="does not begin at"):
            resumed.seek(windowed.encode_step(wrong, state))
    with pytest.raises(ResumeError, match="does not begin at"):
        resumed.seek(windowed.encode_step(step, 0))


@given(data=st.data())
def test_a_damaged_cursor_is_refused_or_harmless(data: st.DataObject) -> None:
    sharding = Sharding(num_records=100)
    cursor = bytearray(ORDERS["windowed 7"](sharding).cursor(2, 50))
    at = data.draw(st.integers(0, len(cursor) - 1))
    cursor[at] ^= 1 << data.draw(st.integers(0, 7))
    order = ORDERS["windowed 7"](sharding)
    try:
        order.seek(bytes(cursor))
    except ResumeError:
        return
    assert len(set(whole_epoch(order, 2))) == 100


def test_the_memory_of_a_windowed_shuffle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Blocks of 8 steps; a window of 20 slots is written down every 24, in 33 bytes.
    order = WindowedOrder(Sharding(num_records=500), 20, 3)
    whole_epoch(order, 0)
    assert list(order._checkpoints) == [432, 456, 480] and len(order._blocks) == 3
    monkeypatch.setattr(windowed, "_MAX_CHECKPOINT_BYTES", 70)
    order = WindowedOrder(Sharding(num_records=500), 20, 3)
    whole_epoch(order, 0)
    assert list(order._checkpoints) == [456, 480]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_windows_are_the_same_one_by_one_and_all_together(data: st.DataObject) -> None:
    num, window = data.draw(st.integers(1, 2000)), data.draw(st.integers(1, 700))
    order = orders.BlockOrder(Sharding(num_records=num), 3, window)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, num)] * 2)))
    epoch = data.draw(st.integers(0, 2))
    assert (order.indices(epoch, start, stop) == order.at(epoch, np.arange(start, stop))).all()
    records = order.indices(epoch, 0, num)
    assert sorted(records.tolist()) == [*range(num)]
    # Those of a window come together.
    windows = records // window
    assert np.count_nonzero(np.diff(windows)) == -(-num // window) - 1
