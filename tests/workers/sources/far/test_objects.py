"""Requests are made again while they may succeed, and what lasts is named at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import far_server
from far_server import FarServer
from feeder.errors import StorageError
from feeder.workers.sources.far import objects as module
from feeder.workers.sources.far.objects import Known, Objects

pytestmark = pytest.mark.foreign_sockets

DATA = bytes(range(256)) * 16


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can wait for."""
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(module, "_SLOW_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "STALL_S", 0.2)


@pytest.fixture(params=["s3", "http"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def objects(scheme: str, far: FarServer) -> Objects:
    far.objects["bucket/some dir/a.bin"] = DATA
    return Objects(far.options()) if scheme == "s3" else Objects()


@pytest.fixture
def one(scheme: str, objects: Objects, far: FarServer) -> Known:
    http = f"{far.address}/bucket/some%20dir/a.bin"
    return objects.known("s3://bucket/some dir/a.bin" if scheme == "s3" else http)


def failing(*faults: str) -> Callable[[int, str, tuple[int, int] | None], str]:
    """The first requests meet with these faults, one each."""
    return lambda number, path, span: faults[number] if number < len(faults) else ""


def test_ranges_sizes_and_tags(far: FarServer, objects: Objects, one: Known) -> None:
    assert (one.size, one.tag) == (4096, far.etag("bucket/some dir/a.bin"))
    assert objects.read(one, 10, 300) == DATA[10:300]
    assert objects.read(one, 4000, 4096) == DATA[4000:]
    assert objects.counts() == {
        "requests": 2, "bytes": 386, "retries": 0, "slower": 0, "stalls": 0, "damaged": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("faults", "counted"),
    [
        (["500", "502"], {"retries": 2}),
        (["503", "429"], {"retries": 2, "slower": 2}),
        (["cut"], {"retries": 1, "damaged": 1}),
        (["shifted", "shifted"], {"retries": 2, "damaged": 2}),
        (["stall"], {"retries": 1, "stalls": 1}),
        (["408", "cut", "503"], {"retries": 3, "damaged": 1, "slower": 1}),
    ],
)
def test_what_may_pass_is_asked_for_again(
    far: FarServer, objects: Objects, one: Known, faults: list[str], counted: dict[str, int]
) -> None:
    far.fault = failing(*faults)
    assert objects.read(one, 10, 300) == DATA[10:300]
    counts = {name: value for name, value in objects.counts().items() if value}
    assert counts == {"requests": len(faults) + 1, "bytes": 290, **counted}


def test_what_has_arrived_is_not_asked_for_again(
    far: FarServer, objects: Objects, one: Known
) -> None:
    far.fault = failing("cut", "500")
    parts: list[bytes] = []
    objects.bring(one, 10, 1010, 300, parts.append)
    assert [len(part) for part in parts] == [300, 300, 300, 100]
    assert b"".join(parts) == DATA[10:1010]
    # Half of it came, of which one part is whole.
    assert [span for _, span in far.asked] == [(10, 1010), (310, 1010), (310, 1010)]
    assert objects.counts()["bytes"] == 1000


def test_an_answer_that_breaks_off_behind_its_last_byte_is_whole(
    far: FarServer, objects: Objects, one: Known
) -> None:
    far.fault = failing("unended")
    assert objects.read(one, 10, 300) == DATA[10:300]
    assert [span for _, span in far.asked] == [(10, 300)]


def test_what_fails_beside_the_store_is_not_asked_for_again(
    far: FarServer, objects: Objects, one: Known
) -> None:
    got: list[bytes] = []

    def arrived(part: bytes) -> None:
        got.append(part)
        if len(got) == 2:
            raise RuntimeError("no more memory")

    with pytest.raises(StorageError, match="no more memory"):
        objects.bring(one, 0, len(DATA), 1024, arrived)
    assert got == [DATA[:1024], DATA[1024:2048]]
    assert len(far.asked) == 1


@pytest.mark.parametrize(
    ("fault", "told"),
    [("403", "is refused"), ("401", "is refused"), ("404", "is missing"), ("400", "cannot be read"),
     ("412", "has changed"), ("416", "has changed")],
)  # fmt: skip
def test_what_lasts_is_named_at_once(
    far: FarServer, objects: Objects, one: Known, fault: str, told: str
) -> None:
    far.fault = lambda number, path, span: fault
    with pytest.raises(StorageError, match=rf"'{one.url}' {told}"):
        objects.read(one, 0, 10)
    assert (len(far.asked), objects.counts()["retries"]) == (1, 0)


@pytest.mark.parametrize(
    ("status", "told"), [(405, "cannot be read.*405"), (404, "is missing"), (200, "Content-Length")]
)
def test_a_store_that_does_not_tell_sizes_is_named_at_once(
    far: FarServer, status: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def head(handler: Any) -> None:
        asked.append(1)
        handler.send_response(status)
        handler.send_header("ETag", '"e"')
        handler.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        handler.end_headers()

    monkeypatch.setattr(far_server._Handler, "do_HEAD", head)
    with pytest.raises(StorageError, match=told):
        Objects().known(f"{far.address}/bucket/x")
    assert len(asked) == 1


def test_a_key_that_the_library_does_not_take_is_named_at_once(far: FarServer) -> None:
    far.objects["bucket/d/a//b"] = DATA
    objects = Objects(far.options())
    with pytest.raises(StorageError, match=r"'s3://bucket/d/a//b' cannot be read: .*empty path"):
        objects.known("s3://bucket/d/a//b")
    with pytest.raises(StorageError, match=r'cannot be read: .*"d/a//b"'):
        objects.listed("s3://bucket/d/")
    assert objects.counts()["retries"] == 0


@pytest.mark.parametrize("compares", [True, False])
def test_an_object_that_is_another_one_or_shorter_is_named(
    far: FarServer, objects: Objects, one: Known, compares: bool
) -> None:
    # A store that compares nothing says what the object is now.
    far.compares = compares
    for other in (DATA[:-1] + b"?", DATA[:200], DATA + b"more"):
        far.objects["bucket/some dir/a.bin"] = other
        with pytest.raises(StorageError, match=r"has changed since .* had 4096 bytes") as caught:
            objects.read(one, 100, 300)
        # One that compares does not send it.
        assert ("412" in str(caught.value)) is compares
    del far.objects["bucket/some dir/a.bin"]
    with pytest.raises(StorageError, match="is missing"):
        objects.read(one, 0, 10)


def test_a_store_that_asks_for_less_holds_up_every_request(
    far: FarServer, objects: Objects, one: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SLOW_PAUSE_S", 10.0)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    far.fault = lambda number, path, span: "503"
    with pytest.raises(StorageError, match="503"):
        objects.read(one, 0, 10)
    waits: list[float] = []

    class Ending:
        """Notes what is waited for."""

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return False

    monkeypatch.setattr(module, "ENDING", Ending())
    far.fault = lambda number, path, span: ""
    assert objects.read(one, 0, 10) == DATA[:10]
    assert 4.0 < waits[0] <= 10.0


def test_a_store_that_does_not_answer_is_named_in_time(
    far: FarServer, objects: Objects, one: Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.5)
    far.fault = lambda number, path, span: "500"
    with pytest.raises(StorageError, match=r"cannot be read: for 0 s: .*500"):
        objects.read(one, 0, 10)
    # On a busy machine a request may fail before it is heard.
    assert objects.counts()["retries"] >= len(far.asked) - 1 >= 1


def test_objects_of_a_folder_are_listed_with_their_tags(far: FarServer) -> None:
    for name in ("d/b", "d/a", "d/e/c", "other"):
        far.objects[f"bucket/{name}"] = name.encode()
    objects = Objects(far.options())
    assert [(known.url, known.size, known.tag) for known in objects.listed("s3://bucket/d")] == [
        (f"s3://bucket/{name}", len(name), far.etag(f"bucket/{name}"))
        for name in ("d/a", "d/b", "d/e/c")
    ]
    with pytest.raises(StorageError, match="cannot be listed over HTTP"):
        objects.listed(f"{far.address}/bucket/d/")


def test_files_have_urls_too(warm: None, tmp_path: Path) -> None:
    path = tmp_path / "with a %41 blank"
    path.mkdir()
    (path / "x.bin").write_bytes(DATA)
    objects = Objects()
    (known,) = objects.listed(f"file://{tmp_path}/")
    assert known.url == f"file://{tmp_path}/with%20a%20%2541%20blank/x.bin"
    assert objects.known(known.url) == known
    assert objects.read(known, 5, 9) == DATA[5:9]
    with pytest.raises(StorageError, match="is missing"):
        objects.known(f"file://{tmp_path}/none")
