"""Feeds on GPUs: slots, copies, what is kept, and what is given back; over a stand-in."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import feeder
import parts
from feeder.devices.cuda.copier import Copier
from feeder.devices.cuda.leases import Leases
from feeder.devices.routed import HOLD
from small import Calls, ids, make
from standin.gpu import Machine, StandinDriver, assert_sound, installed
from watching import around

ROWS, WIDTH = 4, 50
SLOT_BYTES = 64 + 256
"""Of the batches of `wide`: ids, padded to 64 bytes, and 200 bytes of rows, padded to 256."""


def wide(num_calls: int = 40, **settings: Any) -> feeder.Coordinator:
    """A feed of ids, three in a call, and beside each a row of `WIDTH` bytes like it."""

    def fetch(call: feeder.Call) -> Any:
        numbers = np.arange(3) + 3 * call.index
        return numbers, np.repeat(numbers % 251, WIDTH).astype(np.uint8).reshape(-1, WIDTH)

    settings = {"devices": ("cuda:0",)} | settings
    return make(Calls(num_calls, fetch), ["id", "row"], ROWS, **settings)


def assert_is(batch: feeder.Batch, step: int) -> None:
    """See that a batch of `wide` holds what it held when it was handed out."""
    numbers = list(range(ROWS * step, ROWS * step + ROWS))
    assert batch.step == step
    assert batch["id"].tolist() == numbers
    assert batch["row"].tolist() == [[number % 251] * WIDTH for number in numbers]


@pytest.fixture(params=(1, 2) if parts.is_full else (1,))
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with installed(Machine(seed=request.param)) as made:
        yield made
    assert_sound(made)


def held_bytes(machine: Machine, kind: str, owner: str = "") -> int:
    gc.collect()
    return machine.used(kind, owner)


# ---- batches


def test_a_batch_is_one_copy_and_small_ones_share_one(machine: Machine) -> None:
    with wide(400) as coordinator:
        assert len(list(coordinator["train"])) == 300
        assert 300 / 16 <= machine.num_copies < 300
    # From the begin of the first batch to the end of the last there is nothing but batches.
    assert machine.num_copied_bytes == 300 * SLOT_BYTES


# ---- memory


@pytest.mark.parametrize(("depth", "num_pinned"), [(1, 3), (2, 3), (5, 5), (0, 64)])
def test_memory_is_taken_once_for_as_many_slots_as_it_was_told(
    machine: Machine, depth: int, num_pinned: int
) -> None:
    with wide(400, depth=depth) as coordinator:
        for _ in coordinator["train"]:
            assert machine.used("pinned", "") == num_pinned * SLOT_BYTES
            assert machine.used("device", "cuda:0") == ((depth or 64) + HOLD) * SLOT_BYTES


def test_large_batches_get_few_slots_by_default(machine: Machine) -> None:
    machine.gpu_bytes = machine.pinned_bytes = 2**28
    rows = np.zeros((8, 2**20), np.uint8)
    fetch = Calls(9, lambda call: (rows,))
    with make(fetch, batch_size=8, devices=("cuda:0",)) as coordinator:
        next(coordinator["train"])
        assert machine.used("pinned", "") == 4 * 2**23
        assert machine.used("device", "cuda:0") == (4 + HOLD) * 2**23


def test_memory_goes_with_the_last_array_after_the_feed(machine: Machine) -> None:
    with wide() as coordinator:
        feed = coordinator["train"]
        batches = [next(feed) for _ in range(3)]
    del coordinator, feed
    for step, batch in enumerate(batches):
        assert_is(batch, step)
    assert held_bytes(machine, "device", "cuda:0") > 0
    assert held_bytes(machine, "pinned") == 0
    row = batches[1]["row"][2]
    del batches, batch
    assert row.tolist() == [6] * WIDTH
    del row
    assert held_bytes(machine, "device", "cuda:0") == 0


# ---- what is kept


def test_a_list_of_a_feed_holds_different_batches_and_warns_once(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    with wide(200, depth=2) as coordinator:
        batches = list(coordinator["train"])
    assert len(batches) == 150
    for step, batch in enumerate(batches):
        assert_is(batch, step)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == (
        "cuda:0: more than 3 batches are kept: from now on batches are copied for as long as that "
        "is so; drop them"
    )
    del batch
    batches.clear()
    assert held_bytes(machine, "device", "cuda:0") == 0


def test_memory_of_the_users_own_goes_when_he_lets_go_of_it(machine: Machine) -> None:
    with wide(400, depth=2) as coordinator:
        feed = coordinator["train"]
        ring = (2 + HOLD) * SLOT_BYTES
        kept = [next(feed) for _ in range(HOLD + 4)]
        assert machine.used("device", "cuda:0") == ring + 4 * SLOT_BYTES
        for step, batch in enumerate(kept):
            assert_is(batch, step)
        kept.clear()
        del batch
        for step in range(HOLD + 4, 300):
            assert_is(next(feed), step)
        assert machine.used("device", "cuda:0") == ring
    assert feed.on(0)._queue.num_copies == 4


def test_a_copy_of_a_batch_is_described_before_its_slot_is_another_batchs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next batch, which is longer, may be there at once."""
    begun = threading.Event()

    def wait(*_: Any) -> None:
        begun.clear()
        begun.wait(0.02)

    around(monkeypatch, StandinDriver, "copy_in", after=lambda *_: begun.set())
    around(monkeypatch, Leases, "give", before=wait)
    lengths = [3, 4, 1, 2] * 8
    fetch = Calls(len(lengths), lambda call: (np.arange(lengths[call.index]),))
    with make(fetch, dont_rebatch=True, devices=("cuda:0",), depth=1) as coordinator:
        batches = list(coordinator["train"])
        assert [len(batch["id"]) for batch in batches] == lengths
        batches.clear()


