"""`on_device=`: what a function makes of batches, on the host and over a stand-in for GPUs."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeder.checkpoint.transcript import read_file
from feeder.devices.ondevice import OnDevice
from feeder.devices.routed import HOLD
from feeds import assert_same, deal, note, running
from feeds import make as make_feed
from parts import is_full
from small import Calls, Pure, ids, make
from standin.arrays import DeviceArray, mapped
from standin.gpu import Machine, StandinError, assert_sound, installed
from standin.making import factors_of, made
from standin.making import make as function
from standin.numbered import ROWS, settings
from standin.reading import LateReader
from watching import says

SEED = 11
SEEDS = range(8)
NUM = 2_000 if is_full else 200
CPU, GPU = ("cpu",), ("cuda:0",)


def feed_of(num_batches: int, devices: tuple[str, ...] = GPU, **more: Any) -> Any:
    given = {"devices": devices, "on_device": function, "seed": SEED}
    return running(**settings(num_batches, **given) | more)


@pytest.fixture
def machine() -> Iterator[Machine]:
    with installed(Machine(seed=5)) as made_one:
        yield made_one
    made_one.failing.clear()
    assert_sound(made_one)


# ---- what is handed out


def test_on_the_host_a_batch_is_what_the_function_makes_of_it() -> None:
    with feed_of(NUM, CPU) as (_, feed):
        assert_same([note(batch) for batch in feed], made(NUM, SEED))


def run(machine: Machine, num: int, most_kept: int = 0) -> None:
    """Read a feed, two slots ahead; raises AssertionError where a batch is wrong."""
    with installed(machine), feed_of(num, depth=2) as (_, feed):
        reader = LateReader(machine, seed=machine.seed, most_kept=most_kept)
        assert_same(reader.read_all(feed), made(num, SEED))
        del feed


@pytest.mark.parametrize("most_kept", (0, 5))
def test_on_a_device_it_is_the_same_whatever_is_late(most_kept: int) -> None:
    """Its memory is poisoned; what the function's library lends is lent again at once. Each wait
    for an event is needed: `scripts/nightly planted` deletes each."""
    for seed in SEEDS[: 3 if most_kept else None]:
        machine = Machine(seed=seed, slow_s=0.001)
        run(machine, NUM // 2, most_kept)
        assert_sound(machine)


def test_the_devices_of_a_feed_may_be_of_several_kinds(machine: Machine) -> None:
    with feed_of(60, ("cuda:0", "cpu", "cuda:1")) as (_, feed):
        assert_same([note(batch) for batch in deal(feed)], made(60, SEED))


def test_a_position_of_any_device_goes_on_with_the_same_draws_on_any_other(
    machine: Machine,
) -> None:
    """A position with a function is also the one without it."""
    num, wanted = 40, made(40, SEED)
    places: dict[str, list[dict[str, bytes]]] = {}
    for kind, more in {"host": CPU, "gpu": GPU}.items():
        with feed_of(num, more) as (coordinator, feed):
            places[kind] = [coordinator.state_dict() for _ in feed]
    with feed_of(num, GPU, on_device=None) as (coordinator, feed):
        assert [coordinator.state_dict() for _ in feed] == places["gpu"]
    with feed_of(num, CPU, on_device=None) as (coordinator, feed):
        assert [coordinator.state_dict() for _ in feed] == places["host"]
    draw = random.Random(2)
    for kind in places:
        for devices in (CPU, GPU):
            for step in draw.sample(range(num), 100 if is_full else 4):
                with feed_of(num, devices, resume=places[kind][step]) as (_, feed):
                    rest = [note(batch) for batch in islice(feed, 6)]
                assert_same(rest, wanted[step + 1 : step + 7], kind, devices, step)


def test_draws_are_of_the_epoch_and_the_batchs_place_in_it() -> None:
    seen = []

    def draw(batch: Any, rng: np.random.Generator) -> Any:
        seen.append((batch.epoch, batch.index, rng.random(ROWS, np.float32)))
        return {"none": np.zeros(len(batch["id"]))}

    with make(Pure(5, 4), devices=2, epochs=2, seed=3, on_device=draw) as coordinator:
        assert len(list(deal(coordinator["train"]))) == 10
    assert [head for *head, _ in seen] == [[epoch, index] for epoch in (0, 1) for index in range(5)]
    for epoch, index, drawn in seen:
        assert np.array_equal(drawn, factors_of(3, epoch, index))


def test_a_transcript_is_of_the_rows_that_were_fed(tmp_path: Path) -> None:
    for name, on_device in {"with": function, "without": None}.items():
        folder = tmp_path / name
        with feed_of(20, CPU, on_device=on_device, transcript=folder) as (_, feed):
            assert len(list(feed)) == 20
    left, right = (next((tmp_path / name).iterdir()).read_bytes() for name in ("with", "without"))
    assert left == right


def test_a_function_goes_on_after_an_edit_of_the_running_feed(machine: Machine) -> None:
    """With the new seed."""
    fetch = feeder.sources.arrays({"id": np.arange(64)})

    def draw(batch: Any, rng: np.random.Generator) -> Any:
        drawn = rng.random(ROWS, np.float32)
        return {"id": mapped(lambda x: x * 1, batch["id"]), "drawn": mapped(
            lambda x: x * 0 + drawn, batch["id"])}  # fmt: skip

    for devices in (CPU, GPU):
        feeds = make(fetch, batch_size=ROWS, devices=devices, on_device=draw, seed=1)
        with feeds as coordinator:
            feed = coordinator["train"]
            first = next(feed)
            assert np.array_equal(first["drawn"], factors_of(1, 0, 0))
            step = feed.edit(seed=2, why="other draws")
            for batch in feed:
                wanted = factors_of(1 if batch.step < step else 2, 0, batch.index)
                assert np.array_equal(batch["drawn"], wanted)
            del first, batch, feed
        del feeds, coordinator


# ---- memory


def test_memory_is_bounded_by_the_slots(machine: Machine) -> None:
    """Those on the device are of what the function makes; beside them is one batch as it came."""
    # ids, of doubles 7 a row, and of floats 2, each in cache lines of its own.
    slot, raw = 64 + 256 + 64, 64 + 128 + 64
    with feed_of(100, depth=3) as (_, feed):
        for _ in feed:
            assert machine.used("device", "cuda:0") == (3 + HOLD) * slot + raw
            # What a call of the function has at once: four arrays.
            assert machine.used("pool", "cuda:0") <= 2 * 4 * 256
        del feed


def test_arrays_may_be_of_no_bytes_or_axes_and_grow(machine: Machine) -> None:
    lengths = [3, 4, 1, 9, 2, 30, 5]

    def fetch(call: feeder.Call) -> Any:
        return np.arange(lengths[call.index]), np.full((lengths[call.index], 2), b"x", "V1")

    def grow(batch: Any) -> Any:
        return {
            "id": batch["id"],
            "sum": mapped(lambda one: np.asarray(one.sum()), batch["id"]),
            "none": mapped(lambda one: np.zeros((len(one), 0)), batch["id"]),
            "bytes": batch["bytes"],
            "twice": mapped(lambda one: np.concatenate([one[:, None]] * 40, 1), batch["id"]),
        }

    for devices in (CPU, GPU):
        with make(
            Calls(len(lengths), fetch), ["id", "bytes"], devices=devices, dont_rebatch=True,
            on_device=grow, depth=int(devices is GPU),
        ) as coordinator:  # fmt: skip
            kept = list(coordinator["train"])
            for batch, length in zip(kept, lengths, strict=True):
                assert list(batch) == ["id", "sum", "none", "bytes", "twice"]
                assert batch["id"].tolist() == list(range(length))
                assert int(np.asarray(batch["sum"])) == sum(range(length))
                assert batch["none"].shape == (length, 0)
                assert type(batch["bytes"]) is np.ndarray and len(batch["bytes"]) == length
                assert batch["twice"].tolist() == [[i] * 40 for i in range(length)]
            del kept, batch


def test_rows_may_lie_along_any_axis_of_a_column() -> None:
    def fetch(call: feeder.Call) -> Any:
        return (np.zeros((2, 3, 4)),)

    def swap(batch: Any) -> Any:
        return {"x": batch["x"][:1], "first": batch["x"][0]}

    with make(Calls(1, fetch), ["x"], 3, batch_columns=[1], on_device=swap) as coordinator:
        (batch,) = coordinator["train"]
        assert [array.shape for array in batch.arrays()] == [(1, 3, 4), (3, 4)]


# ---- what goes wrong


class Fails:
    """A function that does something else with the batch of one step."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what = step, what

    def __call__(self, batch: Any) -> Any:
        return self.what(batch) if batch.step == self.step else {"id": batch["id"]}


