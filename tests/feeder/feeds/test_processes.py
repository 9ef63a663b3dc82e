"""Feeds and processes: forked children, and interpreters that exit without a stop."""

from __future__ import annotations

import builtins
import dis
import importlib
import pkgutil
import subprocess
import sys
import time

import pytest

import feeder
from feeder.workers.stream.loans import Loans
from project import ROOT

pytestmark = pytest.mark.process

EXIT_S = 4.0
"""More than an exit takes on a busy machine."""

BEGIN = """
import os, sys, threading, time
import numpy as np
import feeder

def fetch(call):
    if call.index == 50:
        raise StopIteration
    return (np.arange(3) + 100 * call.index + 1,)

def make(fetch=fetch, **settings):
    return feeder.init_data_input_workers(["id"], fetch, 4, **settings)

def tell(*values):
    os.write(1, (" ".join(map(str, values)) + "\\n").encode())
"""


def run(script: str, *, code: int = 0) -> list[str]:
    """Run a script in an interpreter of its own; return the lines it wrote to stdout."""
    command = [sys.executable, "-W", "error", "-W", "ignore:.*fork:DeprecationWarning", "-c"]
    done = subprocess.run(
        [*command, BEGIN + script], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout.splitlines()


FORK = """
def attempt(what, do):
    try:
        tell(what, do())
    except Exception as error:
        tell(what, type(error).__name__, error)

coordinator = make(max_buffered_batches=20)
coordinator.start()
feed = coordinator["train"]
kept = next(feed)
if os.fork() == 0:
    CHILD
    sys.exit(0)
tell("child", os.waitstatus_to_exitcode(os.wait()[1]))
tell("parent", sum(len(batch["id"]) for batch in feed), coordinator.stop())
"""
PARENT = ["child 0", "parent 146 True"]


OF_THE_FEED = (
    "feed 'train' was made in the parent process; make it after the fork, or start children with "
    "the spawn method"
)
OF_THE_COORDINATOR = "the coordinator was made in the parent process; make one after the fork"
USES = {
    **dict.fromkeys([
        "next(feed)", "list(feed)", "next(feed.on(0))", "coordinator.snapshot()",
        "feed.snapshot()", "coordinator.state_dict()", "feed.state_dict()",
        "coordinator.checkpoint()",
    ], OF_THE_FEED),
    **dict.fromkeys([
        "coordinator.start()", "coordinator.__enter__()", "coordinator.load_state_dict({})",
        "make(coordinator=coordinator)",
    ], OF_THE_COORDINATOR),
}  # fmt: skip


@pytest.mark.parametrize("use", USES)
def test_a_feed_is_not_used_in_a_forked_child(use: str) -> None:
    lines = run(FORK.replace("CHILD", f"attempt('use', lambda: {use})"))
    assert lines == [f"use ForkedError {USES[use]}", *PARENT]


def test_what_a_child_may_do_with_its_copy() -> None:
    child = """
    attempt("batch", lambda: kept["id"].tolist())
    attempt("stop", coordinator.stop)
    attempt("again", coordinator.stop)
    """
    lines = run(FORK.replace("CHILD", child.strip()))
    assert lines == ["batch [1, 2, 3, 101]", "stop True", "again True", *PARENT]


@pytest.mark.parametrize("own", ["coordinator=feeder.Coordinator()", ""], ids=["own", "default"])
def test_a_child_makes_feeds_of_its_own(own: str) -> None:
    child = f"""
    with make({own}) as mine:
        tell("rows", sum(len(batch["id"]) for batch in mine["train"]))
    """
    assert run(FORK.replace("CHILD", child.strip())) == ["rows 150", *PARENT]


def test_a_child_of_a_parent_that_has_not_started_uses_the_feed() -> None:
    script = """
coordinator = make()
if os.fork() == 0:
    with coordinator:
        tell("rows", sum(len(batch["id"]) for batch in coordinator["train"]))
    sys.exit(0)
tell("child", os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert run(script) == ["rows 150", "child 0"]


FORK_OF_A_SERVER = """
def factory():
    return make(coordinator=feeder.Coordinator())

with feeder.serve(factory, "tcp://127.0.0.1:0", insecure=True) as server:
    if os.fork() == 0:
        CHILD
    tell("child", os.waitstatus_to_exitcode(os.wait()[1]))
    with feeder.connect(server.addresses[0]) as consumer:
        tell("parent", sum(len(batch["id"]) for batch in consumer))
"""


@pytest.mark.parametrize("way", ["sys.exit(7)", "server.close(); os._exit(7)"])
def test_a_child_leaves_a_server_of_its_parent_and_that_serves_on(way: str) -> None:
    assert run(FORK_OF_A_SERVER.replace("CHILD", way)) == ["child 7", "parent 150"]


@pytest.mark.parametrize("use", ["server.wait()", "server.figures()"])
def test_a_server_is_not_used_in_a_forked_child(use: str) -> None:
    child = f"""
        try:
            {use}
        except feeder.ForkedError as error:
            tell(error)
        sys.exit(7)
    """
    told, *lines = run(FORK_OF_A_SERVER.replace("CHILD", child.strip()))
    assert told.startswith("the server was made in the parent process; make it after the fork")
    assert lines == ["child 7", "parent 150"]


def test_a_child_that_dies_without_a_word_leaves_the_parent_running() -> None:
    assert run(FORK.replace("CHILD", "os._exit(0)")) == PARENT


EXITS = {
    "at the bound": "coordinator = make(max_buffered_batches=1); coordinator.start()",
    "in the middle": "coordinator = make(); coordinator.start(); next(coordinator['train'])",
    "at the end": "coordinator = make(); coordinator.start(); list(coordinator['train'])",
    "fetch gives None": "coordinator = make(lambda worker_id, batch_size: None, timeout=100)\n"
                        "coordinator.start()",
    "a user thread waits": "coordinator = make(lambda worker_id, batch_size: None)\n"
                           "coordinator.start()\n"
                           "def use():\n"
                           "    try: next(coordinator['train'])\n"
                           "    except feeder.ClosedError: pass\n"
                           "threading.Thread(target=use, daemon=True).start()",
    "in the with block": "with make() as coordinator:\n    next(coordinator['train'])\n"
                         "    tell(time.monotonic()); sys.exit(0)",
    "a batch is kept": "coordinator = make(); coordinator.start()\n"
                       "kept = [next(coordinator['train'])]",
    "forgotten": "make().start()",
}  # fmt: skip


@pytest.mark.parametrize("script", EXITS.values(), ids=EXITS.keys())
def test_an_interpreter_exits_cleanly_and_fast_without_a_stop(script: str) -> None:
    (told,) = run(f"{script}\ntell(time.monotonic())")
    assert time.monotonic() - float(told) < EXIT_S


def test_an_exit_does_not_wait_for_a_fetch_that_never_returns() -> None:
    script = """
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
entered, never = threading.Event(), threading.Event()

def stuck(worker_id, batch_size):
    entered.set()
    never.wait()

make(stuck, num_worker_threads=1).start()
entered.wait()
tell(time.monotonic())
"""
    began, named, *stack = run(script)
    assert time.monotonic() - float(began) < 1.0 + EXIT_S
    assert named.startswith("1 threads did not end within ")
    assert named.endswith(" s: ['feeder train fetcher 0']")
    assert any(line.endswith("in stuck") for line in stack)


FORGOTTEN = """
import os, threading, feeder
called, never = threading.Event(), threading.Event()
def fetch(call):
    called.set()
    never.wait(0.2)
    os.write(1, b"returned\\n")
    raise StopIteration
def main():
    made = feeder.init_data_input_workers(["x"], fetch, 4, coordinator=feeder.Coordinator())
    made.start()
    called.wait(10)
main()
"""


STOPPED = """
import os, threading, feeder
begun, stopped, never, made = threading.Event(), threading.Event(), threading.Event(), []
def fetch(call):
    begun.wait(10)
    made.pop().stop()
    stopped.set()
    never.wait(0.2)
    os.write(1, b"returned\\n")
    raise StopIteration
made.append(feeder.init_data_input_workers(["x"], fetch, 4, coordinator=feeder.Coordinator(),
                                           num_worker_threads=1))
made[0].start()
begun.set()
stopped.wait(10)
"""


@pytest.mark.parametrize("script", [FORGOTTEN, STOPPED], ids=["forgotten", "stopped in a call"])
def test_an_exit_waits_for_the_calls_of_what_was_forgotten(script: str) -> None:
    """Otherwise a thread in a C++ library would come back into a dying interpreter. The garbage
    collector, too, may stop a feed in a call of it."""
    assert set(run(script)) == {"returned"}


def test_an_exit_with_an_error_keeps_its_code() -> None:
    assert run("make().start(); tell('begun'); sys.exit(3)", code=3) == ["begun"]


KEEP = """
import ctypes

def some(batches):
    return [batch for _, batch in zip(range(3), batches)]

def started(**settings):
    coordinator = make(coordinator=feeder.Coordinator(), **settings)
    coordinator.start()
    return coordinator

def served(address):
    server = feeder.serve(
        lambda: make(coordinator=feeder.Coordinator()), address, queues=1, insecure=True
    )
    consumer = feeder.connect(server.addresses[0], queue=0, hold=8)
    return server, consumer, *some(consumer)

np.kept = kept = []
KEPT
# As libraries written in C do, which refer to modules for good: then the names of each module go
# before the process ends, those of modules that were imported last go first, and what others keep
# goes after them.
for module in list(sys.modules.values()):
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(module))
del kept
"""
KEPT_AT_EXIT = {
    "batches": "c = started(); kept += [c, *some(c['train'])]",
    "batches of their own": "c = started(writable=True); kept += [c, *some(c['train'])]",
    "batches from processes": "c = started(executor=feeder.Processes(1)); "
                              "kept += [c, *some(c['train'])]",
    "batches in shared memory": "kept += served(f'ipc://exit{os.getpid()}')",
    "batches in shared memory alone": "server, *rest = served(f'ipc://exit{os.getpid()}')\n"
                                      "kept += rest[1:]\n"
                                      "rest[0].close(); server.close(); del server, rest",
    "batches from tcp": "kept += served('tcp://127.0.0.1:0')",
    "what wakes a thread": "from feeder.waking import Waker; kept.append(Waker())",
    "shared memory": "from feeder.service.memory.memfd import Pages; kept.append(Pages(4096))",
}  # fmt: skip


@pytest.mark.parametrize("kept", KEPT_AT_EXIT.values(), ids=KEPT_AT_EXIT.keys())
def test_what_outlives_the_modules_at_an_exit_goes_without_a_word(kept: str) -> None:
    assert run(KEEP.replace("KEPT", kept)) == []


def test_no_finaliser_needs_a_name_of_its_module() -> None:
    """At the interpreter's exit a module's names may be gone before the last object is."""
    found = []
    for module in pkgutil.walk_packages(feeder.__path__, "feeder."):
        if module.name.startswith(("feeder.adapters.", "feeder.__main__")):
            continue
        for owner in vars(importlib.import_module(module.name)).values():
            if isinstance(owner, type) and "__del__" in vars(owner):
                names = {
                    step.argval
                    for step in dis.get_instructions(vars(owner)["__del__"])
                    if step.opname == "LOAD_GLOBAL"
                }
                found.append(owner.__name__)
                assert names <= set(dir(builtins)), f"{module.name}: {owner.__name__}.__del__"
    assert {"Allocated", "Pages", "Waker"} <= set(found)
    # What is called for the end of a loan is none, and runs as late.
    steps = dis.get_instructions(Loans._end)
    assert {step.argval for step in steps if step.opname == "LOAD_GLOBAL"} <= set(dir(builtins))
