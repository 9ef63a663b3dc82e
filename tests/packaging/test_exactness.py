"""`scripts/bench exactness` tells what a loader does that loses, repeats, moves, hangs or leaks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from project import ROOT, TESTS, printed

pytestmark = [pytest.mark.process, pytest.mark.fresh]

PATH = os.pathsep.join(map(str, (ROOT / "scripts", TESTS)))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Asks a loader that pretends."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    monkeypatch.setenv("PYTHONPATH", PATH)
    asker = importlib.import_module("exactness.asker").Asker
    questions = importlib.import_module("exactness.questions").QUESTIONS

    def ask(pretended: str, *names: str, limit_s: float = 60.0) -> list[str]:
        monkeypatch.setenv("PRETEND", pretended)
        with closing(asker("pretender", tmp_path / pretended, limit_s)) as made:
            return [questions[name](made) for name in names]

    yield ask
    for path in Path("/dev/shm").glob("pretender-*"):
        path.unlink()


def test_an_exact_loader_is_exact_in_all_that_it_offers(answers: Any) -> None:
    names = [
        "same_again", "killed", "killed_before_first", "killed_behind_first", "prefetched",
        "last_batch", "behind_epoch", "second_epoch", "more_workers", "raised", "left_early",
        "two_at_once",
    ]  # fmt: skip
    assert answers("nothing", *names) == ["exact"] * len(names)
    assert answers("nothing, else", "closed", "orphaned") == ["clean", "clean"]


def test_what_it_does_not_offer_is_told(answers: Any) -> None:
    assert answers("nothing", "fewer_ranks", "skipped", "corrupt") == [
        "not supported", "not supported", "refused: ValueError, record named",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("pretended", "answer"),
    [
        ("loses", "lost 8"),
        ("repeats", "repeated 8"),
        ("moves", "moved"),
        ("refuses", "refused: LookupError"),
        ("dies", "died: exit status 3"),
    ],
)
def test_a_fault_after_a_resume_is_told(answers: Any, pretended: str, answer: str) -> None:
    assert answers(pretended, "killed") == [answer]


def test_a_loader_that_hangs_is_told_and_killed(answers: Any) -> None:
    assert answers("hangs", "killed", "same_again", limit_s=3.0) == ["hung", "exact"]


@pytest.mark.parametrize(
    ("pretended", "closed", "orphaned"),
    [
        ("process", "leaked 1 process", "clean"),  # its input ends with the trainer
        ("thread", "leaked 1 thread", "clean"),
        ("memory", "leaked 1 shared memory", "leaked 1 shared memory"),
    ],
)
def test_a_leak_is_told(answers: Any, pretended: str, closed: str, orphaned: str) -> None:
    assert answers(pretended, "closed", "orphaned") == [closed, orphaned]


def test_the_command_prints_a_table_and_names_what_is_not_installed() -> None:
    told = printed(
        "-m", "exactness", "--loaders", "pretender", "nobody", "--questions", "killed",
        PYTHONPATH=PATH, PRETEND="loses",
    )  # fmt: skip
    assert "| Killed in mid-epoch, resumed | lost 8 |" in told
    assert "nobody is left out: nobody is not installed" in told
