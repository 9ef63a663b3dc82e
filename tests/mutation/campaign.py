"""Plants sampled mutants in a copy of the project, one at a time, and sees that tests notice them.

A mutant is killed by the first test that fails, or by the time that its tests may take; what no
test notices is alive. Each result is a line of a file, so that a campaign that was stopped goes on,
and two of them, before and after a change of the tests, are compared mutant by mutant.

The tests of a mutant run in a fork of an interpreter that has imported everything but the project:
most mutants are killed in a second, of which starting an interpreter would be most.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mutation.modules import ADAPTERS, CORE
from mutation.mutants import Mutant, sample
from project import ROOT

SLOWER = 4
"""How many times as long as without a mutant the tests of a module may take."""
AT_LEAST_S = 20.0

PRELOADED = ("hypothesis", "msgpack", "msgspec", "numpy", "pyarrow", "xxhash", "zmq")


class FirstFailure:
    """pytest plugin: writes the first test that failed to a pipe."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def _tell(self, name: str) -> None:
        if self.pipe >= 0:
            os.write(self.pipe, name.encode()[:4096])
            self.pipe = -1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._tell(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._tell(f"{report.nodeid} (collection)")


def run_tests(folder: Path, tests: Iterable[str], limit_s: float) -> tuple[str, float]:
    """Return what killed the project in that folder (nothing: it lives), and the seconds it took.

    Call it from one thread of a process of its own: it forks."""
    begun = time.monotonic()
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reads)
        _be_the_tests(folder, list(tests), writes)
    os.close(writes)
    with open(reads, "rb") as pipe, _pidfd(pid) as ended:
        is_over, _, _ = select.select([ended], [], [], limit_s)
        os.killpg(pid, signal.SIGKILL)  # what the tests have started, too
        _, status = os.waitpid(pid, 0)
        said = pipe.read().decode(errors="replace") if is_over else "time limit"
    code = os.waitstatus_to_exitcode(status)
    if is_over and code != pytest.ExitCode.OK:
        said = said or f"exit status {code}"
    return said, time.monotonic() - begun


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _be_the_tests(folder: Path, tests: list[str], pipe: int) -> None:
    """The body of the forked child."""
    code: int = pytest.ExitCode.INTERNAL_ERROR
    try:
        os.setsid()
        os.chdir(folder)
        with open(folder / "output-of-the-tests", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        sys.path[:] = [str(folder), *(p for p in sys.path if not p.startswith(str(ROOT / "tests")))]
        for name in [
            name for name in sys.modules if name.partition(".")[0] in ("mutation", "project")
        ]:
            del sys.modules[name]
        os.environ["PYTHONPATH"] = str(folder)
        options = [
            "-x", "-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported",
            "--hypothesis-profile=mutants",
        ]  # fmt: skip
        code = pytest.main([*options, *tests], plugins=[FirstFailure(pipe)])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Copy:
    """A copy of the project in which one mutant is planted at a time. Owner: one thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True,
        ).stdout.decode().split("\0")  # fmt: skip
        for name in filter(None, names):
            if not (ROOT / name).exists() and not (ROOT / name).is_symlink():
                continue  # removed, and not yet committed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The mutant is in the copy."""
        path = self.folder / mutant.file
        source = path.read_bytes()
        try:
            self._write(path, mutant.apply(source))
            yield
        finally:
            self._write(path, source)

    def _write(self, path: Path, source: bytes) -> None:
        path.write_bytes(source)
        # Compiled code is taken for that of a file of the same size and second.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


class Judge:
    """Plants mutants of one file after the other and writes down what became of each. Owner: the
    one thread of a process, for it forks."""

    def __init__(self, modules: dict[str, tuple[str, ...]], folder: Path, results: Path) -> None:
        self._modules = modules
        self._copy = Copy(folder)
        self._results = results

    def judge(self, mutants: list[Mutant], until: float) -> bool:
        """Judge mutants of one file, until that time; returns whether that could be done."""
        file = mutants[0].file
        by, seconds = run_tests(self._copy.folder, self._modules[file], 600.0)
        if by:
            print(f"the tests of {file} fail without a mutant: {by}", file=sys.stderr, flush=True)
            return False
        print(f"{file}: its tests take {seconds:.1f} s", flush=True)
        limit_s = max(AT_LEAST_S, SLOWER * seconds)
        for mutant in mutants:
            if time.monotonic() > until:
                return False
            with self._copy.planted(mutant):
                by, seconds = run_tests(self._copy.folder, self._modules[file], limit_s)
            self._note(mutant, by, seconds)
        return True

    def _note(self, mutant: Mutant, by: str, seconds: float) -> None:
        result = {
            "id": mutant.id, "file": mutant.file, "line": mutant.line, "symbol": mutant.symbol,
            "kind": mutant.kind, "old": mutant.old, "new": mutant.new,
            "killed_by": by, "seconds": round(seconds, 1),
        }  # fmt: skip
        with open(self._results, "a") as file:  # one write: other processes append to it, too
            file.write(json.dumps(result) + "\n")
        state = f"killed by {by}" if by else "ALIVE"
        print(f"{mutant.file}:{mutant.line} {mutant.kind} {seconds:.1f} s {state}", flush=True)


def run(
    modules: dict[str, tuple[str, ...]],
    mutants: list[Mutant],
    results: Path,
    jobs: int,
    until: float,
) -> bool:
    """Judge the mutants that have no result yet, in as many processes; returns whether all of them
    came to their end."""
    assert "feeder" not in sys.modules, "forks would test this project, and not their copy of it"
    done = {one["id"] for one in read(results)}
    of_file: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        if mutant.id not in done:
            of_file.setdefault(mutant.file, []).append(mutant)
    files = list(of_file)
    # The queue of the work: each process reads one byte, the number of a file.
    reads, writes = os.pipe()
    os.write(writes, bytes(range(len(files))))
    os.close(writes)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        processes = []
        for number in range(jobs):
            if (pid := os.fork()) == 0:
                code = 1
                try:
                    judge = Judge(modules, Path(folder, str(number)), results)
                    is_whole = True
                    while taken := os.read(reads, 1):
                        is_whole &= judge.judge(of_file[files[taken[0]]], until)
                    code = int(not is_whole)
                finally:
                    os._exit(code)
            processes.append(pid)
        os.close(reads)
        statuses = [os.waitpid(pid, 0)[1] for pid in processes]
    return not any(statuses)


def read(results: Path) -> list[dict[str, Any]]:
    """Return the results in a file, none where there is no such file."""
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def draw(modules: Iterable[str], seed: str, num: int) -> list[Mutant]:
    """Return `num` mutants, as many of each module as of any other, or all that it has."""
    drawn = [sample(file, (ROOT / file).read_bytes(), seed, num) for file in modules]
    turns = [one[turn] for turn in range(num) for one in drawn if turn < len(one)]
    # By module, so that the tests of a module without a mutant are run once.
    return sorted(turns[:num], key=lambda mutant: mutant.file)


def summarise(results: Iterable[dict[str, Any]]) -> None:
    """Print the mutants that live, and how many of each file were killed."""
    results = list(results)
    killed, total = Counter[str](), Counter[str]()
    for one in sorted(results, key=lambda one: (one["file"], one["line"])):
        total[one["file"]] += 1
        killed[one["file"]] += bool(one["killed_by"])
        if not one["killed_by"]:
            print(f"alive: {one['file']}:{one['line']} {one['symbol']} ({one['kind']})")
            print(f"    {one['old']}  ->  {one['new']}")
    for file in total:
        print(f"{killed[file]:4} of {total[file]:4}  {file}")
    share = 100 * killed.total() / max(1, total.total())
    print(f"mutants killed: {killed.total()} of {total.total()} ({share:.1f} %)")


def compare(before: Path, after: Path) -> int:
    """Print which mutants were killed before and live after, or were not judged after; returns how
    many, and one where a file has no results."""
    old, new = ({one["id"]: one for one in read(file)} for file in (before, after))
    both = old.keys() & new.keys()
    lost = [id for id in both if old[id]["killed_by"] and not new[id]["killed_by"]]
    for id in sorted(lost, key=lambda id: (new[id]["file"], new[id]["line"])):
        one = new[id]
        print(f"killed before, alive after: {one['file']}:{one['line']} {one['symbol']}")
        print(f"    {one['old']}  ->  {one['new']}    (was killed by {old[id]['killed_by']})")
    for name, results in (("before", old), ("after", new)):
        print(f"{name}: killed {sum(bool(results[id]['killed_by']) for id in both)} of {len(both)}")
    unjudged, added = len(old.keys() - new.keys()), len(new.keys() - old.keys())
    print(f"killed before and alive after: {len(lost)}; judged after alone: {added}")
    if unjudged:
        print(f"ERROR: of {len(old)} mutants that were judged before, {unjudged} were not after")
    for file, results in ((before, old), (after, new)):
        if not results:
            print(f"ERROR: {file} has 0 results")
    return len(lost) + unjudged + (not (old and new))


def main() -> None:
    """The command; see its help."""
    parser = argparse.ArgumentParser(prog="scripts/mutate", description=__doc__)
    parser.add_argument("--seed", default="1", help="draws the sample (%(default)s)")
    parser.add_argument("--mutants", type=int, default=300, metavar="N", help="%(default)s")
    parser.add_argument("--minutes", type=float, default=120, help="then it stops (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--results", type=Path, metavar="FILE", help="go on with this campaign")
    parser.add_argument(
        "--only", metavar="TEXT", default="", help="files whose path has this in it"
    )
    parser.add_argument("--adapters", action="store_true", help="the modules of the adapters alone")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        sys.exit(compare(*options.compare) > 0)
    modules = {
        file: tests
        for file, tests in (ADAPTERS if options.adapters else CORE).items()
        if options.only in file
    }
    if not modules:
        sys.exit(f"0 modules have {options.only!r} in their paths")
    chosen = draw(modules, options.seed, options.mutants)
    if options.list:
        for one in chosen:
            print(f"{one.file}:{one.line} {one.symbol} ({one.kind})\n    {one.old}  ->  {one.new}")
        return
    for name in PRELOADED:
        __import__(name)
    results = options.results or Path(tempfile.mkdtemp(prefix="mutants-")) / "results.jsonl"
    print(f"seed {options.seed}: {len(chosen)} mutants; results in {results}", flush=True)
    is_whole = run(modules, chosen, results, options.jobs, time.monotonic() + 60 * options.minutes)
    ids = {one.id for one in chosen}
    summarise(one for one in read(results) if one["id"] in ids)
    print(f"seed {options.seed}: {len(chosen)} mutants; results in {results}")
    sys.exit(not is_whole)


if __name__ == "__main__":
    main()
