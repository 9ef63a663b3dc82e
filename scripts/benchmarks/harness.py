"""How everything is measured: wall time and CPU of the same work, in turns with other work.

Wall time is what a trainer waits for, and moves with whatever else the machine does. CPU is that of
this process and of all that it started; other load moves it by a few percent. Both are told of
each sample, with the load average of that moment.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

LIMIT_S = 120.0
"""Nothing that is measured once takes so long, unless it hangs."""

Take = Callable[[], object]
"""Hands over the next batch."""
Contender = Callable[[], AbstractContextManager[Take]]
"""Makes something that hands over batches, and ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long and how often everything is measured."""

    repetitions: int = 5
    """Repetitions of every measurement; the medians are theirs."""
    timed_s: float = 0.4
    """How long batches are counted, in seconds."""
    warm_s: float = 0.15
    """How long they come at full speed before that, in seconds."""
    warm_batches: int = 20
    """Batches that the warm-up takes at least: every buffer has gone round by then."""
    tries: int = 5
    """How often something short is timed in each repetition."""


QUICK = Settings(repetitions=3, timed_s=0.06, warm_s=0.03, warm_batches=10, tries=2)


# ---- costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one batch takes, or doing something once."""

    wall_s: float
    cpu_s: float
    """CPU of this process and of all that it started."""
    here_s: float
    """What of it this process used: the trainer's part, where batches come from another one."""
    load: float
    """The machine's load average of that moment."""
    more: Mapping[str, float] = field(default_factory=dict)
    """What else was seen, by name."""


class Watch:
    """Counts wall time and CPU while a block runs, or several blocks."""

    def __init__(self) -> None:
        self._wall_s = self._here_s = self._below_s = 0.0

    def __enter__(self) -> None:
        # What looking at other processes costs falls outside, at both ends.
        self._below_s -= cpu_below()
        self._here_s -= time.process_time()
        self._wall_s -= time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._wall_s += time.perf_counter()
        self._here_s += time.process_time()
        self._below_s += cpu_below()

    def cost(self, times: int = 1, **more: float) -> Cost:
        """The cost of each of so many times."""
        return Cost(
            wall_s=self._wall_s / times,
            cpu_s=(self._here_s + self._below_s) / times,
            here_s=self._here_s / times,
            load=os.getloadavg()[0],
            more=more,
        )


def processes_below(root: int) -> list[int]:
    """The processes that a process has started, and those below them."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (fields := _fields_of(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def cpu_below() -> float:
    """Seconds of CPU of the processes below this one, living or waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = used.ru_utime + used.ru_stime
    for pid in processes_below(os.getpid()):
        with contextlib.suppress(OSError, IndexError):
            # The clock of another process's CPU has this number on Linux; what it has waited for
            # is counted in ticks alone.
            total += time.clock_gettime(~pid << 3 | 2)
            total += sum(map(int, _fields_of(pid)[13:15])) / os.sysconf("SC_CLK_TCK")
    return total


def _fields_of(pid: int) -> list[str]:
    """What the system says of a process, behind its name; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def cost_of_batches(take: Take, settings: Settings) -> Cost:
    """What a batch costs, after a warm-up at full speed.

    The warm-up uses up what was buffered before the consumer came, and touches the memory of every
    buffer that goes round. The last batch is held until the next one is there, as a training loop
    holds it.
    """
    begin = time.perf_counter()
    warm = _take_for(take, settings.warm_s, least=settings.warm_batches, stride=1)
    per_s = warm / (time.perf_counter() - begin)
    watch = Watch()
    with watch:
        # The clock is read about once a millisecond: reading it costs as much as a tiny batch.
        count = _take_for(take, settings.timed_s, least=1, stride=max(1, int(per_s / 1000)))
    return watch.cost(count)


def _take_for(take: Take, seconds: float, least: int, stride: int) -> int:
    count = 0
    held = None
    end = time.perf_counter() + seconds
    while count < least or time.perf_counter() < end:
        for _ in range(stride):
            held = take()
        count += stride
    del held
    return count


# ---- rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a load: what is measured, and what it is compared with."""

    name: str
    measure: Callable[[Settings], Cost]
    of: str | None = None
    """The row that it is compared with, sample by sample of the same repetition."""
    ours: bool = True
    """Whether feeder is measured: `bench pair` runs these rows alone."""
    counts_batches: bool = True
    """Whether it tells batches per second; else how long something takes once."""
    needs: str | None = None
    """The package without which the row is left out."""

    @property
    def is_possible(self) -> bool:
        # What is there may not work, as a torchvision that was built for another PyTorch.
        with contextlib.suppress(Exception):
            return self.needs is None or bool(importlib.import_module(self.needs))
        return False


def batches(
    name: str, contender: Contender, *, of: str | None = None, ours: bool = True,
    needs: str | None = None,
) -> Row:  # fmt: skip
    """A row of batches that come without end, from a contender that is made anew each time."""

    def measure(settings: Settings) -> Cost:
        with contender() as take:
            return cost_of_batches(take, settings)

    return Row(name=name, measure=measure, of=of, ours=ours, needs=needs)


Once = Callable[[Watch], int]
"""Does something while the watch runs; returns how many times."""


def once(name: str, do: Once, *, of: str | None = None, ours: bool = True) -> Row:
    """A row of something that is done again and again, each time anew."""

    def measure(settings: Settings) -> Cost:
        watch = Watch()
        return watch.cost(sum(do(watch) for _ in range(settings.tries)))

    return Row(name=name, measure=measure, of=of, ours=ours, counts_batches=False)


def chosen(rows: Sequence[Row], texts: Sequence[str]) -> list[Row]:
    """The rows that hold any of the texts, all without texts, and those they are compared with."""
    wanted = {row.name for row in rows if not texts or any(text in row.name for text in texts)}
    wanted |= {row.of for row in rows if row.name in wanted and row.of is not None}
    return [row for row in rows if row.name in wanted]


def interleave(rows: Sequence[Row], settings: Settings) -> dict[str, list[Cost]]:
    """Measure all rows in each repetition, each time another one first.

    The garbage collector is run before each of them and stays on during it, for all alike.
    """
    samples: dict[str, list[Cost]] = {row.name: [] for row in rows}
    for repetition in range(settings.repetitions):
        turn = repetition % len(rows)
        for row in (*rows[turn:], *rows[:turn]):
            gc.collect()
            with bounded(LIMIT_S):
                samples[row.name].append(row.measure(settings))
    return samples


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the main thread when what is done here takes longer."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"a measurement did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