def _raise(batch: Any) -> Any:
    raise ValueError("no such thing")


WRONG = {
    "raised ValueError: no such thing": _raise,
    "returned None, expected a mapping of arrays by name": lambda batch: None,
    "returned a list, expected a mapping of arrays by name": lambda batch: [batch["id"]],
    "returned a dict, expected a mapping of arrays by name": lambda batch: {},
    "returned a int as 'id', expected arrays by name": lambda batch: {"id": 3},
    "returned a ndarray as 3, expected arrays by name": lambda batch: {3: np.zeros(4)},
    "returned 'id' with 2 rows, and the batch has 4: a batch keeps its rows": lambda batch: {
        "id": batch["id"][:2]
    },
}


@pytest.mark.parametrize("devices", (CPU, GPU), ids=("host", "gpu"))
@pytest.mark.parametrize("told", WRONG)
def test_what_a_function_does_wrong_is_told_after_the_batches_before_it(
    machine: Machine, told: str, devices: tuple[str, ...]
) -> None:
    """With the step; the position stays before it."""
    fetch, on_device = Pure(40, 4), Fails(7, WRONG[told])
    with make(fetch, devices=devices, on_device=on_device) as coordinator:
        feed = coordinator["train"]
        assert ids(islice(feed, 7)) == ids(make_whole(7))
        for _ in range(2):
            with says(feeder.DeviceError, f"on_device at step 7 (batch 7 of epoch 0): it {told}"):
                next(feed)
        state = coordinator.state_dict()
        del feed
    with make(fetch, devices=devices, resume=state) as coordinator:
        assert next(coordinator["train"]).step == 7
    gc.collect()


