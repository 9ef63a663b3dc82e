"""The parts of the tests: what is in the fast one, and which combinations the default takes."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

import costs
import parts
from fetches import FORMS, PATTERNS
from parts import some, unit_of

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


def test_a_case_takes_the_same_each_time() -> None:
    assert list(some(("seek", 7), LAST_BATCH, "abc")) == list(some(("seek", 7), LAST_BATCH, "abc"))


@pytest.mark.parametrize(
    ("cases", "axes"),
    [
        (product(FORMS, PATTERNS, (1, 2, 3, 5)), (LAST_BATCH, (1, 2, 3, 4))),
        (product(FORMS, PATTERNS, ("uneven", "drop", "pad")), ((1, 2), LAST_BATCH)),
        (product(FORMS, (1, 2, 7, 64)), (tuple(PATTERNS), LAST_BATCH)),
        (product(FORMS, PATTERNS), ((1, 2, 8), (1, 2))),
    ],
    ids=["naive", "rounds", "sizes", "buffers"],
)
def test_all_cases_together_take_all_pairs(cases, axes) -> None:
    taken = {pair for case in cases for pair in some(case, *axes)}
    for i, k in combinations(range(len(axes)), 2):
        pairs = {(one[i], one[k]) for one in taken}
        assert pairs == set(product(axes[i], axes[k]))


def test_the_full_part_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "is_full", True)
    assert list(some(("seek",), (1, 2), "ab")) == [(1, "a"), (1, "b"), (2, "a"), (2, "b")]


@pytest.mark.parametrize(
    ("name", "text", "is_in"),
    [
        ("test_a.py", "", True),
        ("test_a.py", "pytestmark = pytest.mark.unit", True),
        ("test_a.py", "x = 1\npytestmark = pytest.mark.served\n", False),
        ("test_a.py", "pytestmark = [pytest.mark.timeout(9), pytest.mark.process]", False),
        ("test_a.py", "@pytest.mark.process\ndef test_b(): ...\ndef test_c(): ...", True),
        ("adapters/test_a.py", "", False),
        ("gpu/test_a.py", "", False),
        ("workers/test_a.py", "", True),
    ],
)
def test_the_fast_part_leaves_out_files_of_other_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, is_in: bool
) -> None:
    monkeypatch.setattr(costs, "TESTS", tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert costs.is_fast(path) is is_in
    assert costs.is_fast(path.parent) is (path.parent.name not in ("adapters", "gpu"))


COSTLY = """
import subprocess, pytest, zmq

def start(): subprocess.run(["true"], check=True)
def connect():
    with zmq.Context() as context: context.socket(zmq.PUSH).close()


def test_rule(): pass
def test_unit_starts(): start()
def test_unit_connects(): connect()
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
def test_a_test_that_costs_more_than_its_mark_says_fails(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import costs, parts\n"
        "def pytest_configure(config):\n"
        "    config.pluginmanager.register(costs.Costs(tells_slowest=True))\n"
        "    config.pluginmanager.register(parts.Parts(fast=False))\n"
        "    for name in costs.COSTS: config.addinivalue_line('markers', name)\n"
    )
    pytester.makepyfile(COSTLY)
    done = pytester.runpytest_inprocess("-p", "no:xdist")
    done.assert_outcomes(passed=3, failed=3, deselected=1)
    done.stdout.fnmatch_lines(
        [
            "a test of cost `unit` starts *'true'*: mark it `process`",
            "a test of cost `unit` makes a ZeroMQ socket: mark it `served`",
            "a test of cost `served` starts *'true'*: mark it `process`",
            "*the 30 slowest tests*",
            "*process *test_process_starts*",
        ]
    )


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("tests/feeder/job/test_sessions.py::test_array[x]", "tests/feeder/job/test_sessions.py"),
        ("tests/feeder/job/test_sessions.py::test_a[ray-file]", "a Ray cluster"),
        ("tests/feeder/job/test_managers.py::test_b[file-ray]", "a Ray cluster"),
        (
            "tests/conformance/test_stream.py::test_c[3-pure]",
            "tests/conformance/test_stream.py::test_c",
        ),
        ("tests/conformance/test_a.py::test_d", "tests/conformance/test_a.py::test_d"),
    ],
)
def test_what_belongs_together_runs_in_one_process(nodeid: str, unit: str) -> None:
    assert unit_of(nodeid) == unit
