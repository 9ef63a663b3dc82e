"""Fetch functions that cannot be run in processes, or end them, or never return."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import remote
from feeder import Call, ConfigError, FetchError, FetchTimeout, Processes
from feeder.workers.fetch import queue
from feeds import assert_same, drain, make, running
from remote import At, Raises

pytestmark = pytest.mark.process

THREE_WAYS = (
    "there are three ways out: put it into a module of its own, give its place as 'MODULE:ATTR', "
    "or install cloudpickle"
)


class Holds:
    """`fetch(call)` that holds something."""

    def __init__(self, what: Any) -> None:
        self.what = what

    def __call__(self, call: Call) -> Any:
        raise StopIteration


# ---- It cannot be sent


@pytest.fixture
def no_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no cloudpickle, whether or not it is installed."""
    monkeypatch.setitem(sys.modules, "cloudpickle", None)


def closure() -> Any:
    rows = 3

    def fetch(call: Call) -> Any:
        return [np.zeros(rows)]

    return fetch


@pytest.mark.usefixtures("no_cloudpickle")
@pytest.mark.parametrize(
    ("fetch", "name"),
    (
        (lambda call: [np.zeros(3)], "<lambda>"),
        (closure(), r"closure\.<locals>\.fetch"),
        (remote.At(3, lambda: None), "At"),
    ),
    ids=("lambda", "closure", "holds a lambda"),
)
def test_a_function_without_a_name_is_told_with_the_ways_out(fetch: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"fetch_fun '{name}' cannot be sent") as caught:
        make(fetch, executor=Processes(2))
    assert THREE_WAYS in str(caught.value)


