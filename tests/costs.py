"""What a test costs, and that it costs no more.

Each test has one mark of cost: its own or its file's, else that of its folder, else `unit`. The
parts that `scripts/test` takes are those marks, so a test that starts an interpreter without saying
so would make the fast part slow: it fails. So does a test of cost `unit` that computes for long.
"""

from __future__ import annotations

import multiprocessing.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import pytest
import zmq

from project import TESTS

COSTS = ("unit", "served", "process", "adapters", "nightly")
"""The marks, which pyproject.toml explains."""
FOLDERS = {"adapters": "adapters", "gpu": "process"}
"""The marks of what lies in these folders of the tests, if it has none of its own."""

MOST_S, PROPERTY_MOST_S = 1.0, 4.0
"""So much CPU a test of cost `unit` may use, and one that draws examples."""
# Nothing fails by chance: 99 of 100 use less than 0.11 s, and the slowest 0.4 s and 1.1 s, beside
# five busy processes on two cores (2026-11-28). Seconds of a clock say how busy the machine is.

SLOWEST = 30
COST, SECONDS = "cost", "seconds of CPU"
USED = pytest.StashKey[float]()

_OF_FILE = re.compile(r"^pytestmark = .*\bmark\.(\w+)", re.MULTILINE)

_SPAWN = "multiprocessing.spawn"  # no event of Python's: it has none
_STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", _SPAWN}


def cost_of(item: pytest.Item) -> str:
    """Return the mark of cost of a test."""
    for mark in item.iter_markers():  # the nearest first
        if mark.name in COSTS:
            return mark.name
    return _of_folder(item.path) or "unit"


def _of_folder(path: Path) -> str | None:
    return FOLDERS.get(path.relative_to(TESTS).parts[0]) if path.is_relative_to(TESTS) else None


def is_fast(path: Path) -> bool:
    """Return whether a file may have tests of the fast part: a file that says in one line that it
    costs more need not be imported for that."""
    if path.is_dir():
        return _of_folder(path / "a file") is None
    marks = _OF_FILE.findall(path.read_text()) if path.suffix == ".py" else []
    return _of_folder(path) is None and not set(COSTS[1:]).intersection(marks)


class Watch:
    """What the current test does that costs. Owner: the thread that runs the tests; any thread
    tells what it does.

    An audit hook stays for as long as the interpreter, so there is one, which knows the test.
    """

    def __init__(self) -> None:
        self._cost = ""
        self._problem = ""
        self.may_start = True
        """Whether the test may start processes."""
        make, spawn = zmq.Socket.__init__, multiprocessing.util.spawnv_passfds

        def socket(*args: Any, **settings: Any) -> None:
            if self._cost == "unit":
                self._problem = "a test of cost `unit` makes a ZeroMQ socket: mark it `served`"
            make(*args, **settings)

        def spawned(*args: Any) -> int:
            self._hear(_SPAWN, args)
            return spawn(*args)

        zmq.Socket.__init__ = socket  # type: ignore[method-assign]
        multiprocessing.util.spawnv_passfds = spawned
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _STARTS and not self.may_start:
            what = f"starts {arguments[1]}" if event == "subprocess.Popen" else f"calls {event}"
            self._problem = f"a test of cost `{self._cost}` {what}: mark it `process`"

    def begin(self, cost: str) -> None:
        """A test begins."""
        self._cost, self._problem = cost, ""
        self.may_start = cost not in ("unit", "served")

    def take_problem(self) -> str:
        """Return what the test may not do, and did since it was last asked."""
        problem, self._problem = self._problem, ""
        return problem


watch = Watch()


class Costs:
    """pytest plugin: holds tests to their marks, and tells which take longest."""

    def __init__(self, *, tells_slowest: bool, bounds_cpu: bool = True) -> None:
        """`bounds_cpu`: tests draw no more examples than usual."""
        self._tells_slowest, self._bounds_cpu = tells_slowest, bounds_cpu
        self._taken: dict[str, tuple[str, float, float]] = {}
        """Of each test its mark, its seconds, and its seconds of CPU, children included."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        watch.begin(cost_of(item))
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        began, num_modules = cpu_seconds(), len(sys.modules)
        yield
        used, is_first = cpu_seconds() - began, len(sys.modules) != num_modules
        _check()
        # To import a module costs the first test that needs it.
        if self._bounds_cpu and cost_of(item) == "unit" and not is_first:
            most = PROPERTY_MOST_S if is_property(item) else MOST_S
            if used > most:
                told = f"a test of cost `unit` used {used:.1f} s of CPU, more than {most:.0f} s"
                pytest.fail(f"{told}: have it do less, or mark it `served`", pytrace=False)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        yield
        _check()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        used = cpu_seconds()
        report.user_properties.append((COST, cost_of(item)))
        report.user_properties.append((SECONDS, used - item.stash.get(USED, used)))
        item.stash[USED] = used
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = dict(report.user_properties)
        _, seconds, used = self._taken.get(report.nodeid, ("", 0.0, 0.0))
        self._taken[report.nodeid] = (
            told.get(COST, ""), seconds + report.duration, used + told.get(SECONDS, 0.0),
        )  # fmt: skip

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._tells_slowest:
            terminalreporter.section(f"the {SLOWEST} slowest tests: seconds, those of CPU, mark")
            slowest = sorted(self._taken.items(), key=lambda one: -one[1][1])[:SLOWEST]
            for name, (cost, seconds, used) in slowest:
                terminalreporter.write_line(f"{seconds:7.2f} {used:7.2f} {cost:8} {name}")


def _check() -> None:
    if problem := watch.take_problem():
        pytest.fail(problem, pytrace=False)


def is_property(item: pytest.Item) -> bool:
    """Whether Hypothesis draws examples for a test."""
    return bool(getattr(getattr(item, "obj", None), "is_hypothesis_test", False))


def cpu_seconds() -> float:
    """Return the CPU that this process has used, and its children that it has waited for."""
    return sum(sum(getrusage(who)[:2]) for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
