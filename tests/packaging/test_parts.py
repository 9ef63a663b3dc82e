"""The parts of the tests: what is in the fast one, and which combinations the default takes."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest

import parts
from fetches import FORMS, PATTERNS
from parts import is_fast, some, unit_of
from project import TESTS

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


def test_the_fast_part_names_what_is_there() -> None:
    for name in (*parts.FAST, *parts.NOT_FAST):
        assert (TESTS / name).exists(), name
    assert all(is_fast(TESTS / name) for name in parts.FAST)
    assert not any(is_fast(TESTS / name) for name in parts.NOT_FAST)


@pytest.mark.parametrize(
    ("name", "is_in"),
    [
        ("", True), ("workers", True), ("workers/stream/test_merge.py", True), ("feeder", True),
        ("feeder/feeds", True), ("feeder/feeds/test_stop.py", False), ("chaos", False),
        ("feeder/state/test_token.py", True), ("workers/fetch/test_inline_merge.py", False),
    ],
)  # fmt: skip
def test_a_folder_on_the_way_to_the_fast_part_is_looked_into(name: str, is_in: bool) -> None:
    assert is_fast(TESTS / name) is is_in


def test_a_folder_of_elsewhere_is_not_of_the_fast_part(tmp_path: Path) -> None:
    assert not is_fast(tmp_path / "test_fast.py")


@pytest.mark.parametrize(
    ("nodeid", "unit"),
    [
        ("tests/feeder/job/test_sessions.py::test_array[x]", "tests/feeder/job/test_sessions.py"),
        ("tests/feeder/job/test_sessions.py::test_a[ray-file]", "a Ray cluster"),
        ("tests/feeder/job/test_put_back.py::test_b[file-ray]", "a Ray cluster"),
        (
            "tests/conformance/test_stream.py::test_c[3-pure]",
            "tests/conformance/test_stream.py::test_c",
        ),
        ("tests/conformance/test_a.py::test_d", "tests/conformance/test_a.py::test_d"),
    ],
)
def test_what_belongs_together_runs_in_one_process(nodeid: str, unit: str) -> None:
    assert unit_of(nodeid) == unit