# ---- places of calls


class Writing(Calls):
    """`fetch(call)`: a batch's numbers, written where they belong; it keeps the first arrays."""

    def __init__(self, num_kept: int = 0) -> None:
        super().__init__(60, self.write)
        self.num_kept = num_kept
        self.kept: dict[int, np.ndarray] = {}
        self.addresses: dict[int, int] = {}

    def write(self, call: feeder.Call) -> Any:
        array = call.empty((ROWS,), np.int64)
        array[:] = np.arange(ROWS) + ROWS * call.index
        self.addresses[call.index] = array.ctypes.data
        if call.index < self.num_kept:
            self.kept[call.index] = array
        return (array,)


@pytest.mark.parametrize("depth", (1, 4, 0))
def test_calls_write_to_pinned_memory(machine: Machine, depth: int) -> None:
    fetch = Writing()
    settings: Any = {
        "devices": ("cuda:0",), "rows_per_call": ROWS, "depth": depth, "max_buffered_batches": 4
    }  # fmt: skip
    with make(fetch, **settings) as coordinator:
        feed = coordinator["train"]
        assert ids([next(feed) for _ in range(50)]) == list(range(50 * ROWS))
        pinned = [region for region in machine.regions if region.kind == "pinned"]
        inside = [
            index for index, address in list(fetch.addresses.items())  # Calls go on.
            if any(region.holds(address, 8 * ROWS) for region in pinned)
        ]  # fmt: skip
        # Not all: what the columns are like is known with the first call only, and the call that
        # the merge waits for is made without a place where no slot is free.
        assert inside


def test_what_a_call_has_kept_does_not_change(machine: Machine) -> None:
    fetch = Writing(num_kept=1)
    settings: Any = {"devices": ("cuda:0",), "rows_per_call": ROWS, "depth": 16, "num_threads": 1}
    with make(fetch, **settings) as coordinator:
        assert ids(coordinator["train"]) == list(range(60 * ROWS))
    assert fetch.kept[0].tolist() == list(range(ROWS))


def test_a_function_that_keeps_all_pinned_memory_is_told(machine: Machine) -> None:
    fetch = Writing(num_kept=60)
    settings: Any = {
        "devices": ("cuda:0",), "rows_per_call": ROWS, "depth": 1, "max_buffered_batches": 4
    }  # fmt: skip
    told = pytest.raises(feeder.FetchError, match=r"keeps what call\.out or call\.empty gave it")
    with make(fetch, **settings) as coordinator, told:
        list(coordinator["train"])
    fetch.kept.clear()


def test_a_position_tells_nothing_of_pinned_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever still has the batch that lay there: the memory may be the next batch's by now."""
    kept: list[Any] = []
    around(monkeypatch, Copier, "_load", before=lambda copier, transfer: kept.append(transfer))
    with wide() as coordinator:
        cuts = [batch.cut for batch in coordinator["train"]]
    assert len(cuts) == 30
    assert [cut.step for cut in cuts if cut.checked is not None] == []
    kept.clear()
