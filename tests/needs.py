"""Tools and packages that a test needs: where one is missing the test is skipped and counted.

Use `@pytest.mark.needs("name", ...)` on a test, or `needs("name")` in one or at the top of a file.

The tests in `tests/adapters` need frameworks, which are in an environment of their own that
`scripts/test adapters` makes. Elsewhere they are left out by `needs_framework`, and counted apart;
where FEEDER_ADAPTERS is "required" they fail.

A GPU is no tool that one could install. The tests in `tests/gpu` are left out where there is none,
by `needs_gpus`, and counted apart, each reason told; where FEEDER_GPU is "required" they fail.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

REASON = "missing tool or package: "
MAX_SKIPS = "FEEDER_MAX_SKIPS"
NO_GPU = "no GPU: "
GPU = "FEEDER_GPU"
GPU_TESTS = "tests/gpu/"
NO_FRAMEWORK = "no framework: "
ADAPTERS = "FEEDER_ADAPTERS"
ADAPTER_TESTS = "tests/adapters/"
FILES = "files that were skipped"


needs_counts = pytest.mark.skipif(
    not getattr(sys, "_is_gil_enabled", lambda: True)(), reason=REASON + "the interpreter's lock"
)
"""Of a test of chunks that are passed on: nobody can tell who holds one where threads count their
references apart."""


def needs(name: str) -> None:
    """Skip where `name` is neither a package that can be imported nor a tool on the path."""
    if not (shutil.which(name) or _is_package(name)):
        pytest.skip(REASON + name, allow_module_level=True)


def _is_package(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return False  # What the package lies in is not there either.
    # A folder that happens to have the name is found too, as a namespace, which has no origin.
    return spec is not None and spec.origin is not None


def needs_framework(*names: str) -> None:
    """Leave a file of `tests/adapters` out where one of the frameworks is not installed."""
    missing = [name for name in names if not _is_package(name)]
    if missing and os.environ.get(ADAPTERS) != "required":
        pytest.skip(NO_FRAMEWORK + missing[0], allow_module_level=True)


def needs_gpus(num: int = 1) -> None:
    """Leave a test of `tests/gpu` out where there are fewer GPUs, or where CuPy finds none. One
    is required where the environment says so, and no more."""
    if why := why_no_gpus(num):
        if os.environ.get(GPU) == "required" and num == 1:
            pytest.fail(f"{GPU} is 'required', but {why}", pytrace=False)
        pytest.skip(NO_GPU + why)


def why_no_gpus(num: int = 1) -> str:
    """Return why there are not so many GPUs; empty where there are."""
    from feeder.devices.cuda.cupydriver import count_gpus, import_cupy
    from feeder.errors import ConfigError

    try:
        found = count_gpus(import_cupy("cuda:0"), "cuda:0")
    except ConfigError as error:
        return str(error)
    return "" if found >= num else f"{found} of {num} found"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    _, _, reason = report.longrepr
    return reason.removeprefix("Skipped: ")


class SkipCounter:
    """pytest plugin: skips what lacks something, says what was skipped, fails above a limit."""

    def __init__(self, max_skips: int | None) -> None:
        self.max_skips = max_skips
        self.reasons: Counter[str] = Counter()
        self.without_gpu: Counter[str] = Counter()
        """Tests of `tests/gpu` that were left out, by why; they do not count as skipped."""
        self.without_framework: Counter[str] = Counter()
        """Files of `tests/adapters` that were left out, by why; nor do they."""
        self.files: dict[str, str] = {}
        """Files that were skipped whole, and why."""

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        for mark in item.iter_markers("needs"):
            for name in mark.args:
                needs(name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._count(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._count_files({report.nodeid: _reason(report)})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Count the files that a process which shared the work has skipped. Each of them looks at
        all files, and none of its reports of them comes here."""
        self._count_files(getattr(node, "workeroutput", {}).get(FILES, {}))

    def _count_files(self, found: dict[str, str]) -> None:
        for name in found.keys() - self.files.keys():
            reason = found[name]
            is_adapter = reason.startswith(NO_FRAMEWORK) and name.startswith(ADAPTER_TESTS)
            (self.without_framework if is_adapter else self.reasons)[reason] += 1
        self.files |= found

    def _count(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = _reason(report)
            is_gpus = reason.startswith(NO_GPU) and report.nodeid.startswith(GPU_TESTS)
            (self.without_gpu if is_gpus else self.reasons)[reason] += 1

    @property
    def exceeded(self) -> bool:
        return self.max_skips is not None and self.reasons.total() > self.max_skips

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[FILES] = self.files
        if self.exceeded and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._summary():
            terminalreporter.write_line(line)

    def _summary(self) -> Iterator[str]:
        missing = {r: n for r, n in self.reasons.items() if r.startswith(REASON)}
        names = ", ".join(sorted(reason.removeprefix(REASON) for reason in missing)) or "none"
        yield f"skipped for missing tools or packages: {sum(missing.values())} ({names})"
        others = {r: n for r, n in self.reasons.items() if r not in missing}
        if others:
            yield f"skipped for other reasons: {sum(others.values())} ({'; '.join(sorted(others))})"
        if self.without_gpu:
            why = "; ".join(sorted(self.without_gpu))
            yield f"not run, for they need a GPU: {self.without_gpu.total()} ({why})"
        if self.without_framework:
            why = "; ".join(sorted(self.without_framework))
            num = self.without_framework.total()
            yield f"files not run, for `scripts/test adapters` runs them: {num} ({why})"
        if self.exceeded:
            skips = self.reasons.total()
            yield f"failed: {skips} skipped, where at most {self.max_skips} may be"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--max-skips",
        type=int,
        default=os.environ.get(MAX_SKIPS) or None,
        metavar="N",
        help=f"fail when more than N tests are skipped (default: {MAX_SKIPS}, else no limit)",
    )


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(name, ...): skipped and counted where one is missing")
    # Where processes share the work, theirs are counted here, in the one that they report to.
    is_worker = hasattr(config, "workerinput")
    config.pluginmanager.register(SkipCounter(None if is_worker else config.getoption("max_skips")))
