"""Which schedules are tried: all that cost little, or some of all."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from schedules.world import Choose, Step


class _Decision:
    """Steps that there were, and the one that is tried."""

    def __init__(self, costs: tuple[int, ...], spent: int) -> None:
        self.costs, self.spent, self.number = costs, spent, 0

    def advance(self, bound: int) -> bool:
        """Go to the next step that can be paid; whether there is one."""
        for number in range(self.number + 1, len(self.costs)):
            if self.spent + self.costs[number] <= bound:
                self.number = number
                return True
        return False


def all_within(bound: int) -> Iterator[Choose]:
    """Each schedule with at most so many preemptions, once: to be run before the next is taken.
    The first has none."""
    path: list[_Decision] = []
    while True:
        at = 0

        def choose(steps: Sequence[Step]) -> int:
            nonlocal at
            costs = tuple(step.cost for step in steps)
            if at == len(path):
                before = path[-1] if path else None
                spent = 0 if before is None else before.spent + before.costs[before.number]
                path.append(_Decision(costs, spent))
            decision = path[at]
            at += 1
            assert decision.costs == costs, "the program is another one when it is run again"
            return decision.number

        yield choose
        del path[at:]
        while path and not path[-1].advance(bound):
            path.pop()
        if not path:
            return


def by_priority(seed: int, *, changes: int, points: int) -> Choose:
    """A schedule by chance: the thread of the highest priority runs, and at so many moments, of so
    many points, the one that would run gets the lowest.

    The method is PCT, of Burckhardt, Kothari, Musuvathi and Nagarakatte, "A randomized scheduler
    with probabilistic guarantees of finding bugs" (ASPLOS 2010).
    """
    draw = random.Random(seed)
    priorities: dict[tuple[int, str], float] = {}
    moments = {draw.randrange(points) for _ in range(changes)}
    count = 0

    def priority(step: Step) -> float:
        return priorities.setdefault((step.ident, step.how), draw.random())

    def choose(steps: Sequence[Step]) -> int:
        nonlocal count
        count += 1
        number = max(range(len(steps)), key=lambda i: priority(steps[i]))
        if count in moments:
            priorities[steps[number].ident, steps[number].how] = -count
            number = max(range(len(steps)), key=lambda i: priority(steps[i]))
        return number

    return choose


def again(numbers: Sequence[int]) -> Choose:
    """The schedule of which these are the choices."""
    left = iter(numbers)
    return lambda steps: next(left, 0)


def recorded(choose: Choose, numbers: list[int]) -> Choose:
    """The same, and its choices are kept."""

    def chosen(steps: Sequence[Step]) -> int:
        numbers.append(choose(steps))
        return numbers[-1]

    return chosen
