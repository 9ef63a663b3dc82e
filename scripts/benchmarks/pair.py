"""Times this checkout against another commit, a whole process after the other, row by row.

Of each row a pair is three processes in turn: the other commit, this checkout, the other commit
once more. The two runs of the same commit tell the row's own spread: half of all pairs differ by no
more from 1 than its figure. A row fails where the median pair loses more than the tolerance beyond
that spread. The processes of both commits run the measuring code of this checkout, which uses
nothing but the public names of the package.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from report import figure, machine, table

ROOT = Path(__file__).parents[2]
PAIRS = 10
TOLERANCE_PERCENT = 3.0
PROCESS_LIMIT_S = 120.0
WARM_S, TIMED_S = 0.3, 0.8

Measure = Callable[[], float]
"""Runs one row in this process and returns a figure of which more is better."""


# ---- the rows; what they need is imported in the process that measures


def _rate(contender: Callable[[], AbstractContextManager[Callable[[], object]]]) -> float:
    """Batches per second of a contender."""
    from harness import Settings, rate_of

    with contender() as take:
        return rate_of(take, Settings(timed_s=TIMED_S, warm_s=WARM_S))


def _race(case: str) -> float:
    from contenders import product
    from races import RACES

    (race,) = [race for race in RACES if race.case == case]
    return _rate(product(race.load, lambda: race.make_fetch(race.load)))


def _small(form: str) -> float:
    import fetches
    from contenders import product

    return _rate(product(fetches.SMALL, lambda: getattr(fetches, form)(fetches.SMALL)))


def _beside_busy(served: bool) -> float:
    import served as service
    from contenders import BusyThread, product
    from fetches import VECTORS, fresh_holding

    load = VECTORS.in_chunks_of(17)
    contender = service.served("vectors", plane="shared") if served else None
    with BusyThread():
        return _rate(contender or product(load, lambda: fresh_holding(load)))


def _served(name: str, scheme: str = "ipc", **options: Any) -> float:
    from served import served

    return _rate(served(name, scheme, **options))


def _source(name: str) -> float:
    import jpegs
    import lmdbs

    if name == "jpeg":
        return _rate(jpegs.of_feeder(2))
    return _rate(lmdbs.of_feeder(next(load for load in lmdbs.DATUMS if load.case == name)))


def _cheap(case: str) -> float:
    from cheap import CHEAP, of_feeder

    return _rate(of_feeder(next(records for records in CHEAP if records.case == case), 2))


def _many(kind: str, number: int, fetch: str = "passed") -> float:
    import many

    return _rate(getattr(many, f"of_{kind}")(number, fetch))


def _trivial(case: str) -> float:
    from trivial import TRIVIAL, of_feed

    return _rate(of_feed(next(trivial for trivial in TRIVIAL if trivial.case == case)))


def _per_second(action: Callable[[], float], times: int) -> float:
    """How often an action fits into a second, by its median time."""
    return 1 / statistics.median(action() for _ in range(times))


def _stop() -> float:
    from stopping import stop_product

    return _per_second(stop_product, 7)


def _snapshot() -> float:
    from snapshots import snapshots_per_second

    return snapshots_per_second()


def _token() -> float:
    from contenders import FEED, make_coordinator
    from fetches import SeekableFetch
    from harness import time_of
    from snapshots import NUM_WORKERS, TINY

    with make_coordinator(TINY, SeekableFetch(TINY), NUM_WORKERS) as coordinator:
        feed = coordinator[FEED]
        return _per_second(lambda: time_of(next(feed).cut.token), 2_000)


def _resume() -> float:
    from resuming import resumes_per_second

    return resumes_per_second(15)


def _connect() -> float:
    from children import Child, address_for
    from harness import time_of
    from served import connect

    with address_for("ipc") as address, Child("serve", "small", address) as server:

        def first_batch() -> float:
            with ExitStack() as stack:
                return time_of(lambda: next(stack.enter_context(connect(server.address))))

        first_batch()
        # Few: a feed goes back for newcomers a few times at once, then every half second.
        return _per_second(first_batch, 5)


def _import() -> float:
    program = "import feeder; [getattr(feeder, name) for name in feeder.__all__]"

    def run() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", program], check=True)
        return time.perf_counter() - start

    return _per_second(run, 5)


CORE_RACES = (
    "images-32", "images-7", "images-7-fresh", "images-100", "vectors-1", "vectors-1-fresh",
    "vectors-17", "vectors-17-fresh", "vectors-256", "small-64",
)  # fmt: skip
ROWS: Mapping[str, Measure] = {
    **{f"core {case}": partial(_race, case) for case in CORE_RACES},
    "core small, passed": partial(_small, "fresh"),
    "core small, copied": partial(_small, "constant"),
    "core small, 16 workers": partial(_many, "workers", 16),
    "core small, 64 workers": partial(_many, "workers", 64),
    "core small, 64 workers, copied": partial(_many, "workers", 64, "copied"),
    "core small, 1,000 workers": partial(_many, "workers", 1000),
    "core small, by index, 8 threads": partial(_many, "threads", 8, "by index"),
    "core small, 2 buffered": partial(_many, "buffer", 2),
    "core small, 8 buffered": partial(_many, "buffer", 8),
    "core batches-of-1": partial(_trivial, "batches-of-1"),
    "core columns-1000": partial(_trivial, "columns-1000"),
    "core python-50us": partial(_trivial, "python-50us"),
    "core vectors-17 beside a busy thread": partial(_beside_busy, False),
    "core stop": _stop,
    "core snapshot": _snapshot,
    "core token": _token,
    "core resume": _resume,
    "core import": _import,
    "service images, shared": partial(_served, "images", plane="shared"),
    "service images-7, shared": partial(_served, "images-7", plane="shared"),
    "service images, shared, checksum sampled": partial(
        _served, "images", plane="shared", checksum="sampled"
    ),
    "service images, frames, ipc": partial(_served, "images", plane="frames"),
    "service images, frames, tcp": partial(_served, "images", "tcp", plane="frames"),
    "service images, frames, tcp, unchecked": partial(
        _served, "images", "tcp", plane="frames", checksum="off"
    ),
    "service vectors, shared": partial(_served, "vectors", plane="shared"),
    "service small, credit 8": partial(_served, "small", plane="shared", credit=8),
    "service small-4096, credit 64": partial(_served, "small-4096", plane="shared", credit=64),
    "service vectors beside a busy thread": partial(_beside_busy, True),
    "service connect": _connect,
    "sources jpeg": partial(_source, "jpeg"),
    "sources lmdb-1kb": partial(_source, "lmdb-1kb"),
    "sources lmdb-100kb": partial(_source, "lmdb-100kb"),
    "sources cheap-sequences": partial(_cheap, "cheap-sequences"),
    "sources cheap-numbers": partial(_cheap, "cheap-numbers"),
}


# ---- pairs


@contextmanager
def exported(revision: str) -> Iterator[Path]:
    """The package as it was at a commit, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="feeder-pair-") as folder:
        paths = [name for name in ("feeder", "workers") if _holds(revision, name)]
        archive = subprocess.run(
            ["git", "archive", revision, *paths], cwd=ROOT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def _holds(revision: str, name: str) -> bool:
    found = subprocess.run(
        ["git", "cat-file", "-e", f"{revision}:{name}"], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    return found.returncode == 0


def _run(row: str, package: Path) -> float:
    """The figure of one process that measures a row over the package in a folder."""
    # It runs in that folder, for `python -c` imports from where it runs before all else.
    done = subprocess.run(
        [sys.executable, __file__, "--measure", row, "--of", str(package), "HEAD"],
        cwd=package, env={**os.environ, "PYTHONPATH": str(package)}, stdout=subprocess.PIPE,
        text=True, check=True, timeout=PROCESS_LIMIT_S,
    )  # fmt: skip
    return float(done.stdout)


def _measure(row: str, package: Path) -> None:
    import feeder

    if Path(feeder.__file__).parents[1] != package.resolve():
        raise SystemExit(f"measured {feeder.__file__}, wanted the package in {package}")
    print(ROWS[row]())


def _pairs(row: str, base: Path, count: int) -> dict[str, list[float]]:
    """Samples of the other commit, of this checkout, and of the other commit again."""
    samples: dict[str, list[float]] = {"base": [], "change": [], "again": []}
    places = {"base": base, "change": ROOT, "again": base}
    for pair in range(count + 1):
        # Where the first of three has a harder start, it is another one in each pair.
        order = list(places)[pair % 3 :] + list(places)[: pair % 3]
        for name in order:
            value = _run(row, places[name])
            # The first pair warms files and bytecode up.
            if pair:
                samples[name].append(value)
    return samples


def _verdict(samples: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """The median gain of this checkout and the row's own spread, both in percent."""
    triples = list(zip(samples["base"], samples["change"], samples["again"], strict=True))
    gain = statistics.median(change / ((a + b) / 2) - 1 for a, change, b in triples)
    own = statistics.median(abs(b / a - 1) for a, _, b in triples)
    return 100 * gain, 100 * own


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench pair", description=__doc__)
    parser.add_argument("base", metavar="BASE_REV", help="the commit to compare this checkout with")
    parser.add_argument("--rows", action="append", metavar="TEXT", help="only rows that hold TEXT")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"pairs of each row ({PAIRS})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every sample to FILE")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        _measure(arguments.measure, arguments.of)
        return 0
    wanted = [row for row in ROWS if not arguments.rows or any(t in row for t in arguments.rows)]
    if not wanted or arguments.pairs < 1:
        parser.error(f"nothing to measure; the rows are: {', '.join(ROWS)}")
    return _compare(arguments.base, wanted, arguments.pairs, arguments.json)


def _compare(revision: str, rows: Sequence[str], pairs: int, json_file: Path | None) -> int:
    print("; ".join(f"{name} {value}" for name, value in machine().items()))
    found, cells, lost = {}, [], []
    with exported(revision) as base:
        for row in rows:
            found[row] = _pairs(row, base, pairs)
            gain, own = _verdict(found[row])
            verdict = "ok" if gain >= -(TOLERANCE_PERCENT + own) else "LOST"
            if verdict != "ok":
                lost.append(row)
            values = [figure(statistics.median(found[row][name])) for name in ("base", "change")]
            cells.append((row, *values, f"{gain:+.1f} %", f"{own:.1f} %", verdict))
            print(f"{row}: {gain:+.1f} % (own spread {own:.1f} %) {verdict}", flush=True)
    head = ("row, per second", revision, "this checkout", "median pair", "own spread", "")
    print(f"\n{table(head, cells)}\n{pairs} pairs; {len(lost)} of {len(rows)} rows lost")
    if json_file:
        json_file.write_text(json.dumps(found, indent=2) + "\n")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
