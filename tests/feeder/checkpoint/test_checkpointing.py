"""Positions of feeds are stored beside the feeding, and found again."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.checkpoint import saving
from feeder.checkpoint.feed_meta import check_steps
from feeder.checkpoint.format import Receipt
from feeder.checkpoint.store import CheckpointStore
from feeder.devices.host import HostQueue
from feeder.observe.figures import CheckpointFigures
from lineage import forked, status_of
from small import WAIT_S, Counted, Pure, ids, make
from watching import around, says


class Watched(CheckpointStore):
    """A store that tells when something has been saved, and can be made to fail or to wait."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, **settings)
        self.saved = threading.Semaphore(0)
        self.errors: list[Exception] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def put(self, name: str, *args: Any, **kwargs: Any) -> Receipt:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        try:
            if self.errors:
                raise self.errors.pop(0)
            return super().put(name, *args, **kwargs)
        finally:
            self.saved.release()

    def wait(self, num: int = 1) -> None:
        for _ in range(num):
            assert self.saved.acquire(timeout=WAIT_S)


def disk_is_full() -> feeder.CheckpointError:
    error = feeder.CheckpointError("cannot write checkpoint 'x': No space left on device")
    error.__cause__ = OSError(28, "No space left on device")
    return error


def with_policy(store: Any, fetch: Any = None, *, resume: Any = None, **policy: Any) -> Any:
    """Return a coordinator with one feed of 25 batches of four rows, and its checkpoints."""
    coordinator = feeder.Coordinator(feeder.Checkpointing(store, **policy))
    feed_settings = {"coordinator": coordinator, "resume": resume}
    return make(fetch or Pure(num_calls=33), **feed_settings)


def steps(store: CheckpointStore) -> list[int]:
    """Return where the feed stands in each of a store's checkpoints."""
    return [store.get(name).meta["feeds"]["train[0]"] for name in store.names()]


def rest_after(step: int) -> list[int]:
    with make(Pure(num_calls=33)) as coordinator:
        return ids(coordinator["train"])[4 * step :]


# ---- on demand


def test_a_coordinator_stores_in_its_own_place(tmp_path: Path) -> None:
    coordinator = feeder.Coordinator(checkpoints=tmp_path / "run")
    coordinator.checkpoint(step=1)  # before there is a feed, and before it is started
    with make(Pure(num_calls=33), coordinator=coordinator):
        next(coordinator["train"])
        coordinator.checkpoint(step=2)
    coordinator.checkpoint(step=3)
    store = CheckpointStore(tmp_path / "run")
    assert [store.get(name).meta["step"] for name in store.names()] == [1, 2, 3]
    assert coordinator.checkpoint_stats()["saves"] == 3


def test_where_writing_is_slower_than_asking_the_newest_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Watched(tmp_path)
    with with_policy(store) as coordinator:
        store.gate.clear()
        for step in range(4):
            next(coordinator["train"])
            coordinator.checkpoint(step=step, wait=False)
            assert store.entered.wait(WAIT_S)
        store.gate.set()
        store.wait(2)
    assert steps(store) == [1, 4]
    assert coordinator.checkpoint_stats()["skipped_saves"] == 2
    assert "asked for faster than they are written: that of step 1 is left out" in caplog.text


