"""Sources of URLs give, byte for byte, what the same files give on a disk: in any order, with any
cache, whatever the store does, and after a resume on a host whose cache is empty."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pyarrow.ipc
import pytest
from hypothesis import given
from hypothesis import strategies as st

import far_link
import feeder
from far_campaign import main as campaign
from far_files import (
    BLOCK,
    CHANGES,
    COLUMNS,
    KINDS,
    NUM,
    batch_bytes,
    make,
    read,
    small_store,
    upload,
    write_files,
)
from far_server import FarServer, far_server
from feeder import sources
from feeder.cli import main
from feeder.errors import ConfigError, ResumeError, StorageError
from feeder.workers.sources.far import blocks as blocks_module
from feeder.workers.sources.far import cache as cache_module
from feeder.workers.sources.far import paths
from feeder.workers.sources.far.waits import StoreWaits
from watching import Clock, around

pytestmark = pytest.mark.foreign_sockets


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("files")
    write_files(root)
    return root


@pytest.fixture(scope="module")
def store(warm: None, files: Path) -> Iterator[FarServer]:
    """One for all examples; each sets the faults."""
    with small_store(files) as far:
        yield far


def far_source(far: FarServer, kind: str, cache: feeder.Cache | None = None) -> sources.Source:
    """A source of the files in the store."""
    return KINDS[kind]("s3://bucket", cache=cache, storage_options=far.options())


@pytest.mark.served
@given(data=st.data())
def test_far_is_near(
    store: FarServer, files: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    kind, change = data.draw(st.sampled_from([*KINDS])), data.draw(st.sampled_from([*CHANGES]))
    size, threads = data.draw(st.integers(1, 17)), data.draw(st.integers(1, 3))
    blocks, stop = data.draw(st.integers(16, 40)), data.draw(st.integers(0, 12))
    faults = data.draw(
        st.lists(st.sampled_from(["", "", "", "500", "cut", "shifted", "503"]), max_size=6)
    )
    folder = tmp_path_factory.mktemp("caches")
    # Of the requests of an example, in turn.
    store.fault = lambda number, path, span: [*faults, *[""] * 9][number % (len(faults) + 9)]

    def of_host(name: str) -> tuple[feeder.Cache, sources.Source]:
        cache = feeder.Cache(folder / name, blocks * 4096)
        return cache, CHANGES[change](far_source(store, kind, cache))

    near, _ = read(make(kind, CHANGES[change](KINDS[kind](files)), size, threads))
    one, source = of_host("one")
    with one:
        begun, state = read(make(kind, source, size, threads), stop)
    # Another host: its cache is empty.
    other, source = of_host("other")
    with other:
        rest, _ = read(make(kind, source, size, threads, state))
    assert begun + rest == near
    for name in ("one", "other"):
        taken = sum(path.stat().st_size for path in (folder / name / "blocks").glob("??/*"))
        assert taken <= blocks * 4096


@pytest.mark.process
def test_a_few_faults_and_kills_change_nothing(
    warm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert campaign(["--faults", "150", "--kills", "2", "--seed", "7"]) == 0
    faults, kills = re.findall(r"(\d+) (?:faults|kills)", capsys.readouterr().out)
    assert int(faults) >= 150 and int(kills) == 2


# ---- what goes wrong


@pytest.fixture
def changing(warm: None, files: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FarServer]:
    """A store whose objects a test may change."""
    monkeypatch.setattr(blocks_module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(paths, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(cache_module, "_LEAST_BYTES", BLOCK)
    with far_server() as far:
        upload(far, files)
        yield far


@pytest.fixture
def caches() -> Iterator[ExitStack]:
    """Closes caches."""
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("kind", [
    "tokens", "mds", "jsonl", "tfrecord", "parquet", "arrow", "images",
    pytest.param("webdataset", marks=pytest.mark.served),  # as much work as feeds that are served
])  # fmt: skip
def test_an_object_that_has_changed_is_named_at_a_resume_and_at_reading(
    changing: FarServer, tmp_path: Path, files: Path, kind: str, caches: ExitStack
) -> None:
    def source(name: str) -> sources.Source:
        cache = caches.enter_context(feeder.Cache(tmp_path / name, 16 * 4096))
        return far_source(changing, kind, cache)

    _, state = read(make(kind, source("a"), 4, 1), 2)
    first = source("c")
    folder = {"webdataset": "tar"}.get(kind, kind)
    named = [path for path in changing.objects if path.startswith(f"bucket/{folder}/")]
    path = max(path for path in named if not path.endswith(("index.json", ".txt")))
    # One byte of the content, and nothing else.
    data = bytearray(changing.objects[path])
    data[{"webdataset": 600, "images": 40, "parquet": 40, "arrow": 40}.get(kind, -1)] ^= 1
    changing.objects[path] = bytes(data)
    with pytest.raises(
        ResumeError, match="objects" if kind == "images" else path.rpartition("/")[2]
    ):
        make(kind, source("b"), 4, 1, state)
    # A source that was made before does not mix old and new bytes. If it has read all of it
    # before, for its index or its footer, the rows are those of then.
    if kind in ("jsonl", "tfrecord", "parquet", "arrow"):
        assert read(make(kind, first, 4, 1))[0] == read(make(kind, KINDS[kind](files), 4, 1))[0]
        return
    with pytest.raises(feeder.FetchError) as caught:
        read(make(kind, first, 4, 1))
    assert isinstance(caught.value.__cause__, StorageError)
    assert f"'s3://{path}' has changed" in str(caught.value)


@pytest.mark.parametrize(
    "kind", ["tokens", "mds", "jsonl", "tfrecord", "parquet", "arrow", "images"]
)
def test_a_bucket_that_was_moved_is_the_same_source(
    changing: FarServer, tmp_path: Path, kind: str, caches: ExitStack
) -> None:
    for path, data in [*changing.objects.items()]:
        changing.objects[f"archive/2026/{path.partition('/')[2]}"] = data

    def source(root: str, name: str) -> sources.Source:
        cache = caches.enter_context(feeder.Cache(tmp_path / name, 16 * 4096))
        return KINDS[kind](root, cache=cache, storage_options=changing.options())

    found, state = read(make(kind, source("s3://bucket", "a"), 4, 1), 2)
    rest, _ = read(make(kind, source("s3://archive/2026", "b"), 4, 1, state))
    assert found + rest == read(make(kind, source("s3://bucket", "a"), 4, 1))[0]


def test_what_is_missing_refused_or_compressed_is_named_when_a_source_is_made(
    changing: FarServer,
) -> None:
    url, far = f"{changing.address}/bucket", changing
    with pytest.raises(StorageError, match=r"none\.bin' is missing"):
        sources.tokens(f"{url}/tokens/{{a,none}}.bin", 5, "uint16")
    with pytest.raises(StorageError, match="cannot be listed over HTTP"):
        sources.tokens(f"{url}/tokens/", 5, "uint16")
    with pytest.raises(ConfigError, match="fits no object, expected a file of lines"):
        sources.jsonl("s3://bucket/jsonl/*.txt", storage_options=far.options())
    with pytest.raises(ConfigError, match="is a folder without a tar shard"):
        sources.webdataset("s3://bucket/jsonl/", storage_options=far.options())
    del far.objects["bucket/mds/shard.00040.mds"]
    with pytest.raises(StorageError, match=r"shard\.00040\.mds' is missing"):
        sources.mds(f"{url}/mds")
    far.objects["bucket/mds/shard.00040.mds"] = b"short"
    with pytest.raises(ConfigError, match=r"has 5 bytes, its index says .* it is truncated"):
        sources.mds("s3://bucket/mds", storage_options=far.options())
    index = json.loads(far.objects["bucket/mds/index.json"])
    for entry in index["shards"]:
        del far.objects[f"bucket/mds/{entry['raw_data']['basename']}"]
        entry |= {"compression": "zstd", "zip_data": {"basename": "x.zstd"}}
    far.objects["bucket/mds/index.json"] = json.dumps(index).encode()
    with pytest.raises(ConfigError, match=r"compressed shards \(zstd\), and .* is missing: "):
        sources.mds("s3://bucket/mds", storage_options=far.options())
    far.objects["bucket/x.jsonl.gz"] = bytes.fromhex("1f8b0800000000000003") + b"rest"
    with pytest.raises(ConfigError, match=r"is compressed \(gzip\)"):
        sources.jsonl(f"{url}/x.jsonl.gz")
    rows = pyarrow.table({"i": [1, 2]})
    stream = io.BytesIO()
    with pyarrow.ipc.new_stream(stream, rows.schema) as file:
        file.write_table(rows)
    with pytest.raises(ConfigError, match="an LMDB is mapped, so it is read from a disk: copy it"):
        sources.caffe_lmdb("s3://bucket/lmdb")
    far.objects["bucket/x.arrow"] = stream.getvalue()
    with pytest.raises(ConfigError, match=r"x\.arrow' cannot be read: it has no directory"):
        sources.arrow(f"{url}/x.arrow")
    far.objects["bucket/x.arrow"] = b"ARROW1\0\0 and no more"
    with pytest.raises(ConfigError, match=r"x\.arrow' cannot be read: "):
        sources.arrow(f"{url}/x.arrow")
    far.objects["bucket/cut.tar"] = far.objects["bucket/tar/000.tar"][:20_000]
    with pytest.raises(ConfigError, match="unexpected end of data"):
        sources.webdataset(f"{url}/cut.tar", ["cls"])
    far.fault = lambda number, path, span: "403"
    with pytest.raises(StorageError, match="is refused"):
        sources.tokens(f"{url}/tokens/a.bin", 5, "uint16")


def test_arguments_that_fit_no_path_are_told(files: Path) -> None:
    for read_files in (
        lambda **far: sources.jsonl(files / "jsonl", **far),
        lambda **far: sources.mds(files / "mds", **far),
        lambda **far: sources.tokens(files / "tokens", 5, "uint16", **far),
    ):
        with pytest.raises(ConfigError, match="storage_options are given"):
            read_files(storage_options={"region": "x"})
    with pytest.raises(ConfigError, match=r"cache is 'x', expected a feeder\.Cache"):
        sources.jsonl("s3://b/x.jsonl", cache="x")
    with pytest.raises(ConfigError, match="storage_options are 3, expected a mapping"):
        sources.jsonl("s3://b/x.jsonl", storage_options=3)
    with pytest.raises(ConfigError, match="verify: shards of a URL"):
        sources.mds("s3://b/x", verify=True)


def test_an_index_is_made_once_and_a_warm_cache_asks_for_nothing(
    changing: FarServer, tmp_path: Path
) -> None:
    def rows() -> list[Any]:
        changing.asked.clear()
        with feeder.Cache(tmp_path / "cache", 64 * 4096) as cache:
            source = far_source(changing, "jsonl", cache).shuffle()
            return read(make("jsonl", source, 8, 2))[0]

    first = rows()
    assert changing.asked
    assert rows() == first
    assert changing.asked == []


@pytest.mark.served  # as much work as feeds that are served
def test_indexes_beside_objects_are_made_once_for_every_host(
    changing: FarServer, tmp_path: Path, files: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in changing.options().items():
        monkeypatch.setenv(f"AWS_{name.upper()}", value)
    monkeypatch.setenv("FEEDER_CACHE", f"{tmp_path / 'first'},{64 * 4096}")
    shards = sorted(path for path in changing.objects if path.endswith(".tar"))
    assert main(["index", "s3://bucket/tar/*.tar"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"s3://bucket/tar/.{name}.tar.feeder-index: 30 records" for name in ("000", "030", "060")
    ]
    # It goes on where it was: what is there is not made again.
    cache_module.blocks_of_this_process(str(tmp_path / "first"), 64 * 4096).close()
    changing.asked.clear()
    del changing.objects["bucket/tar/.030.tar.feeder-index"]
    monkeypatch.setenv("FEEDER_CACHE", f"{tmp_path / 'second'},{64 * 4096}")
    assert main(["index", "s3://bucket/tar/*.tar"]) == 0
    assert {path for path, _ in changing.asked if path in shards} == {"bucket/tar/030.tar"}
    # What it has asked for in advance has come.
    cache_module.blocks_of_this_process(str(tmp_path / "second"), 64 * 4096).close()
    # Another host reads no shard for its index, and one that has changed is gone through.
    changing.asked.clear()
    with feeder.Cache(tmp_path / "third", 64 * 4096) as cache:
        source = KINDS["webdataset"]("s3://bucket", cache=cache)
        assert [path for path, _ in changing.asked if path in shards] == []
        near = KINDS["webdataset"](files)
        assert read(make("webdataset", source, 4, 1))[0] == read(make("webdataset", near, 4, 1))[0]
    changing.objects["bucket/tar/000.tar"] = changing.objects["bucket/tar/030.tar"]
    changing.objects["bucket/tar/.060.tar.feeder-index"] = b"no index"
    changing.asked.clear()
    with feeder.Cache(tmp_path / "fourth", 64 * 4096) as cache:
        KINDS["webdataset"]("s3://bucket", cache=cache)
    assert {path for path, _ in changing.asked if path in shards} == {shards[0], shards[2]}
    # A store that takes nothing is told of, and a folder takes its place.
    changing.takes = False
    assert main(["index", "s3://bucket/tar/000.tar"]) == 1
    assert "is refused" in capsys.readouterr().err
    assert main(["index", "s3://bucket/tar/000.tar", "--index", str(tmp_path)]) == 0
    assert str(tmp_path) in capsys.readouterr().out
    assert main(["index", "s3://bucket/mds", "--as", "mds"]) == 2
    cache_module.blocks_of_this_process(str(tmp_path / "second"), 64 * 4096).close()


def test_a_call_of_arrow_files_foresees_its_batches(
    changing: FarServer, tmp_path: Path, caches: ExitStack
) -> None:
    cache = caches.enter_context(feeder.Cache(tmp_path / "cache", 64 * 4096))
    source = far_source(changing, "arrow", cache)
    # Rows 0 to 49 lie in the first file, 12 in a batch.
    found = [*source.records.touches(np.array([13, 0, 1, 55]), feeder.Call(0, 0, 0, 4, 7))]
    for path, start, stop in found:
        message = pyarrow.ipc.read_message(changing.objects[str(path)[5:]][start:stop])
        assert (message.type, message.body.size > 0) == ("record batch", True)
    assert [str(path)[-14:] for path, _, _ in found] == ["half=0/x.arrow"] * 2 + ["half=1/x.arrow"]
    assert found[0][2] <= found[1][1]


def test_many_urls_are_asked_about_at_once(far: FarServer) -> None:
    urls = [f"{far.address}/b/{i}" for i in range(12)]
    for i in range(12):
        far.objects[f"b/{i}"] = bytes([i, 0]) * 50
    far.latency_s = 0.3
    source = sources.tokens(urls, 50, "uint16", offset=0)
    assert far.deepest <= 3
    assert source(feeder.Call(0, 0, 0, 12, 7))[0][:, 0].tolist() == [*range(12)]


@pytest.mark.nightly
def test_an_epoch_takes_as_long_as_its_link_and_few_requests() -> None:
    one = far_link.measure(None, 1.5, 1, 0.25, 20e6, 128)
    assert one.bytes == 1.0
    assert one.requests <= 1.2
    # A busy machine may be late.
    assert one.time <= 1.25
    assert one.first_trips <= 3.0


def test_a_feed_tells_how_long_it_waits_for_a_store_and_what_came(
    changing: FarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, go, clock = Event(), Event(), Clock(monkeypatch)

    def fault(number: int, path: str, span: Any) -> str:
        go.wait(20)
        return ""

    around(monkeypatch, StoreWaits, "change", after=lambda *_: waits.set())

    with feeder.Cache(tmp_path / "cache", 64 * 4096) as cache:
        source = far_source(changing, "jsonl", cache)
        assert source._store_counts() is None
        # All of it was read for the index.
        shutil.rmtree(tmp_path / "cache" / "blocks")
        before = len(changing.asked)
        changing.fault = fault
        with make("jsonl", source, 9, 1) as feeds:
            assert waits.wait(20)
            clock.set_ahead(1.0)
            # The wait that is under way counts.
            store = feeds.figures().feeds[0].store
            assert store is not None
            assert store.wait_s >= 1.0
            go.set()
            assert len([*feeds["train"]]) == 2 * NUM // 9
            (figures,) = feeds.figures().feeds
            told = feeds["train"].stats()
    assert figures.store is not None
    assert figures.store.requests >= len(changing.asked) - before > 0
    assert (told["store/requests"], told["store/wait_s"]) == (
        figures.store.requests, figures.store.wait_s
    )  # fmt: skip
    assert figures.store.hits > 0 < figures.store.waits


def test_a_cache_of_the_environment_and_one_in_memory(
    changing: FarServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Path
) -> None:
    def rows() -> list[Any]:
        source = far_source(changing, "tokens")
        return read(make("tokens", source, 8, 2))[0]

    near = read(make("tokens", KINDS["tokens"](files), 8, 2))[0]
    assert rows() == near
    path = tmp_path / "of the environment"
    monkeypatch.setenv("FEEDER_CACHE", f"{path},{64 * 4096}")
    assert rows() == near
    assert [*path.glob("blocks/??/*")]
    cache_module.blocks_of(None).close()
    for wrong in ("/x", "/x,2GB", ",5"):
        monkeypatch.setenv("FEEDER_CACHE", wrong)
        with pytest.raises(ConfigError, match="expected FOLDER,BYTES"):
            rows()
    monkeypatch.setenv("FEEDER_CACHE", "/x," + "9" * 5000)
    with pytest.raises(ConfigError, match="FEEDER_CACHE has a number of 5000 digits"):
        rows()


def test_a_cache_may_be_below_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEEDER_CACHE", f"~/a,{16 << 20}")
    blocks = cache_module.blocks_of(None)
    with feeder.Cache("~/b", 16 << 20) as cache:
        assert (blocks.path, cache.path) == (str(tmp_path / "a"), str(tmp_path / "b"))
    blocks.close()


def test_an_index_that_the_disk_has_changed_is_found_and_made_anew(
    changing: FarServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows() -> list[Any]:
        with feeder.Cache(tmp_path / "cache", 64 * 4096) as cache:
            source = far_source(changing, "jsonl", cache)
            return read(make("jsonl", source, 8, 1))[0]

    first = rows()
    index = min((tmp_path / "cache" / "indexes").iterdir())
    mine = index.with_name("mine.feeder-index")
    mine.write_text("mine")
    whole = np.load(index)
    whole["offset"][3] = whole["offset"][4]
    for mended in (False, True):
        with index.open("wb") as file:
            np.save(file, whole)
        if mended:
            assert main(["cache", "verify", str(tmp_path / "cache")]) == 1
            assert f"the index {index.name} was damaged" in capsys.readouterr().out
            assert not index.exists()
        assert rows() == first
        assert main(["cache", "verify", str(tmp_path / "cache")]) == 0
    assert mine.read_text() == "mine"


@pytest.mark.process
def test_processes_read_through_the_folder_of_the_cache(
    changing: FarServer, tmp_path: Path, files: Path
) -> None:
    near = read(make("jsonl", KINDS["jsonl"](files).shuffle(), 8, 1))[0]
    # In a child blocks have their usual size: each file is one.
    cache = feeder.Cache(tmp_path / "cache", 64 << 20)
    source = far_source(changing, "jsonl", cache).shuffle()
    feeds = feeder.init_data_input_workers(
        COLUMNS["jsonl"], source, batch_size=8, epochs=2, executor=feeder.Processes(2)
    )
    at, here = len(changing.asked), cache_module.totals()
    with feeds:
        assert [batch_bytes(batch) for batch in feeds["train"]] == near
        stats = feeds["train"].stats()
    # What the children have asked for is told here; this process has asked for nothing.
    spans = [span for _, span in changing.asked[at:] if span]
    assert cache_module.totals() == here
    assert stats["store/requests"] - here["requests"] == len(spans) > 0
    assert stats["store/bytes"] - here["bytes"] == sum(stop - start for start, stop in spans)
    assert stats["store/hits"] > here["hits"]
    cache.close()
