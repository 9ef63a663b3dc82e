"""How things are measured beside each other: interleaved repetitions, medians, paired ratios."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Measures = Mapping[str, float]
"""What one contender measured in one repetition: names and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How long and how often everything is measured."""

    repetitions: int = 5
    """Repetitions of every measurement; the medians are theirs."""
    timed_s: float = 0.4
    """How long a throughput is timed, in seconds."""
    warm_s: float = 0.15
    """How long it runs at full speed before that, in seconds."""
    warm_batches: int = 20
    """Batches that the warm-up takes at least: every buffer has gone round by then."""
    checked_batches: int = 60
    """The numbered rows of a checking pass, in batches."""
    tries: int = 5
    """How often something short is timed in each repetition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The samples of one measure, one per repetition; the median speaks for them."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def low(self) -> float:
        return min(self.samples)

    @property
    def high(self) -> float:
        return max(self.samples)

    def per(self, other: Spread) -> Spread:
        """The ratio to another measure, repetition by repetition."""
        return Spread(samples=tuple(a / b for a, b in self._paired(other)))

    def minus(self, other: Spread) -> Spread:
        """The difference from another measure, repetition by repetition."""
        return Spread(samples=tuple(a - b for a, b in self._paired(other)))

    def times(self, factor: float) -> Spread:
        """The same measure in another unit."""
        return Spread(samples=tuple(a * factor for a in self.samples))

    def _paired(self, other: Spread) -> Iterator[tuple[float, float]]:
        return zip(self.samples, other.samples, strict=True)


def interleave(contenders: Sequence[Callable[[], Measures]], repetitions: int) -> dict[str, Spread]:
    """Run all contenders in each repetition, each time another one first.

    The garbage collector is run before each of them and stays on during it, for all alike.
    """
    samples: dict[str, list[float]] = {}
    for repetition in range(repetitions):
        turn = repetition % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            gc.collect()
            for name, value in contender().items():
                samples.setdefault(name, []).append(value)
    return {name: Spread(samples=tuple(values)) for name, values in samples.items()}


def rate_of(take: Callable[[], object], settings: Settings) -> float:
    """How often per second `take` can be called, after a warm-up at full speed.

    The warm-up uses up what was buffered before the consumer came, and touches the memory of every
    buffer that goes round. The last result is held until the next one is there, as a training loop
    holds it.
    """
    warm = _rate_within(take, settings.warm_s, least=settings.warm_batches, stride=1)
    # The clock is read about once a millisecond: reading it costs as much as a tiny batch.
    return _rate_within(take, settings.timed_s, least=1, stride=max(1, int(warm / 1000)))


def _rate_within(take: Callable[[], object], seconds: float, least: int, stride: int) -> float:
    count = 0
    held = None
    start = time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds or count < least:
        for _ in range(stride):
            held = take()
        count += stride
    del held
    return count / elapsed


def time_of(action: Callable[[], object]) -> float:
    """How long one call of `action` takes, in seconds."""
    start = time.perf_counter()
    result = action()
    elapsed = time.perf_counter() - start
    del result
    return elapsed
