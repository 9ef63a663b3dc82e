"""`feeder serve`: in a process of its own where signals and exit statuses are what is seen."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import feeder
import served_feeds
from commands import (
    END_S,
    READY_S,
    command,
    end,
    folder,
    read_line,
    serving,
    started,
    status,
    told,
)  # fmt: skip
from feeder.cli import serve

__all__ = ["folder"]
pytestmark = pytest.mark.usefixtures("folder")


# ---- in a process


@pytest.mark.process
@pytest.mark.parametrize(
    ("number", "kind"), [(signal.SIGTERM, "file"), (signal.SIGINT, "abstract")]
)
def test_serve_says_where_and_ends_with_0_at_a_signal(
    number: signal.Signals, kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It tells systemd, too."""
    place = str(folder / "notify") if kind == "file" else f"@feeder-notify-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(place.replace("@", "\0"))
        systemd.settimeout(READY_S)
        monkeypatch.setenv("NOTIFY_SOCKET", place)
        with serving("make", "--queues=2") as (process, line):
            default = f"ipc://{folder}/runtime/feeder/default.sock"
            assert line == f"serving feed 'train', 2 queues, at {default}\n"
            assert systemd.recv(100) == b"READY=1"
            assert end(process, number) == ""
            assert systemd.recv(100) == b"STOPPING=1"


