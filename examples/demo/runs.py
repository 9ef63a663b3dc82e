"""What a run was: who was killed, the trainers' processes and steps, and how two runs compare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

NUM_TRAINERS = 2
SERVER = "server"


def trainer_name(queue: int) -> str:
    """What the trainer that reads a queue is called."""
    return f"trainer {queue + 1}"


EVERYBODY = (SERVER, *map(trainer_name, range(NUM_TRAINERS)))
"""Every process of a run, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One SIGKILL, to one process or to several at once."""

    step: int
    """The step that both trainers have just reported, for the first time."""
    victims: tuple[str, ...]
    """Who is killed, by name."""

    def __str__(self) -> str:
        who = "all" if self.victims == EVERYBODY else " and ".join(self.victims)
        return f"{who} at step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a training process reported of one step."""

    number: int
    """1 for the first step of the run."""
    loss: float
    """Mean cross-entropy over the step's rows, before the step."""
    batches: str
    """Chained digest of all batches up to this step, in hex."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a training process that reached the end reported."""

    batches: str
    """Chained digest of all batches, in hex."""
    weights: str
    """Digest of the final weights, in hex."""
    accuracy: float
    """Share of the digits kept out of training that are named correctly, 0..1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One training process, from its start to its end."""

    start: int
    """Steps already done in the checkpoint that it began with."""
    steps: tuple[Step, ...]
    """The steps that it reported, in order."""
    result: Result | None
    """None where the process was killed."""

    @property
    def end(self) -> int:
        """The last step that it reported."""
        return self.steps[-1].number if self.steps else self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What one trainer did in a run, over one process or many."""

    lives: tuple[Life, ...]
    """Its processes, in order; the last one reached the end."""
    result: Result
    """What the last process reported."""

    @property
    def num_kills(self) -> int:
        """Processes that were killed."""
        return sum(life.result is None for life in self.lives)

    @property
    def num_repeated(self) -> int:
        """Steps done again, because they came after the last checkpoint before a kill."""
        return sum(1 for _ in self.reports()) - len(self.first_reports())

    def reports(self) -> Iterator[Step]:
        """Every report of a step, in order of time; a step done again comes again."""
        for life in self.lives:
            yield from life.steps

    def first_reports(self) -> dict[int, Step]:
        """Each step by its number, as it was reported the first time."""
        steps: dict[int, Step] = {}
        for step in self.reports():
            steps.setdefault(step.number, step)
        return steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run: a server and its trainers."""

    trainings: tuple[Training, ...]
    """What each trainer did, by its queue."""
    kills: tuple[Kill, ...]
    """Who was killed when, in order."""

    @property
    def num_killed(self) -> int:
        """Processes that were killed: a kill of all is one of each process."""
        return len(self.server_kills) + sum(training.num_kills for training in self.trainings)

    @property
    def server_kills(self) -> tuple[int, ...]:
        """The steps at which the server was killed."""
        return tuple(kill.step for kill in self.kills if SERVER in kill.victims)


def differences(undisturbed: Run, disturbed: Run) -> list[str]:
    """Everything in which the two runs differ, in words; empty where they are equal bit for bit."""
    pairs = zip(undisturbed.trainings, disturbed.trainings, strict=True)
    return [
        f"{trainer_name(queue)}: {difference}"
        for queue, (before, after) in enumerate(pairs)
        for difference in training_differences(before, after)
    ]


def training_differences(undisturbed: Training, disturbed: Training) -> list[str]:
    """Everything in which what a trainer did in two runs differs, in words.

    Floats are compared with ==: they were sent with all their digits.
    """
    expected, got = undisturbed.first_reports(), disturbed.first_reports()
    found = []
    if expected.keys() != got.keys():
        found.append(f"the number of steps: {len(expected)} undisturbed, {len(got)} disturbed")
    found += first_difference("a step done again after a kill", got, disturbed.reports())
    found += first_difference("a step of the disturbed run", expected, got.values())
    for name in ("batches", "weights", "accuracy"):
        before, after = getattr(undisturbed.result, name), getattr(disturbed.result, name)
        if before != after:
            found.append(f"{name} at the end: {before} undisturbed, {after} disturbed")
    return found


def first_difference(what: str, expected: dict[int, Step], steps: Iterable[Step]) -> list[str]:
    """The first of `steps` that is not as `expected`, in words."""
    for step in steps:
        before = expected.get(step.number, step)
        if step != before:
            return [
                f"{what}, number {step.number}: loss {step.loss!r} and batches {step.batches}, "
                f"expected loss {before.loss!r} and batches {before.batches}"
            ]
    return []
