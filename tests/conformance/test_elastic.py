"""Other numbers of devices than before: what is told, what is not made, and positions of before."""

from __future__ import annotations

import json
import logging
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.workers.stream.rounds import Dealing
from feeds import assert_same, make, note
from fetches import make_fetch
from freeze.positions import MADE
from naive import naive_dealing
from small import Calls

NUM_EPOCHS = 3


def test_epochs_that_would_be_dropped_whole_are_an_error() -> None:
    fetch = Calls(2, lambda call: {"id": np.full(8, call.index)})
    settings = {"input_blob_names": ["id"], "rounds": "epoch", "last_round": "drop"}
    told = "epoch 1 has fewer batches than the 3 queues"
    with (
        make(fetch, devices=3, epochs=None, **settings) as coordinator,
        pytest.raises(feeder.FeedError, match=told),
    ):
        next(coordinator["train"].on(0))


@pytest.mark.parametrize("resumed", ["at its start", "in rounds that are skipped"])
def test_an_epoch_that_would_be_dropped_whole_is_an_error_after_a_resume(resumed: str) -> None:
    def rows(call: feeder.Call) -> dict[str, np.ndarray]:
        if call.index == (1, 4)[call.epoch % 2]:
            raise StopIteration
        return {"id": np.full(8, call.index)}

    settings = {"input_blob_names": ["id"], "rounds": "epoch", "last_round": "drop", "epochs": 3}
    with make(rows, devices=2, **settings) as coordinator:
        for i in (0, 1) * 2:
            next(coordinator["train"].on(i))
        state = coordinator.state_dict()
    further = {"skip": 3} if resumed != "at its start" else {"resume": state}
    with (
        make(rows, devices=2, **settings, **further) as coordinator,
        pytest.raises(feeder.FeedError, match="epoch 2 has fewer batches than the 2 queues"),
    ):
        next(coordinator["train"].on(0))


def test_another_global_batch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with make(make_fetch("pure", "ragged"), devices=2) as coordinator:
        for device in range(2):
            next(coordinator["train"].on(device))
        state = coordinator.state_dict()
    with caplog.at_level(logging.INFO, "feeder"):
        make(make_fetch("pure", "ragged"), devices=2, resume=state)
        assert not caplog.records
        make(make_fetch("pure", "ragged"), devices=3, resume=state)
    (record,) = caplog.records
    assert record.getMessage() == (
        "feed 'train' goes on with 3 devices of 8 rows each, 24 rows in a round; before there were "
        "2 of 8, 16 in a round: the global batch has changed, global_batch_size= would keep it"
    )


Read = set[tuple[int, int]]


def of_samples(read: Read, **settings: Any) -> feeder.Coordinator:
    """A feed of 400 samples; notes of which epoch and number it made each."""

    def take(info: feeder.sources.SampleInfo) -> np.ndarray:
        read.add((info.epoch_idx, info.idx_in_epoch))
        return np.array([info.epoch_idx, info.idx_in_epoch])

    settings = {"batch_size": 7, "last_round": "pad", **settings}
    return make(
        feeder.sources.samples(take, 400), input_blob_names=["id"], epochs=NUM_EPOCHS, **settings
    )


@pytest.mark.parametrize("skip", [1, 7, 40])
@pytest.mark.parametrize("rounds", ["stream", "epoch"])
def test_what_a_source_skips_is_not_made(rounds: str, skip: int) -> None:
    with of_samples(set()) as coordinator:
        stream = [note(batch) for batch in coordinator["train"]]
    with of_samples(set(), devices=2, rounds=rounds) as coordinator:
        devices = [coordinator["train"].on(i) for i in range(2)]
        tokens = [next(devices[step % 2]).cut.token() for step in range(7)]
    # Step 6 is the first of its round.
    (*_, (at, _)) = islice(naive_dealing(stream, 8, 3, rounds, "pad"), skip)
    (wanted,) = islice(naive_dealing(stream, at, 3, rounds, "pad"), 1)
    read: Read = set()
    settings = {"devices": 3, "rounds": rounds, "resume": tokens[-1], "skip": skip}
    with of_samples(read, **settings) as coordinator:
        before = coordinator.state_dict()
        got = [note(next(coordinator["train"].on(i))) for i in range(3)]
        after = coordinator["train"].snapshot()
    assert_same(got, wanted[1], skip)
    # The last call before the position is made again and compared.
    skipped = {(epoch, 7 * index + i) for epoch, index, *_ in stream[7:at] for i in range(7)}
    assert not skipped & read
    # As it was given before anything was handed out; from then on it tells what was left out.
    assert dealing_of(before) == Dealing(0, 2, 7, 0, NUM_EPOCHS)
    assert dealing_of(after) == Dealing(0, 3, 7, skip, NUM_EPOCHS).begun_at(at)
    with of_samples(set(), devices=1, rounds=rounds, resume=after, skip=2) as coordinator:
        next(coordinator["train"])
        assert dealing_of(coordinator.state_dict()) == Dealing(0, 1, 7, skip + 2)


