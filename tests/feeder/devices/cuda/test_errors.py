"""What goes wrong with GPUs is named, reaches who waits, and leaves nothing behind."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeder.service.protocol import events
from feeder.service.server.group import ConsumerGroup
from small import WAIT_S, Aside, Calls, Pure, make
from standin.arrays import DeviceArray
from standin.gpu import Machine, StandinError, assert_sound, installed
from watching import around, says


@pytest.fixture
def machine() -> Iterator[Machine]:
    with installed(Machine(seed=6)) as made:
        yield made
    made.failing.clear()
    assert_sound(made)


def on(*devices: str, num_calls: int = 400, **settings: Any) -> feeder.Coordinator:
    """Return a feed on devices of batches of 32 bytes, in slots of 64."""
    return make(Pure(num_calls, 4), devices=devices, **{"depth": 2} | settings)


def fail_of(batches: Any) -> tuple[list[int], feeder.FeedError]:
    """Take batches until an error comes; return the steps before it, and the error."""
    steps = []
    with pytest.raises(feeder.FeedError) as caught:
        for batch in batches:
            steps.append(batch.step)
    return steps, caught.value


# ---- asking for what is not there


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"devices": ("cuda:2",)}, "device 'cuda:2' is none of the 2 GPUs"),
        ({"devices": ("cuda:01",)}, "device is 'cuda:01', expected 'cpu', 'cpu:<number>', "
         "'cuda:<number>' or 'torch:<number>'"),
        ({"devices": ("cuda:0",), "depth": -1}, "depth is -1, expected a whole number >= 0"),
        ({"devices": ("cuda:0",), "depth": 1025}, "depth is 1025, expected a whole number <= 1024"),
        ({"devices": ("cpu",), "depth": 4}, "depth is 4, but none of the devices ('cpu',) is a "
         "GPU; leave it out, or name one: 'cuda:0'"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_named_and_nothing_is_added(
    machine: Machine, settings: dict[str, Any], told: str
) -> None:
    coordinator = feeder.Coordinator()
    with says(feeder.ConfigError, told):
        make(Pure(), coordinator=coordinator, **settings)
    assert list(coordinator) == []
    assert machine.regions == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"device": "cuda:9"}, "device 'cuda:9' is none of the 2 GPUs"),
        ({"device": "gpu"}, "device is 'gpu', expected 'cpu', 'cuda:<number>' or 'torch:<number>'"),
        ({"device": 0}, "device is 0, expected 'cpu', 'cuda:<number>' or 'torch:<number>'"),
        ({"device": "cuda:0", "stream": 7}, "stream is 7, expected a stream of the stand-in"),
        ({"stream": 7}, "stream is 7, but device is 'cpu'; leave it out"),
    ],
)
def test_a_consumers_wrong_setting_is_named_before_anything_is_connected(
    machine: Machine, settings: dict[str, Any], told: str
) -> None:
    with says(feeder.ConfigError, told):
        feeder.connect("tcp://127.0.0.1:1", timeout=0.1, **settings)


# ---- dtypes


@pytest.mark.parametrize(
    "dtype",
    ["datetime64[ns]", "timedelta64[s]", "U3", "S3", "V8", "i4,f4", np.longdouble, np.clongdouble],
    ids=str,
)
def test_a_dtype_that_the_device_lacks_is_named(machine: Machine, dtype: Any) -> None:
    def fetch(call: feeder.Call) -> Any:
        return np.arange(4), np.zeros(4, dtype)

    told = (
        f"column 'when' has dtype {np.dtype(dtype)}, of which 'cuda:0' has no arrays; expected "
        "booleans, integers, or real or complex numbers of at most 8 bytes each: convert it in the "
        "fetch function, or feed it to 'cpu'"
    )
    for more in ({}, {"dont_rebatch": True}):
        with make(fetch, ["id", "when"], devices=("cpu", "cuda:0"), **more) as coordinator:
            feed = coordinator["train"]
            steps, error = fail_of(feed.on("cuda:0"))
            assert (steps, type(error), str(error)) == ([], feeder.ConfigError, told)
            assert fail_of(feed.on("cpu")) == ([0], error)
    assert machine.regions == []


def with_names(call: feeder.Call) -> Any:
    """Numbers, and beside each the bytes of its name."""
    numbers = np.arange(3) + 3 * call.index
    names = b"".join(b"%04d" % number for number in numbers)
    return numbers, np.frombuffer(names, "V1").reshape(3, 4).copy(), numbers * 0.5


def test_raw_bytes_stay_on_the_host(machine: Machine) -> None:
    """Also of batches that are kept, and of a last one that is shorter."""
    fetch, names = Calls(11, with_names), ["id", "name", "half"]
    with make(fetch, names, 4, last_batch="keep", devices=("cuda:0",)) as coordinator:
        kept = list(coordinator["train"])
        found = [
            (batch["id"].tolist(), batch["name"].tobytes(), batch["half"].tolist())
            for batch in kept
        ]
        assert {type(batch["name"]) for batch in kept} == {np.ndarray}
        assert {type(batch["half"]) for batch in kept} == {DeviceArray}
        del kept
    rows = [list(range(33))[i : i + 4] for i in range(0, 33, 4)]
    assert found == [
        (ids, b"".join(b"%04d" % i for i in ids), [i * 0.5 for i in ids]) for ids in rows
    ]


@pytest.mark.served
def test_a_consumer_is_told_of_a_dtype_that_its_device_lacks(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()

    def note(group: ConsumerGroup, one: Any) -> None:
        if isinstance(one, events.EndLease):
            left.set()

    around(monkeypatch, ConsumerGroup, "_perform", after=note)
    with (
        serving(lambda: make(lambda call: (np.zeros(4, "datetime64[s]"),))) as server,
        reading(server, device="cuda:1") as consumer,
    ):
        steps, error = fail_of(consumer)
        # It leaves its queue: the server would send what cannot be taken.
        assert left.wait(WAIT_S)
        with reading(server) as other:
            assert next(other).step == 0
    assert (steps, type(error)) == ([], feeder.ConfigError)
    assert "dtype datetime64[s], of which 'cuda:1' has no arrays" in str(error)


# ---- memory


def test_too_little_device_memory_is_told_with_what_to_lower(machine: Machine) -> None:
    machine.gpu_bytes = 5 * 64 - 1
    with on("cuda:0", "cuda:1") as coordinator:
        feed = coordinator["train"]
        steps, error = fail_of(feed.on(0))
        assert (steps, type(error)) == ([], feeder.DeviceError)
        assert str(error) == (
            "cuda:0: 320 bytes for 5 slots of 64 bytes were refused: out of device memory; 319 "
            "bytes are free; lower depth= or batch_size"
        )
        assert isinstance(error.__cause__, StandinError)
        again = fail_of(feed.on(0))
        assert again == ([], error)
    del feed, again
    assert machine.regions == []


@pytest.mark.parametrize("devices", [("cuda:0",), ("cpu", "cuda:0", "cpu:1")])
def test_pinned_memory_that_is_refused_is_told_with_what_to_lower(
    machine: Machine, devices: tuple[str, ...]
) -> None:
    machine.pinned_bytes = 100
    with on(*devices) as coordinator:
        steps, error = fail_of(coordinator["train"].on("cuda:0"))
    assert (steps, type(error)) == ([], feeder.DeviceError)
    assert str(error) == (
        "cuda:0: 192 bytes of pinned host memory for 3 slots of 64 bytes were refused: out of "
        "pinned memory; lower depth= or batch_size, or let the process lock more memory (ulimit -l)"
    )
    assert isinstance(error.__cause__, StandinError)


def test_one_more_batch_than_there_is_memory_for_is_told(machine: Machine) -> None:
    machine.gpu_bytes = 7 * 64
    with on("cuda:0") as coordinator:
        feed = coordinator["train"]
        kept = list(islice(feed, 5))
        told = (
            "cuda:0: 64 bytes for one more batch, beside 5 that are kept, were refused: out of "
            "device memory; 0 bytes are free; keep fewer batches"
        )
        with says(feeder.DeviceError, told) as caught:
            next(feed)
        # What comes after it is not handed out in its place.
        kept.clear()
        for _ in range(2):
            assert fail_of(feed) == ([], caught.value)
        assert coordinator.snapshot().states[0].summary[2] == 5


@pytest.mark.served
@pytest.mark.parametrize("what", ["device", "pinned"])
@pytest.mark.parametrize("way", ["registered", "bounced", "frames"])
def test_a_consumer_is_told_of_memory_that_is_refused(
    machine: Machine, what: str, way: str
) -> None:
    machine.registers = way == "registered"
    machine.failing[what] = StandinError("no")
    plane: Any = "frames" if way == "frames" else "shared"
    with (
        serving(lambda: make(Pure(40, 4))) as server,
        reading(server, device="cuda:0", plane=plane, credit=3) as consumer,
    ):
        if (what, way) == ("pinned", "registered"):
            assert sum(1 for _ in consumer) == 40
            return
        steps, error = fail_of(consumer)
        assert (steps, type(error)) == ([], feeder.DeviceError)
        assert "credit=, or the server's batch_size" in str(error)
        assert fail_of(consumer) == ([], error)


# ---- a device that fails


@pytest.mark.parametrize("what", ["copy", "record", "synchronize", "wait"])
def test_an_error_of_the_device_is_told_with_its_cause_and_to_the_other_devices(
    machine: Machine, what: str
) -> None:
    with on("cuda:0", "cpu", "cuda:1") as coordinator:
        feed = coordinator["train"]
        taken = [next(feed.on(step % 3)).step for step in range(30)]
        assert taken == list(range(30))
        machine.failing[what] = failure = StandinError("an illegal memory access")
        asides = [Aside(lambda i=i: fail_of(feed.on(i))) for i in range(3)]
        told = [aside.result() for aside in asides]
    for steps, error in told:
        assert steps == sorted(steps)
        assert len(steps) < 30
        assert type(error) is feeder.DeviceError
        assert "failed: StandinError: an illegal memory access" in str(error)
        assert error.__cause__ is failure
    machine.failing.clear()
    del told, error, asides
    gc.collect()


@pytest.mark.served
def test_a_consumer_is_told_of_a_device_that_fails(machine: Machine) -> None:
    with (
        serving(lambda: make(Pure(400, 4))) as server,
        reading(server, device="cuda:0", credit=3) as consumer,
    ):
        for step in range(20):
            assert next(consumer).step == step
        machine.failing["copy"] = failure = StandinError("lost")
        steps, error = fail_of(consumer)
        assert steps == list(range(20, 20 + len(steps)))
        assert (type(error), error.__cause__) == (feeder.DeviceError, failure)
        again = consumer.state_dict()
        machine.failing.clear()
    with (
        serving(lambda: make(Pure(400, 4))) as server,
        reading(server, device="cuda:0", resume=again) as consumer,
    ):
        assert next(consumer).step == 20 + len(steps)
    del consumer
