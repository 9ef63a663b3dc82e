"""Which records a batch was made of, behind a filter, skips and packing, against what rows say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from feeder.feeds.records import asked_of, records_of
from small import make

LAST = ("keep", "drop", "pad", "carry")
PACKED = ["tokens", "segment_ids", "positions", "loss_mask"]


def is_odd(record: Any) -> bool:
    return bool(record % 2)


def thirds_fail(record: Any) -> Any:
    if record % 3 == 0:
        raise ValueError("a third")
    return record


def document(record: Any) -> Any:
    return int(record) * 10 + np.arange(int(record) % 9 + 1)


def numbers(num: int = 40) -> Any:
    return sources.arrays(np.arange(1, num + 1)).shuffle()


def packed(**options: Any) -> Any:
    return sources.pack(numbers(48).map(document), 6, window=8, **options)


@pytest.mark.parametrize("last_batch", LAST)
@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("kind", ["filter", "skip"])
def test_records_that_are_left_out_are_no_rows(kind: str, epochs: int, last_batch: str) -> None:
    source = (
        numbers().filter(is_odd)
        if kind == "filter"
        else numbers().map(thirds_fail, on_error="skip")
    )
    with make(source, ["x"], 3, last_batch=last_batch, epochs=epochs) as coordinator:
        feed = coordinator["train"]
        batches = list(feed)
        skipped = source.skipped
        for batch in batches:
            wanted = batch["x"][: batch.rows].tolist()
            for told in (batch.records(), feed.records(batch.step, read=True)):
                assert [one.number + 1 for (one,) in told] == wanted
        with pytest.raises(feeder.ConfigError, match="the feed has ended"):
            feed.records(len(batches), read=True)
        assert source.skipped == skipped


@pytest.mark.parametrize("dont_rebatch", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"window_tokens": 20}, {"bos": 98, "eos": 99}, {"long": "drop"},
                {"long": "truncate"}, {"cu_seqlens": 2}],
)  # fmt: skip
def test_pieces_say_which_tokens_a_row_has(options: dict[str, Any], dont_rebatch: bool) -> None:
    names = [*PACKED, *(["cu_seqlens", "max_seqlen"] if "cu_seqlens" in options else [])]
    settings = {"epochs": 2, "dont_rebatch": dont_rebatch}
    with make(packed(**options), names, 3, **settings) as coordinator:
        feed = coordinator["train"]
        for batch in list(feed):
            told = batch.records()
            assert told == feed.records(batch.step, read=True)
            assert len(told) == batch.rows
            for row, pieces in enumerate(told):
                for number, piece in enumerate(pieces, 1):
                    whole = document(piece.number + 1).tolist()
                    whole = [98, *whole, 99] if "bos" in options else whole
                    place = row, slice(piece.start, piece.stop)
                    tokens = batch["tokens"][place].tolist()
                    assert tokens == whole[piece.offset : piece.offset + len(tokens)]
                    assert set(batch["segment_ids"][place].tolist()) == {number}
                assert not batch["segment_ids"][row, pieces[-1].stop :].any()


@pytest.mark.parametrize("last_batch", LAST)
@pytest.mark.parametrize(
    ("source", "names"), [(numbers().filter(is_odd), ["x"]), (packed(), PACKED)]
)
def test_they_are_read_from_the_nearest_place(
    source: Any, names: list[str], last_batch: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"last_batch": last_batch, "epochs": 2}
    with make(source, names, 2, **settings) as coordinator:
        whole = [batch.records() for batch in coordinator["train"]]
    for step in range(1, 12):
        with make(source, names, 2, **settings) as coordinator:
            for _ in range(step):
                next(coordinator["train"])
            state = coordinator.state_dict()
        with make(source, names, 2, resume=state, **settings) as coordinator:
            feed = coordinator["train"]
            caplog.clear()
            with caplog.at_level("INFO", "feeder"):
                assert feed.records(step, read=True) == whole[step]
            assert f"read from step {step} on: at least 2 rows" in caplog.text
            assert feed.records(0, read=True) == whole[0]
            assert [batch.records() for batch in feed] == whole[step:]


@pytest.mark.parametrize(
    "settings",
    [{"batch_size": None, "global_batch_size": 4}, {"rounds": "epoch", "last_round": "drop"},
     {"dont_rebatch": True}],
)  # fmt: skip
@pytest.mark.parametrize("source", [numbers(), numbers().filter(is_odd)])
def test_a_batch_at_hand_is_known_whatever_its_step(source: Any, settings: dict[str, Any]) -> None:
    state = None
    for devices in (2, 4, 1):
        with make(
            source, ["x"], epochs=3, devices=devices, resume=state, **settings
        ) as coordinator:
            feed = coordinator["train"]
            for _ in range(3):
                for device in feed.devices:
                    batch = next(feed.on(device), None)
                    if batch is not None:
                        wanted = batch["x"].tolist()
                        assert [one.number + 1 for (one,) in batch.records()] == wanted
            state = coordinator.state_dict()


@pytest.mark.parametrize("rounds", ["stream", "epoch"])
@pytest.mark.parametrize("source", [numbers(), numbers().filter(is_odd)])
def test_a_batch_that_fills_a_round_has_no_records(source: Any, rounds: Any) -> None:
    with make(source, ["x"], 2, devices=3, rounds=rounds, last_round="pad") as coordinator:
        feed = coordinator["train"]
        batches = [batch for device in feed.devices for batch in feed.on(device)]
        state = feed.snapshot().states[0]
    assert any(not batch.rows for batch in batches)
    for batch in batches:
        told = [one.number + 1 for (one,) in batch.records()]
        assert told == batch["x"][: batch.rows].tolist()
        if rounds == "stream":
            assert feed.records(batch.step, read=True) == batch.records()
            if not batch.rows and not source.traits.may_skip:
                assert records_of(asked_of(state)[0], batch.step) == ()
    if rounds == "stream":
        with pytest.raises(feeder.ConfigError, match="has ended before it"):
            feed.records(len(batches), read=True)


def test_a_cure_is_told() -> None:
    with (
        make(packed(), PACKED) as coordinator,
        pytest.raises(feeder.ConfigError, match=r"records\(step, read=True\) reads them"),
    ):
        coordinator["train"].records(0)


@pytest.mark.parametrize(
    "source",
    [numbers().map(document).batch_by_tokens(40), sources.mix({"a": numbers()}, unit="tokens")],
)
def test_rows_without_records_of_their_own_are_refused(source: Any) -> None:
    with (
        make(source, ["x"], dont_rebatch=True) as coordinator,
        pytest.raises(feeder.ConfigError, match="has depends on what is in the records"),
    ):
        coordinator["train"].records(0, read=True)


def test_a_batch_that_is_moved_does_not_know_its_feed() -> None:
    with make(numbers(), ["x"]) as coordinator:
        batch = next(coordinator["train"])
        assert [one.number + 1 for (one,) in batch.records()] == batch["x"].tolist()
        with pytest.raises(feeder.FeedError, match="ask the batch before"):
            batch.with_arrays(batch.arrays()).records()