def make_whole(num: int) -> Iterator[feeder.Batch]:
    with make(Pure(40, 4)) as coordinator:
        yield from islice(coordinator["train"], num)


def test_an_array_of_another_device_is_told(machine: Machine) -> None:
    other = machine.drivers_of(1)
    there = DeviceArray(np.zeros(4), None, other)
    with make(Pure(4, 4), devices=GPU, on_device=Fails(2, lambda _: {"id": there})) as coordinator:
        feed = coordinator["train"]
        next(feed), next(feed)
        with pytest.raises(feeder.DeviceError, match=r"at step 2 .*: it returned an array on .*"):
            next(feed)
        del feed


def test_memory_that_is_refused_is_told(machine: Machine) -> None:
    machine.failing["device"] = StandinError("none")
    with make(Pure(4, 4), devices=GPU, on_device=lambda batch: dict(batch)) as coordinator:
        told = r"cuda:0: 64 bytes for the batch that on_device is given were refused: none; .*; "
        with pytest.raises(feeder.DeviceError, match=told + "lower depth= or batch_size"):
            next(coordinator["train"])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (3, "3, expected a function, or None"),
        (lambda: None, "which takes (), expected fn(batch) or fn(batch, rng)"),
        (lambda a, b, c: None, "which takes (a, b, c), expected fn(batch) or fn(batch, rng)"),
        (lambda a, *, b: None, "which takes (a, *, b), expected fn(batch) or fn(batch, rng)"),
    ],
)
def test_what_is_no_such_function_is_told(given: Any, told: str) -> None:
    coordinator = feeder.Coordinator()
    with pytest.raises(feeder.ConfigError) as caught:
        make(Pure(), on_device=given, coordinator=coordinator)
    assert str(caught.value).startswith("on_device is ") and str(caught.value).endswith(told)
    assert list(coordinator) == []
    with pytest.raises(feeder.ConfigError) as caught:
        feeder.connect("tcp://127.0.0.1:1", timeout=0.1, on_device=given)
    assert str(caught.value).endswith(told)


