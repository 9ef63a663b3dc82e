"""Steps that look at one record at a time: `Mapped`, `Filtered`, `Zipped`.

The functions are the user's, and draw by record (`rng`) or not at all, so that a record is made
alike wherever and however often it is read. A record that a filter leaves out has no row, and keeps
its number: how many rows an epoch has is not known before all of it was read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.fetch.seeding import RECORD_SEEDS
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.steps.rows import (
    Step,
    function,
    part_of,
    plain,
)
from feeder.workers.sources.stores.reading import Columns, Faults, OnError, RecordError
from feeder.workers.sources.stores.records import LEFT_OUT, Records
from feeder.workers.stream.batch import Call


class Mapped(Step):
    """Each record as a function of the user's makes it."""

    kind = "map"

    def __init__(self, of: Records, fn: Callable[..., Any], on_error: OnError) -> None:
        super().__init__(of)
        self._fn = function("fn", fn)
        self._draws = _takes_rng(fn)
        self._faults = Faults(on_error)
        self.traits = replace(
            self.traits,
            may_skip=self.traits.may_skip or self._faults.may_skip,
            by_sample=True,
            depth=self.traits.depth + 1,
        )

    @property
    def skipped(self) -> int:
        """Reads of records that were left out, here or before."""
        return super().skipped + self._faults.skipped

    def touches(self, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """What the record below reads."""
        return self.parts[0].touches(indices, call)

    def samples(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        """What the function makes of each sample."""
        made = self.parts[0].samples(indices, call)
        # Functions that follow one another draw from different generators.
        own = part_of(call, f"map/{self.traits.depth}")

        def make(sample: Any, index: int) -> Any:
            if RECORD_SEEDS.are_on:
                RECORD_SEEDS.seed(own, index)
            given = plain(sample)
            return self._fn(given, own.rng_for(index)) if self._draws else self._fn(given)

        for i, index in enumerate(indices.tolist()):
            if made[i] is LEFT_OUT:
                continue
            try:
                made[i] = self._faults.attempt(partial(make, made[i], index))
            except Exception as error:
                self._faults.handle(lambda index: self.name_in(index, call), index, error)
                made[i] = LEFT_OUT
        return made


def _takes_rng(fn: Callable[..., Any]) -> bool:
    """Whether a function requires a second argument."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        # Written in C: it says nothing of its arguments.
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    if len(required) > 2:
        raise ConfigError(f"fn requires {required}, expected (record) or (record, rng)")
    return len(required) == 2


class Filtered(Step):
    """The records that a function of the user's is true of; the others have no row."""

    kind = "filter"

    def __init__(self, of: Records, fn: Callable[[Any], Any]) -> None:
        super().__init__(of)
        self._fn = function("fn", fn)
        self._number: int = of._number + 1 if isinstance(of, Filtered) else 0
        self.traits = replace(self.traits, may_skip=True, filters=True, by_sample=True)

    def touches(self, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """What the record below reads."""
        return self.parts[0].touches(indices, call)

    def samples(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        """The samples, with `LEFT_OUT` in place of those that the function is false of."""
        samples = self.parts[0].samples(indices, call)
        faults = Faults("raise")
        own = part_of(call, f"filter/{self.traits.depth}/{self._number}")
        for i, index in enumerate(indices.tolist()):
            if samples[i] is LEFT_OUT:
                continue
            try:
                if RECORD_SEEDS.are_on:
                    RECORD_SEEDS.seed(own, index)
                if not self._fn(plain(samples[i])):
                    samples[i] = LEFT_OUT
            except Exception as error:
                faults.handle(lambda index: self.name_in(index, call), index, error)
        return samples


class Zipped(Step):
    """Record i of each part, as one record with the columns of all."""

    kind = "zip"

    def __init__(self, *parts: Records) -> None:
        super().__init__(*parts)
        sizes = [part.epoch_size for part in parts]
        if len(set(sizes)) > 1:
            raise ConfigError(f"zip of sources of {sizes} records, expected equally many")

    def __len__(self) -> int:
        return self.parts[0].epoch_size

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """The columns of all parts."""
        if self.traits.by_sample:
            return super().read(indices, call)
        # Whole columns, where each part gives a row for each record: nothing is stacked again.
        columns = [part.read(indices, call) for part in self.parts]
        joined: Columns = self._join([c for c in columns if c is not None], int(indices[0]), call)
        return joined

    def touches(self, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """What the records of all parts read."""
        for part in self.parts:
            yield from part.touches(indices, call)

    def samples(self, indices: NDArray[np.int64], call: Call) -> list[Any]:
        """The samples of all parts, joined; left out if one of them is."""
        rows = zip(*(part.samples(indices, call) for part in self.parts), strict=True)
        return [
            LEFT_OUT if any(s is LEFT_OUT for s in row) else self._join(list(row), index, call)
            for row, index in zip(rows, indices.tolist(), strict=True)
        ]

    def _join(self, parts: list[Any], index: int, call: Call) -> Any:
        named = [isinstance(part, Mapping) for part in parts]
        if not any(named):
            return tuple(
                value
                for part in parts
                for value in (part if isinstance(part, (tuple, list)) else (part,))
            )
        if not all(named):
            raise RecordError(
                f"{self.name_in(index, call)}: zip of records with names and without: give all of "
                "them names, with map"
            )
        joined = {name: value for part in parts for name, value in part.items()}
        if len(joined) < sum(map(len, parts)):
            names = sorted(name for part in parts for name in part)
            twice = sorted({name for name in names if names.count(name) > 1})
            raise RecordError(
                f"{self.name_in(index, call)}: several sources have the columns {twice}"
            )
        return joined
