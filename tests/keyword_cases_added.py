"""What the keywords do that the original did not have."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import pytest

import feeder
from keyword_cases import CASES, Init, case, drain, own
from small import Counted, Held, Pure, chunk, ids
from standin.gpu import Machine, installed

__all__ = ["CASES"]


@case
def devices(init: Init) -> None:
    """Makes a queue for each, and deals the batches out."""
    with own(init, Pure(8, 4), devices=3) as coordinator:
        feed = coordinator["train"]
        assert feed.devices == ("cpu:0", "cpu:1", "cpu:2")
        steps = [[next(feed.on(device)).step for device in range(3)] for _ in range(2)]
    assert steps == [[0, 1, 2], [3, 4, 5]]


@case
def depth(init: Init) -> None:
    """Says how many batches a GPU holds ahead of the user."""
    with installed(Machine()) as machine:
        sizes = []
        for depth in (2, 7):
            with own(init, Pure(8, 4), devices=("cuda:0",), depth=depth) as coordinator:
                next(coordinator["train"])
                sizes.append(machine.used("device", "cuda:0") // 64)
    assert [size - sizes[0] for size in sizes] == [0, 5]


@case
def seed(init: Init) -> None:
    """Keys the random numbers of a call."""
    seeds = set()

    def fetch(call: feeder.Call) -> Any:
        seeds.add(call.seed)
        return (call.rng.integers(0, 2**60, 4),)

    drawn = {}
    for value in (7, 8, 2**64 - 1):
        with own(init, fetch, seed=value) as coordinator:
            drawn[value] = ids([next(coordinator["train"])])
    assert seeds == drawn.keys()
    assert len({tuple(row) for row in drawn.values()}) == 3


@case
def epochs(init: Init) -> None:
    """Is how often the fetch function is begun anew; None is without end."""
    got = drain(init, Pure(2, 4), epochs=3)
    assert [(batch.epoch, batch.index) for batch in got] == [
        (e, i) for e in range(3) for i in (0, 1)
    ]
    with own(init, Pure(2, 4), epochs=None) as coordinator:
        assert [next(coordinator["train"]).epoch for _ in range(41)][-1] == 20


@case
def last_batch(init: Init) -> None:
    """Says what becomes of an epoch's last rows, here two of 4 + 4 + 2."""
    shapes = {}
    for policy in ("keep", "drop", "pad", "carry"):
        got = drain(init, Pure(5, 2), last_batch=policy, epochs=2)
        shapes[policy] = [(len(batch["id"]), batch.rows) for batch in got]
        if policy == "pad":
            assert list(got[2]["id"]) == [401, 402, 402, 402]
        if policy == "carry":
            assert list(got[2]["id"]) == [401, 402, 100_001, 100_002]
    full = (4, 4)
    assert shapes["keep"] == [full, full, (2, 2)] * 2
    assert shapes["drop"] == [full] * 4
    assert shapes["pad"] == [full, full, (4, 2)] * 2
    assert shapes["carry"] == [full] * 5


@case
def last_round(init: Init) -> None:
    """Says what becomes of the stream's last batches, here two on three devices."""
    steps = {}
    for policy in ("uneven", "drop", "pad"):
        with own(init, Pure(5, 4), devices=3, last_round=policy) as coordinator:
            feed = coordinator["train"]
            got = [list(feed.on(device)) for device in range(3)]
        steps[policy] = [[batch.step for batch in batches] for batches in got]
        if policy == "pad":
            extra = got[2][1]
            assert (extra.rows, list(extra["id"])) == (0, list(got[1][1]["id"]))
    assert steps["uneven"] == [[0, 3], [1, 4], [2]]
    assert steps["drop"] == [[0], [1], [2]]
    assert steps["pad"] == [[0, 3], [1, 4], [2, 5]]


@case
def rounds(init: Init) -> None:
    """Says whether a round goes on from one epoch into the next, here of three batches each."""
    steps = {}
    for kind in ("stream", "epoch"):
        settings = {"devices": 2, "epochs": 2, "last_round": "drop", "rounds": kind}
        with own(init, Pure(3, 4), **settings) as coordinator:
            feed = coordinator["train"]
            steps[kind] = [[batch.step for batch in feed.on(device)] for device in range(2)]
    assert steps == {"stream": [[0, 2, 4], [1, 3, 5]], "epoch": [[0, 3], [1, 4]]}