@pytest.mark.parametrize("without", (True, False), ids=("without cloudpickle", "as it is"))
@pytest.mark.parametrize("kind", ("file", "file to read", "lock", "socket", "thread"))
def test_what_holds_a_handle_is_told_with_the_ways_out(
    kind: str, without: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if without:
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
    file, sock = (tmp_path / "file").open("w"), socket.socket()
    read = (tmp_path / "file").open()
    what = {
        "file": file, "file to read": read, "lock": threading.Lock(), "socket": sock,
        "thread": threading.Thread(),
    }  # fmt: skip
    told = pytest.raises(ConfigError, match="fetch_fun 'Holds' cannot be sent")
    with file, read, sock, told as caught:
        make(Holds(what[kind]), executor=Processes(2))
    assert THREE_WAYS in str(caught.value)
    assert "files, locks and sockets" in str(caught.value)
    assert "__getstate__ that leaves it out, and open it at its first use" in str(caught.value)


def test_a_function_is_named_by_its_place() -> None:
    whole = drain(remote.plain, epochs=2)
    assert_same(drain("remote:plain", epochs=2, executor=Processes(2)), whole)


@pytest.mark.parametrize("place", ("no_such_module:fetch", "remote:no_such_name", "remote"))
def test_a_place_where_nothing_is(place: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(place)):
        make(place, executor=Processes(2))


def test_a_place_is_for_processes() -> None:
    with pytest.raises(ConfigError, match="fetch_fun"):
        make("remote:plain")


@pytest.mark.parametrize(
    ("given", "told"),
    (
        ("cores", "executor is 'cores'"),
        ("processes:0", "Processes is 0, expected a whole number"),
        (3, "executor is 3"),
        (
            {"processes": 2, "colour": 1},
            "executor has the key 'colour', expected one of processes, ",
        ),
        ({"colour": 1}, "executor is"),
    ),
)
def test_an_executor_that_there_is_none_of(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        make(remote.plain, executor=given)


def test_threads_are_named_once() -> None:
    with pytest.raises(ConfigError, match="num_threads is 2 and executor is"):
        make(remote.plain, executor=Processes(2), num_threads=2)


@pytest.mark.parametrize(
    "settings",
    ({"max_calls": 0}, {"preload": "numpy"}, {"env": {"A": 1}}, {"seed_globals": 1}),
    ids=lambda settings: next(iter(settings)),
)
def test_options_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        Processes(2, **settings)
    assert Processes(2, max_calls=10**6).max_calls == 10**6


def test_a_module_that_a_process_cannot_import_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text(
        "import os, remote\n"
        f"if os.getpid() != {os.getpid()}:\n"
        "    raise ImportError('not in a process')\n"
        "fetch = lambda call: remote.plain(call)\n"
        "fetch.__qualname__ = 'fetch'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    told = "worker 0, call 0: .*'only_here:fetch', which cannot be had: not in a process"
    with pytest.raises(FetchError, match=told) as caught:
        drain("only_here:fetch", executor=Processes(2))
    (noted,) = caught.value.__cause__.__notes__
    assert "only_here.py" in noted


def test_a_preload_that_fails_is_named() -> None:
    executor = Processes(2, preload=["json", "no_such_module"])
    told = "worker 0, call 0: preload names 'no_such_module', which cannot be imported"
    with running(remote.plain, executor=executor) as (_, feed):
        for _ in range(2):
            with pytest.raises(FetchError, match=told):
                next(feed)


def test_a_stop_does_not_wait_for_a_preload_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text("import threading\nthreading.Event().wait()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FetchTimeout) as caught:
        drain(remote.plain, executor=Processes(2, preload=["hangs"]), timeout=0.5)
    (noted,) = caught.value.__notes__
    assert "no process of the fetch function has started yet" in noted


def test_preloaded_modules_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = tmp_path / "marks"
    marks.mkdir()
    (tmp_path / "preloaded.py").write_text(
        f"import os, pathlib\npathlib.Path({str(marks)!r}, str(os.getpid())).touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    whole = drain(remote.plain, epochs=2)
    fetch = At(0, remote.import_it, "preloaded")
    assert_same(drain(fetch, epochs=2, executor=Processes(2, preload=["preloaded"])), whole)
    # In the zygote, and nowhere else.
    assert len(list(marks.iterdir())) == 1


# ---- It ends its process


@pytest.mark.parametrize(
    ("number", "num"), ((signal.SIGKILL, 1), (signal.SIGSEGV, 3), (signal.SIGTERM, 3))
)
def test_a_call_that_ends_each_process_is_told(number: int, num: int) -> None:
    fetch = At(3, remote.die, number)
    with running(fetch, executor=Processes(num), batch_size=3) as (_, feed):
        assert [next(feed).index for _ in range(3)] == [0, 1, 2]
        name = signal.Signals(number).name
        told = rf"^worker 0, call 3: its process ended 3 times, .* process \d+ was killed by {name}"
        with pytest.raises(FetchError, match=told) as caught:
            next(feed)
    assert (caught.value.worker_id, caught.value.call) == (0, 3)
    hint = ", as the kernel does if memory is short"
    assert (hint in str(caught.value)) == (number == signal.SIGKILL)


def test_a_call_is_made_as_often_as_retries_say(tmp_path: Path) -> None:
    fetch = remote.Counts(tmp_path)
    with pytest.raises(FetchError, match="its process ended 6 times"):
        drain(fetch, executor=Processes(1), retries=5, retry_backoff_s=0.0)
    assert len(list(tmp_path.iterdir())) == 6


def test_a_function_whose_loading_ends_the_process_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_on_import.py").write_text(
        f"import os\nif os.getpid() != {os.getpid()}:\n    os._exit(7)\ndef fetch(call): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FetchError, match=r"ended one after the other .* exited with status 7"):
        drain("ends_on_import:fetch", executor=Processes(2), num_worker_threads=1)


def test_a_call_that_is_made_again_for_a_resume_is_told() -> None:
    with running(remote.plain, executor=Processes(1), batch_size=4) as (_, feed):
        batch = next(feed)
    # The batch ended in the second chunk, which is fetched again.
    settings = {"batch_size": 4, "resume": batch.cut.token(), "retry_backoff_s": 0.0}
    with pytest.raises(FetchError, match=r"call 1: its process ended 3 times.*SIGKILL"):
        drain(At(1, remote.die), executor=Processes(1), retries=2, **settings)


# ---- It never returns


@pytest.mark.parametrize(
    ("num", "at", "act", "stack"),
    (
        (1, 2, remote.hang_in_a_place_of_its_own, "in hang_in_a_place_of_its_own"),
        (2, 2, remote.hang_in_a_place_of_its_own, "in hang_in_a_place_of_its_own"),
        # After quick ones, which are asked for together.
        (1, 15, remote.hang_in_a_place_of_its_own, "in hang_in_a_place_of_its_own"),
        (1, 0, remote.compute_for_ever, "in compute_for_ever"),
    ),
)
def test_a_call_that_hangs_is_told_with_the_stack_of_its_process(
    num: int, at: int, act: Callable[[str], None], stack: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # A new limit counts from the next look.
    monkeypatch.setattr(queue, "_SLOW_LOOK_S", 0.2)
    door = remote.door(tmp_path)
    fetch = At(at, act, door)
    with running(fetch, executor=Processes(num), batch_size=3, timeout=60) as (_, feed):
        remote.wait_at(door)
        # Whatever a start takes on a busy machine: from now on there is one call to wait for.
        feed.streams[0].pipeline.queue._timeout_s = 1.0
        told = r"no chunk for 1\.0 s.* has not returned; see in its stack"
        with pytest.raises(FetchTimeout, match=told) as caught:
            list(feed)
    (noted,) = caught.value.__notes__
    assert re.match(rf"the call has not returned:\nprocess \d+, call {at}:\n", noted)
    assert stack in noted and "in _read" not in noted


def test_a_stop_in_a_call_is_no_error(tmp_path: Path) -> None:
    door = remote.door(tmp_path)
    fetch = At(9, remote.hang_in_a_place_of_its_own, door)
    with running(fetch, executor=Processes(2), batch_size=3, retries=1) as (coordinator, feed):
        next(feed)
        remote.wait_at(door)
    (figures,) = coordinator.figures().feeds
    assert (figures.last_error, sum(worker.errors for worker in figures.workers)) == ("", 0)
    assert figures.executor is not None and figures.executor.restarts == 0


# ---- It raises


@pytest.mark.served
@pytest.mark.usefixtures("in_threads")
@pytest.mark.parametrize(
    ("raises", "told"),
    (
        (remote.value_error, "ValueError: a value"),
        (remote.needs_two, "CallError: NeedsTwo: one and two"),
        (remote.HoldsLock, r"CallError: HoldsLock: \('holds a lock', <unlocked"),
        (remote.SaysNothing, "SaysNothing"),
        (SystemExit, "SystemExit"),
        (KeyboardInterrupt, "KeyboardInterrupt"),
        (remote.chained, "ValueError: a value"),
    ),
)
def test_what_a_call_raises_is_told_with_its_own_traceback(raises: Any, told: str) -> None:
    with running(Raises(raises), executor=Processes(2), batch_size=3) as (_, feed):
        assert [next(feed).index for _ in range(3)] == [0, 1, 2]
        for _ in range(2):
            with pytest.raises(FetchError, match=f"worker 0, call 3: .*raised {told}") as caught:
                next(feed)
    cause = caught.value.__cause__
    assert cause is not None
    (noted,) = cause.__notes__
    assert re.match(r"in process \d+:\n", noted) and "raise self.make()" in noted
    assert ("KeyError: 'its cause'" in noted) == (raises is remote.chained)


@pytest.mark.served
@pytest.mark.usefixtures("in_threads")
def test_an_exception_that_is_raised_again_has_one_note() -> None:
    with pytest.raises(FetchError) as caught:
        drain(Raises(remote.the_same), executor=Processes(1), retries=3, retry_backoff_s=0.0)
    assert len(caught.value.__cause__.__notes__) == 1


# ---- What a process says


def test_what_a_process_says_is_said_here(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    drain(At(1, remote.speak), executor=Processes(1))
    out, err = capsys.readouterr()
    assert out == "printed\nwithout an endin bytes: ü\n\\ud800\n"
    assert err == "to stderr\n"
    warned, failed = [one for one in caplog.records if one.name == "remote"]
    assert (warned.getMessage(), warned.levelname) == ("logged here", "WARNING")
    assert warned.who == "a process" and warned.process != os.getpid()
    assert "an error" in failed.getMessage() and "ValueError: told" in failed.getMessage()


def test_nobody_may_hear_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = drain(remote.plain)
    for stream in (None, remote.Closed()):
        monkeypatch.setattr(sys, "stdout", stream)
        got = drain(At(1, remote.speak), executor=Processes(1))
        monkeypatch.undo()
        assert_same(got, whole)


def test_a_process_has_its_own_environment_and_no_input() -> None:
    whole = drain(remote.plain)
    executor = Processes(2, env={"FEEDER_REMOTE": "set", "OMP_NUM_THREADS": "3"})
    fetch = At(1, remote.look_at_environment, {"FEEDER_REMOTE": "set", "OMP_NUM_THREADS": "3"})
    assert_same(drain(fetch, executor=executor), whole)
    fetch = At(1, remote.look_at_environment, {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"})
    assert_same(drain(fetch, executor=Processes(1)), whole)


def test_a_process_makes_no_more_calls_than_it_may(tmp_path: Path) -> None:
    num, most = 2, 4
    whole = drain(remote.plain, epochs=2)
    executor = Processes(num, max_calls=most)
    assert_same(drain(remote.Marked(tmp_path), epochs=2, executor=executor), whole)
    counts: dict[str, int] = {}
    for path in tmp_path.iterdir():
        _, _, pid = path.name.split("-")
        counts[pid] = counts.get(pid, 0) + 1
    assert max(counts.values()) <= most
    # Nor is it replaced long before.
    assert len(counts) <= 2 * 40 // most + 2 * num + 2
