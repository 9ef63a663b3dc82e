"""What holds for every test: it leaves nothing behind, a skip is counted, and a signal is heard."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, Phase, settings

import costs
import needs
import parts
import zygote
from leaks import held, left_behind

# A shell that starts the tests in the background, or under nohup, has them ignore these signals,
# and every process that a test starts would inherit that and not hear the test.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Helpers that assert show what they compared, as tests do.
pytest.register_assert_rewrite("small", "watching")

# How long an example takes, or is drawn for, says nothing about the code where the machine is
# busy; the tests' own limit holds. The same examples are drawn each time: what fails was changed.
settings.register_profile(
    "some",
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("all", parent=settings.get_profile("some"), max_examples=100)
# A mutant is known by the first example that fails.
settings.register_profile(
    "mutants", parent=settings.get_profile("some"), phases=(Phase.explicit, Phase.generate)
)

FAILED = pytest.StashKey[bool]()

MAX_PROCESSES = 4

CLUSTER_TEST_S = 240
"""How long a test on a Ray cluster may take, the cluster's start with the first one."""


def pytest_addoption(parser: pytest.Parser) -> None:
    needs.add_option(parser)
    which = parser.getgroup("parts of the tests")
    which.addoption("--fast", action="store_true", help="tests of cost `unit` alone")
    which.addoption("--full", action="store_true", help="every combination of parameters")


def pytest_configure(config: pytest.Config) -> None:
    needs.configure(config)
    parts.is_full = config.getoption("full")
    # As pytest's option of Hypothesis has it, if it is given.
    usual = "all" if parts.is_full else "some"
    settings.load_profile(config.getoption("hypothesis_profile", None) or usual)
    config.pluginmanager.register(parts.Parts(fast=config.getoption("fast")))
    full = parts.is_full
    config.pluginmanager.register(costs.Costs(tells_slowest=full, bounds_cpu=not full))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """How many processes share the work where `-n auto` asks for it. Each starts threads and
    children of its own; with more of them tests would wait for one another's."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in filter(is_on_cluster, items):
        item.add_marker(pytest.mark.timeout(CLUSTER_TEST_S))


def is_on_cluster(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and (
        hasattr(item, "callspec") and item.callspec.params.get("place") == "ray"
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    if any(costs.cost_of(item) in ("process", "adapters") for item in session.items):
        zygote.install()


def pytest_unconfigure() -> None:
    zygote.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with zygote.paused() if item.get_closest_marker("fresh") else nullcontext():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


@pytest.fixture(autouse=True, scope="module")
def old_objects_are_not_collected() -> None:
    """Thousands of tests are many objects: a garbage collection would look at them all each time,
    and hold every thread up for as long."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a file descriptor or a child process behind.

    A test that has failed already is let be: its traceback keeps alive what it held. One that is
    marked `foreign_sockets` uses a library whose sockets come and go as that likes.
    """
    before = held()
    yield
    if request.node.stash.get(FAILED, False):
        return
    lines = left_behind(before)
    if request.node.get_closest_marker("foreign_sockets"):
        lines = [line for line in lines if "file descriptor of socket:" not in line]
    if lines:
        pytest.fail("the test left behind: " + ", ".join(lines), pytrace=False)
