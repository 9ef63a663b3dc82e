"""From samples to columns.

A column holds exactly what the samples held: what NumPy would make something else of (a whole
number beyond 64 bits, strings that end with zeros, rows of several shapes) is an error that names
the sample. Whole lists are looked at at once, in C, and one by one only to name what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.stores.reading import (
    Columns,
    RecordError,
    has_place,
    masked_error,
    stack,
)
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import is_masked, is_nested, leaves, leaves_of

Collate: TypeAlias = Callable[[Sequence[Any]], Columns]

_NUMBERS = {kind: np.dtype(kind) for kind in np.ScalarType if np.dtype(kind).kind in "biufc"}
"""The types of numbers of Python's and NumPy's, and what NumPy makes of each."""

_CURE = ": bring them to one shape, or give collate= a function that does"


def check_collate(collate: Any) -> Collate | None:
    """A collate function of the user's, or None, else a ConfigError."""
    if collate is not None and not callable(collate):
        raise ConfigError(f"collate is {collate!r}, expected a function of a list of samples")
    function: Collate | None = collate
    return function


def make_columns(
    samples: Sequence[Any], names: Callable[[int], str], collate: Collate | None,
    call: Call | None = None,
) -> Columns:  # fmt: skip
    """Columns of samples: by the user's function, or stacked, in the place of the call's rows if
    there is one. `names` calls the i-th sample by its name.

    Raises:
        RecordError: a sample is not like the first, or the function made no columns.
    """
    # Stacking is the default, and checks each sample against the first.
    if collate is None:
        return stack_samples(samples, names, call)
    try:
        columns = collate(samples)
    except StopIteration as error:
        # Passed on, it would end the epoch.
        raise RecordError(f"{names(0)} and on: collate raised StopIteration") from error
    if columns is None:
        raise RecordError(f"{names(0)} and on: collate returned None, expected columns")
    return columns


def stack_samples(
    samples: Sequence[Any], names: Callable[[int], str], call: Call | None = None
) -> Columns:
    """Stack samples: mappings by name, tuples and lists by place, anything else as one column.
    Mappings and named tuples within a sample are columns of their own, by names such as
    "image.left", as Arrow and Hugging Face's datasets flatten them; `nested` puts them together
    again.

    Each value is what `numpy.asarray` makes an array of: a number, an array, a tensor of another
    library.

    Raises:
        RecordError: a sample is not like the first.
    """
    # The first sample says what a sample is; another one is named by where it differs.
    first = samples[0]
    # Arrays, the commonest samples, are told first: to tell a mapping asks its abstract class.
    if isinstance(first, np.ndarray) or not isinstance(first, (tuple, list, Mapping)):
        return (_column(samples, names, "sample", call),)
    samples = flat(samples, names)
    first = samples[0]
    keys: Sequence[Any] = list(first) if isinstance(first, Mapping) else range(len(first))
    if not _are_alike(samples, first):
        for i, sample in enumerate(samples):
            _check(sample, first, keys, names, i)
    columns = {
        key: _column([sample[key] for sample in samples], names, f"column {key!r}", call)
        for key in keys
    }
    return columns if isinstance(first, Mapping) else tuple(columns.values())


def flat(samples: Sequence[Any], names: Callable[[int], str]) -> Sequence[Any]:
    """Samples without mappings and named tuples in them, where the first has some.

    Raises:
        RecordError: a value in a mapping would have the name of another column.
    """
    first = samples[0]
    is_mapping = isinstance(first, Mapping)
    if not (is_mapping or isinstance(first, (tuple, list))):
        return samples
    if not any(map(is_nested, first.values() if is_mapping else first)):
        return samples
    return [_flat(sample, names, i) for i, sample in enumerate(samples)]


def _flat(sample: Any, names: Callable[[int], str], i: int) -> Any:
    if isinstance(sample, Mapping):
        columns = list(leaves(sample))
        made = dict(columns)
        if len(made) < len(columns):
            keys = [name for name, _ in columns]
            twice = sorted({name for name in keys if keys.count(name) > 1})
            raise RecordError(f"{names(i)}: several values are the columns {twice}")
        return made
    if not isinstance(sample, (tuple, list)):
        return sample
    return tuple(leaf for value in sample for _, leaf in leaves_of(value, ""))


@public("feeder.sources")
def nested(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Columns with names such as "image.left", as of a batch, put together as the samples were:
    a mapping of mappings.

    Raises:
        ValueError: a name is that of a column and of a mapping too.
    """
    made: dict[str, Any] = {}
    for name, column in columns.items():
        *outer, last = name.split(".")
        inner = made
        for key in outer:
            inner = inner.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ValueError(f"column {name!r} lies in another column")
        if last in inner:
            raise ValueError(f"{name!r} is a column, and other columns lie in it")
        inner[last] = column
    return made


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


def _column(
    values: Sequence[Any], names: Callable[[int], str], column: str, call: Call | None
) -> Any:
    kinds = set(map(type, values))
    if kinds == {np.ndarray}:
        return stack(values, names, column, _CURE, call)
    if len(kinds) == 1 and (dtype := _NUMBERS.get(type(values[0]))) and not has_place(call):
        # All at once, in C. Another dtype is that of whole numbers beyond 64 bits.
        made = np.array(values)
        if made.dtype == dtype:
            return made
    if any(map(is_masked, kinds)):
        i = [is_masked(type(value)) for value in values].index(True)
        raise masked_error(f"{names(i)}: {column}")
    rows: list[Any] = []
    try:
        for value in values:
            rows.append(exact_array(value))
    except (TypeError, ValueError) as error:
        raise RecordError(f"{names(len(rows))}: {column} is no array: {error}") from error
    return stack(rows, names, column, _CURE, call)


def exact_array(value: Any) -> NDArray[Any]:
    """What `numpy.asarray` makes of a value, if that is the same value.

    Raises:
        ValueError: NumPy would make something else of its strings, or of whole numbers.
    """
    # Tensors of other libraries are taken without a copy.
    made: NDArray[Any] = np.asarray(value)
    if made.dtype == np.float64 and isinstance(value, (list, tuple)):
        _check_fractions(value, made)
    if made.dtype.kind not in "SU" or isinstance(value, np.ndarray):
        return made
    kind = bytes if made.dtype.kind == "S" else str
    for one in np.asarray(value, object).flat:
        if not isinstance(one, kind):
            raise ValueError(
                f"{type(one).__name__} beside {kind.__name__}, of which NumPy makes strings alone: "
                "make arrays of them with map"
            )
        if one[-1:] in (b"\0", "\0"):
            raise ValueError(
                f"{one!r} ends with a zero, which NumPy's strings have not: make an array of it "
                "with map, such as np.frombuffer(value, np.uint8) of bytes"
            )
    return made


def _check_fractions(value: Any, made: NDArray[Any]) -> None:
    """Raise ValueError if whole numbers in a list are other ones as fractions."""
    if not (np.abs(made) >= 2**53).any():
        return
    for one in np.asarray(value, object).flat:
        if isinstance(one, (int, np.integer)) and int(float(one)) != int(one):
            raise ValueError(
                f"{one} beside others of which NumPy makes float64, which cannot hold it: make an "
                "array of them with map"
            )
