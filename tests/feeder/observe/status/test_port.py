"""The status port: what is at each path, to whom, and how it ends."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import numpy as np
import pytest

import feeder
from feeder.errors import ClosedError, ConfigError
from feeder.observe.metrics import names
from feeder.observe.status import port as port_module
from feeder.observe.status.board import Board
from feeder.observe.status.port import StatusPort, parse_place
from feeder.observe.status.routes import answer, is_near
from feeder.service.server import serve as server_module
from figures import feed, figures
from project import ROOT
from samples import parse
from small import WAIT_S, Aside, Held, Pure, make

pytestmark = pytest.mark.served

PATHS = ["/", "/page.css", "/page.js", "/icon.svg", "/stats.json", "/metrics", "/healthz",
         "/readyz", "/debug/threads"]  # fmt: skip


class Got(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def place_of(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rstrip("/").rpartition(":")
    return host.strip("[]"), int(port)


def get(url: str, path: str = "/", method: str = "GET", **headers: str) -> Got:
    connection = http.client.HTTPConnection(*place_of(url), timeout=WAIT_S)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return Got(response.status, response.headers, response.read())
    finally:
        connection.close()


@pytest.fixture(autouse=True)
def a_slow_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_LOOK_S", 8.0)


@pytest.fixture
def url() -> Iterator[str]:
    """The page of a feed that runs."""
    with make(Pure(1000, 4)) as coordinator, coordinator.serve_status() as port:
        next(coordinator["train"])
        yield port.url


# ---- what is there


def test_every_path_answers(url: str) -> None:
    for path in PATHS:
        got, head = get(url, path), get(url, path, "HEAD")
        assert (got.status, head.status, head.body) == (200, 200, b""), path
        assert int(got.headers["Content-Length"]) == len(got.body) > 0
        assert int(head.headers["Content-Length"]) > 0
        assert got.headers["Cache-Control"] == "no-store"
        assert got.headers["X-Content-Type-Options"] == "nosniff"
        assert "default-src 'none'" in got.headers["Content-Security-Policy"]
    for path in ("/nothing", "/../pyproject.toml", "/page.html", "/stats"):
        got = get(url, path)
        assert got.status == 404
        assert b"/metrics" in got.body


def test_nothing_can_be_changed(url: str) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert get(url, "/", method).status == 501


def test_stats_and_metrics_are_the_figures_with_verdicts_and_curves(url: str) -> None:
    got = get(url, "/stats.json?since=now")
    assert got.headers["Content-Type"] == "application/json"
    told = json.loads(got.body)
    assert told.keys() == {"figures", "verdicts", "history"}
    assert told["figures"]["feeds"][0]["queues"][0]["batches"] == 1
    assert told["verdicts"]["train"].keys() == {"kind", "why", "advice"}
    assert len(told["history"]["train"][0]) == 5
    got = get(url, "/metrics")
    assert got.headers["Content-Type"].startswith("text/plain; version=")
    found = {name for name, _ in parse(got.body)}
    assert {"feeder_rows_total", "feeder_verdict", "feeder_fetch_seconds_total"} <= found
    assert found <= names()


def test_who_asks_first_is_told_a_verdict_too() -> None:
    made = figures(feed(state="ended"))
    for path in ("/metrics", "/stats.json"):
        board = Board(lambda: made)
        assert b"ended" in answer(board, path, peer="127.0.0.1", host=None).body
        assert board.kinds(made) == {"train": "ended"}


def test_no_row_is_shown() -> None:
    """Rows that would be found in any text: the same ten digits again and again."""
    rows = np.full((4, 2), 1_357_924_679 + 1)  # the sum is in no stack's source
    coordinator = make(lambda call: [rows], epochs=None)
    with coordinator, coordinator.serve_status() as port:
        next(coordinator["train"])
        for path in PATHS:
            assert str(rows[0, 0]).encode() not in get(port.url, path).body, path


def test_the_page_asks_nobody_else_for_anything(url: str) -> None:
    for path in ("/", "/page.css", "/page.js"):
        text = get(url, path).body.decode()
        assert "//" not in text.replace("http://www.w3.org/", "").replace("\n//", "").replace(
            "; //", ""
        ), path
        assert "innerHTML" not in text


# ---- whether all is well


def test_a_feed_that_failed_is_not_ready_but_healthy() -> None:
    def fetch(call: feeder.Call) -> Any:
        raise OSError("no disk")

    coordinator = make(fetch)
    with coordinator, coordinator.serve_status() as port:
        assert get(port.url, "/readyz").status in (200, 503)
        with pytest.raises(feeder.FetchError):
            next(coordinator["train"])
        got = get(port.url, "/readyz")
        assert got.status == 503
        assert b"feed 'train': FetchError: worker 0, call 0" in got.body
        assert get(port.url, "/healthz")[::2] == (200, b"ok\n")


def test_a_process_that_cannot_tell_is_neither() -> None:
    def look() -> Any:
        raise ClosedError("the server is closed")

    with StatusPort(0, look) as port:
        for path in ("/healthz", "/readyz", "/stats.json", "/metrics"):
            got = get(port.url, path)
            assert (got.status, got.body) == (503, b"the server is closed\n")
        assert get(port.url, "/").status == 200


def test_a_bug_of_ours_is_told_to_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Board, "everything", lambda board: 1 / 0)
    with StatusPort(0, lambda: figures(feed())) as port:
        got = get(port.url, "/stats.json")
    assert (got.status, got.body) == (500, b"ZeroDivisionError\n")
    assert "the status page failed" in caplog.text


# ---- to whom


def test_who_is_near() -> None:
    near = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"]
    far = ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "localhost.evil.example", ""]
    assert [host for host in near + far if is_near(host)] == near


def test_stacks_are_for_this_host_alone() -> None:
    board = Board(lambda: figures(feed()))
    near, far = ("127.0.0.1", "localhost:9478"), ("10.0.0.1", "feeder.example:9478")
    for path in PATHS:
        assert answer(board, path, peer=near[0], host=near[1]).status == 200
        status = 403 if path == "/debug/threads" else 200
        assert answer(board, path, peer=far[0], host=far[1]).status == status, path
    for peer, host in ((far[0], near[1]), (near[0], None)):
        got = answer(board, "/debug/threads?x", peer=peer, host=host)
        assert got.status == 403
        assert b"File" not in got.body


def test_all_is_for_those_who_mean_this_host(url: str) -> None:
    """A browser here may be told by another host's page that a name of that host is this one."""
    ours = ("localhost:9478", "localhost", "127.0.0.1:9478", "[::1]:9478", "::1")
    others = ("evil.example:9478", "evil.example", "", "10.0.0.1")
    board = Board(lambda: figures(feed()))
    for path in PATHS:
        for host in (*ours, *others):
            got = answer(board, path, peer="127.0.0.1", host=host)
            assert got.status == (200 if host in ours else 403), (path, host)
    # The name is that of the request's head.
    assert get(url, "/stats.json", Host=ours[0]).status == 200
    assert get(url, "/stats.json", Host=others[0]).status == 403


