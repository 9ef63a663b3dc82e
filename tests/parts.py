"""The parts of the tests: the fast one, the default, and the full one; and who runs which file
where several processes share the work.

The fast part has the tests that `costs.py` marks as `unit`, and says within a minute that a change
breaks something. The default leaves out campaigns, which are marked as `nightly`, and combinations
of parameters: it takes each value of each with each case. The full part takes every combination.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from costs import cost_of, is_fast

_ON_CLUSTER = re.compile(r"[\[-]ray[\]-]")

is_full = False
"""Whether every combination is taken; set from the command line."""


def examples(num: int) -> int:
    """Return how many examples of a property to draw: in the full part `num`, else a quarter."""
    return num if is_full else max(1, num // 4)


def some(case: Sequence[Any], *axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield combinations of one value of each axis for a test case: those of `few`, and in the full
    part all."""
    return product(*axes) if is_full else few(case, *axes)


def few(case: Sequence[Any], *axes: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield as many combinations as the longest axis has values: each value of each axis comes,
    beside others in another case."""
    shift = crc32(repr(case).encode())
    for i in range(max(map(len, axes))):
        rest, chosen = shift, []
        for axis in axes:
            chosen.append(axis[(i + rest) % len(axis)])
            rest //= len(axis)
        yield tuple(chosen)


def unit_of(nodeid: str) -> str:
    """Return what is run by one process, in its order: the tests of a file, which share fixtures;
    of the conformance tests, which share none, those of a function; those on a Ray cluster."""
    file, _, test = nodeid.partition("::")
    if _ON_CLUSTER.search(test):
        return "a Ray cluster"
    return nodeid.partition("[")[0] if file.startswith("tests/conformance/") else file


def sendable(value: Any) -> Any:
    """Return what a report consists of, with escapes for what UTF-8 cannot hold."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {sendable(key): sendable(one) for key, one in value.items()}
        case list() | tuple():
            return type(value)(map(sendable, value))
    return value


class Parts:
    """pytest plugin: takes the part that was asked for."""

    def __init__(self, *, fast: bool) -> None:
        self.fast = fast

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        return True if self.fast and not is_fast(collection_path) else None

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        left_out = [item for item in items if not self._takes(cost_of(item), config)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item not in set(left_out)]

    def _takes(self, cost: str, config: pytest.Config) -> bool:
        if self.fast:
            return cost == "unit"
        return cost != "nightly" or "nightly" in config.option.markexpr

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Iterator[None]:
        """Between processes text goes as UTF-8: what that cannot hold, such as the half of a name
        of a file that a test is about, would end the process that reports it."""
        return sendable((yield))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        from xdist.scheduler import LoadScopeScheduling

        class ByUnit(LoadScopeScheduling):  # type: ignore[misc]
            def _split_scope(self, nodeid: str) -> str:
                return unit_of(nodeid)

            def remove_node(self, node: Any) -> str | None:
                """Queue again what a process has left, and return the test that it died in."""
                # The scheduler of xdist would also queue units that are done, for whose end it
                # then waits for ever, and the test that ended the process.
                units = self.assigned_work.pop(node)
                left = {
                    unit: names
                    for unit, tests in units.items()
                    if (names := [name for name, is_done in tests.items() if not is_done])
                }
                ended_by = next(iter(left.values()), [None]).pop(0)
                self.workqueue.update(
                    {unit: dict.fromkeys(names, False) for unit, names in left.items() if names}
                )
                for other in self.assigned_work:
                    self._reschedule(other)
                return ended_by

            def _reschedule(self, node: Any) -> None:
                super()._reschedule(node)
                # A process begins with a test once it knows the next one; xdist gives a process
                # that takes another's place one unit, which may be of one test.
                while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                    super()._reschedule(node)

        # In the order of the folders: many of the long ones come first, and the rules of the
        # engine, which take no time, last. Else the longest, of few tests each, would be last.
        config.option.loadscopereorder = False
        return ByUnit(config, log)
