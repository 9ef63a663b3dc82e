"""What a run is like, and what goes wrong in it, all of it drawn from a seed before it begins."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from simulation.fleet import Workers
from simulation.stream import Feed
from simulation.world import MOST_EVENTS


class Fault(NamedTuple):
    """Something goes wrong."""

    at: float
    """Seconds after the beginning."""
    kind: str
    queue: int = 0
    """Whom it happens to: the number of a trainer."""
    seconds: float = 0.0
    """For how long, or after what time somebody does something about it."""
    share: float = 0.0
    """A number from 0 to 1 for what else is to be chosen."""

    def __str__(self) -> str:
        return (
            f"{self.at:.3f} s: {self.kind}, queue {self.queue}, {self.seconds:.3f} s, "
            f"{self.share:.2f}"
        )


KINDS = {
    "kill trainer": 6,
    "stop trainer": 3,
    "trainer leaves": 2,
    "break": 5,
    "break again": 3,
    "break late": 3,
    "break above": 2,
    "break below": 2,
    "slow": 2,
    "cut off": 2,
    "kill server": 5,
    "close server": 2,
    "stop server": 2,
    "second server": 1,
    "roll back": 9,
    "late start": 2,
    "other number": 4,
    "usurp": 2,
    "stray": 2,
    "store": 2,
    "other run": 3,
    "ask": 2,
    "no memory": 1,
}
"""The kinds of faults, and how often each comes."""

RESIZE = "resize"
"""A server comes back with another number of queues or replicas, and trainers live on. It comes in
one of seven runs, from a generator of its own, so that all else of a run is as without it."""

DISK_KINDS = {"power": 10, "die in save": 6, "full disk": 3, "slow disk": 2, "damage": 3}
"""Those that come as well where positions are saved to disks."""

OF_SOURCES = "edit", "calls fail"
"""Those that come as well where the feed is of sources."""

Kind = Literal["stream", "epoch", "sources"]
"""What a run's feed is like: calls of a small function, with rounds of the stream or of each epoch;
or sources, which are edited, leave records out and fail, with rounds of either kind."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run. The seed draws the delays in it."""

    seed: str
    feed: Feed
    lease_s: float = 2.0
    credits: tuple[int, ...] = (0, 0)
    hold: int = 2
    keeps: bool = False
    """Whether users keep as many batches as they may."""
    has_disks: bool = False
    """Whether positions are saved to checkpoint stores on disks."""
    planes: tuple[str, ...] = ("auto", "auto")
    save_every: int = 2
    """Rounds between two checkpoints."""
    think_s: float = 0.02
    """Seconds that a trainer takes for a batch, at most."""
    paces: tuple[int, ...] = (1, 1)
    """How many times longer each trainer takes."""
    delay_s: float = 0.005
    make_s: float = 0.003
    addresses: int = 1
    exit_when: str = "never"
    undecided: bool = False
    """Whether trainers load their state after they have connected."""
    quiet_s: float = 2.0
    """When all faults are over."""
    faults: tuple[Fault, ...] = ()
    workers: Workers | None = None
    """The actors that make the calls; None where a call takes no time."""
    most_events: int = MOST_EVENTS
    """More events than the run has in which nobody spins."""

    @property
    def bound_s(self) -> float:
        """Within so many seconds after the last fault everybody is done."""
        waits = 60.0 if self.addresses == 1 else 90.0
        return waits + 25 * self.lease_s + 0.2 * self.feed.num_batches

    @property
    def has_silence(self) -> bool:
        """Whether a living trainer may be silent for as long as a lease, or lose its connection."""
        kinds = {fault.kind for fault in self.faults}
        return self.undecided or bool(kinds - {"stray", "ask", "kill trainer"})

    def of_seat(self, settings: tuple[Any, ...], seat: int) -> Any:
        """What a trainer has of settings that are one for each."""
        return settings[seat % len(settings)]

    def __str__(self) -> str:
        feed = self.feed
        lines = [
            f"seed {self.seed}: {feed.queues} queues, {feed.num_batches} batches of "
            f"{feed.batch_size} rows, chunks of {feed.chunk_rows}, {feed.epochs} epochs, "
            f"{feed.replicas} replicas, last_batch={feed.last_batch}, rounds={feed.rounds}, "
            f"last_round={feed.last_round}, weights {feed.weights}, skips={feed.skips}, "
            f"retries={feed.retries}, lease {self.lease_s} s, "
            f"credits {self.credits}, hold {self.hold}, keeps={self.keeps}, "
            f"has_disks={self.has_disks}, planes {self.planes}, {self.addresses} addresses, "
            f"exit_when={self.exit_when}, undecided={self.undecided}",
            *(f"  fault at {fault}" for fault in self.faults),
        ]
        return "\n".join(lines)


def draw(seed: int | str, kind: Kind = "stream") -> Plan:
    """The plan of a seed."""
    return of_sources(_draw(seed, "stream")) if kind == "sources" else _draw(seed, kind)