def test_stacks_name_every_thread() -> None:
    fetch = Held()
    coordinator = make(fetch, num_worker_threads=1)
    with coordinator, coordinator.serve_status() as port:
        assert fetch.entered.wait(WAIT_S)
        text = get(port.url, "/debug/threads").body.decode()
        fetch.release()
    assert "feeder train fetcher 0" in text
    assert "feeder train enqueuer" in text
    assert "_released.wait" in text
    assert "MainThread" in text


def test_it_listens_to_this_host_by_itself() -> None:
    with StatusPort("0", lambda: figures()) as port:
        assert port.url.startswith("http://127.0.0.1:")
    with StatusPort("[::1]:0", lambda: figures()) as port:
        assert port.url.startswith("http://[::1]:")
        assert get(port.url, "/healthz").status == 200


# ---- wrong places


PLACES = {
    "80": ("127.0.0.1", 80), 9478: ("127.0.0.1", 9478), "0.0.0.0:1": ("0.0.0.0", 1),
    ":80": ("127.0.0.1", 80), "[::]:80": ("::", 80), "host.name:65535": ("host.name", 65535),
}  # fmt: skip
NO_PLACES = ["", "host", "host:", "65536", "-1", "1.5", "http://x:80/", "8O", None, True, 1.5, "²"]


def test_places() -> None:
    assert {text: parse_place(text) for text in PLACES} == PLACES
    for text in NO_PLACES:
        with pytest.raises(ConfigError, match=r"expected \[HOST:\]PORT"):
            parse_place(text)  # type: ignore[arg-type]
    for host in ("no.such.host.invalid", "x" * 300):
        with pytest.raises(ConfigError, match="is not known here"):
            StatusPort(f"{host}:0", lambda: figures())


def test_a_port_in_use_is_told_and_nothing_is_left() -> None:
    with StatusPort(0, lambda: figures()) as port:
        text = port.url.removeprefix("http://").rstrip("/")
        with pytest.raises(ConfigError, match=r"cannot show the status at 127.*in use.*free port"):
            StatusPort(text, lambda: figures())


# ---- its life


