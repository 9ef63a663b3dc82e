"""`feeder top` and `feeder serve --status`, in processes of their own and here."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

import feeder
from commands import END_S, end, folder, told
from commands import serving as serving_process
from conformance.served import reading, serving
from feeder import cli
from feeder.cli.frames import make_frame, plain
from feeder.observe.status.history import History
from figures import consumer, feed, figures, queue, service, store, worker
from small import Pure, make

__all__ = ["folder"]
pytestmark = pytest.mark.served


def factory() -> feeder.Coordinator:
    return make(Pure(100_000, 4), coordinator=feeder.Coordinator())


@pytest.fixture(autouse=True)
def wide(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


def drawn(history: History, trouble: str = "", width: int = 100) -> str:
    """Return a frame as text."""
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(make_frame(history, "ipc:///there", trouble))
        return console.export_text()


def read_twice(**fields: object) -> History:
    history = History()
    slow = (worker(0), worker(1))
    history.add(figures(feed(age_s=10.0, workers=slow), at_s=10.0))
    queues = (
        queue(0, batches=100, bytes=10**8, wait_s=6.0, waiting=3, consumer=consumer()),
        queue(1, waiting=7),
    )
    workers = (worker(0, calls=100, fetch_s=0.2), worker(1, calls=100, fetch_s=4.1, wait_s=3.0))
    later = {
        "age_s": 20.0, "queues": queues, "workers": workers, "chunks_wait_s": 9.0,
        "batches": 100, "bytes": 10**8, "service": service(),
    }  # fmt: skip
    history.add(figures(feed(**(later | fields)), at_s=20.0))
    return history


# ---- a frame


def test_a_frame_has_feeds_queues_consumers_workers_and_the_verdict() -> None:
    text = drawn(read_twice())
    for words in (
        "ipc:///there  pid 5 on host", "train (running)", "stalled-queue", "10.0 batches/s",
        "10 MB/s", "trainer waits 60%", "3/10", "7/10", "pid 7 on host, shared", "nobody",
        "41 ms", "2 ms", "30%",
    ):  # fmt: skip
        assert words in text, words


def test_what_comes_from_stores_is_told() -> None:
    text = drawn(read_twice(store=store(
        requests=30, bytes=10**8, retries=2, hits=300, waits=100, ahead=10**7, coming=3, wanted=4
    )))  # fmt: skip
    words = " ".join(text.replace("│", " ").split())
    assert "store 10 MB/s in 3 requests/s, 2 retries; 75% of reads found their block; " in words
    assert "10 MB ahead, blocks coming 3, wanted 4" in words
    assert "store " not in drawn(read_twice())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_frame_fits_its_terminal(width: int) -> None:
    text = drawn(read_twice(), "no answer from there", width)
    assert max(map(len, text.splitlines())) <= width
    assert "no answer from there" in text


def test_of_many_workers_those_are_shown_that_are_waited_for() -> None:
    workers = tuple(worker(i, calls=1, wait_s=float(i == 55)) for i in range(60))
    text = drawn(read_twice(workers=workers))
    assert "\n│ 55 " in text
    assert "and 44 more" in text


def test_nothing_that_is_read_can_move_the_cursor() -> None:
    evil = "\x1b[2Jevil\r\n\x07"
    held = queue(consumer=consumer(who=evil))
    text = drawn(read_twice(name=evil, queues=(held,), state="failed", failure=evil))
    assert not set(text) & {"\x1b", "\r", "\x07"}
    assert plain("é\x1b[31m\n") == "é?[31m?"
    assert "[bold]x[/bold] (running)" in drawn(read_twice(name="[bold]x[/bold]"))


# ---- the command


def test_once_prints_one_frame(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(factory) as server, reading(server) as consumer:
        for _ in range(5):
            next(consumer)
        assert cli.main(["top", server.addresses[0], "--once", "--every", "0.05"]) == 0
        assert consumer.stats()["reconnects"] == 0
        assert next(consumer).step == 5
    out = capsys.readouterr().out
    assert out.startswith(f"feeder top {server.addresses[0]}")
    assert "train (running)" in out
    assert "shared" in out


@pytest.mark.process
def test_it_shows_this_users_server_by_itself(folder: Path) -> None:
    with feeder.serve(factory):
        done = subprocess.run(
            [sys.executable, "-m", "feeder", "top", "--every", "0.05"],
            capture_output=True, text=True, timeout=END_S, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "train (waiting)" in done.stdout
    assert "for a consumer on queue 0" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("top --keys nowhere --once", "nowhere"),
        ("serve served_feeds:make --status eighty", "[HOST:]PORT"),
        ("serve served_feeds:make --status 127.0.0.1:99999", "[HOST:]PORT"),
        ("serve served_feeds:make --status no.such.host.invalid:0", "not known here"),
    ],
)
def test_what_cannot_be_shown_is_told(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words.split()) != 0
    assert says in told(capsys)


def test_without_rich_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(feeder.ConfigError, match=r"needs rich: pip install 'feedworks\[cli\]'"):
        from feeder.cli import top

        top.main(None)  # type: ignore[arg-type]


@pytest.mark.process
def test_live_it_draws_until_it_is_interrupted() -> None:
    with serving(factory) as server, reading(server) as consumer:
        next(consumer)
        text = live(server.addresses[0], until=" (running)")
    assert "\x1b[?1049h" in text and "\x1b[?1049l" in text, "the screen is given back"


def live(address: str, until: str) -> str:
    """Run it at a terminal until some words have come, interrupt it, and return all that came."""
    controller, terminal = pty.openpty()
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "feeder", "top", address, "--every", "0.05"],
            stdout=terminal, stderr=terminal, stdin=terminal,
        )  # fmt: skip
        os.close(terminal)
        text, ends, is_told = "", time.monotonic() + END_S, False
        for piece in pieces(controller, ends):
            text += piece
            if until in text and not is_told:
                is_told = True
                process.send_signal(signal.SIGINT)
        assert process.wait(END_S) == 0
        return text
    finally:
        os.close(controller)


def pieces(descriptor: int, ends: float) -> Iterator[str]:
    while select.select([descriptor], [], [], max(0.0, ends - time.monotonic()))[0]:
        try:
            data = os.read(descriptor, 1 << 16)
        except OSError:  # the other end is closed
            return
        yield data.decode(errors="replace")


# ---- serve --status


@pytest.mark.process
def test_serve_shows_its_status() -> None:
    with serving_process("make", "--status", "0") as (process, line):
        assert line.startswith("serving feed 'train', 1 queue, at ipc://")
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("status page: http://127.0.0.1:")
        url = line.split()[-1]
        assert urllib.request.urlopen(url + "readyz", timeout=END_S).read() == b"ready\n"
        assert end(process, signal.SIGTERM) == ""
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=END_S)
