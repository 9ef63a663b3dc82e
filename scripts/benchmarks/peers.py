"""The loaders that users of PyTorch have, beside feeder's, on the same data sets.

Each figure is measured in a process of its own, and all loaders take turns within each repetition.
Medians are printed with the lowest and the highest sample. Every loader gives every sample of an
epoch, which digests tell. Then each is killed in the middle of an epoch and resumed, where it has
a state, with as many workers and with one less; its rows are compared with those of a run
that was not killed. A loader that is not installed is left out, and named.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import jpegs
from children import Process, bounded
from command import run_cases
from harness import Measures, Settings, Spread, interleave
from peer_loaders import LOADER, OURS, PEERS, THREADS, is_there
from peer_works import WORKS, write_tokens
from report import Goal, Report, figure, spread

WORKERS = (1, 2)
ASKED = {"jpeg": 1.3, "tokens": 4.0, "text": 1.5, "tiny": 5.0}
FIRST_ASKED = 0.5
LIMIT_S = 120.0
BATCHES, SAVED_AT = 12, 5
"""Of the epoch that is killed, and where its state is saved."""
MEASURES = ("samples/s", "first batch, ms", "CPU, µs/sample")
MEMORY = "peak, MB"
Rows = list[list[int]]


def name_of(loader: str, workers: int) -> str:
    """How a loader with so many workers is called."""
    kind = "thread" if loader == THREADS else "worker"
    return f"{loader.partition(',')[0]}, {workers} {kind}{'s' * (workers > 1)}"


def compare(work: str, settings: Settings) -> Report:
    """All loaders over one data set."""
    # Its length follows from how long a figure is to take, and is the same for all.
    size, full = WORKS[work].batch_size, Settings().timed_s
    batches = max(24, round(WORKS[work].samples * settings.timed_s / full) // size)
    loaders = [loader for loader, peer in PEERS.items() if is_there(peer)]
    contenders = [(loader, workers) for loader in loaders for workers in WORKERS]
    found = interleave(
        [partial(time_one, work, *contender, batches * size) for contender in contenders],
        settings.repetitions,
    )
    checks = {one: ask_one("checked", work, *one, batches * size) for one in contenders}
    for (loader, workers), check in checks.items():
        found[f"{name_of(loader, workers)}: {MEMORY}"] = Spread(samples=(check[MEMORY],))
    digests = {check["digest"] for check in checks.values()}
    rows = [_row(found, name_of(*contender)) for contender in contenders]
    told = "all loaders gave the same samples" if len(digests) == 1 else "THE SAMPLES DIFFER"
    kills = [f"{loader}, killed and gone on with 2 workers: {same}; with 1: {other}"
             for loader in loaders for same, other in [resume(work, loader)]]  # fmt: skip
    return Report(
        case=work, title=WORKS[work].title, head=("loader", *MEASURES, MEMORY), rows=tuple(rows),
        measures=found, goals=_goals(work, found),
        notes=(
            f"an epoch of {batches * size:,} samples; {told}", *kills,
            *(f"not installed: {loader}" for loader in PEERS if loader not in loaders),
        ),
    )  # fmt: skip


def _row(found: Mapping[str, Spread], name: str) -> tuple[str, ...]:
    pace, *others = (found[f"{name}: {what}"] for what in (*MEASURES, MEMORY))
    return name, spread(pace), *(figure(one.median) for one in others)


def _goals(work: str, found: Mapping[str, Spread]) -> tuple[Goal, ...]:
    ours, threads, theirs = (name_of(loader, 2) for loader in (OURS, THREADS, LOADER))
    if f"{theirs}: samples/s" not in found:
        return ()
    pace = found[f"{ours}: samples/s"].per(found[f"{theirs}: samples/s"])
    first = found[f"{threads}: first batch, ms"].per(found[f"{theirs}: first batch, ms"])
    return (
        Goal(what=f"{work}: {ours}, of {theirs}", asked=ASKED[work], measured=pace, unit="×"),
        Goal(what=f"{work}: first batch of {threads}, of {theirs}", asked=FIRST_ASKED,
             measured=first, unit="×", at_most=True),
    )  # fmt: skip


# ---- processes


@cache
def data() -> Path:
    """The folder of what is read, which ends with this process."""
    folder = jpegs.photographs()
    write_tokens(folder)
    return folder


@contextmanager
def child(task: str, work: str, loader: str, workers: int, samples: int,
          *rest: str) -> Iterator[Process]:  # fmt: skip
    """A process that does this; those that it has started end with it."""
    command = ("-c", "import peer_child; peer_child.main()", task, loader, work)
    with Process([*command, str(workers), str(samples), str(data()), *rest]) as process:
        try:
            yield process
        finally:
            process.kill_all()


def ask_one(task: str, work: str, loader: str, workers: int, samples: int) -> Any:
    """What one process finds."""
    with bounded(LIMIT_S), child(task, work, loader, workers, samples) as process:
        return json.loads(process.read_line())


def time_one(work: str, loader: str, workers: int, samples: int) -> Measures:
    """The figures of one process."""
    found = ask_one("timed", work, loader, workers, samples)
    return {f"{name_of(loader, workers)}: {what}": found[what] for what in MEASURES}


def read_rows(process: Process, batches: int | None = None) -> Any:
    """The rows that a process tells, to its end or of so many batches; or its error."""
    rows: Rows = []
    while batches is None or batches > 0:
        told = json.loads(process.read_line())
        if told == "end":
            break
        if isinstance(told, dict):
            return str(told["error"])
        rows += told
        batches = None if batches is None else batches - 1
    return rows


def resume(work: str, loader: str) -> tuple[str, ...]:
    """Kill it in the middle of an epoch, and go on with as many workers and with one less: what is
    equal to a run that was not killed."""
    if not PEERS[loader].has_state:
        return ("no state",) * 2
    size, most = WORKS[work].batch_size, max(WORKERS)
    samples = BATCHES * size
    with tempfile.TemporaryDirectory() as folder, bounded(LIMIT_S):
        file = str(Path(folder) / "state")
        with child("run", work, loader, most, samples, "0", file) as process:
            expected = read_rows(process)[SAVED_AT * size :]
        with child("run", work, loader, most, samples, str(SAVED_AT), file) as process:
            # It has gone on since, and its workers have read ahead.
            read_rows(process, SAVED_AT + 2)
        found = []
        for workers in (most, most - 1):
            with child("resumed", work, loader, workers, samples, file) as process:
                rows = read_rows(process)
            found.append(rows if isinstance(rows, str) else _told(rows, expected))
    return tuple(found)


def _told(rows: Rows, expected: Rows) -> str:
    if rows == expected:
        return "equal"
    same = [number for number, _ in rows] == [number for number, _ in expected]
    return "samples equal, draws not" if same else "other samples"


CASES: Mapping[str, Callable[[Settings], Report]] = {work: partial(compare, work) for work in WORKS}


if __name__ == "__main__":
    run_cases("peers", __doc__, CASES)
