"""From samples to columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from feeder.workers.errors import ConfigError
from feeder.workers.sources.stores.reading import Columns, RecordError, stack

Collate: TypeAlias = Callable[[Sequence[Any]], Columns]

_CURE = ": bring them to one shape, or give collate= a function that does"


def check_collate(collate: Any) -> Collate | None:
    """A collate function of the user's, or None, else a ConfigError."""
    if collate is not None and not callable(collate):
        raise ConfigError(f"collate is {collate!r}, expected a function of a list of samples")
    function: Collate | None = collate
    return function


def make_columns(
    samples: Sequence[Any], names: Callable[[int], str], collate: Collate | None
) -> Columns:
    """Columns of samples: by the user's function, or stacked. `names` calls the i-th sample by
    its name.

    Raises:
        RecordError: a sample is not like the first, or the function made no columns.
    """
    # Stacking is the default, and checks each sample against the first.
    if collate is None:
        return stack_samples(samples, names)
    try:
        columns = collate(samples)
    except StopIteration as error:
        # Passed on, it would end the epoch.
        raise RecordError(f"{names(0)} and on: collate raised StopIteration") from error
    if columns is None:
        raise RecordError(f"{names(0)} and on: collate returned None, expected columns")
    return columns


def stack_samples(samples: Sequence[Any], names: Callable[[int], str]) -> Columns:
    """Stack samples: mappings by name, tuples and lists by place, anything else as one column.

    Each value is what `numpy.asarray` makes an array of: a number, an array, a tensor of another
    library.

    Raises:
        RecordError: a sample is not like the first.
    """
    # The first sample says what a sample is; another one is named by where it differs.
    first = samples[0]
    # Arrays, the commonest samples, are told first: to tell a mapping asks its abstract class.
    if isinstance(first, np.ndarray) or not isinstance(first, (tuple, list, Mapping)):
        return (_column(samples, names, "sample"),)
    keys: Sequence[Any] = list(first) if isinstance(first, Mapping) else range(len(first))
    if not _are_alike(samples, first):
        for i, sample in enumerate(samples):
            _check(sample, first, keys, names, i)
    columns = {
        key: _column([sample[key] for sample in samples], names, f"column {key!r}") for key in keys
    }
    return columns if isinstance(first, Mapping) else tuple(columns.values())


def _are_alike(samples: Sequence[Any], first: Any) -> bool:
    """Whether samples are of one type, length and list of names. Others may fit as well."""
    # All at once, in C: a test of each sample costs more than its columns.
    if set(map(type, samples)) != {type(first)} or set(map(len, samples)) != {len(first)}:
        return False
    return not isinstance(first, Mapping) or [*map(list, samples)].count([*first]) == len(samples)


def _check(
    sample: Any, first: Any, keys: Sequence[Any], names: Callable[[int], str], i: int
) -> None:
    # A mapping and a tuple of the same length would be stacked by different rules.
    is_like = isinstance(sample, Mapping) == isinstance(first, Mapping)
    if not (is_like and isinstance(sample, (Mapping, tuple, list)) and len(sample) == len(keys)):
        raise RecordError(f"{names(i)}: is {_kind(sample)}, {names(0)} is {_kind(first)}")
    if isinstance(sample, Mapping) and sample.keys() != first.keys():
        raise RecordError(f"{names(i)}: has {sorted(sample)}, {names(0)} has {sorted(first)}")


def _kind(sample: Any) -> str:
    if sample is None:
        return "None"
    sized = isinstance(sample, (Mapping, tuple, list))
    return f"a {type(sample).__name__}" + (f" of {len(sample)}" if sized else "")


def _column(values: Sequence[Any], names: Callable[[int], str], column: str) -> Any:
    if set(map(type, values)) == {np.ndarray}:
        return stack(values, names, column, _CURE)
    rows: list[Any] = []
    try:
        for value in values:
            # `asarray` takes tensors of other libraries without a copy.
            rows.append(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise RecordError(f"{names(len(rows))}: {column} is no array: {error}") from error
    return stack(rows, names, column, _CURE)
