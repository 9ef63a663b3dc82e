"""Sources of numbers alone, made of what `describe` said of a source: an order without data.

A position holds the description of its source. Which record comes when follows from the sizes, the
seeds and the kinds of order in it; so a source that is made of it tells `records_of` and
`places_of` as the source of the run does, and reads nothing. What it says of itself has to be what
it was made of: a description that says more than is understood here is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.sources.mixture import DealtRoute, MixRoute, Mixture, epoch_length
from feeder.workers.sources.orders.edited import Selection
from feeder.workers.sources.source import Source
from feeder.workers.sources.steps.each import Zipped
from feeder.workers.sources.steps.routed import (
    Excluding,
    Repeats,
    Route,
    Routed,
    Stretch,
    concatenated,
)
from feeder.workers.sources.steps.rows import Step
from feeder.workers.sources.stores.reading import Columns
from feeder.workers.sources.stores.records import Records
from feeder.workers.stream.batch import Call

Told = Mapping[str, Any]

_OWN = {"take": "first", "skip": "first", "repeat": "times", "exclude": "excluded", "mix": "blocks",
        "concat": "0.source", "zip": "0.source", "pad": "length"}  # fmt: skip
"""A field that the description of each step has, and that of an order upon it has not."""
_UNKNOWN = {
    "pack": "the lengths of documents, by which pack makes rows of them",
    "batch_by_tokens": "the lengths of records, by which batch_by_tokens makes batches",
    "offsets": "which records of a call have a row of offsets",
    "filter": "which records a filter leaves out",
    "iterable": "what iterators give",
}
"""What no position holds, by the kind of the source that needs it."""
_PLAN = ("shard_id", "num_shards", "stick_to_shard", "pad_last_batch")


def described_source(told: Told) -> Source:
    """The source that said this of itself, without its data.

    Raises:
        ConfigError: which record comes when does not follow from what it said.
    """
    source = _source(told)
    again = {name: _plain(value) for name, value in source.describe().items()}
    if again != (now := {name: _plain(value) for name, value in told.items()}):
        fields = sorted(k for k in again.keys() | now.keys() if again.get(k) != now.get(k))
        raise ConfigError(f"it says of its source what this feeder cannot read: {fields}")
    return source


def _plain(value: Any) -> Any:
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


def _below(told: Told, label: str) -> dict[str, Any]:
    """What a description says of a part."""
    prefix = f"{label}."
    return {k.removeprefix(prefix): v for k, v in told.items() if k.startswith(prefix)}


def _source(told: Told) -> Source:
    kind = told["source"]
    records: Any
    if told.get("of.source") == kind and "of.shuffle" in told and _OWN.get(kind, "") not in told:
        # An order upon an order.
        records = _source(_below(told, "of"))
    else:
        records = _records(told)
    made = Mixture if kind == "mix" else Source
    shuffle = told["shuffle"]
    source = made(records, list_shuffle=shuffle == "dali, of a list", **_options(told, shuffle))
    if shuffle == "feeder" and "window" in told:
        source._plan = source._plan.in_windows(told["window"])
    return source


def _options(told: Told, shuffle: str) -> Any:
    """The `OrderOptions` that a source was made with."""
    options = {name: told[name] for name in _PLAN}
    if shuffle.startswith("dali after epoch"):
        # Each shard keeps its share of the list in any case.
        del options["stick_to_shard"]
        after = "compound" if shuffle.endswith("compound") else True
        return {**options, "order": "dali", "shuffle_after_epoch": after,
                "shuffle_after_epoch_seed": told["seed"]}  # fmt: skip
    if shuffle == "none":
        return options
    fill = {"initial_fill": told["initial_fill"]} if "initial_fill" in told else {}
    return {**options, "order": shuffle.partition(",")[0], "random_shuffle": True,
            "seed": told["seed"], **fill}  # fmt: skip


def _records(told: Told) -> Records:
    """What lies below the order of a source."""
    kind = told["source"]
    if kind in _UNKNOWN:
        raise ConfigError(f"it does not hold {_UNKNOWN[kind]}")
    if kind == "mix":
        return _mixture(told)
    if kind in ("concat", "zip"):
        parts = [_source(_below(told, str(i))) for i in _numbers(told)]
        return concatenated(parts) if kind == "concat" else Zipped(*parts)
    if "of.source" not in told:
        return Numbered(told)
    below = _below(told, "of")
    if kind in ("take", "skip", "repeat", "exclude"):
        part = _source(below)
        return Routed(kind, [part], _route(told, part), [None])
    return _Alike(told, _source(below) if "shuffle" in below else _records(below))


def _numbers(told: Told) -> Iterator[int]:
    for number in count():
        if f"{number}.source" not in told:
            return
        yield number


def _route(told: Told, part: Source) -> Route:
    if told["source"] == "repeat":
        return Repeats(part.epoch_size, told["times"])
    if told["source"] == "exclude":
        excluded = tuple((first, stop) for first, stop in told["excluded"])
        return Excluding(Selection(part.epoch_size, excluded))
    return Stretch(told["first"], told["size"])


def _mixture(told: Told) -> Routed:
    if "blocks" not in told:
        raise ConfigError(
            "it does not hold the rows of a mixture by tokens, or of packed or filtered "
            "sources, by which each row follows from those before it"
        )
    route = MixRoute.described(told)
    parts = [_source(_below(told, name)) for name in map(str, route.names)]
    shards = tuple(part._plan.sharding for part in parts)
    lengths = tuple(epoch_length(sharding, route.on_exhausted) for sharding in shards)
    route = replace(route, lengths=lengths, shards=shards)
    if route.varies:
        raise ConfigError(
            "it does not hold the weights of a mixture whose sources have shards that "
            "differ in size"
        )
    whole = DealtRoute(route, told["dealt"]) if "dealt" in told else route
    return Routed("mix", parts, whole, route.names)


_NUM_RECORDS = re.compile(r"(?:^|, )(\d+) (?:records|samples)\b")
"""How a description says how many records a file has, if it does."""


class Numbered(Records):
    """Records of which the numbers alone are known, and of some their files. Never changes."""

    kind = ""
    skipped = 0
    may_skip = False

    def __init__(self, told: Told) -> None:
        self.kind, self._size = told["source"], told["size"]
        self._fields = _own_fields(told)
        self._files, self._ends = self._find_files()

    def _find_files(self) -> tuple[list[str], NDArray[np.int64]]:
        """The names of the files, and the record after the last of each; none if it is not told
        which records they have."""
        told = {k: v for k, v in self._fields.items() if k.startswith("file ")}
        found = [_NUM_RECORDS.search(str(one)) for one in told.values()]
        ends = np.cumsum([int(one[1]) for one in found if one is not None], dtype=np.int64)
        if None in found or not found or ends[-1] != self._size:
            return [], ends[:0]
        return [name.removeprefix("file ") for name in told], ends

    def __len__(self) -> int:
        return self._size  # type: ignore[no-any-return]

    def name(self, index: int) -> str:
        """The file, and the number there, if that is known."""
        if not self._files:
            return f"record {index}"
        file = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[file - 1]) if file else 0
        return f"{self._files[file]!r}, record {index - first}"

    def read(self, indices: NDArray[np.int64], call: Call) -> NoReturn:
        """Never."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What the source of the run said."""
        return self._fields


class _Alike(Step):
    """A step that makes one row of each record, as `map` does."""

    def __init__(self, told: Told, of: Records) -> None:
        super().__init__(of)
        self.kind, self._fields = told["source"], _own_fields(told)

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """Never."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What the step of the run said."""
        return {**super().describe(), **self._fields}


def _own_fields(told: Told) -> dict[str, Any]:
    """Those that are not of the order, nor of what lies below."""
    order = {"source", "size", *_PLAN, "shuffle"} if "shuffle" in told else {"source", "size"}
    if told.get("shuffle", "none") != "none":
        order |= {"seed", "initial_fill"}
    return {k: v for k, v in told.items() if k not in order and not k.startswith("of.")}
