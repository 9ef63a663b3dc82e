"""What became of the records of a run, against those of the run that it should equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Batch = tuple[int, tuple[int, ...]]
"""An epoch, and the records of a batch."""


@dataclass(slots=True, kw_only=True)
class Ran:
    """What a run has told."""

    batches: list[Batch] = field(default_factory=list)
    other: list[Batch] = field(default_factory=list)
    """Of the second loader."""
    end: str
    """"done", "killed" (by itself), "hung", "refused" (by an error), "died"."""
    error: str = ""
    """The class of that error."""
    text: str = ""
    """What it said; or the signal of a death."""
    processes: int = 0
    """Processes that were left when the trainer had closed its loader."""
    threads: Sequence[str] = ()
    orphans: int = 0
    """Processes that were left when the trainer had ended."""
    memory: int = 0
    """Names in shared memory that were left then."""


def records(batches: Iterable[Batch]) -> Counter[tuple[int, int]]:
    """How often each record of each epoch came."""
    return Counter((epoch, number) for epoch, numbers in batches for number in numbers)


def compared(expected: Sequence[Batch], got: Sequence[Batch], *, order: bool = True) -> str:
    """What is lost, repeated or moved; otherwise "exact"."""
    wanted, found = records(expected), records(got)
    lost, repeated = (wanted - found).total(), (found - wanted).total()
    told = [f"lost {lost}"] * bool(lost) + [f"repeated {repeated}"] * bool(repeated)
    if not told and order and list(expected) != list(got):
        told = ["moved"]
    return ", ".join(told) or "exact"


def ended(ran: Ran) -> str | None:
    """What to say of a run that did not come to its end; None if it did."""
    match ran.end:
        case "done":
            return None
        case "refused":
            return f"refused: {ran.error}"
        case "died":
            return f"died: {ran.text}"
    return ran.end


def judged(ran: Ran, expected: Sequence[Batch], *, order: bool = True) -> str:
    """What a run comes to that should have given these batches."""
    return ended(ran) or compared(expected, ran.batches, order=order)


def left_behind(ran: Ran) -> str:
    """What a run has left behind; otherwise "clean"."""
    counts = {
        ("process", "processes"): max(ran.processes, ran.orphans),
        ("thread", "threads"): len(ran.threads),
        ("shared memory", "shared memories"): ran.memory,
    }
    told = [f"{count} {words[count > 1]}" for words, count in counts.items() if count]
    return f"leaked {', '.join(told)}" if told else "clean"
