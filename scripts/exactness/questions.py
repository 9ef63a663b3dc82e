"""What every loader is asked, and how its answer is judged. A question is a function.

Where a run is killed, its trainer kills itself behind a certain batch; then a new process goes on
from the state that was saved last. What that gives is compared with what the run without a kill
gives from there on, in the same batches and the same order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from exactness.asker import BATCHES, WORKERS, Asker
from exactness.judge import Batch, compared, ended, judged, left_behind, records
from exactness.loader import Fault

NOT_SUPPORTED = "not supported"
MIDDLE = 5
"""Batches of the first epoch before a state is saved."""

Question = Callable[[Asker], str]


def _needs_state(ask: Question) -> Question:
    @functools.wraps(ask)
    def asked(asker: Asker) -> str:
        return ask(asker) if asker.about.state else NOT_SUPPORTED

    return asked


def _resumed(asker: Asker, after: int, first: dict[str, Any], **then: Any) -> str:
    """Save after so many batches, be killed, and go on."""
    saved = asker.path()
    ran = asker.run(**{"save": saved, "save_after": after, "kill_after": after, **first})
    if ran.end != "killed":
        return ended(ran) or "ended before its kill"
    # The last batch of an epoch is one in it: what is left of the epoch is nothing.
    start = max(after - 1, 0) // BATCHES
    return judged(asker.run(load=saved, start=start, **then), asker.reference[after:])


def same_again(asker: Asker) -> str:
    """The same run once more"""
    return judged(asker.run(), asker.reference)


@_needs_state
def killed(asker: Asker) -> str:
    """Killed in mid-epoch, resumed"""
    return _resumed(asker, MIDDLE, {})


def _killed_twice(asker: Asker, more: int) -> str:
    saved, again = asker.path(), asker.path()
    first = asker.run(save=saved, save_after=MIDDLE, kill_after=MIDDLE)
    second = asker.run(load=saved, save=again, save_after=more, kill_after=more)
    for ran in (first, second):
        if ran.end != "killed":
            return ended(ran) or "ended before its kill"
    whole = asker.reference
    if (told := compared(whole[MIDDLE : MIDDLE + more], second.batches)) != "exact":
        return told
    return judged(asker.run(load=again), whole[MIDDLE + more :])


@_needs_state
def killed_before_first(asker: Asker) -> str:
    """Killed again before the first batch, with a state saved anew"""
    return _killed_twice(asker, 0)


@_needs_state
def killed_behind_first(asker: Asker) -> str:
    """Killed again after the first batch, with its state"""
    return _killed_twice(asker, 1)


@_needs_state
def prefetched(asker: Asker) -> str:
    """State saved while batches are read ahead, killed two batches later"""
    return _resumed(asker, MIDDLE, {"idle": True, "kill_after": MIDDLE + 2})


@_needs_state
def last_batch(asker: Asker) -> str:
    """State saved at an epoch's last batch"""
    return _resumed(asker, BATCHES, {})


def behind_epoch(asker: Asker) -> str:
    """Killed between two epochs, resumed"""
    saved = asker.path()
    if asker.about.state:
        ran = asker.run(save=saved, save_behind=True)
        if ran.end != "killed":
            return ended(ran) or "ended before its kill"
    return judged(
        asker.run(load=saved if asker.about.state else "", start=1), asker.reference[BATCHES:]
    )


@_needs_state
def second_epoch(asker: Asker) -> str:
    """Killed in the second epoch, resumed"""
    return _resumed(asker, BATCHES + MIDDLE, {})


@_needs_state
def more_workers(asker: Asker) -> str:
    """Resumed with three workers after two"""
    return _resumed(asker, MIDDLE, {}, given={"workers": WORKERS + 1})


