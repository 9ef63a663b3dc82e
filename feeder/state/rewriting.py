"""An edit of a position alone, without the feed and without its data: what numbers can say.

Weights, sizes of batches and seeds are numbers in a position, and so is where each source stands.
Records are not: whether those that are excluded have come follows from the order of a source. So
whatever changes the records of a run is an edit of the feed call (`feeder.state.history`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from feeder.errors import ConfigError, ResumeError
from feeder.state.fingerprint import fingerprint_digest
from feeder.state.history import (
    FORMAT,
    SIZES,
    after_round,
    check_after,
    of_windows,
    pack,
    settings_in,
    tell,
    unpack,
)
from feeder.state.snapshot import HISTORY, StreamState, summarise
from feeder.state.token import StreamId

if TYPE_CHECKING:
    # Sources are loaded where a run of one is edited.
    from feeder.workers.sources.chapters import Settings
    from feeder.workers.sources.orders.blocks import Step

_NOT_ONE_FOR_EACH = ("filter", "pack", "batch_by_tokens", "offsets")
# Whether a source may leave out records, by on_error="skip", no position says: the resume refuses
# that.


def edited(
    state: StreamState,
    why: str,
    *,
    weights: Mapping[str, Fraction] | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int | None = None,
) -> StreamState:
    """The position of a run that goes on with other weights of all its sources, where 0 takes one
    out, another batch_size or global_batch_size, or another seed. Raises `ConfigError` and
    `ResumeError` for what cannot be changed so."""
    from feeder.workers.sources.chapters import Run
    from feeder.workers.sources.edited import Walk, edit_at

    then = {k: v for k, v in state.fingerprint.items() if k != HISTORY}
    _check(state.name, then, is_of_windows=of_windows(state.fingerprint.get(HISTORY)))
    fields = {**then, **_sizes(state.name, then, sizes or {})}
    if seed is not None:
        fields["seed"] = seed
    was = settings_in(then, skips=False)
    steps: Sequence[Step] | None = steps_in(was)
    if weights:
        fields, steps = _weighed(state.name, fields, weights)
    elif seed not in (None, was.seed) and steps is None:
        raise ConfigError(
            f"seed is {seed}, and the mixture of feed {state.name!r} has a schedule, of which the "
            "position does not say where it stands: give the seed to the feed call, with edit="
        )
    now = settings_in(fields, skips=False)
    edits = unpack(state.fingerprint.get(HISTORY, [FORMAT, [], []]), was)
    if now == was and edits and edits[-1].note == why:
        return state
    cut = StreamId(state.name, state.number, fingerprint_digest(state.fingerprint)).decode(
        state.token, None
    )
    if cut.dealing is None:
        raise ResumeError(
            f"the position of feed {state.name!r} does not say to how many queues it was dealt, as "
            "those of older versions: edit it by resume= and edit= of the feed call"
        )
    run = Run(edits, was)
    cut, found = after_round(
        state.name, Walk(run, cut), edits, was, cut, drops=then["last_batch"] == "drop",
        epochs=cut.dealing.epochs,
    )  # fmt: skip
    check_after(state.name, edits, cut)
    made = edit_at(
        run, None, steps or (), now, why,
        epoch=cut.position.epoch, call=cut.position.calls[0], step=cut.step, **found,
    )._replace(digest=fingerprint_digest(state.fingerprint).hex())  # fmt: skip
    tell(state.name, made, now)
    fields[HISTORY] = pack([*edits, made], now)
    is_known = state.rows is not None
    id = StreamId(state.name, state.number, fingerprint_digest(fields))
    cut = replace(cut, checked=None if is_known else cut.checked, encode=id.encode)
    return state._replace(
        fingerprint=fields, token=cut.token(), rows=() if is_known else None, summary=summarise(cut)
    )


def _check(name: str, then: Mapping[str, Any], *, is_of_windows: bool) -> None:
    """Raise `ConfigError` if by its fields a run cannot be edited."""
    what = {
        "it is of a fetch function of your own": "source.source" not in then,
        "last_batch='carry'": then["last_batch"] == "carry",
        "order='arrival'": then["order"] == "arrival",
        "rounds='epoch'": "rounds" in then,
        "a mixture by tokens, or of packed or filtered sources":
        then.get("source.source") == "mix" and "source.blocks" not in then,
        "a shuffle of order='dali'": "dali" in [v for k, v in then.items() if _is(k, "shuffle")],
        "rows that are not one for each record": is_of_windows or any(
            v in _NOT_ONE_FOR_EACH for k, v in then.items() if _is(k, "source")
        ),
    }  # fmt: skip
    for why, holds in what.items():
        if holds:
            raise ConfigError(f"the run of feed {name!r} cannot be edited: {why}")


def _is(field: str, name: str) -> bool:
    return field.startswith("source.") and field.rpartition(".")[2] == name


def _sizes(name: str, then: Mapping[str, Any], sizes: Mapping[str, int]) -> Mapping[str, int]:
    for size in sizes:
        if size not in then:
            (other,) = {*SIZES} - {size}
            raise ConfigError(f"feed {name!r} has no {size}, but {other} {then[other]}: edit that")
    return sizes


def _weighed(
    name: str, fields: Mapping[str, Any], weights: Mapping[str, Fraction]
) -> tuple[dict[str, Any], Sequence[Step]]:
    """The fields of a mixture by other weights, without the sources of weight 0, and its steps."""
    from feeder.workers.sources.chapters import told_by_name
    from feeder.workers.sources.mixture import MixRoute

    parts = told_by_name({k.removeprefix("source."): v for k, v in fields.items() if _is_source(k)})
    if "" in parts:
        raise ConfigError(f"weights are of {sorted(weights)}, and feed {name!r} is no mixture")
    if set(weights) != set(parts):
        raise ConfigError(
            f"weights are of {sorted(weights)}, and the sources of feed {name!r} are "
            f"{[*parts]}: give one for each, 0 for a source that is taken out"
        )
    if not any(weights.values()):
        raise ConfigError(f"every weight of feed {name!r} is 0, expected one that is more")
    steps = ((0, [weights[one] for one in parts if weights[one]]),)
    left = tuple(one for one in parts if weights[one])
    out = tuple(f"source.{one}." for one in parts if one not in left)
    kept = {k: v for k, v in fields.items() if not k.startswith(out) and k != "source.mix"}
    route = MixRoute.made(
        left, tuple(parts[one]["size"] for one in left), steps, fields["source.on_exhausted"],
        fields["source.mix_seed"],
    )  # fmt: skip
    told = {f"source.{k}": v for k, v in route.describe().items()}
    return {**kept, **told, "source.size": route.size}, steps


def _is_source(field: str) -> bool:
    return field.startswith("source.") and field != HISTORY


def steps_in(now: Settings) -> Sequence[Step] | None:
    """The weights of a mixture, from which the rest of its epoch is made; None if it has a
    schedule, of which its blocks do not tell the steps."""
    from feeder.workers.sources.chapters import short, weights_of

    blocks = short(now.blocks, [len(part.selection) for part in now.parts.values()], now.mode)
    if len(blocks) > 1 and isinstance(blocks[0], list):
        return None
    return [(0, [Fraction(one) for one in weights_of(blocks)])] if blocks else ()