@case
def global_batch_size(init: Init) -> None:
    """Is what the batches of all devices have together."""
    for num_devices in (1, 2, 4):
        settings = {"batch_size": None, "global_batch_size": 8, "devices": num_devices}
        with own(init, Pure(2, 4), **settings) as coordinator:
            feed = coordinator["train"]
            got = [next(feed.on(device)) for device in range(num_devices)]
        assert [len(batch["id"]) for batch in got] == [8 // num_devices] * num_devices
        assert ids(got) == [1, 2, 3, 4, 101, 102, 103, 104]


@case
def skip(init: Init) -> None:
    """Leaves so many rounds out."""
    for num_devices in (1, 2):
        with own(init, Pure(8, 4), devices=num_devices, skip=3) as coordinator:
            feed = coordinator["train"]
            got = [next(feed.on(device)).step for device in range(num_devices)]
        assert got == [3 * num_devices + device for device in range(num_devices)]


@case
def order(init: Init) -> None:
    """Merges chunks as they come: worker 1's reach the user while worker 0 has given none."""
    held = Held()

    def fetch(worker_id: int, batch_size: int) -> Any:
        return held(worker_id, batch_size) if worker_id == 0 else rest(worker_id, batch_size)

    rest = Counted(3, 4)
    with own(init, fetch, order="arrival", timeout=3.0) as coordinator:
        try:
            assert ids([next(coordinator["train"])]) == [10_001, 10_002, 10_003, 10_004]
        finally:
            held.release()


@case
def num_threads(init: Init) -> None:
    """Is how many threads serve the workers: more of them, and fewer."""
    meeting = threading.Barrier(3)

    def meet(call: feeder.Call) -> Any:
        if call.index >= 3:
            raise StopIteration
        meeting.wait(4.0)  # nobody goes on before three calls are under way
        return chunk(0, call.index, 4)

    assert len(drain(init, meet, num_worker_threads=1, num_threads=3)) == 3
    threads = set()

    def note(worker_id: int, batch_size: int) -> Any:
        threads.add(threading.get_ident())
        return counted(worker_id, batch_size)

    counted = Counted(20)
    assert len(drain(init, note, num_worker_threads=4, num_threads=1)) == 60
    assert len(threads) == 1


@case
def executor(init: Init) -> None:
    """Is what the function runs on: threads, or processes."""
    pids = {}
    for name, given in (("threads", feeder.Threads(2)), ("processes", feeder.Processes(1))):
        batches = drain(init, pid_of_call, executor=given)
        pids[name] = {int(batch["id"][0]) for batch in batches}
    assert pids["threads"] == {os.getpid()}
    assert len(pids["processes"]) == 1
    assert pids["processes"] != pids["threads"]


def pid_of_call(call: feeder.Call) -> Any:
    """A function that processes can import."""
    if call.index == 3:
        raise StopIteration
    return [np.full(4, os.getpid())]


@case
def rows_per_call(init: Init) -> None:
    """Is how many rows each call gives, which may write them where they belong."""
    places = []

    def fetch(call: feeder.Call) -> Any:
        if call.index >= 20:
            raise StopIteration
        places.append(call.out is not None)
        array = call.empty((2,), np.int64)
        array[:] = chunk(0, call.index, 2)[0]
        return (array,)

    assert ids(drain(init, fetch, rows_per_call=2)) == ids(drain(init, Pure(20, 2)))
    assert any(places)
    with pytest.raises(feeder.ChunkError, match="chunk has 3 rows, expected 2"):
        drain(init, Pure(20, 3), rows_per_call=2)


class Unsteady(Pure):
    """Raises so many times before it returns its third chunk."""

    def __init__(self, num_failures: int) -> None:
        super().__init__()
        self.num_failures = num_failures
        self.times: list[float] = []

    def __call__(self, call: feeder.Call) -> Any:
        if call.index == 2:
            self.times.append(time.monotonic())
            if len(self.times) <= self.num_failures:
                raise OSError("the disk is away")
        return super().__call__(call)


@case
def retries(init: Init) -> None:
    """Is how often a call that raised is made again."""
    fetch = Unsteady(2)
    assert ids(drain(init, fetch, retries=2, retry_backoff_s=0.001)) == ids(drain(init, Pure()))
    assert len(fetch.times) == 3
    with pytest.raises(feeder.FetchError, match=r"^worker 0, call 2: .*: the disk is away$"):
        drain(init, Unsteady(3), retries=2, retry_backoff_s=0.001)


@case
def retry_backoff_s(init: Init) -> None:
    """Is how long the first retry waits; the next waits twice as long."""
    fetch = Unsteady(2)
    drain(init, fetch, retries=2, retry_backoff_s=0.05)
    first, second, third = fetch.times
    assert second - first >= 0.05
    assert third - second >= 0.1
    assert third - first < 2.9  # by default they wait for a second and for two


@case
def repeatable(init: Init) -> None:
    """False keeps the leftover rows in the state dict, and refuses what does not hold them."""

    def different(call: feeder.Call) -> Any:
        return (chunk(0, call.index, 3)[0] + next(calls) * 10**6,)

    calls = iter(range(1000))
    alone = {"repeatable": False, "num_worker_threads": 1}
    with own(init, different, **alone) as coordinator:
        batch = next(coordinator["train"])
        state = coordinator.state_dict()
    with own(init, different, resume=state, **alone) as coordinator:
        assert ids([next(coordinator["train"])])[:2] == [1_000_102, 1_000_103]
    with pytest.raises(feeder.ResumeError, match="a bare token does not hold its leftover"):
        own(init, different, resume=batch.cut.token(), **alone)


@case
def writable(init: Init) -> None:
    """Makes the arrays private and writable, those that were copied and those that were not."""
    for rows in (3, 4):
        for batch in drain(init, Pure(4, rows), writable=True):
            batch["id"][:] = 0
    for batch in drain(init, Pure(4)):
        with pytest.raises(ValueError, match="read-only"):
            batch["id"][:] = 0


@case
def version(init: Init) -> None:
    """Is part of what a snapshot has to fit."""
    with own(init, Pure(), version="1") as coordinator:
        next(coordinator["train"])
        snapshot = coordinator.snapshot()
    own(init, Pure(), version="1", resume=snapshot)
    with pytest.raises(feeder.ResumeError, match=r": version: '1' then, '2' now$"):
        own(init, Pure(), version="2", resume=snapshot)


@case
def resume(init: Init) -> None:
    """Is where the feed goes on."""
    whole = drain(init, Pure())
    with own(init, Pure()) as coordinator:
        seen = [next(coordinator["train"])]
        snapshot = coordinator.snapshot()
    rest = drain(init, Pure(), resume=snapshot)
    assert ids(seen + rest) == ids(whole)
    assert [batch.step for batch in rest] == [1, 2, 3]


@case
def coordinator(init: Init) -> None:
    """Is what the feed is added to."""
    mine = feeder.Coordinator()
    for name in ("train", "val"):
        assert own(init, Pure(), coordinator=mine, input_source_name=name) is mine
    assert list(mine) == ["train", "val"]
