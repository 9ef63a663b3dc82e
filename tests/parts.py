"""The parts of the tests: the fast one, the default, and the full one; and who runs which file
where several processes share the work.

The fast part is a list of folders and files whose tests are rules, formats and messages: they
start no process, wait for no clock, and say within a minute that a change breaks something. The
default leaves nothing out but combinations of parameters: it takes each value of each with each
case. The full part takes every combination.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from project import TESTS

FAST = (
    "conformance/test_golden_files.py",
    "conformance/test_source_differences.py",
    "conformance/test_stream.py",
    "conformance/test_upstream.py",
    "feeder/checkpoint/test_format.py",
    "feeder/checkpoint/test_nodes.py",
    "feeder/checkpoint/test_store.py",
    "feeder/cli/test_gpus.py",
    "feeder/config_file",
    "feeder/devices/cuda/test_driver.py",
    "feeder/devices/cuda/test_errors.py",
    "feeder/devices/cuda/test_queue.py",
    "feeder/devices/cuda/test_rules.py",
    "feeder/devices/cuda/test_streams.py",
    "feeder/devices/test_slots.py",
    "feeder/feeds/test_lifecycle.py",
    "feeder/feeds/test_races.py",
    "feeder/feeds/test_read_once.py",
    "feeder/job/test_definition.py",
    "feeder/job/test_managers.py",
    "feeder/job/test_workspace.py",
    "feeder/observe/status/test_history.py",
    "feeder/observe/test_prometheus.py",
    "feeder/observe/test_verdict.py",
    "feeder/service/client/test_connecting.py",
    "feeder/service/memory/test_arena.py",
    "feeder/service/memory/test_mapping.py",
    "feeder/service/net/test_addresses.py",
    "feeder/service/protocol",
    "feeder/service/server/test_accounts.py",
    "feeder/service/server/test_groups.py",
    "feeder/state",
    "feeder/test_config.py",
    "feeder/test_ranks.py",
    "freeze",
    "packaging/test_house_rules.py",
    "workers",
)
NOT_FAST = (
    "workers/fetch/test_bad_input.py",
    "workers/fetch/test_inline_merge.py",
    "workers/fetch/test_running_ahead.py",
    "workers/fetch/test_timeouts.py",
    "workers/sources/orders/test_permutation.py",
)
"""Files of those folders that wait for clocks or draw large samples."""

_ON_CLUSTER = re.compile(r"[\[-]ray[\]-]")

is_full = False
"""Whether every combination is taken; set from the command line."""


def is_fast(path: Path) -> bool:
    """Return whether a file, or something in a folder, is of the fast part."""
    name = path.relative_to(TESTS).as_posix() if path.is_relative_to(TESTS) else ""
    if path.is_dir():
        return name in ("", ".") or any(_is_in(one, name) or _is_in(name, one) for one in FAST)
    return any(_is_in(name, part) for part in FAST) and name not in NOT_FAST


def _is_in(name: str, folder: str) -> bool:
    return name == folder or name.startswith(folder + "/")


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
        if self.fast:
            slow = [item for item in items if item.get_closest_marker("slow")]
            config.hook.pytest_deselected(items=slow)
            items[:] = [item for item in items if not item.get_closest_marker("slow")]

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
