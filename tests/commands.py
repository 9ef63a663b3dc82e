"""Running the command `feeder`: here, or in a process of its own."""

from __future__ import annotations

import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import served_feeds
from feeder import cli
from project import ROOT

READY_S = 10.0
END_S = 20.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module of feeds, and a private directory of sockets in it."""
    (tmp_path / "runtime").mkdir()
    shutil.copy(served_feeds.__file__, tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def status(*words: str) -> int:
    """Run a command here; its exit status, where argparse exits, too."""
    try:
        return cli.main(words)
    except SystemExit as left:
        return int(left.code or 0)


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "feeder", *words]


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A command in the background, killed and reaped at the end."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command(*words), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    """The next line of stdout; to be called where it is the only one."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], READY_S)[0], "no line came"
    return process.stdout.readline()


@contextmanager
def serving(target: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server in a process of its own that is ready, and its line."""
    with started("serve", f"served_feeds:{target}", *words) as process:
        yield process, read_line(process)


def end(process: subprocess.Popen[str], number: int, status: int = 0) -> str:
    """Send a signal, see that the command ends, and return what it said of errors."""
    process.send_signal(number)
    assert process.wait(END_S) == status
    assert process.stderr is not None
    return process.stderr.read()


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line in which something was refused."""
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert (out, line[:8]) == ("", "feeder: ")
    return line[8:]
