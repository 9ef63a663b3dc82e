"""`feeder top` and `feeder serve --status`, in processes of their own and here."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

import feeder
from conformance.served import reading, serving
from feeder import cli
from feeder.cli.frames import make_frame, plain
from feeder.observe.status.history import History
from feeder.observe.status.port import StatusPort
from figures import consumer, feed, figures, queue, service, worker
from project import ROOT
from small import Pure, make

pytestmark = pytest.mark.served

END_S = 20.0
FEEDS = """
import feeder
import numpy as np

def make():
    return feeder.init_data_input_workers(
        ["x"], lambda call: [np.ones((8, 3))], 8, epochs=None, coordinator=feeder.Coordinator()
    )
"""


def factory() -> feeder.Coordinator:
    return make(Pure(100_000, 4), coordinator=feeder.Coordinator())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "top_feeds.py").write_text(FEEDS)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_a_frame_says_that_the_server_is_away() -> None:
    assert "no answer from there; trying again" in drawn(read_twice(), "no answer from there")


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_frame_fits_its_terminal(width: int) -> None:
    assert max(map(len, drawn(read_twice(), width=width).splitlines())) <= width


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


def test_markup_in_names_is_text() -> None:
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


def test_with_keys_it_needs_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keygen", "keys"]) == 0
    with feeder.serve(factory, "tcp://127.0.0.1:0", keys=folder / "keys") as server:
        words = ["top", server.addresses[0], "--once", "--every", "0.05"]
        assert cli.main([*words, "--keys", "keys"]) == 0
        assert "train (waiting)" in capsys.readouterr().out
        assert cli.main(words) == 1
        error = capsys.readouterr().err
    assert error.startswith("feeder: ")
    assert "keys" in error


WRONG = [
    (["top", "nonsense"], 2, "nonsense"),
    (["top", "--every", "0"], 2, "above 0"),
    (["top", "--every", "soon"], 2, "soon"),
    (["top", "a", "b"], 2, ""),
    (["top", "--keys", "nowhere", "--once"], None, "nowhere"),
    (["serve", "top_feeds:make", "--status", "eighty"], None, "[HOST:]PORT"),
    (["serve", "top_feeds:make", "--status", "127.0.0.1:99999"], None, "[HOST:]PORT"),
    (["serve", "top_feeds:make", "--status", "no.such.host.invalid:0"], None, "not known here"),
]


@pytest.mark.parametrize(("words", "status", "told"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_wrong_usage_is_one_line(
    words: list[str], status: int | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = cli.main(words)
    except SystemExit as end:
        found = end.code
    error = capsys.readouterr().err
    assert found != 0
    assert status is None or found == status
    assert told in error
    assert "Traceback" not in error
    assert len([line for line in error.splitlines() if not line.startswith("usage:")]) <= 2


def test_a_port_in_use_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with StatusPort(0, lambda: figures()) as port:
        place = port.url.removeprefix("http://").rstrip("/")
        assert cli.main(["serve", "top_feeds:make", "--bind=ipc://a", "--status", place]) != 0
    error = capsys.readouterr().err
    assert error.startswith("feeder: --status: cannot show the status at ")
    assert "in use" in error
    assert error.count("\n") == 1


def test_without_rich_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(feeder.ConfigError, match=r"needs rich: pip install 'feedworks\[cli\]'"):
        from feeder.cli import top

        top.main(None)  # type: ignore[arg-type]


def test_nobody_answers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from feeder.service.client.monitor import Monitor

    monkeypatch.setattr(Monitor.fetch, "__defaults__", (0.1,))
    assert cli.main(["top", "ipc://nobody", "--once"]) == 1
    assert "no answer from ipc://" in capsys.readouterr().err


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
    with subprocess.Popen(
        [sys.executable, "-m", "feeder", "serve", "top_feeds:make", "--status", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None and process.stderr is not None
            assert process.stdout.readline().startswith("serving feed 'train', 1 queue, at ipc://")
            line = process.stdout.readline()
            assert line.startswith("status page: http://127.0.0.1:")
            url = line.split()[-1]
            assert urllib.request.urlopen(url + "readyz", timeout=END_S).read() == b"ready\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(END_S) == 0
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_the_page_of_a_server_is_gone_with_it() -> None:
    with feeder.serve(factory, "tcp://127.0.0.1:0", status=0) as server:
        url = server.status_url
        assert url is not None
        assert threading.active_count() > 1
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=END_S)
