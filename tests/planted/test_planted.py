"""All planted bugs can be planted, one is, and what is no catch is not taken for one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from planted import plant as planting
from planted.bug import BUGS, Bug, PlantError, planted, planted_text
from planted.plant import ROOT, plant

HARMLESS = Bug(
    name="harmless",
    at="workers/stream/position.py: next_live",
    old="num = len(live)",
    new="num = len(tuple(live))",
    tests=("tests/workers/stream/test_position.py::test_an_ended_worker_is_passed_over",),
)
"""No bug at all; the text is the first line of a function that its test calls."""


@pytest.mark.served  # as much work as feeds that are served
def test_every_bug_can_be_planted_and_has_somebody_to_find_it() -> None:
    for bug in BUGS.values():
        text = planted_text(bug)
        assert text != (ROOT / bug.file).read_text(), bug.name
        compile(text, bug.file, "exec")
        assert bug.tests or bug.by, bug.name
        if bug.by:
            with planted(bug):
                pass


@cache
def text_of(file: str) -> str:
    path = ROOT / file
    return path.read_text() if path.exists() else ""


def test_every_test_that_is_named_is_there() -> None:
    """But for its parameters."""
    named = {test.partition("[")[0] for bug in BUGS.values() for test in bug.tests}
    parts = [test.split("::") for test in sorted(named)]
    assert [
        f"{file}::{name}" for file, name in parts if f"\ndef {name}(" not in text_of(file)
    ] == []


@pytest.mark.process
def test_a_planted_bug_is_caught() -> None:
    bug = replace(BUGS["leftover dropped"], tests=BUGS["leftover dropped"].tests[:1])
    outcomes = plant(bug)
    assert [one.word for one in outcomes.values()] == ["fails"], planting.report(bug, outcomes)


# ---- what is no catch


@pytest.mark.nightly
def test_tests_that_fail_without_a_bug_are_an_error() -> None:
    with planting.copied() as broken:
        wrong = replace(HARMLESS, new="num = 1 + len(live)")
        (broken / wrong.file).write_text(planted_text(wrong, broken))
        with pytest.raises(PlantError, match="without a bug the tests have to pass"):
            planting.check_unplanted(broken, [replace(HARMLESS, old=wrong.new)])
