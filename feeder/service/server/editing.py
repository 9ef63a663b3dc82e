"""An edit of a served feed: which of its numbers are others, and where a position of before it is.

The edited run begins as the run did, so what comes before the edit is had from it, too. So an edit
needs no run of its own for queues that are behind: all go on in the edited one, each at the place
that its position names there. Pure rules; nothing is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

from feeder.config import FeedConfig, with_numbers
from feeder.errors import ConfigError, ResumeError
from feeder.state.history import SIZES, after_round, check_shapes, of_windows, settings_in
from feeder.state.positions import Positions
from feeder.state.rewriting import steps_in
from feeder.state.snapshot import HISTORY, Snapshot, StreamState
from feeder.workers.fetch.resuming import Resume
from feeder.workers.stream.position import Cut, first_step

if TYPE_CHECKING:
    # Sources are loaded where a run of one is edited.
    from feeder.workers.sources.chapters import Settings


class Change(NamedTuple):
    """What edits have made of the settings that a feed is given with. Immutable."""

    weights: Mapping[str, Fraction] = {}
    """The weight of each source of a mixture; none if they are as they were."""
    sizes: Mapping[str, int] = {}
    """`batch_size` or `global_batch_size`."""
    seed: int | None = None

    def then(self, other: Change) -> Change:
        """This and then another one."""
        return Change(
            other.weights or self.weights,
            {**self.sizes, **other.sizes},
            self.seed if other.seed is None else other.seed,
        )

    def applied(self, config: FeedConfig) -> FeedConfig:
        """The settings of a feed with this change. Raises `ConfigError`."""
        from feeder.workers.sources.mixture import Mixture, weighed

        if self.weights:
            source = config.stream.fetch
            if not isinstance(source, Mixture):
                raise ConfigError(
                    f"weights are of {sorted(self.weights)}, and feed {config.name!r} is no mixture"
                )
            config = config.with_fetch(weighed(source, self.weights))
        return with_numbers(config, self.sizes, self.seed)


def change_in(given: FeedConfig, fingerprint: Mapping[str, Any]) -> Change:
    """What edits have changed of the settings that a feed is given with, by the fields of a
    position."""
    then, now = (settings_in(one, skips=False) for one in (given.fingerprint(), fingerprint))
    weights: dict[str, Fraction] = {}
    if now.blocks and (steps := steps_in(now)) and not is_alike(then, now):
        weights = {
            **dict.fromkeys(then.parts, Fraction(0)),
            **dict(zip(now.parts, steps[0][1], strict=True)),
        }
    sizes = {size: fingerprint[size] for size in SIZES if size in fingerprint}
    return Change(weights, sizes, now.seed)


def is_alike(one: Settings, other: Settings) -> bool:
    """Whether runs are made of the same records, in the same proportions."""
    first, second = (
        (s.mode, s.mix_seed, s.packing, list(s.parts.items()), _short(s)) for s in (one, other)
    )
    return first == second


def _short(one: Settings) -> Any:
    from feeder.workers.sources.chapters import short

    return list(short(one.blocks, [len(part.selection) for part in one.parts.values()], one.mode))


def is_part_of(one: Positions, other: Positions) -> bool:
    """Whether the history of a run is the beginning of that of another one, which has more edits,
    and what it is made of is what that was made of then."""
    first, second = (
        [edit[:5] for edit in p.fingerprint[HISTORY][2]] if HISTORY in p.fingerprint else []
        for p in (one, other)
    )
    if len(first) >= len(second) or second[: len(first)] != first:
        return False
    run: Any = other.config.stream.fetch.run  # type: ignore[attr-defined]
    here, then = settings_in(one.fingerprint, skips=False), run.edits[len(first)].was
    return (here.asked, here.seed) == (then.asked, then.seed) and is_alike(here, then)


def edited(given: Positions, state: StreamState, why: str) -> Resume:
    """Where the run of a state goes on that becomes what is given. Raises `ConfigError` and
    `ResumeError`."""
    from feeder.workers.sources.steps.ragged import Windowed

    source: Any = given.config.stream.fetch
    is_of_windows = isinstance(getattr(source, "records", None), Windowed)
    may_skip = getattr(getattr(source, "traits", None), "may_skip", False)
    if is_of_windows or may_skip or of_windows(state.fingerprint.get(HISTORY)):
        raise ConfigError(
            f"feed {given.config.name!r} cannot be edited while it is served: its rows are not one "
            "for each record, so the place of an edit is found by reading; start the server again "
            "with edit="
        )
    given = Positions(given.config._replace(edit=why), given.number)
    return given.find_in(Snapshot((state,)))


def place_in(owner: Positions, former: Positions, at: Resume) -> Resume:
    """Where a place of a run is in the run that edits have made of it. Raises `ResumeError` if that
    has no such place."""
    run: Any = owner.config.stream.fetch.run  # type: ignore[attr-defined]
    name, cut = owner.config.name, at.cut
    history = former.fingerprint.get(HISTORY)
    num = 0 if history is None else len(history[2])
    first, next_step = run.edits[num], first_step(cut)
    if cut.finished or next_step > first.step:
        raise ResumeError(
            f"the position of feed {name!r} is at step {next_step} of a run with {num} edits, and "
            f"the feed was edited at step {first.step}: they have two histories"
        )
    rows = at.rows
    if next_step == first.step:
        cut, rows = _end_of_round(former, run, num, cut), None if rows is None else ()
    check_shapes(name, run, cut)
    if (left := cut.leftover) is not None:
        # Of a call in which an edit lies the edited run has the first rows alone.
        now = run.rows_of(cut.position.epoch, left.call)
        if now[1] - now[0] != left.rows:
            raise ResumeError(
                f"the position of feed {name!r} is within a call that the edit at step "
                f"{first.step} has ended: edit when all queues have had the batches of one call"
            )
    # Compared is the last call; of one that the edit has ended less comes now.
    cut = replace(cut, checked=None, encode=owner.id.encode)
    return at._replace(cut=cut, rows=rows, owner=None, fingerprint=owner.id.fingerprint)


def _end_of_round(former: Positions, run: Any, num: int, cut: Cut) -> Cut:
    """The place where the round ends that a place is in."""
    from feeder.workers.sources.chapters import Run
    from feeder.workers.sources.edited import Walk

    stream, was, edits = former.config.stream, run.edits[num].was, run.edits[:num]
    found, _ = after_round(
        former.config.name, Walk(Run(edits, was), cut), edits, was, cut,
        drops=stream.last_batch == "drop", epochs=stream.epochs, by_calls=stream.dont_rebatch,
    )  # fmt: skip
    return found
