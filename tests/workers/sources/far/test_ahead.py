"""Calls are foreseen in their order, from wherever a feed begins."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import feeder
from far_server import FarServer, Numbers
from feeder import Call, sources
from feeder.workers.sources.far import ahead as module
from feeder.workers.sources.far.ahead import Ahead
from feeder.workers.sources.far.blocks import Blocks
from feeder.workers.sources.far.objects import Known, Objects
from feeder.workers.sources.far.paths import FarPath
from feeder.workers.stream.parts import PartCalls
from feeder.workers.stream.rounds import Turns
from feeder.workers.stream.spec import Part, StreamSpec

CALLS = 20


class Recorded(Blocks):
    """Blocks that note what they are told; nothing is read."""

    def __init__(self) -> None:
        super().__init__("", 0)
        self.told: list[tuple[str, Any]] = []
        self._closed.set()  # Nothing is brought.

    def foresee(self, reader: Any, blocks: Any) -> int:
        blocks = [*blocks]
        self.told.append(("foresee", [start for _, start, _ in blocks]))
        return super().foresee(reader, blocks)

    def enter(self, reader: Any, step: int) -> None:
        self.told.append(("enter", step))
        super().enter(reader, step)

    def leave(self, reader: Any, steps: Any) -> None:
        steps = [*steps]
        self.told += [("leave", step) for step in steps]
        super().leave(reader, steps)

    def forget(self, reader: Any) -> None:
        self.told.append(("forget", None))
        super().forget(reader)


@pytest.fixture
def blocks() -> Recorded:
    return Recorded()


def touched(blocks: Blocks) -> Any:
    """Call i of epoch e reads a byte at 100 e + i."""
    path = FarPath(Known("s3://b/x", 1 << 20, '"t"'), blocks, Objects())

    def touches(call: Call) -> Iterator[Any]:
        if call.index >= CALLS:
            raise StopIteration
        at = 100 * call.epoch + call.index
        return iter([(path, at, at + 1)])

    return touches


def make(ahead: Ahead, blocks: Recorded, epoch: int, index: int) -> list[tuple[str, Any]]:
    """Make a call; what the blocks were told for it."""
    blocks.told.clear()
    with ahead.step(Call(index, epoch, 0, 4, 7), touched(blocks)):
        pass
    return blocks.told


def foreseen(told: list[tuple[str, Any]]) -> list[int]:
    return [start for what, starts in told if what == "foresee" for start in starts]


def test_the_calls_of_this_epoch_and_the_next_are_foreseen_in_their_order(
    blocks: Recorded,
) -> None:
    ahead, found = Ahead(), []
    for index in range(CALLS):
        told = make(ahead, blocks, 3, index)
        assert [one for one in told if one[0] in ("enter", "leave")] == [
            ("enter", index), ("leave", index)
        ]  # fmt: skip
        found += foreseen(told)
    assert found == [*range(300, 300 + CALLS), *range(400, 400 + CALLS)]
    told = make(ahead, blocks, 4, 0)
    assert ("enter", CALLS) in told
    assert foreseen(told) == [*range(500, 500 + CALLS)]


def test_a_call_that_was_not_foreseen_is_where_the_future_begins(blocks: Recorded) -> None:
    ahead = Ahead()
    make(ahead, blocks, 0, 0)
    told = make(ahead, blocks, 7, 15)
    assert told[0] == ("forget", None)
    assert foreseen(told)[:6] == [715, 716, 717, 718, 719, 800]
    # One that was made lately is made again: a feed makes its first call twice.
    for index in (15, 16, 15):
        assert ("forget", None) not in make(ahead, blocks, 7, index)


def test_calls_that_other_processes_make_are_over_when_they_are_late(
    blocks: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LATE_STEPS", 3)
    ahead = Ahead()
    left = [
        step for index in range(0, CALLS, 2)
        for what, step in make(ahead, blocks, 0, index) if what == "leave"
    ]  # fmt: skip
    assert set(left) >= set(range(CALLS - 2 - 3))
    assert len(ahead._numbers) <= module._MOST_STEPS


def test_no_more_is_foreseen_than_there_is_room_for(
    blocks: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_USES", 5)
    ahead = Ahead()
    for index in range(10):
        make(ahead, blocks, 0, index)
        assert ahead._foreseen - index <= 5 + 1


def test_what_other_servers_read_is_not_foreseen(blocks: Recorded) -> None:
    """Of 3 queues the second: batch i of all epochs, counted on, is its own if i % 3 is 1."""

    class Rows:
        gives_all_rows = True

        def rows(self, epoch: int, batch_size: int) -> int:
            return CALLS * batch_size

    spec: Any = StreamSpec(
        fetch=Rows(), pure=True, cursor=None, seek=None, names=("x",), axes=(0,), batch_size=4,
        num_workers=1, first_worker_id=0, seed=7, epochs=None, last_batch="keep",
        last_round="uneven", order="ticket", dont_rebatch=False, repeatable=True,
    )  # fmt: skip
    part = PartCalls(spec, SimpleNamespace(part=Part(1, 2, 3), rows_per_call=None), Turns(0), 0, 0)
    ahead, found = Ahead(part), list[int]()
    own = [100 * (i // CALLS) + i % CALLS for i in range(6 * CALLS) if i % 3 == 1]
    for at in own[:20]:
        told = make(ahead, blocks, *divmod(at, 100))
        assert at == own[0] or ("forget", None) not in told
        found += foreseen(told)
    assert found == own[: len(found)]
    assert len(found) > 20
    # Where a feed goes on in a later epoch, and back to one before.
    assert foreseen(make(ahead, blocks, 9, 1))[:3] == [901, 904, 907]
    assert foreseen(make(ahead, blocks, 0, 4))[:3] == [4, 7, 10]


def test_what_cannot_be_foreseen_does_not_fail_a_call(blocks: Recorded) -> None:
    def defective(call: Call) -> Iterator[Any]:
        raise ValueError("a table is damaged")

    with Ahead().step(Call(0, 0, 0, 4, 7), defective):
        pass
    assert blocks.told == []


def test_nothing_is_foreseen_while_all_is_there(
    blocks: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, are_there = Ahead(), [False]
    monkeypatch.setattr(blocks, "has_all", lambda: are_there[0])
    monkeypatch.setattr(module, "_MOST_USES", 2)
    make(ahead, blocks, 0, 0)
    are_there[0] = True
    # What was foreseen before is used as it was.
    assert make(ahead, blocks, 0, 1) == [("enter", 1), ("leave", 1)]
    assert make(ahead, blocks, 0, 5) == []
    # Another process has removed a block.
    are_there[0] = False
    assert foreseen(make(ahead, blocks, 0, 6))[0] == 6


@pytest.mark.foreign_sockets
def test_a_source_that_is_gone_is_forgotten(far: FarServer) -> None:
    far.objects["b/x"] = bytes(8000)
    source = feeder.sources.tokens(f"{far.address}/b/x", 10, "uint16", offset=0)
    source(Call(0, 0, 0, 4, 0))
    blocks = source.records._paths[0].blocks
    assert len(blocks._foresight._readers) == 1
    # As if the garbage collector came while this thread holds them.
    with blocks._lock, source._ahead._lock:
        del source
        gc.collect()
    blocks.stats()
    assert len(blocks._foresight._readers) == 0
    blocks.close()


class NumbersHere:
    """The numbers that the objects hold, as records."""

    def __init__(self, first: int, num: int) -> None:
        self._first, self._num = first, num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> Any:
        return np.array([self._first + index], "<u8")


@pytest.mark.foreign_sockets
def test_a_mixture_goes_on_at_record_a_billion_within_five_round_trips(
    far: FarServer, tmp_path: Path
) -> None:
    cache = feeder.Cache(tmp_path / "empty", 1 << 28)
    per_object, num_objects, size = 10**8, 12, 64

    def mixed(make: Callable[[int], sources.Source]) -> sources.Source:
        a, b = (make(number).shuffle(window=65536) for number in range(2))
        return sources.mix({"a": (a, 0.7), "b": (b, 0.3)})

    def there(number: int) -> sources.Source:
        names = f"{far.address}/{number}/{{00..11}}"
        return sources.tokens(names, 1, "uint64", offset=0, cache=cache)

    def here(number: int) -> sources.Source:
        return sources.records(NumbersHere(number << 40, num_objects * per_object))

    for number in range(2):
        for i in range(num_objects):
            far.objects[f"{number}/{i:02d}"] = Numbers((number << 40) + i * per_object, per_object)
    far.latency_s = 0.3
    call = feeder.Call(10**9 // size, 0, 0, size, 7)
    (rows,) = mixed(there)(call)
    # One for the sizes and tags of each source, and one for the blocks of the call.
    assert far.deepest <= 5
    assert np.array_equal(rows, mixed(here)(call)[0])
    cache.close()


@pytest.mark.process
def test_a_child_that_is_forked_during_a_call_begins_anew(blocks: Recorded) -> None:
    ahead = Ahead()
    make(ahead, blocks, 3, 0)
    with ahead._lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            status = 1
            try:
                assert ("enter", 0) in make(ahead, blocks, 3, 5)
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
