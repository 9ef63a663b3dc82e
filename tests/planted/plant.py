"""Plants bugs in copies of the project, one at a time, and sees that the tests catch them.

Run by `scripts/planted-bugs`. A bug is caught when each of its tests fails where it is planted,
having passed where it is not. A test that hangs until its limit has caught the bug too.
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
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planted.anchor import find, replaced
from planted.bug import Bug
from planted.catalogue import BUGS
from planted.events import EVENTS
from planted.witness import TESTED

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("feeder", "workers", "tests")
TEST_LIMIT_S = 15.0
"""Seconds after which a test is said to hang."""
RUN_LIMIT_S = 120.0
"""Seconds after which a run of pytest is ended, whatever it does."""

_PASSED, _FAILED = 0, 1
_HUNG = re.compile(r"^\++ Timeout \++$", re.MULTILINE)
_TAIL_LINES = 25


class PlantError(Exception):
    """A bug cannot be planted, or the tests cannot be run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a bug."""

    bug: Bug
    outcomes: dict[str, Outcome]
    """What each of its tests came to."""
    seconds: float

    @property
    def caught(self) -> bool:
        return all(outcome.caught for outcome in self.outcomes.values())

    @property
    def hung(self) -> bool:
        return any(outcome.word == "hangs" for outcome in self.outcomes.values())


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


def planted_text(bug: Bug, folder: Path) -> str:
    """Return the text of the bug's file with the bug in it; raises `PlantError`."""
    text = (folder / bug.file).read_text()
    found = find(text, bug.symbol, bug.old)
    if len(found) != 1:
        raise PlantError(
            f"{bug.name}: {bug.symbol} of {bug.file} holds {bug.old!r} {len(found)} times, "
            "expected once"
        )
    return replaced(text, found[0], bug.new)


def run_tests(
    copy: Path,
    tests: Iterable[str],
    options: Sequence[str] = (),
    *,
    test_limit_s: float = TEST_LIMIT_S,
    run_limit_s: float = RUN_LIMIT_S,
) -> Outcome:
    """Run pytest on a copy. Raises `PlantError` where it is not the copy that is tested."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "planted.witness", *options]
    command += ["-p", "no:cacheprovider", f"--rootdir={copy}", f"--timeout={test_limit_s}", *tests]
    left_out = ("PYTEST_ADDOPTS", "FEEDER_MAX_SKIPS", "FEEDER_DEBUG")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env["PYTHONPATH"] = os.pathsep.join((str(copy), str(copy / "tests")))
    process = subprocess.Popen(
        command, cwd=copy, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=run_limit_s)
    except subprocess.TimeoutExpired as error:
        _end(process)
        return Outcome(word="hangs", output=str(error.output or ""))
    except BaseException:
        _end(process)
        raise
    return Outcome(word=_word(process.returncode, output), output=output)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and its children, which may hold its output open."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def _word(status: int, output: str) -> str:
    # A limit ends pytest on the spot with the exit status of a failure.
    if status == _FAILED and _HUNG.search(output):
        return "hangs"
    # Any other status is of tests that could not be run: that is no catch.
    return {_PASSED: "passes", _FAILED: "fails"}.get(status, "does not run")


def plant(bug: Bug, project: Path = ROOT, *, test_limit_s: float = TEST_LIMIT_S) -> Verdict:
    """Plant a bug in a copy of the project and run its tests there, each by itself."""
    started = time.monotonic()
    with copied(project) as copy:
        (copy / bug.file).write_text(planted_text(bug, copy))
        outcomes = {test: run_tests(copy, [test], test_limit_s=test_limit_s) for test in bug.tests}
    return Verdict(bug=bug, outcomes=outcomes, seconds=time.monotonic() - started)


def named_tests(bugs: Iterable[Bug]) -> list[str]:
    """Return the tests of bugs, each once."""
    return list(dict.fromkeys(test for bug in bugs for test in bug.tests))


def check_unplanted(project: Path, bugs: Sequence[Bug]) -> str:
    """Run all tests of the bugs where none is planted; return what was tested. Raises
    `PlantError` where one fails, and where a bug cannot be planted."""
    for bug in bugs:
        planted_text(bug, project)
    outcome = run_tests(project, named_tests(bugs))
    if outcome.word != "passes":
        raise PlantError(f"without a bug the tests have to pass:\n{outcome.tail}")
    (tested,) = (line for line in outcome.output.splitlines() if line.startswith(TESTED))
    return tested


def plant_all(bugs: Sequence[Bug], num_jobs: int) -> Iterator[Verdict]:
    """Yield what becomes of each bug. Raises `PlantError` where the tests do not pass without."""
    # The project may be edited meanwhile: all copies are of one state of it.
    with copied() as project, ThreadPoolExecutor(num_jobs) as pool:
        tested = check_unplanted(project, bugs)
        print(f"without a bug all {len(named_tests(bugs))} pass, {tested}", flush=True)
        yield from pool.map(lambda bug: plant(bug, project), bugs)


def report(verdict: Verdict) -> str:
    """Return the lines of the table for a bug; where it was not caught with the tests' output."""
    bug = verdict.bug
    lines = [f"{'caught' if verdict.caught else 'MISSED':8}{bug.name:32}{verdict.seconds:5.1f} s"]
    for test, outcome in verdict.outcomes.items():
        lines.append(f"        {outcome.word:13}{test}")
        if not outcome.caught:
            lines.append(outcome.tail)
    return "\n".join(lines)


def describe(bug: Bug) -> str:
    """Return what `--list` says of a bug."""
    return "\n".join(
        [
            bug.name,
            f"    {bug.harm}",
            f"    {bug.file}: {bug.symbol}",
            *(f"    {t}" for t in bug.tests),
        ]
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; ends the process where they are wrong."""
    parser = argparse.ArgumentParser(prog="scripts/planted-bugs", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", choices=[b.name for b in BUGS])
    parser.add_argument(
        "--events", action="store_true", help="those that leave out a wait of a GPU's, and no other"
    )
    parser.add_argument("--list", action="store_true", help="say what they are and plant none")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="copies tested at once (2)"
    )
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}, expected a number >= 1")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 when every bug was caught."""
    options = parse(arguments)
    bugs = [bug for bug in BUGS if options.only is None or bug.name in options.only]
    bugs = [bug for bug in bugs if not options.events or bug in EVENTS]
    if options.list:
        print("\n".join(map(describe, bugs)))
        return 0
    num_caught = num_hung = 0
    try:
        for verdict in plant_all(bugs, options.jobs):
            print(report(verdict), flush=True)
            num_caught += verdict.caught
            num_hung += verdict.caught and verdict.hung
    except PlantError as error:
        print(error, file=sys.stderr)
        return 1
    hung = f", {num_hung} by a test that hung until its limit" if num_hung else ""
    print(f"{num_caught} of {len(bugs)} planted bugs caught{hung}")
    return 0 if num_caught == len(bugs) else 1


if __name__ == "__main__":
    sys.exit(main())
