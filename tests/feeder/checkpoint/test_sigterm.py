"""A process that is told to end stores its position first, and then ends as it would have."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import feeder
from feeder.checkpoint.store import CheckpointStore
from project import ROOT
from small import WAIT_S, Aside, Pure, make

pytestmark = pytest.mark.process


@contextmanager
def trainer(how: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A trainer that has had three batches."""
    command = [sys.executable, "-m", "sigterm_child", how, str(folder)]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with subprocess.Popen(
        command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        try:
            for step in range(1, 4):
                assert line(process) == str(step)
                if step < 3:
                    print("next", file=process.stdin, flush=True)
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def step_in(folder: Path) -> int:
    (state,) = CheckpointStore(folder).load().states
    return state.summary[2]


def test_the_position_is_stored_and_the_process_ends_by_the_signal(tmp_path: Path) -> None:
    with trainer("plain", tmp_path) as process:
        process.terminate()
        assert process.wait(WAIT_S) == -signal.SIGTERM
    assert step_in(tmp_path) == 3


def test_a_handler_that_was_there_before_has_its_turn(tmp_path: Path) -> None:
    with trainer("own handler", tmp_path) as process:
        process.terminate()
        assert line(process) == "my own handler"
        assert process.wait(WAIT_S) == 7
    assert step_in(tmp_path) == 3


def test_a_process_that_ignored_the_signal_goes_on(tmp_path: Path) -> None:
    with trainer("ignored", tmp_path) as process:
        process.terminate()
        assert line(process) == "stored"
        print("next", file=process.stdin, flush=True)
        assert line(process) == "4"
        assert process.poll() is None
    assert step_in(tmp_path) == 3


def test_a_second_signal_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    with trainer("hanging", tmp_path) as process:
        process.terminate()
        assert line(process) == "hanging"
        assert process.poll() is None
        process.terminate()
        assert process.wait(WAIT_S) == -signal.SIGTERM


def test_outside_the_main_thread_it_cannot_be_waited_for(tmp_path: Path) -> None:
    coordinator = feeder.Coordinator(feeder.Checkpointing(tmp_path, on_sigterm=True))
    make(Pure(), coordinator=coordinator)
    with pytest.raises(feeder.ConfigError, match="started outside the main thread; start it"):
        Aside(coordinator.start).result()
    coordinator.stop()


def test_a_stop_gives_the_signal_back(tmp_path: Path) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    coordinator = feeder.Coordinator(feeder.Checkpointing(tmp_path, on_sigterm=True))
    with make(Pure(), coordinator=coordinator):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_handler_that_came_later_is_left_alone(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    coordinator = feeder.Coordinator(feeder.Checkpointing(tmp_path, on_sigterm=True))
    try:
        with make(Pure(), coordinator=coordinator):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
