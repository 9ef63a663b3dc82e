"""Which step may follow which: rules over what a source is, asked before the step is made.

A step needs records that it can find by their numbers. A source of which nobody knows before it is
read how many rows it has, or which record a row is made of, is refused here by name, with the order
of steps that gives the same rows.
"""

from __future__ import annotations

from typing import Any

from feeder.workers.errors import ConfigError
from feeder.workers.sources.orders.sharding import EpochsInTurn
from feeder.workers.sources.stores.records import Traits

_OF_NUMBERS = ("map", "filter", "pad", "offsets")


def check_follows(
    kind: str, traits: Traits, sharding: Any, step: str, *, counts: bool = False,
    rows: bool = True, shards: bool = False, turns: bool = False,
) -> None:  # fmt: skip
    """Raise `ConfigError` if a step cannot follow a source of this kind.

    Args:
        kind: What the user calls its records.
        traits: What they are like.
        sharding: Which part of them an epoch reads.
        step: What the step is called.
        counts: Whether the step counts rows, which a filter leaves out.
        rows: Whether the step needs one row for each record.
        shards: Whether the source may have shards.
        turns: Whether its epochs may differ in size.
    """
    if traits.walks and step != "pack":
        raise _walks(step)
    is_in_turn = isinstance(sharding, EpochsInTurn)
    if is_in_turn and not turns:
        raise ConfigError(
            f"{step} of a mixture of shards that differ in size, so that its epochs do, too: give "
            "the shards stick_to_shard=True, or shard the mixture in place of its sources"
        )
    may_have = shards or is_in_turn
    if (sharding.num_shards > 1 and not may_have) or sharding.pad_last_batch:
        raise ConfigError(
            f"{step} of a source with shards: they come last, with .shard(shard_id, num_shards)"
        )
    if rows:
        check_rows(kind, traits, step)
    if counts and traits.filters:
        raise ConfigError(
            f"{step.rstrip(',')}: the source is filtered, and so has no known length; filter after "
            f"{step.split(',')[0]}"
        )


def check_rows(kind: str, traits: Traits, step: str) -> None:
    """Raise `ConfigError` if a step needs one row for each record, and the source has others."""
    if traits.walks and step in _OF_NUMBERS:
        raise _walks(step)
    if traits.is_last:
        raise ConfigError(
            f"{step} of {kind}, whose rows are not one for each record: {kind} comes "
            f"after {step.split(',')[0]}"
        )


def _walks(step: str) -> ConfigError:
    step = step.rstrip(",")
    return ConfigError(
        f"{step} of a mixture by tokens, or of packed or filtered sources: its rows follow one "
        f"another and have no numbers; {step.split(',')[0]} its sources, before mix"
    )