def of_sources(plan: Plan) -> Plan:
    """The same plan for a feed of sources, with what happens to those."""
    chance, feed, faults = random.Random(f"sources {plan.seed}"), plan.feed, [*plan.faults]
    skips = chance.random() < 0.15
    feed = feed._replace(
        weights=(1,) if skips else chance.choice(((1,), (2, 1), (3, 2), (1, 1, 1))), skips=skips,
        last_batch=chance.choice(("keep", "drop", "pad")),
        last_round=chance.choice(("uneven", "drop", "pad")), retries=chance.choice((0, 0, 1)),
        rounds=chance.choice(("stream", "stream", "stream", "epoch")),
    )  # fmt: skip
    rows = feed.calls * feed.chunk_rows
    if rows // feed.batch_size < feed.queues:
        feed = feed._replace(rounds="stream")  # An epoch without a whole round may be an error.
    rounds = rows * feed.epochs / feed.batch_size / feed.queues
    work_s = 0.1 + rounds * plan.think_s * 0.7
    may_be_edited = not skips and (feed.rounds == "stream" or feed.queues == 1)
    for kind, num in (
        ("edit", chance.choice((1, 1, 2, 3) if may_be_edited else (0, 0, 1))),
        ("calls fail", chance.choice((0, 0, 1))),
    ):
        faults += [
            Fault(
                0.8 * chance.random() * work_s, kind, seconds=chance.random(), share=chance.random()
            )
            for _ in range(num)
        ]
    quiet_s = max((fault.at + fault.seconds for fault in faults), default=0.0)
    return replace(plan, feed=feed, faults=tuple(sorted(faults)), quiet_s=quiet_s)


def _draw(seed: int | str, rounds: str) -> Plan:
    chance = random.Random(f"plan {seed}")
    queues = chance.choice((1, 2, 2, 2, 3, 3, 4))
    size, chunk = chance.choice(((2, 2), (2, 3), (3, 2), (2, 5), (4, 1)))
    epochs = chance.choice((1, 1, 2))
    replicas = chance.choice((1, 1, 1, 2)) if queues < 3 else 1
    num_rounds, hold, keeps = chance.randint(4, 14), chance.choice((0, 1, 2, 4)), False
    if chance.random() < 0.05:
        # More slots are kept by a user than are left to be sent.
        num_rounds, hold, keeps = 24, 14, True
    batches = num_rounds * queues
    seats = range(queues * replicas)
    feed = Feed(
        queues=queues, calls=max(1, batches * size // chunk // epochs), chunk_rows=chunk,
        batch_size=size, epochs=epochs, last_batch=chance.choice(("keep", "keep", "drop")),
        writable=chance.random() < 0.1, replicas=replicas, rounds=rounds,
    )  # fmt: skip
    has_disks = chance.random() < 0.25
    think_s = chance.choice((0.002, 0.02, 0.05))
    lease_s = chance.choice((0.8, 1.5, 3.0))
    # How long the work takes about; faults come in this time, or just after.
    work_s = 0.1 + num_rounds * think_s * chance.choice((0.3, 0.7, 0.7, 3.0))
    # A few kinds in each run, as in swarm testing (Groce and others, 2012): faults that have to
    # come together do so more often than where all kinds come.
    weights = {**KINDS, **DISK_KINDS} if has_disks else KINDS
    kinds = chance.choices([*weights], [*weights.values()], k=chance.choice((1, 2, 3, 6)))
    faults = []
    at = chance.random() * work_s
    for _ in range(chance.choice((0, 1, 2, 2, 3, 3, 4, 6, 9))):
        # Some come together, and some while all begin.
        how = chance.random()
        if how < 0.3:
            at += 0.05 * chance.random()
        else:
            at = chance.random() * (work_s if how < 0.85 else 0.15)
        seconds = chance.choice((0.01, 0.1, 0.5, lease_s, 1.5 * lease_s))
        faults.append(Fault(
            at=at, kind=chance.choice(kinds), queue=chance.choice(seats),
            seconds=seconds * (0.5 + chance.random()), share=chance.random(),
        ))  # fmt: skip
    resizes = random.Random(f"resize {seed}")
    if resizes.random() < 1 / 7:
        at = resizes.random() * work_s
        faults.append(Fault(at, RESIZE, seconds=2 * resizes.random(), share=resizes.random()))
    # From a generator of its own, so that all else of a run is as with rounds of the stream.
    drops = rounds == "epoch" and random.Random(f"last round {seed}").random() < 0.5
    # An epoch without a whole round is an error then.
    if drops and feed.batches_per_epoch >= queues:
        feed = feed._replace(last_round="drop")
    return Plan(
        seed=str(seed),
        feed=feed,
        lease_s=lease_s,
        credits=(1,) if keeps else tuple(chance.choice((0, 1, 2, 3, 6)) for _ in seats),
        hold=hold,
        keeps=keeps,
        has_disks=has_disks,
        planes=tuple(chance.choice(("auto", "auto", "frames")) for _ in seats),
        save_every=chance.choice((1, 2, 3, 5)),
        think_s=think_s,
        paces=tuple(chance.choice((1, 1, 1, 4)) for _ in seats),
        delay_s=chance.choice((0.0005, 0.005, 0.03)),
        make_s=chance.choice((0.0005, 0.003, 0.03)),
        addresses=chance.choice((1, 1, 2)),
        exit_when=chance.choice(("never", "acknowledged")),
        undecided=chance.random() < 0.35,
        quiet_s=max((fault.at + fault.seconds for fault in faults), default=0.0),
        faults=tuple(sorted(faults)),
    )