@pytest.mark.parametrize(("seconds", "is_told"), [(9.0, False), (42.0, True)])
def test_a_slow_disk_is_told(
    seconds: float, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    clock = [0.0]

    class Slow(CheckpointStore):
        def save(self, *args: Any) -> str:
            clock[0] += seconds
            return super().save(*args)

    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    store = Slow(tmp_path)
    with_policy(store).checkpoint(step=7)
    told = [one.getMessage() for one in caplog.records]
    assert told == is_told * [
        f"checkpoint {store.names()[0]} took 42 s to store in {store!r}: the disk or the store is "
        "slow"
    ]


def test_what_is_asked_for_is_written_before_a_stop_returns(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    with with_policy(store) as coordinator:
        next(coordinator["train"])
        coordinator.checkpoint(wait=False)
    assert steps(store) == [1]


def test_without_a_place_it_is_refused_and_not_left_out_in_silence() -> None:
    with make(Pure(num_calls=33)) as coordinator:
        for step, settings in enumerate([{}, {"step": 3}, {"wait": False}]):
            with pytest.raises(
                feeder.ConfigError, match=r"expected a store .* Coordinator\(checkpoints="
            ):
                coordinator.checkpoint(**settings)
            assert next(coordinator["train"]).step == step


def test_a_step_that_is_no_number_is_refused_at_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with with_policy(store) as coordinator:
        for step in (1.0, "1", True, np.int64(1)):
            for settings in ({"where": store}, {"wait": True}, {"wait": False}):
                with pytest.raises(feeder.CheckpointError, match="expected a whole number, or N"):
                    coordinator.checkpoint(step=step, **settings)
    assert store.names() == []


# ---- every n batches


@pytest.mark.parametrize("every", [4, 7, 100])
def test_every_n_batches_it_is_stored_exactly_there_and_at_the_end(
    every: int, tmp_path: Path
) -> None:
    store = Watched(tmp_path)
    taken = 0
    with with_policy(store, every_batches=every) as coordinator:
        for _ in coordinator["train"]:
            taken += 1
            if taken % every == 0:
                store.wait()
    # Whether the last batch is the last may be known when it is handed out, or only then.
    found = steps(store)
    assert found[: 24 // every] == list(range(every, 25, every))
    assert set(found[24 // every :]) == {25}
    assert store.load().states[0].summary[:3] == (1, 0, 25)
    for name, step in zip(store.names(), steps(store), strict=True):
        with make(Pure(num_calls=33), resume=store.load(name)) as resumed:
            assert ids(resumed["train"]) == rest_after(step)


def test_the_cut_is_at_the_batch_though_many_were_taken_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    are_there = threading.Event()
    around(monkeypatch, HostQueue, "finish", after=lambda *_: are_there.set())
    store = Watched(tmp_path)
    with with_policy(store, every_batches=10) as coordinator:
        feed = coordinator["train"]
        assert are_there.wait(WAIT_S)
        for _ in range(10):
            next(feed)
        store.wait()
        assert steps(store) == [10]
        assert ids(feed) == rest_after(10)


@pytest.mark.parametrize("last_round", ["uneven", "drop", "pad"])
def test_with_rounds_of_an_epoch_it_is_stored_at_the_end_of_a_round(
    last_round: str, tmp_path: Path
) -> None:
    """Also of one at an epoch's end that has fewer batches: here of 25 batches in an epoch."""
    store, wanted = Watched(tmp_path), []
    coordinator = feeder.Coordinator(feeder.Checkpointing(store, every_batches=5))
    make(
        Pure(num_calls=33), coordinator=coordinator, devices=3, rounds="epoch",
        last_round=last_round, epochs=2,
    )  # fmt: skip
    num_last = {"uneven": 1, "drop": 0, "pad": 3}[last_round]
    with coordinator:
        feeds = [coordinator["train"].on(i) for i in range(3)]
        for first in range(0, 50, 25):
            for step in range(first, first + 25, 3):
                for feed in feeds[: 3 if step < first + 24 else num_last]:
                    next(feed)
                is_dealt = step < first + 24 or num_last
                if is_dealt and (step + 3) // 5 > step // 5:
                    store.wait()
                    wanted.append(min(step + 3, first + 25))
    assert steps(store) == wanted


def test_each_feed_is_stored_at_its_own_multiples_with_the_others_as_they_stand(
    tmp_path: Path,
) -> None:
    store = Watched(tmp_path)
    coordinator = with_policy(store, every_batches=10)
    make(Pure(num_calls=33), coordinator=coordinator, input_source_name="val")
    with coordinator:
        for i in range(10):
            next(coordinator["train"])
            if i % 2:
                next(coordinator["val"])
        store.wait()
    assert store.get(store.names()[0]).meta["feeds"] == {"train[0]": 10, "val[0]": 4}


# ---- every t seconds


def test_every_t_seconds_it_is_stored_where_something_has_happened(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    with with_policy(store, every_s=0.01) as coordinator:
        store.wait()
        next(coordinator["train"])
        store.wait()
        next(coordinator["train"])
        next(coordinator["train"])
        store.wait()
    # Nothing is stored twice.
    assert steps(store) == sorted(set(steps(store)))
    assert steps(store)[:2] == [0, 1]
    assert steps(store)[-1] in (2, 3)


def test_without_feeds_nothing_is_stored(tmp_path: Path) -> None:
    """Nobody could resume from that."""
    store = Watched(tmp_path)
    with feeder.Coordinator(checkpoints=feeder.Checkpointing(store, every_s=0.01)) as coordinator:
        assert coordinator._saver is not None
        coordinator._saver.save_soon()
        make(Pure(num_calls=33), coordinator=coordinator)
        coordinator.start()
        store.wait()
    assert all(store.get(name).meta["feeds"] for name in store.names())


# ---- what goes wrong


def test_a_save_that_fails_is_told_and_counted_and_feeding_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Watched(tmp_path)
    store.errors = [disk_is_full()]
    with with_policy(store, every_batches=10) as coordinator:
        seen = []
        for batch in coordinator["train"]:
            seen += ids([batch])
            if batch.step + 1 in (10, 20):
                store.wait()
    assert seen == rest_after(0)
    assert steps(store) == [20, 25]
    stats = coordinator.checkpoint_stats()
    assert (stats["saves"], stats["failed_saves"]) == (2, 1)
    assert stats["last_save"] == store.names()[-1]
    assert "a checkpoint is missing: cannot write checkpoint 'x': No space left" in caplog.text


def test_what_became_of_checkpoints_is_among_the_figures(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    store.errors = [disk_is_full()]

    def told() -> CheckpointFigures:
        (feed,) = coordinator.figures().feeds
        assert feed.checkpoint is not None
        return feed.checkpoint

    with with_policy(store, every_batches=10) as coordinator:
        first = told()
        with pytest.raises(feeder.CheckpointError):
            coordinator.checkpoint()
        failed = told()
        assert (failed.saves, failed.failures) == (0, 1)
        assert failed.age_s > first.age_s
        coordinator.checkpoint()
        before = time.monotonic()
        stored = told()
        assert (stored.saves, stored.failures) == (1, 1)
        assert stored.age_s < failed.age_s + time.monotonic() - before
    with make(Pure()) as coordinator:
        assert coordinator.figures().feeds[0].checkpoint is None


def test_a_save_that_fails_ends_the_feeds_where_that_is_wanted(tmp_path: Path) -> None:
    store = Watched(tmp_path)
    store.errors = [disk_is_full()]
    with with_policy(store, every_batches=1, on_save_error="raise") as coordinator:
        feed = coordinator["train"]
        next(feed)
        with pytest.raises(feeder.CheckpointError, match="No space left on device"):
            for _ in range(25):
                store.wait()
                next(feed)
        state = coordinator.state_dict()
        with pytest.raises(feeder.CheckpointError, match="No space left on device"):
            next(feed)
        assert coordinator.state_dict() == state


@pytest.mark.parametrize("on_save_error", ["warn", "raise"])
def test_a_mistake_of_the_code_is_no_failed_save(
    on_save_error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Watched(tmp_path)
    store.errors = [ZeroDivisionError("a bug")]
    with with_policy(store, every_batches=1, on_save_error=on_save_error) as coordinator:
        next(coordinator["train"])
        store.wait()
        told = "^checkpoints are not written any more: ZeroDivisionError: a bug$"
        with pytest.raises(feeder.CheckpointError, match=told) as caught:
            for _ in range(26):
                next(coordinator["train"])
                store.wait()  # the next is stored once the feed has been told of the first
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "the thread that writes checkpoints failed" in caplog.text
    assert coordinator.checkpoint_stats()["failed_saves"] == 0


def test_a_place_that_cannot_be_written_to_is_told_at_the_start_and_feeding_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "missing" / "run"
    with with_policy(place, every_batches=10) as coordinator:
        assert "checkpoints will not be written: cannot write checkpoint" in caplog.text
        assert ids(coordinator["train"]) == rest_after(0)
    assert coordinator.checkpoint_stats()["failed_saves"] >= 1
    with pytest.raises(feeder.CheckpointError, match="make the folder"):
        with_policy(place, on_save_error="raise").start()


def test_a_second_process_that_writes_there_is_refused_at_the_start(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as other:
        other.claim()
        with pytest.raises(feeder.CheckpointError, match="has a writer 'feed' already"):
            with_policy(CheckpointStore(tmp_path), every_batches=1).start()


def test_a_stop_does_not_wait_for_a_disk_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feeder.feeds.running._SAVE_S", 0.1)
    store = Watched(tmp_path)
    with with_policy(store) as coordinator:
        store.gate.clear()
        coordinator.checkpoint(wait=False)
        assert store.entered.wait(WAIT_S)
        assert coordinator.stop(deadline_s=0.1) is False
        store.gate.set()
    assert steps(store) == [0]


NO_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"store": None}, "checkpoints is None, expected a CheckpointStore, a path or a URL, or"),
    ({"store": 3}, "checkpoints is 3, expected a CheckpointStore"),
    ({"store": "http://x/y"}, "'http://x/y' cannot be the place of checkpoints"),
    ({"every_batches": 0}, "every_batches is 0, expected a whole number from 1 on"),
    ({"every_batches": True}, "every_batches is True, expected"),
    ({"every_s": 0}, "every_s is 0 s, expected more than 0, at most 1e9"),
    ({"every_s": float("nan")}, "every_s is nan s, expected"),
    ({"on_sigterm": 1}, "on_sigterm is 1, expected True or False"),
    ({"on_save_error": "ignore"}, "on_save_error is 'ignore', expected 'warn' or 'raise'"),
]


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings, told in NO_SETTINGS:
        with pytest.raises(feeder.ConfigError, match="^" + re.escape(told)):
            feeder.Checkpointing(**{"store": "x", **settings})


# ---- resuming


def test_latest_is_the_beginning_at_first_and_the_newest_from_then_on(tmp_path: Path) -> None:
    seen: list[int] = []
    for _ in range(4):  # the same lines each time, as a job that is started again runs them
        coordinator = feeder.Coordinator(checkpoints=tmp_path / "run")
        with make(Pure(num_calls=33), resume="latest", coordinator=coordinator):
            for _, batch in zip(range(8), coordinator["train"], strict=False):
                seen += ids([batch])
            coordinator.checkpoint()
    assert seen == rest_after(0)


@pytest.mark.parametrize("form", ["store", "folder", "text", "url", "file", "snapshot"])
def test_a_feed_goes_on_from_whatever_names_a_checkpoint(form: str, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store, make(Pure(num_calls=33)) as coordinator:
        for _ in range(3):
            next(coordinator["train"])
        name = store.save(coordinator.snapshot())
        forms = {
            "store": store, "folder": tmp_path, "text": str(tmp_path),
            "url": f"file://{tmp_path}", "file": tmp_path / name, "snapshot": store.load(name),
        }  # fmt: skip
    with make(Pure(num_calls=33), resume=forms[form]) as resumed:
        assert ids(resumed["train"]) == rest_after(3)


def test_a_checkpoint_of_another_feed_is_refused_with_its_file(tmp_path: Path) -> None:
    coordinator = feeder.Coordinator(checkpoints=tmp_path)
    with make(Pure(), coordinator=coordinator):
        coordinator.checkpoint()
    file = str(tmp_path / "feed.00000000")
    for resume in (tmp_path, CheckpointStore(tmp_path), file, "latest"):
        settings = {"coordinator": feeder.Coordinator(checkpoints=tmp_path), "resume": resume}
        with says(
            feeder.ResumeError,
            f"{file!r}: the snapshot is of another feed than 'train': batch_size: 4 then, 5 now; "
            "resume from another",
        ):
            make(Pure(), batch_size=5, **settings)
        with pytest.raises(feeder.ResumeError, match=f"^{file!r}: the snapshot holds feeds "):
            make(Pure(), input_source_name="val", **settings)


def test_a_checkpoint_that_holds_no_feed_is_refused_with_its_file(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.put("feed.00000000", {"weights": np.zeros(3)})
        with pytest.raises(feeder.CheckpointError, match=r"no entries \['snapshot'\], expected"):
            make(Pure(), resume=store)
        store.put("feed.00000001", {"snapshot": b"FEEDSNAP and no more"})
        told = f"^checkpoint '{tmp_path}/feed.00000001': "
        with pytest.raises(feeder.SnapshotFormatError, match=told):
            make(Pure(), resume=store)


def test_where_there_is_nothing_to_resume_from_that_is_told(tmp_path: Path) -> None:
    for resume in (tmp_path, CheckpointStore(tmp_path / "new"), f"file://{tmp_path}"):
        with pytest.raises(feeder.CheckpointError, match="there is none; resume from another"):
            make(Pure(), resume=resume)
    with pytest.raises(feeder.ConfigError, match="is 'latest', and nobody said of what; name it"):
        make(Pure(), resume="latest")


def test_latest_does_not_begin_anew_where_all_are_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = feeder.Coordinator(checkpoints=tmp_path)
    coordinator.checkpoint()
    (tmp_path / "feed.00000000").write_bytes(b"FEEDCKPT")
    with pytest.raises(feeder.CheckpointError, match="1 files of that name are damaged"):
        make(Pure(), resume="latest", coordinator=feeder.Coordinator(checkpoints=tmp_path))
    assert "passed over: checkpoint" in caplog.text


# ---- processes


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_no_thread_and_writes_nothing(tmp_path: Path) -> None:
    def save() -> None:
        with pytest.raises(feeder.ForkedError):
            coordinator.checkpoint(wait=False)

    with with_policy(CheckpointStore(tmp_path), Counted(), every_batches=1) as coordinator:
        next(coordinator["train"])
        assert status_of(forked(save)) == 0


# ---- several nodes: their feeds are cut at the same step, and others are not resumed from


def test_the_trainers_own_steps_are_compared_too() -> None:
    said = {
        "a": {"step": 7, "feeds": {"train[0]": 5, "val[0]": 1}},
        "b": {"step": None, "feeds": {"train[0]": 5}},
        "c": {"step": 7, "feeds": {"train[0]": 5, "val[0]": 2}},
    }
    with pytest.raises(feeder.ResumeError) as caught:
        check_steps(said)
    assert "the trainers' step: 'a' at 7, 'b' at None, 'c' at 7" in str(caught.value)
    assert "feed 'val[0]': 'a' at 1, 'c' at 2" in str(caught.value)
    assert "train" not in str(caught.value).replace("trainers", "")
    check_steps({"a": said["a"]})
    check_steps({"a": said["a"], "b": {"step": 7, "feeds": {"other[0]": 9}}})
    check_steps({})
