"""The parts of the tests: what is in the fast one, and which combinations the default takes."""

from __future__ import annotations

from itertools import product

import pytest

import costs
import parts
from fetches import FORMS, PATTERNS
from parts import some

LAST_BATCH = ("keep", "drop", "pad", "carry")


@pytest.fixture(autouse=True)
def default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "is_full", False)


def test_each_case_takes_each_value() -> None:
    for case in product(FORMS, PATTERNS):
        for axes in ((LAST_BATCH, (1, 2)), ((1, 2), LAST_BATCH), (LAST_BATCH, "abcd", (7,))):
            taken = list(some(case, *axes))
            assert len(taken) == len(set(taken)) == 4
            for axis, values in zip(axes, zip(*taken, strict=True), strict=True):
                assert set(values) == set(axis)


COSTLY = """
import os, subprocess, sys, time, pytest, zmq
from hypothesis import given, settings, strategies
from multiprocessing import util

def start(): subprocess.run(["true"], check=True)
@pytest.fixture
def ends(): yield; start()
def connect():
    with zmq.Context() as context: context.socket(zmq.PUSH).close()
def compute(seconds):
    ends = time.process_time() + seconds
    while time.process_time() < ends: pass
def draws(test): return settings(max_examples=1)(given(strategies.none())(test))


def test_rule(): pass
def test_unit_starts(): start()
def test_unit_connects(): connect()
def test_unit_calls(): os.system("true")
def test_unit_ends(ends): pass
def test_unit_spawns(): os.waitpid(util.spawnv_passfds(b"/bin/true", ["true"], []), 0)
def test_unit_makes():
    with zmq.Context() as context: zmq.Socket(context, zmq.PUSH).close()
def test_unit_computes(): compute(0.06)
def test_unit_imports():
    sys.modules["imported"] = sys
    compute(0.06)
@draws
def test_property(_): compute(0.06)
@draws
def test_property_computes(_): compute(0.6)
@pytest.mark.served
def test_served_computes(): compute(0.06)
@pytest.mark.served
def test_served_starts(): start()
@pytest.mark.served
def test_served_connects(): connect()
@pytest.mark.process
def test_process_starts(): start()
@pytest.mark.nightly
def test_campaign(): start()
"""


@pytest.mark.process
def test_a_test_that_costs_more_than_its_mark_says_fails(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "MOST_S", 0.05)
    monkeypatch.setattr(costs, "PROPERTY_MOST_S", 0.5)
    pytester.makeconftest(
        "import costs, parts\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(costs.Costs(tells_slowest=True))\n"
        "    config.pluginmanager.register(parts.Parts(fast=False))\n"
        "    for name in costs.COSTS: config.addinivalue_line('markers', name)\n"
    )
    pytester.makepyfile(COSTLY)
    done = pytester.runpytest_inprocess("-p", "no:xdist")
    done.assert_outcomes(passed=7, failed=8, errors=1, deselected=1)
    done.stdout.fnmatch_lines(
        [
            "a test of cost `unit` starts *'true'*: mark it `process`",
            "a test of cost `unit` makes a ZeroMQ socket: mark it `served`",
            "a test of cost `unit` calls os.system: mark it `process`",
            "a test of cost `unit` calls multiprocessing.spawn: mark it `process`",
            "a test of cost `unit` makes a ZeroMQ socket: mark it `served`",
            "*a test of cost `unit` used 0.? s of CPU, more than 0 s: have it do less, or *",
            "*a test of cost `unit` used ?.? s of CPU, more than 0 s: have it do less, or *",
            "a test of cost `served` starts *'true'*: mark it `process`",
            "*the 30 slowest tests*",
            "*process *test_process_starts*",
        ]
    )