WAYS: dict[str, dict[str, Any]] = {
    "rounds of the stream": {},
    "rounds of an epoch": {"rounds": "epoch"},
    "drop": {"last_batch": "drop", "rounds": "epoch"},
    "carry": {"last_batch": "carry"},
    "each chunk a batch": {"dont_rebatch": True},
    "calls of several batches": {"batch_size": None, "global_batch_size": 28, "devices": 4},
}


@pytest.mark.parametrize("skip", [1, 15, 29, 40])
@pytest.mark.parametrize("way", WAYS)
def test_nor_is_what_is_skipped_from_the_start(way: str, skip: int) -> None:
    settings = {"devices": 2, **WAYS[way]}
    one = {**settings, "devices": 1, "batch_size": 7, "global_batch_size": None}
    with of_samples(set(), **one) as coordinator:
        stream = [note(batch) for batch in coordinator["train"]]
    num, rounds = settings["devices"], settings.get("rounds", "stream")
    (at, _), (_, wanted) = islice(naive_dealing(stream, 0, num, rounds, "pad"), skip - 1, skip + 1)
    read: Read = set()
    with of_samples(read, skip=skip, **settings) as coordinator:
        before = coordinator.state_dict()
        got = [note(next(coordinator["train"].on(i))) for i in range(num)]
        after = coordinator.state_dict()
    assert_same(got, wanted, way)
    # Where rounds do not begin with calls, the call is made that the round begins in.
    skipped = {tuple(row) for *_, ((*_, rows),) in stream[:at] for row in rows_of(rows)}
    assert len(skipped & read) < (28 if "global_batch_size" in settings else 1)
    dealing = dealing_of(after, **settings)
    assert dealing is not None and dealing.skipped == skip
    with of_samples(set(), resume=before, **settings) as coordinator:
        assert note(next(coordinator["train"].on(0))) == stream[0], "as it was before a batch"


def rows_of(octets: bytes) -> list[list[int]]:
    """The rows of a batch of samples."""
    rows: list[list[int]] = np.frombuffer(octets, np.int64).reshape(-1, 2).tolist()
    return rows


@pytest.mark.parametrize("last_batch", ["keep", "drop", "carry"])
def test_of_what_is_skipped_beyond_the_end_the_last_is_made(last_batch: str) -> None:
    read: Read = set()
    with of_samples(read, skip=10**6, last_batch=last_batch) as coordinator:
        assert list(coordinator["train"]) == []
        end = coordinator.state_dict()
    assert len(read) < 21
    with of_samples(set(), resume=end, last_batch=last_batch) as coordinator:
        assert list(coordinator["train"]) == []


def dealing_of(position: Any, **settings: Any) -> Dealing | None:
    """What a position says of how batches are dealt out."""
    if isinstance(position, dict):
        position = feeder.Snapshot.from_bytes(position["feeder"])
    (state,) = position.states
    settings = {"rounds": state.fingerprint.get("rounds", "stream"), **settings}
    stream = of_samples(set(), **settings)["train"].streams[0]
    return stream.find_resume(position).cut.dealing


OLDER = json.loads((Path(__file__).parent / "positions" / "tokens-1-2.json").read_text())
PLACES = [(name, places) for name in MADE for places in OLDER[name]]


@pytest.mark.parametrize(("name", "places"), PLACES)
def test_positions_of_before_dealing_was_noted_are_resumed(
    name: str, places: str, tmp_path: Path
) -> None:
    num = int(places.split()[0])
    held = OLDER[name][places]
    with MADE[name](tmp_path) as undisturbed:
        train = undisturbed[next(iter(undisturbed))]
        devices = [train.on(i) for i in range(len(train.devices))]
        whole = [note(next(devices[step % len(devices)])) for step in range(num + 2)]
    for kind, data in held.items():
        # A token is of its batch, perhaps in the middle of a round, and holds no rows.
        is_token = kind.startswith("token")
        is_refused = is_token and (num % len(devices) or "not repeatable" in name)
        if kind == "token of valid" or is_refused:
            continue
        step = num - num % len(devices)
        (tmp_path / kind).mkdir()
        coordinator = MADE[name](tmp_path / kind)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", feeder.ReplayWarning)
            coordinator.load_state_dict({"feeder": bytes.fromhex(data)})
        with coordinator:
            train = coordinator[next(iter(coordinator))]
            devices = [train.on(i) for i in range(len(train.devices))]
            got = [note(next(devices[i % len(devices)])) for i in range(num + 2 - step)]
        assert_same(got, whole[step:], name, kind)