def _other_ranks(asker: Asker, before: int, then: int) -> str:
    if not asker.about.state or "ranks" not in asker.about.offers:
        return NOT_SUPPORTED
    saved = [asker.path() for _ in range(before)]
    took = 2
    tasks = [{"save": one, "save_after": took, "kill_after": took} for one in saved]
    first = asker.ranks(None, tasks)
    for ran in first:
        if ran.end != "killed":
            return ended(ran) or "ended before its kill"
    rest = asker.ranks(None, [{"load": saved[0], "epochs": 1} for _ in range(then)])
    for ran in rest:
        if told := ended(ran):
            return told
    every = [(0, (number,)) for number in range(BATCHES * len(asker.reference[0][1]))]
    seen = [batch for ran in (*first, *rest) for batch in ran.batches]
    return compared(every, seen, order=False)


def fewer_ranks(asker: Asker) -> str:
    """Resumed with one rank after two (each record once?)"""
    return _other_ranks(asker, 2, 1)


def more_ranks(asker: Asker) -> str:
    """Resumed with two ranks after one (each record once?)"""
    return _other_ranks(asker, 1, 2)


def _fault(asker: Asker, kind: str) -> Fault:
    """One that happens in the middle of the first epoch."""
    return Fault(kind=kind, at=asker.reference[MIDDLE + 1][1][3], once=asker.path())


def corrupt(asker: Asker) -> str:
    """A record that cannot be read"""
    fault = _fault(asker, "corrupt")
    ran = asker.run(fault, epochs=1)
    if ran.end == "refused":
        named = f"record {fault.at} " in ran.text
        return f"refused: {ran.error}, {'record named' if named else 'record not named'}"
    return ended(ran) or f"left out; {_without(asker, fault, ran.batches)}"


def skipped(asker: Asker) -> str:
    """The same, told to leave it out (are all others there?)"""
    if "skip" not in asker.about.offers:
        return NOT_SUPPORTED
    fault = _fault(asker, "corrupt")
    ran = asker.run(fault, epochs=1, given={"skip": True})
    return ended(ran) or _without(asker, fault, ran.batches)


def _without(asker: Asker, fault: Fault, batches: list[Batch]) -> str:
    whole = records(asker.reference[:BATCHES]) - records([(0, (fault.at,))])
    return compared([(epoch, (number,)) for epoch, number in whole], batches, order=False)


@_needs_state
def raised(asker: Asker) -> str:
    """The data set raises once, resumed from the last state"""
    saved, after = asker.path(), 2
    ran = asker.run(_fault(asker, "once"), save=saved, save_after=after)
    if ran.end == "done":
        return f"read on; {compared(asker.reference, ran.batches)}"
    if ran.end != "refused":
        return ended(ran) or ""
    if not Path(saved).exists():  # The error came before the batches that it was behind.
        return judged(asker.run(), asker.reference)
    return judged(asker.run(load=saved), asker.reference[after:])


def slow(asker: Asker) -> str:
    """One record takes two seconds"""
    return judged(asker.run(_fault(asker, "slow")), asker.reference)


def left_early(asker: Asker) -> str:
    """First epoch left after five batches, second read"""
    expected = asker.reference[:MIDDLE] + asker.reference[BATCHES:]
    return judged(asker.run(leave_after=MIDDLE), expected)


def two_at_once(asker: Asker) -> str:
    """Two loaders in one process, read in turns"""
    ran = asker.run(other=str(asker.other))
    told = judged(ran, asker.reference)
    return told if told != "exact" else compared(asker.reference, ran.other)


def worker_killed(asker: Asker) -> str:
    """A worker process is killed"""
    return judged(asker.run(_fault(asker, "kill")), asker.reference)


def closed(asker: Asker) -> str:
    """Left when an epoch was left early and the loader closed"""
    ran = asker.run(leave_after=MIDDLE)
    return ended(ran) or left_behind(ran)


def orphaned(asker: Asker) -> str:
    """Left five seconds after the trainer was killed"""
    ran = asker.run(kill_after=MIDDLE)
    return left_behind(ran) if ran.end == "killed" else ended(ran) or "ended before its kill"


QUESTIONS: Mapping[str, Question] = {
    ask.__name__: ask
    for ask in (
        same_again, killed, killed_before_first, killed_behind_first, prefetched, last_batch,
        behind_epoch, second_epoch, more_workers, fewer_ranks, more_ranks, corrupt, skipped, raised,
        slow, left_early, two_at_once, worker_killed, closed, orphaned,
    )
}  # fmt: skip
