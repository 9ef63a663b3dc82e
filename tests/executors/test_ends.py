"""However a trainer ends, its processes end with it, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from feeds import digest, expected
from fetches import make_fetch
from lineage import WAIT_S, ends_of, shared_memory
from project import ROOT, TESTS

pytestmark = pytest.mark.process


@contextmanager
def trainer(how: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a trainer that ends so, in a session of its own."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}", "TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, str(TESTS / "executor_child.py"), how], env=env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    """Return the processes that a trainer says."""
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


HOW = {
    "exit": 0,
    "error": 1,
    "at once": 0,
    "SIGTERM": -signal.SIGTERM,
    "SIGKILL": -signal.SIGKILL,
    "SIGKILL in a call": -signal.SIGKILL,
    "SIGHUP": -signal.SIGHUP,
}


@pytest.mark.parametrize("how", HOW)
def test_processes_end_with_their_trainer(how: str, tmp_path: Path) -> None:
    shared = shared_memory()
    waits = {"SIGKILL in a call": "in a call"}.get(how, "wait" if how.startswith("SIG") else how)
    with trainer(waits, tmp_path) as process:
        pids = pids_of(process)
        # The one that forks, and two of its own.
        assert len(pids) == 3
        with ends_of(pids if how.startswith("SIG") else []) as ends:
            if how.startswith("SIG"):
                process.send_signal(signal.Signals[how.split()[0]])
            # Of whoever lived on the pipes would not be closed.
            _, err = process.communicate(timeout=WAIT_S)
            ends.wait()
    assert process.returncode == HOW[how]
    assert ("of the trainer" in err) == (how == "error")
    assert "feeder:" not in err and "Exception ignored" not in err
    assert not shared_memory() - shared
    assert not list(tmp_path.iterdir())


def test_processes_end_also_where_a_forked_trainer_lives_on(tmp_path: Path) -> None:
    with trainer("fork and wait", tmp_path) as process:
        pids = pids_of(process)
        (forked,) = pids_of(process)
        with ends_of(pids) as ends, ends_of([forked]) as end:
            process.kill()
            ends.wait()
            os.kill(forked, signal.SIGKILL)
            end.wait()


@pytest.mark.parametrize("how", ("fork and end", "interrupt"))
def test_a_feed_goes_on(how: str, tmp_path: Path) -> None:
    stream = expected(make_fetch("pure", "single"), pure=True, epochs=3)
    with trainer(how, tmp_path) as process, ends_of(pids_of(process)) as ends:
        # Not by `communicate`: it would not have what was read ahead with the line before.
        assert process.stdout is not None and process.stderr is not None
        out, err = process.stdout.read(), process.stderr.read()
        process.wait(WAIT_S)
        ends.wait()
    assert out.strip() == digest(stream), err
    assert (process.returncode, err) == (0, "")
