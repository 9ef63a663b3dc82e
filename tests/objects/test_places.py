"""Every place for checkpoints keeps the same promises: folders, memory, object stores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import obstore
import pytest
from obstore.store import from_url

import feeder
from crashes.positions import snapshot_at, step_of
from feeder.checkpoint import objects
from feeder.checkpoint.store import CheckpointStore
from objects.conftest import use
from small import Aside, Pure, ids, make

# A thread of the library's own opens and closes connections.
pytestmark = [pytest.mark.process, pytest.mark.foreign_sockets]


def overwrite(url: str, name: str, change: Callable[[bytes], bytes]) -> None:
    """Damage a checkpoint, in whatever place it lies."""
    if "://" not in url:
        with open(f"{url}/{name}", "r+b") as file:
            data = change(file.read())
            file.seek(0)
            file.truncate()
            file.write(data)
        return
    store = objects._in_memory.get(url) or from_url(url, client_options={"allow_http": True})
    obstore.put(store, name, change(bytes(obstore.get(store, name).bytes())))


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def test_what_is_put_is_got_back_whole_or_in_part(url: str) -> None:
    with CheckpointStore(url) as store:
        rows = np.arange(100_000.0)
        receipt = store.put("job/node.1", {"rows": rows, "text": b"some"}, meta={"epoch": 1})
        loaded = store.get("job/node.1")
        assert np.array_equal(loaded.entries["rows"], rows)
        assert (loaded.entries["text"], loaded.meta) == (b"some", {"epoch": 1})
        assert (loaded.digest, loaded.num_bytes) == (receipt.digest, receipt.num_bytes)
        assert store.get("job/node.1", ["text"]).entries == {"text": b"some"}
        assert store.entry_names("job/node.1") == ["rows", "text"]
        assert store.verify("job/node.1") == receipt


def test_names_are_listed_by_their_beginning_and_removed(url: str) -> None:
    with CheckpointStore(url) as store:
        assert (store.names(), store.latest(), store.exists("a")) == ([], None, False)
        for name in ("n.10", "n.9", "job/b.2", "jobs/b.3"):
            store.put(name, {})
        assert store.names() == ["job/b.2", "jobs/b.3", "n.9", "n.10"]
        assert (store.names("job"), store.names("job/")) == (["job/b.2", "jobs/b.3"], ["job/b.2"])
        store.remove("n.10")
        assert (store.names("n."), store.exists("n.10"), store.exists("n.9")) == (
            ["n.9"], False, True,
        )  # fmt: skip
        for call in (store.get, store.remove):
            with pytest.raises(feeder.CheckpointError, match=r"there is no checkpoint '.*n\.10'; "):
                call("n.10")


def test_one_of_many_that_write_the_same_name_is_first(url: str) -> None:
    def put(i: int) -> int | None:
        # A writer each: they are held apart by the name that they write alone.
        with CheckpointStore(url, writer=f"w{i}") as store:
            try:
                store.put("same", {"x": bytes([i]) * 1000})
            except feeder.CheckpointError as error:
                assert "exists; each is written once" in str(error)
                assert isinstance(error.__cause__, FileExistsError)
                return None
        return i

    writers = [Aside(lambda i=i: put(i)) for i in range(8)]  # type: ignore[misc]
    (winner,) = [i for i in (writer.result() for writer in writers) if i is not None]
    assert CheckpointStore(url).get("same").entries == {"x": bytes([winner]) * 1000}


def test_the_newest_that_is_whole_is_loaded_and_the_oldest_are_retired(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointStore(url, keep=3) as store:
        names = [store.save(snapshot_at(step)) for step in range(5)]
        assert store.names() == names[2:]
        assert step_of(store.load()) == 4
        overwrite(url, names[4], flip)
        overwrite(url, names[3], lambda data: data[:50])
        assert step_of(store.load()) == 2
        assert store.latest() == names[2]
        assert f"passed over: checkpoint '{store.path_of(names[4])}' is damaged" in caplog.text
        overwrite(url, names[2], lambda data: b"")
        with pytest.raises(feeder.CheckpointError, match="3 files of that name are damaged"):
            store.load()


def test_what_is_no_checkpoint_is_not_listed_nor_removed(url: str) -> None:
    with CheckpointStore(url) as store:
        store.put("notes", {})
        overwrite(url, "notes", lambda data: b"my own notes")
        assert store.names() == []
        with pytest.raises(feeder.CheckpointError, match="is no checkpoint, and is left where it"):
            store.remove("notes")


def test_a_feed_goes_on_from_its_place(url: str) -> None:
    with make(Pure(num_calls=33)) as undisturbed:
        wanted = ids(undisturbed["train"])
    seen = []
    for _ in range(3):
        coordinator = feeder.Coordinator(feeder.Checkpointing(url, every_batches=5))
        with make(Pure(num_calls=33), resume="latest", coordinator=coordinator):
            for _, batch in zip(range(10), coordinator["train"], strict=False):
                seen += ids([batch])
            coordinator.checkpoint()
    assert seen == wanted
    with make(Pure(num_calls=33), resume=url) as finished:
        assert list(finished["train"]) == []


# ---- object stores alone


def test_a_put_whose_answer_was_lost_finds_its_own_object(monkeypatch: Any) -> None:
    put = obstore.put

    def put_twice(*args: Any, **kwargs: Any) -> Any:
        put(*args, **kwargs)
        return put(*args, **kwargs)

    store = CheckpointStore("memory://lost-answer")
    monkeypatch.setattr(obstore, "put", put_twice)
    store.put("a", {"x": b"mine"})
    assert store.get("a").entries == {"x": b"mine"}


def test_a_server_that_is_away_is_an_error_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "http://127.0.0.1:9")
    store = CheckpointStore("s3://bucket/run", retry_s=0.05)
    calls: list[Callable[[], Any]] = [
        lambda: store.save(snapshot_at(1)), lambda: store.put("a", {}), lambda: store.get("a"),
        store.names, store.latest, lambda: store.remove("a"),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(feeder.CheckpointError) as caught:
            Aside(call).result()
        assert "checkpoint 's3://bucket/run/" in str(caught.value)
        assert str(caught.value).endswith("look at the store's address and credentials")
        assert "\n" not in str(caught.value)


def test_feeding_goes_on_while_a_server_is_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(monkeypatch, "http://127.0.0.1:9")
    with make(Pure(num_calls=33)) as undisturbed:
        wanted = ids(undisturbed["train"])
    store = CheckpointStore("s3://bucket/run", retry_s=0.1)
    coordinator = feeder.Coordinator(feeder.Checkpointing(store, every_batches=5))
    with make(Pure(num_calls=33), coordinator=coordinator):
        assert ids(coordinator["train"]) == wanted
    assert coordinator.checkpoint_stats()["failed_saves"] > 0
    assert "a checkpoint is missing: cannot list checkpoint 's3://bucket/run/" in caplog.text


def test_a_bucket_that_does_not_exist_is_told(endpoint: str) -> None:
    with pytest.raises(feeder.CheckpointError, match="cannot write checkpoint 's3://nobodys/a'"):
        CheckpointStore("s3://nobodys").put("a", {})


def test_a_forked_child_is_told_that_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_process", 1)
    with pytest.raises(feeder.CheckpointError, match="in a forked child of a process that uses"):
        CheckpointStore("memory://forked").names()


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(feeder.ConfigError, match=r"pip install 'feedworks\[objectstore\]'"):
        CheckpointStore("memory://none").names()


def test_a_large_checkpoint_is_uploaded_in_parts_with_the_commit_last(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_WHOLE_BYTES", 2**20)
    monkeypatch.setattr(objects, "_PART_BYTES", 5 * 2**20)
    entries = {"x": np.arange(2**20, dtype=np.int64), "empty": np.zeros(0), "note": b"small"}
    with feeder.CheckpointStore(url) as store:
        receipt = store.put("large", entries)
        loaded = store.get("large")
        assert loaded.digest == receipt.digest == store.verify("large").digest
        assert np.array_equal(loaded.entries["x"], entries["x"])
        with pytest.raises(feeder.CheckpointError, match="exists; each is written once"):
            store.put("large", {"x": np.zeros(2**20)})
        assert np.array_equal(store.get("large", ["x"]).entries["x"], entries["x"])


@pytest.mark.parametrize("url", ["memory", "s3"], indirect=True)
def test_an_upload_that_fails_leaves_no_checkpoint(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_WHOLE_BYTES", 2**20)

    def failing(views: Any) -> Any:
        yield bytes(2**20)
        raise OSError("the line is cut")

    pieces = objects._pieces
    monkeypatch.setattr(objects, "_pieces", failing)
    with feeder.CheckpointStore(url) as store:
        with pytest.raises(feeder.CheckpointError):
            store.put("large", {"x": np.zeros(2**20)})
        assert store.names() == []
        monkeypatch.setattr(objects, "_pieces", pieces)
        store.put("large", {"x": np.zeros(2**20)})
        assert store.latest() == "large"


@pytest.mark.parametrize("url", ["memory", "s3"], indirect=True)
def test_a_name_that_is_claimed_for_an_upload_that_was_killed_is_damaged_and_can_be_removed(
    url: str,
) -> None:
    with feeder.CheckpointStore(url) as store:
        store.put("older", {"x": np.zeros(3)})
        backend = store._backend
        assert isinstance(backend, objects.ObjectFolder)
        with backend.calling("write", "z") as (obstore, place):
            backend._claim(obstore, place, "z", objects.MAGIC, "mark")
        assert store.names() == ["older", "z"]
        assert store.latest() == "older"
        store.remove("z")
        assert store.names() == ["older"]
