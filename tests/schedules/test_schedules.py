"""Small feeds do the same in every schedule of their threads, and what is wrong in one is found."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

import feeder
from schedules.campaign import SMALLEST, Runs, search
from schedules.programs import Checked
from schedules.search import again, all_within, by_priority, recorded
from schedules.world import Violation, World

pytestmark = pytest.mark.filterwarnings("ignore::feeder.ReplayWarning")


@pytest.mark.served
@pytest.mark.parametrize("name", ["two batches", "an error", "an interrupt", "a close"])
def test_a_small_feed_is_right_in_all_schedules_with_a_preemption(name: str) -> None:
    with Runs() as runs:
        assert runs.every(SMALLEST[name], 1) is None
    assert runs.num > 50


@pytest.mark.served
def test_drawn_feeds_are_right_in_schedules_by_chance() -> None:
    with Runs() as runs:
        assert runs.some(iter(range(80))) is None
    assert runs.num == 80


@pytest.mark.served
@pytest.mark.parametrize(
    "name", ["room that nobody is told of", "a user that looks first and is listed after"]
)
def test_a_planted_bug_is_found_and_found_again_by_the_choices(name: str) -> None:
    _, found = search(name, 100)
    assert found is not None
    assert found.again() == str(found.error)


# ---- the threads themselves


def two(first: Callable[[World, Any], None], second: Callable[[World, Any], None]) -> Any:
    """A program of two threads that share what `main` makes."""

    def main(world: World) -> list[str]:
        shared: dict[str, Any] = {"told": []}
        for name in "ab":
            shared[name] = feeder.waking.threading.Lock()
        thread = world.thread(first, world, shared)
        second(world, shared)
        thread.join()
        told: list[str] = shared["told"]
        return told

    return main


@pytest.mark.parametrize("num", [1, 2, 3])
def test_each_schedule_comes_once(num: int) -> None:
    def steps(name: str) -> Callable[[World, Any], None]:
        def run(world: World, shared: Any) -> None:
            for _ in range(num):
                world.point()
                shared["told"].append(name)

        return run

    told, schedules = set(), []
    for choose in all_within(100):
        schedules.append(numbers := list[int]())
        told.add("".join(World(recorded(choose, numbers)).run(two(steps("x"), steps("y")))))
    # Steps of two threads are woven in so many ways.
    assert len(told) == math.comb(2 * num, num)
    assert len({tuple(numbers) for numbers in schedules}) == len(schedules)


def test_locks_that_are_taken_crosswise_are_a_deadlock_in_one_preemption() -> None:
    def take(first: str, second: str) -> Callable[[World, Any], None]:
        def run(world: World, shared: Any) -> None:
            with shared[first], shared[second]:
                pass

        return run

    crosswise = two(take("a", "b"), take("b", "a"))
    for choose in all_within(0):
        World(choose).run(crosswise)
    with pytest.raises(Violation, match="no thread can go on"):
        for choose in all_within(1):
            World(choose).run(crosswise)


def test_a_thread_that_waits_for_a_time_goes_on_then_and_the_clock_with_it() -> None:
    times: list[float] = []

    def sleep(world: World, shared: Any) -> None:
        began = world.now
        world.sleep(0.5)
        times.append(world.now - began)

    World(by_priority(0, changes=0, points=1)).run(two(sleep, sleep))
    assert times == [0.5, 0.5]


def test_a_schedule_of_choices_is_that_schedule() -> None:
    seen: list[int] = []
    checked = Checked(SMALLEST["two batches"])
    with Runs() as runs:
        for numbers in ([], [1], [0, 1], [0, 1]):
            assert runs.run(checked, again(numbers), statements=False) is None
            seen.append(runs.num_points)
    assert seen[2] == seen[3]