@pytest.mark.parametrize(
    ("given", "draws"),
    [
        (lambda batch: {}, False),
        (lambda batch, scale=2: {}, False),
        (lambda batch, rng=None: {}, True),
        (lambda batch, other: {}, True),
        (lambda *batches: {}, False),
        (dict, False),
    ],
)
def test_draws_are_given_to_who_takes_them(given: Any, draws: bool) -> None:
    assert OnDevice(given)._draws == draws


# ---- served feeds


@pytest.mark.served
def test_a_feed_with_a_function_is_not_served() -> None:
    with pytest.raises(feeder.ConfigError, match="a server has no device, its trainers have; give"):
        feeder.serve(lambda: make(Pure(), on_device=function), "ipc://never")


@pytest.mark.served
@pytest.mark.parametrize("way", ("host", "registered", "bounced", "frames"))
def test_a_consumer_makes_the_same_of_its_batches(machine: Machine, way: str) -> None:
    machine.registers = way == "registered"
    num, wanted = 120, made(120, SEED)
    more: dict[str, Any] = {"device": "cpu" if way == "host" else "cuda:0", "credit": 3}
    more |= {"plane": "frames"} if way == "frames" else {}
    with serving(lambda: make_feed(**settings(num, seed=SEED))) as server:
        with reading(server, on_device=function, **more) as consumer:
            reader, states = LateReader(machine, seed=3), []
            for batch in consumer:
                if way == "host":
                    assert_same([note(batch)], wanted[batch.step : batch.step + 1])
                else:
                    reader.read(batch)
                states.append(consumer.state_dict())
            assert len(states) == num
            assert way == "host" or reader.records() == wanted
            del batch, reader
        for step in (3, 77):
            with reading(server, on_device=function, resume=states[step], **more) as consumer:
                rest = [note(batch) for batch in islice(consumer, 5)]
            assert_same(rest, wanted[step + 1 : step + 6])
        del consumer


@pytest.mark.served
@pytest.mark.parametrize("device", ("cpu", "cuda:0"))
def test_a_consumers_position_is_that_of_the_rows(machine: Machine, device: str) -> None:
    """Each batch is one call, of which the position holds a digest on the host."""
    found = []
    for on_device in (None, lambda batch: {"twice": mapped(lambda x: x * 2, batch["id"])}):
        with (
            serving(lambda: make(Pure(20, 4))) as server,
            reading(server, device=device, on_device=on_device) as consumer,
        ):
            found.append([(batch.step, consumer.state_dict()) for batch in consumer])
        del consumer
    assert found[0] == found[1] and len(found[0]) == 20


@pytest.mark.served
@pytest.mark.parametrize("device", ("cpu", "cuda:0"))
def test_a_consumer_is_told_what_its_function_does_wrong(
    machine: Machine, device: str, tmp_path: Path
) -> None:
    more: dict[str, Any] = {} if device != "cpu" else {"transcript": tmp_path}
    on_device = Fails(7, _raise)
    with serving(lambda: make(Pure(40, 4))) as server:
        with reading(server, device=device, on_device=on_device, **more) as consumer:
            assert [next(consumer).step for _ in range(7)] == list(range(7))
            for _ in range(2):
                with says(
                    feeder.DeviceError,
                    "on_device at step 7 (batch 7 of epoch 0): it raised ValueError: no such thing",
                ):
                    next(consumer)
            state = consumer.state_dict()
        with reading(server, resume=state) as consumer:
            assert next(consumer).step == 7
        del consumer
    for file in tmp_path.iterdir():
        # A digest for each step, and none of one that was not handed out.
        assert read_file(file).steps.tolist() == list(range(7))
