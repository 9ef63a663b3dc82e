"""Calls to an object store that fail are made again for as long as `retry_s` says, listings too."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import feeder
from feeder.checkpoint import objects
from feeder.checkpoint.objects import ObjectFolder
from feeder.checkpoint.store import CheckpointStore
from objects.conftest import use

# A thread of the library's own opens and closes connections.
pytestmark = [pytest.mark.process, pytest.mark.foreign_sockets]

LISTING = (
    b"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult><Name>bucket</Name><KeyCount>1"
    b"</KeyCount><IsTruncated>false</IsTruncated><Contents><Key>run/a</Key><LastModified>"
    b"2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag><Size>3</Size></Contents>"
    b"</ListBucketResult>"
)


class Answering(BaseHTTPRequestHandler):
    """Answers a listing whole once it has failed so often in the way that is asked."""

    protocol_version = "HTTP/1.1"
    failing: str
    num_failures: int
    num_requests: int

    def do_GET(self) -> None:
        kind = type(self)
        kind.num_requests += 1
        fails = kind.num_requests <= kind.num_failures
        body = b"" if fails and kind.failing != "cut" else LISTING
        self.send_response(200 if body else int(kind.failing))
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:-50] if fails else body)
        self.close_connection = fails

    def log_message(self, *arguments: Any) -> None: ...


Serve = Callable[[str, int], type[Answering]]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts a server that fails so often; returns what counts its requests."""

    class Kind(Answering):
        num_requests = 0

    with ThreadingHTTPServer(("127.0.0.1", 0), Kind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()

        def start(failing: str, num_failures: int) -> type[Answering]:
            Kind.failing, Kind.num_failures = failing, num_failures
            use(monkeypatch, f"http://127.0.0.1:{server.server_port}")
            return Kind

        yield start
        server.shutdown()
        thread.join()


class Clock:
    """A clock that only waiting moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waits: list[float] = []

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.waits.append(seconds)


def folder(retry_s: float, clock: Clock) -> ObjectFolder:
    return ObjectFolder("s3://bucket/run", retry_s, clock=lambda: clock.now, wait=clock.wait)


def test_more_than_ten_failures_are_outlasted(
    monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    monkeypatch.setattr(objects, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(objects, "_MAX_PAUSE_S", 0.001)
    counted = serve("503", 40)
    assert CheckpointStore("s3://bucket/run", retry_s=300.0)._backend.names("") == ["a"]
    assert counted.num_requests == 41


def test_a_cut_listing_is_asked_for_again(serve: Serve) -> None:
    clock, counted = Clock(), serve("cut", 12)
    assert folder(300.0, clock).names("") == ["a"]
    assert counted.num_requests == 13
    assert clock.waits[:4] == [0.1, 0.2, 0.4, 0.8]
    assert max(clock.waits) == 15.0


def test_a_listing_that_is_always_cut_ends_when_its_time_does(serve: Serve) -> None:
    clock = Clock()
    serve("cut", 1000)
    with pytest.raises(feeder.CheckpointError, match="cannot list checkpoint 's3://bucket/run/'"):
        folder(100.0, clock).names("")
    assert 100.0 - 15.0 < clock.now <= 100.0


def test_a_listing_that_is_refused_is_told_at_once(serve: Serve) -> None:
    clock, counted = Clock(), serve("404", 1000)
    with pytest.raises(feeder.CheckpointError, match="404 Not Found"):
        folder(100.0, clock).names("")
    assert (counted.num_requests, clock.waits) == (1, [])
