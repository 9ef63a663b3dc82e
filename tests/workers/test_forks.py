"""What a forked child is told to give up."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from feeder.workers import forks


class Held:
    """It notes that it was given up."""

    def __init__(self, name: str, told: list[str], *, fails: bool = False) -> None:
        self.name = name
        self.told = told
        self.fails = fails

    def give_up(self) -> None:
        self.told.append(self.name)
        if self.fails:
            raise OSError("no")

    def go_on(self) -> None:
        self.told.append(self.name)
        forks.call_in_child(self.go_on)


@pytest.fixture(autouse=True)
def a_process_that_holds_nothing() -> Iterator[None]:
    """Those of the tests' own process stay as they are."""
    before = dict(forks._functions)
    forks._functions.clear()
    yield
    forks._functions.clear()
    forks._functions.update(before)


def test_all_are_told_in_their_order_though_one_fails(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []
    held = [Held(name, told, fails=name == "b") for name in "abc"]
    for each in (*held, held[0]):
        forks.call_in_child(each.give_up)
    forks._after_fork()
    assert told == ["a", "b", "c"]
    assert "does not let go" in caplog.text


def test_a_child_tells_its_own_children_of_what_it_goes_on_to_use_alone() -> None:
    told: list[str] = []
    gone, stays = Held("gone", told), Held("stays", told)
    forks.call_in_child(gone.give_up)
    forks.call_in_child(stays.go_on)
    for _ in range(2):
        forks._after_fork()
    assert told == ["gone", "stays", "stays"]


def test_what_is_closed_or_forgotten_is_not_told() -> None:
    told: list[str] = []
    closed, forgotten = Held("closed", told), Held("forgotten", told)
    for each in (closed, forgotten):
        forks.call_in_child(each.give_up)
    for _ in range(2):
        forks.call_no_more(closed)
    del each, forgotten
    gc.collect()
    assert list(forks._functions) == []
    forks._after_fork()
    assert not told
