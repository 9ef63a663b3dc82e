"""A small object store over HTTP, for tests: ranges, etags, S3's listings, and faults that a test
asks for. Objects are addressed as `http://HOST:PORT/bucket/key`, and as `s3://bucket/key`."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

_PACE_BYTES, _LATE_S = 1 << 16, 0.3
Fault = Callable[[int, str, tuple[int, int] | None], str]
"""By a request's number, its path and its range: the fault that it meets, "" for none."""


class Numbers:
    """An object that holds the numbers from one on, 8 bytes each, by formula: of any size."""

    def __init__(self, first: int, num: int) -> None:
        self.first, self.num = first, num

    def __repr__(self) -> str:
        return f"Numbers({self.first}, {self.num})"

    def __len__(self) -> int:
        return 8 * self.num

    def __getitem__(self, span: slice) -> bytes:
        numbers = np.arange(span.start // 8, -(-span.stop // 8), dtype="<u8") + self.first
        return numbers.tobytes()[span.start % 8 :][: span.stop - span.start]


class FarServer:
    """Objects by path, such as "bucket/a.bin"; a test changes them and looks at what was asked.

    Threads of the server read `objects` and `fault`, and add to `asked` under the lock.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes | Numbers] = {}
        self.fault: Fault = lambda number, path, span: ""
        self.asked: list[tuple[str, tuple[int, int] | None]] = []
        """Of each GET of an object its path and range."""
        self.listings = 0
        self.deepest = 0
        """The most answers of which each was asked for when the one before had begun to come."""
        self.compares = True
        """Whether it looks at the tags that it is asked to compare."""
        self.latency_s = 0.0
        """How long each answer is on its way."""
        self.bytes_per_s = 0.0
        """What all answers share; 0 is no bound."""
        self._way_is_free_at = 0.0
        self.takes = True
        """Whether objects may be written."""
        self.given_up = threading.Event()
        """Set when the test ends: what stalls stalls until then."""
        self._lock = threading.Lock()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.far = self
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    def etag(self, path: str) -> str:
        data = self.objects[path]
        content = repr(data).encode() if isinstance(data, Numbers) else data
        return f'"{hashlib.md5(content).hexdigest()}"'

    def note(self, path: str, span: tuple[int, int] | None) -> str:
        """Count a request; returns its fault."""
        with self._lock:
            self.asked.append((path, span))
            number = len(self.asked) - 1
        return self.fault(number, path, span)

    def come(self, depth: int) -> None:
        """An answer begins to come, to a request that so many answers went before."""
        with self._lock:
            self.deepest = max(self.deepest, depth + 1)

    def send(self, write: Callable[[Any], Any], body: bytes) -> None:
        """Send a body, as quick as the way is."""
        if not self.bytes_per_s:
            write(body)
            return
        for start in range(0, len(body), _PACE_BYTES):
            part = memoryview(body)[start : start + _PACE_BYTES]
            with self._lock:
                now = time.monotonic()
                # A machine that is late catches up.
                begin = max(now - _LATE_S, self._way_is_free_at)
                self._way_is_free_at = begin + len(part) / self.bytes_per_s
                left = self._way_is_free_at - now
            if left > 0:
                self.given_up.wait(left)
            write(part)

    def options(self) -> dict[str, Any]:
        """Storage options by which `s3://` leads here."""
        return {
            "endpoint": self.address, "access_key_id": "x", "secret_access_key": "y",
            "region": "us-east-1", "allow_http": "true",
        }  # fmt: skip


@contextmanager
def far_server() -> Iterator[FarServer]:
    far = FarServer()
    thread = threading.Thread(target=far._http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield far
    finally:
        far.given_up.set()
        far._http.shutdown()
        thread.join(20)
        far._http.server_close()


class _Http(ThreadingHTTPServer):
    # Joined when the server is closed.
    daemon_threads = False
    request_queue_size = 64
    far: FarServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away when they will."""


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    timeout = 20

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        if "list-type" in url.query:
            self._list(url.path.strip("/"), parse_qs(url.query))
        else:
            self._answer(with_body=True)

    def do_PUT(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.far.takes:
            self.server.far.objects[path] = data
        self.send_response(200 if self.server.far.takes else 403)
        self.send_header("ETag", '"e"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _answer(self, *, with_body: bool) -> None:
        far, path = self.server.far, unquote(urlsplit(self.path).path).strip("/")
        depth = far.deepest
        far.given_up.wait(far.latency_s)
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        span = (int(found[1]), int(found[2]) + 1) if found else None
        fault = far.note(path, span) if with_body else ""
        if fault.isdigit():
            return self._refuse(int(fault))
        if fault == "gone":
            self.close_connection = True
            return None
        data = far.objects.get(path)
        if data is None:
            return self._refuse(404)
        wanted = self.headers.get("If-Match")
        if far.compares and wanted and wanted != far.etag(path):
            return self._refuse(412)
        start, stop = span or (0, len(data))
        if start >= len(data) and span:
            return self._refuse(416)
        stop = min(stop, len(data))
        if fault == "shifted":
            start, stop = start + 1, stop + 1
        far.come(depth)
        self.send_response(206 if span else 200)
        if span:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start + (fault == "unended")))
        self.send_header("ETag", far.etag(path))
        self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        self.end_headers()
        if not with_body:
            return None
        body = data[start:stop]
        if fault == "cut":
            body = body[: len(body) // 2]
        if fault == "stall":
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            far.given_up.wait(20)
            return None
        far.send(self.wfile.write, body)
        return None

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _list(self, bucket: str, query: dict[str, list[str]]) -> None:
        far = self.server.far
        far.listings += 1
        start = f"{bucket}/{query.get('prefix', [''])[0]}"
        rows = "".join(
            f"<Contents><Key>{path.partition('/')[2]}</Key><Size>{len(data)}</Size>"
            f"<LastModified>2015-10-21T07:28:00.000Z</LastModified><ETag>{far.etag(path)}</ETag>"
            "</Contents>"
            for path, data in sorted(far.objects.items())
            if path.startswith(start)
        )
        body = (
            '<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>'
            f"{rows}</ListBucketResult>"
        ).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
