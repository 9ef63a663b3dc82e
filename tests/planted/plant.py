"""Plants bugs in copies of the project, one at a time, and sees that the tests catch them.

A bug is caught when each of its tests fails where it is planted, having passed where it is not. A
test that hangs until its limit has caught the bug too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from planted.bug import BUGS, Bug, PlantError, planted_text
from project import ROOT

COPIED = ("feeder", "workers", "tests")
TEST_LIMIT_S = 15.0
"""Seconds after which a test is said to hang."""
RUN_LIMIT_S = 120.0
"""Seconds after which a run of pytest is ended, whatever it does."""

_HUNG = re.compile(r"^\++ Timeout \++$", re.MULTILINE)
_TAIL_LINES = 25


class Outcome(NamedTuple):
    """What a run of pytest came to."""

    word: str
    """"passes", "fails", "hangs", or "does not run"."""
    output: str
    """All that it wrote."""

    @property
    def caught(self) -> bool:
        return self.word in ("fails", "hangs")

    @property
    def tail(self) -> str:
        return "\n".join(self.output.splitlines()[-_TAIL_LINES:])


@contextmanager
def copied(project: Path = ROOT) -> Iterator[Path]:
    """Yield a temporary folder with a copy of a project's packages and tests."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder).resolve()
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(project / name, copy / name, symlinks=True, ignore=ignored)
        shutil.copy(project / "pyproject.toml", copy)
        yield copy


def run_tests(copy: Path, tests: Sequence[str], test_limit_s: float = TEST_LIMIT_S) -> Outcome:
    """Run pytest on a copy."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
    command += ["--hypothesis-profile=mutants"]  # the first example that fails is enough
    command += [f"--rootdir={copy}", f"--timeout={test_limit_s}", *tests]
    left_out = ("PYTEST_ADDOPTS", "FEEDER_MAX_SKIPS", "FEEDER_DEBUG")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env["PYTHONPATH"] = os.pathsep.join((str(copy), str(copy / "tests")))
    process = subprocess.Popen(
        command, cwd=copy, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=RUN_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        return Outcome("hangs", str(error.output or ""))
    finally:
        if process.poll() is None:
            # Its children may hold its output open.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    # A limit ends pytest on the spot with the exit status of a failure. Any other status than that
    # and 0 is of tests that could not be run, which is no catch.
    word = {0: "passes", 1: "hangs" if _HUNG.search(output) else "fails"}
    return Outcome(word.get(process.returncode, "does not run"), output)


def plant(bug: Bug, project: Path = ROOT, test_limit_s: float = TEST_LIMIT_S) -> dict[str, Outcome]:
    """Plant a bug in a copy of the project; return what each of its tests comes to there."""
    with copied(project) as copy:
        (copy / bug.file).write_text(planted_text(bug, copy))
        return {test: run_tests(copy, [test], test_limit_s) for test in bug.tests}


def check_unplanted(project: Path, bugs: Sequence[Bug]) -> None:
    """Run all tests of the bugs where none is planted. Raises `PlantError` where one fails, and
    where a bug cannot be planted."""
    for bug in bugs:
        planted_text(bug, project)
    outcome = run_tests(project, sorted({test for bug in bugs for test in bug.tests}))
    if outcome.word != "passes":
        raise PlantError(f"without a bug the tests have to pass:\n{outcome.tail}")


def report(bug: Bug, outcomes: dict[str, Outcome], seconds: float = 0.0) -> str:
    """Return the lines of the table for a bug; where it was not caught with the tests' output."""
    is_caught = all(one.caught for one in outcomes.values())
    lines = [f"{'caught' if is_caught else 'MISSED':8}{bug.name:40}{seconds:5.1f} s"]
    for test, outcome in outcomes.items():
        lines.append(f"        {outcome.word:13}{test}")
        if not outcome.caught:
            lines.append(outcome.tail)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 when every bug was caught."""
    parser = argparse.ArgumentParser(prog="scripts/nightly planted", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="those with it in name or file")
    parser.add_argument("--list", action="store_true", help="say what they are and plant none")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="copies at once (2)")
    options = parser.parse_args(arguments)
    bugs = [bug for bug in BUGS.values() if bug.tests]
    bugs = [bug for bug in bugs if options.only in bug.name or options.only in bug.file]
    if not bugs:
        parser.error(f"no bug that tests catch has {options.only!r} in its name or file")
    if options.list:
        for bug in bugs:
            print("\n    ".join((bug.name, bug.at, *bug.tests)))
        return 0

    def timed(bug: Bug) -> tuple[Bug, dict[str, Outcome], float]:
        started = time.monotonic()
        return bug, plant(bug, project), time.monotonic() - started

    # The project may be edited meanwhile: all copies are of one state of it.
    with copied() as project, ThreadPoolExecutor(options.jobs) as pool:
        try:
            check_unplanted(project, bugs)
        except PlantError as error:
            print(error, file=sys.stderr)
            return 1
        num_missed = 0
        for bug, outcomes, seconds in pool.map(timed, bugs):
            print(report(bug, outcomes, seconds), flush=True)
            num_missed += not all(outcome.caught for outcome in outcomes.values())
    print(f"{len(bugs)} planted bugs, {num_missed} missed")
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