def test_it_closes_at_once_with_slow_clients_in_the_middle() -> None:
    with ExitStack() as stack:
        port = StatusPort(0, lambda: figures(feed()))
        slow = [stack.enter_context(socket.create_connection(place_of(port.url))) for _ in range(5)]
        for client in slow:
            client.sendall(b"GET / HT")
        assert get(port.url, "/healthz").status == 200, "others are answered"
        Aside(port.close).result()
        port.close()
        with pytest.raises(OSError):
            get(port.url)


def test_clients_that_say_nothing_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a byte now and then."""
    monkeypatch.setattr(port_module, "_REQUEST_S", 0.1)
    with (
        StatusPort(0, lambda: figures()) as port,
        socket.create_connection(place_of(port.url)) as silent,
        socket.create_connection(place_of(port.url)) as slow,
    ):
        silent.settimeout(WAIT_S)
        assert silent.recv(1) == b""
        slow.settimeout(0.02)
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(int(WAIT_S / 0.02)):
                slow.sendall(b"G")
                with suppress(TimeoutError):
                    assert slow.recv(1) == b""
                    return
            pytest.fail("it still reads")


def test_a_probe_is_answered_beside_many_slow_clients() -> None:
    with ExitStack() as stack:
        port = stack.enter_context(StatusPort(0, lambda: figures(feed())))
        place = place_of(port.url)
        for _ in range(2 * port_module._PLACES["reading"]):
            slow = stack.enter_context(socket.create_connection(place))
            slow.sendall(b"GET /healthz HT")
        for path in ("/healthz", "/readyz", "/stats.json"):
            assert get(port.url, path).status == 200


def test_a_probe_keeps_its_place_beside_many_who_want_the_figures() -> None:
    """Who came first of them makes room."""
    entered, gate = threading.Semaphore(0), threading.Event()

    def look() -> Any:
        entered.release()
        assert gate.wait(WAIT_S)
        return figures(feed())

    with ExitStack() as stack:
        port = stack.enter_context(StatusPort(0, look))
        stack.callback(gate.set)
        assert entered.acquire(timeout=WAIT_S), "the sampler"
        probe = Aside(lambda: get(port.url, "/healthz").status)
        assert entered.acquire(timeout=WAIT_S)
        crowd = []
        for _ in range(port_module._PLACES["answering"] + 1):
            crowd.append(stack.enter_context(socket.create_connection(place_of(port.url))))
            crowd[-1].settimeout(WAIT_S)
            crowd[-1].sendall(b"GET /stats.json HTTP/1.0\r\n\r\n")
            assert entered.acquire(timeout=WAIT_S)
        assert crowd[0].recv(1) == b""
        gate.set()
        assert probe.result() == 200
        assert crowd[1].recv(1) == b"H"


def test_where_no_thread_can_be_had_later_requests_are_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with StatusPort(0, lambda: figures(feed())) as port:
        with monkeypatch.context() as patch:

            def refuse(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(OSError):
                get(port.url, "/healthz")
        assert get(port.url, "/healthz").status == 200


GARBAGE = [b"\0\xff\n\n", b"GET\n\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 70_000 + b"\r\n\r\n",
           b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n"]  # fmt: skip


def test_garbage_is_answered_or_dropped(url: str) -> None:
    """And leaves no thread, as many requests do not."""
    for data in GARBAGE:
        with socket.create_connection(place_of(url)) as client, suppress(ConnectionResetError):
            client.settimeout(WAIT_S)
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while client.recv(4096):
                pass
    for _ in range(20):
        assert get(url, "/healthz").status == 200
    named = [thread for thread in threading.enumerate() if "request" in thread.name]
    assert len(named) < 5


@pytest.mark.process
def test_a_forked_child_does_not_keep_the_port() -> None:
    """Otherwise it could not be taken again for as long as the child lives, and a client would wait
    for the end of its answer."""
    code = """
import os
import socket
from feeder.observe.figures import build_figures
from feeder.observe.status.port import StatusPort

port = StatusPort(0, lambda: build_figures([], 0.0))
name, _, number = port.url.removeprefix("http://").rstrip("/").rpartition(":")
clients = [socket.create_connection((name, int(number))) for _ in range(2)]
clients[1].sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
assert clients[1].recv(1)  # The first was accepted before.
mine = {str(client.fileno()) for client in clients}
child = os.fork()
if not child:
    left = set(os.listdir("/proc/self/fd")) - mine
    sockets = [fd for fd in left if os.path.exists(p := f"/proc/self/fd/{fd}")
               and os.readlink(p).startswith("socket:")]
    os._exit(7 if port._listener.fileno() == -1 and not sockets else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
port.close()
"""
    # From 3.12 on Python warns of a fork beside threads, which is what this is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