@pytest.mark.process
def test_serve_makes_some_of_the_queues(folder: Path) -> None:
    """As a flag says it, or a file; the other half is served here."""
    config = folder / "feed.toml"
    config.write_text('[server]\nqueues = "2-3/4"\naddresses = "ipc://half"\n')
    with serving("make_even", "--queues=0-1/4") as (process, line):
        assert line.startswith("serving feed 'train', queues 0 to 1 of 4, at ")
        with serving("make_even", f"--config={config}") as (other, line):
            assert line.startswith("serving feed 'train', queues 2 to 3 of 4, at ")
            places = [None, "ipc://half"]
            steps = []
            for queue in (0, 3):
                with feeder.connect(places[queue // 2], queue=queue, timeout=READY_S) as consumer:
                    partner = feeder.connect(places[queue // 2], queue=queue ^ 1, timeout=READY_S)
                    with partner:
                        steps += [next(consumer).step, next(consumer).step]
            assert steps == [0, 4, 3, 7]
            assert end(other, signal.SIGTERM) == ""
        assert end(process, signal.SIGTERM) == ""


def blocks(task: Path, number: signal.Signals) -> bool:
    """Whether a thread blocks a signal."""
    (mask,) = re.findall(r"^SigBlk:\s*(\w+)$", (task / "status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.process
def test_serve_ends_whatever_thread_the_signal_comes_to() -> None:
    """The system chooses one; under a debugger it is not the main thread."""
    with serving("make") as (process, _):
        tasks = Path(f"/proc/{process.pid}/task")
        # Threads of ZeroMQ block all signals: one that is sent to such a thread alone waits there.
        others = [
            int(task.name)
            for task in tasks.iterdir()
            if int(task.name) != process.pid and not blocks(task, signal.SIGTERM)
        ]
        assert ctypes.CDLL(None).tgkill(process.pid, others[0], signal.SIGTERM) == 0
        assert process.wait(END_S) == 0


@pytest.mark.process
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_serve_ends_at_a_signal_while_it_starts(number: signal.Signals, status: int) -> None:
    with started("serve", "served_feeds:make_for_ever") as process:
        assert read_line(process) == "being made\n"
        assert end(process, number, status) == ""


@pytest.mark.process
def test_serve_tells_a_fetch_function_that_hangs() -> None:
    with serving("make_slow") as (process, _):
        assert status("consume", "--limit=2") == 0
        assert "threading.Event().wait()" in end(process, signal.SIGTERM, 1)


@pytest.mark.process
@pytest.mark.parametrize(("target", "failed"), [("make", 0), ("make_bad", 1)])
def test_serve_ends_by_itself_where_everything_was_used(target: str, failed: int) -> None:
    with (
        serving(target, "--exit-when=acknowledged") as (process, _),
        started("consume") as consumer,
    ):
        assert process.wait(END_S) == failed
        assert process.stderr is not None
        log = process.stderr.read()
        # A server whose feed has failed may be gone before its consumer has heard of it.
        assert failed or consumer.wait(END_S) == 0
    assert log.startswith("feed 'train' has failed: worker " if failed else "")
    assert log.count("Traceback") == log.count('raise OSError("no more disk")') == failed


@pytest.mark.process
def test_keys_are_read_again_when_they_change_and_at_sighup(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status("keygen", "keys", "--name=first") == 0
    with serving("make", "--bind=tcp://127.0.0.1:0", "--keys=keys") as (process, line):
        consume = ("consume", line.split()[-1], "--limit=1")
        shutil.copytree("keys", "late")
        assert status("keygen", "late", "--name=second") == 0
        os.unlink("late/first.key_secret")
        assert status(*consume, "--keys=late") == 1
        assert "it does not know this client's key" in capsys.readouterr().err
        shutil.copy("late/clients/second.key", "keys/clients")
        assert status(*consume, "--keys=late") == 0
        os.unlink("keys/clients/second.key")
        assert status(*consume, "--keys=late") == 1
        # A list that nobody could connect with is not taken.
        os.rename("keys/clients", "keys/away")
        process.send_signal(signal.SIGHUP)
        assert status(*consume, "--keys=keys") == 0
        end(process, signal.SIGTERM)
    with serving("make") as (process, _):
        assert end(process, signal.SIGHUP) == ""


@pytest.mark.process
def test_what_killed_servers_left_is_removed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    # A short path: of a long one the socket would lie in /tmp, among those of other servers.
    with tempfile.TemporaryDirectory(prefix="fd") as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        for name in ("first", "second"):
            with serving("make", f"--bind=ipc://{name}") as (process, _):
                process.kill()
                process.wait(END_S)
        old, new = sorted(Path(runtime, "feeder").glob("*.arenas"))
        os.utime(old, (1, 1))
        with serving("make", "--bind=ipc://third") as (process, _):
            # The young one may be of a server that is about to listen.
            assert (old.exists(), new.exists()) == (False, True)
            end(process, signal.SIGTERM)


@pytest.mark.process
def test_serve_tells_in_a_line_how_many_descriptors_it_needs() -> None:
    words = command("serve", "served_feeds:make", "--queues=9")

    def limited(num: str) -> list[str]:
        return ["sh", "-c", f'ulimit -Sn {num}; ulimit -Hn {num}; exec "$@"', "sh", *words]

    done = subprocess.run(limited("40"), capture_output=True, text=True, timeout=END_S)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    needs = re.search(r"may have 40 descriptors, and a server for 9 consumers needs (\d+):", line)
    assert needs is not None, line
    with subprocess.Popen(limited(needs[1]), stdout=subprocess.PIPE, text=True) as process:
        try:
            assert read_line(process).startswith("serving feed")
        finally:
            process.kill()


# ---- here


def test_serve_takes_a_coordinator() -> None:
    assert serve.load("served_feeds", "coordinator") is served_feeds.coordinator


def test_serve_looks_in_the_current_folder_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an installed command: Python itself has not put the folder on the path."""
    monkeypatch.setattr(sys, "path", [name for name in sys.path if name != ""])
    monkeypatch.delitem(sys.modules, "served_feeds")
    made = serve.load("served_feeds", "make")
    assert made.__code__.co_filename == str(folder / "served_feeds.py")


@pytest.mark.served
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no_such_module:make"], "no module 'no_such_module'"),
        (["served_feeds.inner:make"], "no module 'served_feeds.inner'"),
        (["served_feeds:nothing"], "no attribute 'nothing'"),
        (["served_feeds:number"], "'served_feeds:number' is int, expected a function"),
        (["served_feeds:make_slow", "--resume=missing"], "--resume is 'missing', which is not the"),
        (["served_feeds:fetch"], "cannot be called without arguments"),
        (["served_feeds:make_nothing"], "'make_nothing' returned int"),
        (["served_feeds:make_wrongly"], "'served_feeds:make_wrongly' raised OSError: no disk, at"),
        (["served_feeds:make", "--bind=tcp://0.0.0.0:0"], "--insecure"),
        (["served_feeds:make", "--bind=ipc://taken"], "is held by this process"),
        ([], "there is nothing to serve: give MODULE:ATTR, or --config FILE"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_serve_tells_what_it_cannot_serve(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with feeder.serve(served_feeds.make, "ipc://taken"):
        assert status("serve", *words) == 2
    assert says in told(capsys)


def test_serve_shows_where_a_module_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "served_broken.py").write_text("import no_such_module_at_all\n")
    assert status("serve", "served_broken:make") == 2
    line = told(capsys)
    error = "ModuleNotFoundError: No module named 'no_such_module_at_all'"
    where = f"{folder}/served_broken.py:1"
    assert line.startswith(
        f"module 'served_broken' cannot be imported: {error}, at {where}; modules are in "
    )
    assert repr(str(folder)) in line
    assert status("serve", "served_broken:make", "--debug") == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback ")
    assert error.splitlines()[-1] == f"feeder: {line}"
