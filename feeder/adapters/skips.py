"""`on_error="skip"` of loaders: samples of a data set that are left out of their batches.

A batch has the samples that its order says, so one that is left out makes it shorter: to fill it up
would move all samples after it, and neither another rank nor a resumed run could know how far.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, get_args

from feeder.errors import ConfigError, FeedError
from feeder.workers.sources.stores.reading import RECORD_ATTEMPTS, Faults, OnError, may_pass, why

Left = dict[int, str]
"""Which of the samples of a batch are left out, and what is wrong with each."""


AN_ITERABLE_ENDS = (
    "an iterator that has raised may have ended, and what follows would be lost: leave out what is "
    "defective in its own __iter__, or give a data set with __getitem__"
)
NO_FAULTS = Faults("raise")
"""Of what leaves nothing out."""


def check_on_error(on_error: Any) -> bool:
    """Whether samples are left out; raises `ConfigError`."""
    if on_error not in get_args(OnError):
        raise ConfigError(f"on_error is {on_error!r}, expected one of {get_args(OnError)!r}")
    return bool(on_error == "skip")


def is_defect(error: Exception) -> bool:
    """Whether an error is one of a sample, and not of the program. PyTorch's own decoders raise
    `RuntimeError` for files that are damaged; so it does if memory is short."""
    if isinstance(error, (FeedError, NotImplementedError, RecursionError)):
        return False
    is_of_memory = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, (ValueError, OSError, RuntimeError)) and not is_of_memory


def read_sound(
    wanted: Sequence[Any], read: Callable[[Any, int], Any], begin: Callable[[], object] | None
) -> tuple[list[Any], Left]:
    """The samples that `read(index, number)` gives for the wanted indices, and those left out.

    An error that may pass is no defect before the sample was read several times. `begin` puts the
    generators where they were before the first sample: what was drawn since would be drawn again,
    so all are read again. None if `read` does so for each sample.
    """
    made: list[Any] = []
    left: Left = {}
    tries: Counter[int] = Counter()
    number = 0
    while number < len(wanted):
        if begin is not None and number == 0:
            begin()
        try:
            made.append(read(wanted[number], number))
        except Exception as error:
            tries[number] += 1
            if may_pass(error) and tries[number] < RECORD_ATTEMPTS:
                if begin is not None:
                    made, left, number = [], {}, 0
                continue
            if not is_defect(error):
                raise
            left[number] = why(error)
        number += 1
    return made, left


def read_together(
    take: Callable[[list[Any]], Any], wanted: Sequence[Any], begin: Callable[[], object]
) -> Any:
    """What `__getitems__` returns for these; None if one of them is defective: which one it is, is
    told if they are read one by one."""
    begin()
    try:
        # A list of its own: the data set may empty it.
        return take([*wanted])
    except Exception as error:
        if not is_defect(error):
            raise
        return None


NOTHING = object()
"""In place of the samples of a batch of which all are left out."""


def sound_samples(
    dataset: Any, indices: Any, *, makes_batches: bool, read: Callable[[Any, int], Any],
    begin: Callable[[], object], seeds_each: bool = False,
) -> tuple[Any, list[tuple[str, str]]]:  # fmt: skip
    """What a loader of PyTorch's collates for these indices, or `NOTHING`; and the names of the
    samples that are left out, with the reasons. `seeds_each`: `read` seeds for each sample."""
    wanted = list(indices) if makes_batches else [indices]
    if makes_batches and getattr(dataset, "__getitems__", None):
        made = read_together(dataset.__getitems__, wanted, begin)
        if made is not None:
            return made, []
    samples, left = read_sound(wanted, read, None if seeds_each else begin)
    named = [(f"sample {wanted[number]!r}", why) for number, why in left.items()]
    if left and not samples:
        return NOTHING, named
    return samples if makes_batches else samples[0], named
