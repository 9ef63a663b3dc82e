"""All planted bugs can be planted, some are, and what is no catch is not taken for one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from planted import plant as planting
from planted.anchor import find, replaced
from planted.bug import Bug
from planted.catalogue import BUGS
from planted.plant import ROOT, PlantError, copied, named_tests, plant, planted_text, run_tests

pytestmark = pytest.mark.process

FEW = (
    "leftover dropped", "slot given back early", "cut of the prefetched head",
    "cursor read too late", "copy does not wait for user",
)  # fmt: skip
"""Those that are planted here; `scripts/planted-bugs` plants all."""

HARMLESS = Bug(
    name="harmless",
    harm="None.",
    file="workers/stream/position.py",
    symbol="next_live",
    old="    num = len(live)\n",
    new="    num = len(tuple(live))\n",
    tests=("tests/workers/stream/test_position.py::test_an_ended_worker_is_passed_over",),
)
"""No bug at all; the text is the first line of a function that its test calls."""


@pytest.fixture(scope="module")
def project() -> Iterator[Path]:
    with copied() as folder:
        yield folder


def test_there_are_as_many_as_there_should_be_and_no_name_twice() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 14
    assert all(bug.tests for bug in BUGS)


@pytest.mark.parametrize("bug", [*BUGS, HARMLESS], ids=lambda bug: bug.name)
def test_a_bug_can_be_planted(bug: Bug) -> None:
    text = planted_text(bug, ROOT)
    assert text != (ROOT / bug.file).read_text()
    compile(text, bug.file, "exec")


@pytest.mark.parametrize("old", ["live", "no such text"])
def test_code_that_is_not_there_exactly_once_is_an_error(old: str) -> None:
    with pytest.raises(PlantError, match=f"^harmless: .*{old}.* times, expected once$"):
        planted_text(replace(HARMLESS, old=old), ROOT)


@pytest.mark.parametrize("symbol", ["nobody", "position", ""])
def test_a_definition_that_is_not_there_is_an_error(symbol: str) -> None:
    with pytest.raises(PlantError, match="0 times"):
        planted_text(replace(HARMLESS, symbol=symbol), ROOT)


SOURCE = """\
def first(a, b):
    return join("a", b)


class Pair:
    LIMIT = 3

    @property
    def size(self):
        if self.a:
            # As long as there are two.
            return join(
                'a',
                self.b,
            )
        return 0

    @size.setter
    def size(self, value):
        self.b = value
"""


@pytest.mark.parametrize(
    ("symbol", "code", "found"),
    [
        ("first", 'return join("a", b)', 'return join("a", b)'),
        ("first", "join('a',\n  b,)  # once", 'join("a", b)'),
        ("Pair.size", 'return join("a", self.b)', SOURCE[175:246]),
        ("Pair.size", "self.b = value", "self.b = value"),
        ("Pair.LIMIT", "3", "3"),
        ("Pair", "return 0", "return 0"),
    ],
)
def test_code_is_found_by_its_tokens_in_its_definition(symbol: str, code: str, found: str) -> None:
    ((start, end),) = find(SOURCE, symbol, code)
    assert SOURCE[start:end] == found


@pytest.mark.parametrize(
    ("symbol", "code"),
    [
        ("first", "self.b"),
        ("first", 'join("b", b)'),
        ("size", "return 0"),
        ("Pair.size", "eturn 0"),
    ],
)
def test_code_of_elsewhere_is_not_found(symbol: str, code: str) -> None:
    assert find(SOURCE, symbol, code) == []


def test_lines_that_are_planted_stand_as_deep_as_the_first() -> None:
    (place,) = find(SOURCE, "Pair.size", "return 0")
    planted = replaced(SOURCE, place, "    if 1:\n        pass\n")
    assert planted == SOURCE.replace("return 0", "if 1:\n            pass")


def test_every_test_that_is_named_exists(project: Path) -> None:
    outcome = run_tests(project, named_tests(BUGS), ["--collect-only", "-q"])
    assert outcome.word == "passes", outcome.tail


def test_a_test_that_does_not_exist_catches_nothing(project: Path) -> None:
    outcome = run_tests(project, [HARMLESS.tests[0] + "_and_more"], ["--collect-only"])
    assert (outcome.word, outcome.caught) == ("does not run", False)


@pytest.mark.parametrize("name", FEW)
def test_a_planted_bug_is_caught(name: str, project: Path) -> None:
    (bug,) = (bug for bug in BUGS if bug.name == name)
    verdict = plant(bug, project)
    assert verdict.caught, planting.report(verdict)
    assert not verdict.hung


def test_a_bug_that_is_not_caught_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planting, "BUGS", (HARMLESS,))
    assert planting.main([]) == 1
    told = capsys.readouterr().out
    assert "\nMISSED  harmless" in told
    assert told.endswith("\n0 of 1 planted bugs caught\n")


def test_a_test_that_hangs_has_caught_the_bug_and_is_told_apart(project: Path) -> None:
    verdict = plant(
        replace(HARMLESS, new="    while True:\n        pass\n"), project, test_limit_s=1
    )
    assert verdict.caught
    assert verdict.hung


def test_a_bug_by_which_no_test_runs_is_not_caught(project: Path) -> None:
    verdict = plant(replace(HARMLESS, new="    num = )\n"), project)
    assert [outcome.word for outcome in verdict.outcomes.values()] == ["does not run"]
    assert not verdict.caught


def test_packages_of_elsewhere_are_not_tested_in_place_of_the_copy() -> None:
    with copied() as folder:
        (folder / "workers").rename(folder / "moved")
        (folder / "workers").symlink_to(ROOT / "workers")
        outcome = run_tests(folder, HARMLESS.tests)
    assert outcome.word == "does not run"
    assert f"feeder.workers is of {ROOT}, not {folder}" in outcome.output


def test_tests_that_fail_without_a_bug_are_an_error(project: Path) -> None:
    with copied(project) as broken:
        file = broken / HARMLESS.file
        file.write_text(file.read_text().replace(HARMLESS.old, "    num = 1 + len(live)\n"))
        with pytest.raises(PlantError, match="without a bug the tests have to pass"):
            planting.check_unplanted(broken, [replace(HARMLESS, old="    num = 1 + len(live)\n")])
