"""Where the system gives no more processes, descriptors or memory, the feed says so and ends."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import remote
from feeder import FetchError, Processes
from feeds import assert_same, drain
from lineage import WAIT_S
from project import printed
from remote import At

pytestmark = [pytest.mark.fresh, pytest.mark.process]

CHILD = """
import os, resource
import feeder
from feeds import running
from remote import Big
open_now = len(os.listdir("/proc/self/fd"))
{limit}
settings = dict(input_blob_names=["x"], batch_size=4, executor=feeder.Processes(2))
try:
    with running(Big(20), **settings) as (_, feed):
        print(len(list(feed)), "batches")
except feeder.FetchError as error:
    print(error)
"""


def run_limited(limit: str) -> str:
    """Return what a trainer says under a limit."""
    return printed("-c", CHILD.format(limit=limit), limit_s=4 * WAIT_S).strip()


def test_each_small_number_of_descriptors_is_enough_or_told() -> None:
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + {},) * 2)"
    told = [run_limited(limit.format(more)) for more in (1, 4, 6, 40)]
    assert re.match("worker 0, call 0: no process could be started: .*Too many open files", told[0])
    assert told[-1] == "20 batches", told
    words = ("20 batches", "could be started", "could not be started", "ulimit -n")
    assert all(any(word in one for word in words) for one in told), told


@pytest.mark.parametrize(
    ("fetch", "settings", "told"),
    [
        (At(2, remote.take_memory), {}, "(MemoryError|OSError)"),
        (remote.Greedy(), {"input_blob_names": ["x"]}, ".*(mapped|memory)"),
    ],
    ids=["in a call", "for a block"],
)
def test_too_little_memory_is_told_by_the_call(
    fetch: Any, settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(FetchError, match=f"call 2: fetch function raised {told}"):
        drain(fetch, executor=Processes(2), batch_size=1, **settings)


def test_a_system_without_processes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_fork.py").write_text(
        "import errno, os\n"
        "def fork():\n    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))\n"
        "os.fork = fork\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    told = "worker 0, call 0: a process could not be started: .*Resource temporarily unavailable"
    with pytest.raises(FetchError, match=told):
        drain(remote.plain, executor=Processes(2, preload=["no_fork"]))


def test_an_interpreter_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Processes(2, env={"PYTHONHOME": "/nonexistent"})
    with pytest.raises(FetchError, match=r"no process could be started: .* exited with status 1"):
        drain(remote.plain, executor=executor)


def test_a_process_that_is_full_of_memory_goes_on() -> None:
    whole = drain(remote.plain)
    assert_same(drain(At(2, remote.run_out_of_descriptors), executor=Processes(1)), whole)
