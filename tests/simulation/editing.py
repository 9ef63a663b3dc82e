"""The edits of a job's feed: made at its servers, and what each trainer is to have of them.

What a trainer is handed is a batch of the run that its position names, with that run's edits; and
these become more and never others. So two trainers are in one run if the edits of one are the first
ones of the other, and lie behind what the other has been handed without them.

A server that is begun anew knows no edit before somebody brings it. If some trainers have not
heard of one then, or have saved nothing since, the others may come too late with it, and the run is
*torn*: they are refused by name, and all is begun anew, the servers too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feeder.errors import ConfigError, ResumeError
from feeder.state.fingerprint import fingerprint_digest
from feeder.state.snapshot import HISTORY, Snapshot, StreamState
from feeder.state.state_dict import unpack_position
from feeder.workers.stream.position import Cut
from simulation.sources import Edit, steps_in
from simulation.stream import Feed, positions_of
from simulation.world import Violation

if TYPE_CHECKING:
    from simulation.faults import Fault
    from simulation.job import Job
    from simulation.server import ServerProcess
    from simulation.trainer import TrainerProcess

TRIES, TRY_S = 40, 0.02
"""So often an edit is asked for, so many seconds apart: while a trainer is away it is refused."""

Edits = tuple[Edit, ...]


def cut_in(feed: Feed, position: bytes | StreamState) -> Cut:
    """The place that a position means, whatever edits its run has."""
    positions = positions_of(feed)
    found = unpack_position(position) if isinstance(position, bytes) else Snapshot((position,))
    if isinstance(found, Snapshot) and HISTORY in found.states[0].fingerprint:
        (state,) = found.states
        of = positions.id._replace(fingerprint=fingerprint_digest(state.fingerprint))
        return of.decode(state.token, feed.epochs)
    return positions.find_in(found).cut


class Editor:
    """The edits that were made, by their notes. Owned by the world's one thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._made: dict[tuple[int, str], Edit] = {}
        self.is_torn = False
        """Whether a server has begun that may be told too late of an edit."""

    # ---- what is known

    def edits_in(self, fingerprint: Any) -> Edits:
        """The edits that a position has."""
        try:
            return tuple(self._made[one] for one in steps_in(fingerprint))
        except KeyError as error:
            raise Violation(f"positions: one has the edit {error}, which nobody has made") from None

    def edits_at(self, position: bytes | None) -> Edits:
        """The same, of a position that was saved."""
        if position is None or not self._made:
            return ()
        found = unpack_position(position)
        return () if isinstance(found, bytes) else self.edits_in(found.states[0].fingerprint)

    def of_server(self, server: ServerProcess) -> Edits:
        """The edits of a server's run."""
        return self.edits_in(server.group.feed.factory.positions.fingerprint)

    def fits(self, position: bytes, edits: Edits) -> bool:
        """Whether a position is a place of a run with these edits, or of one with more."""
        mine = self.edits_at(position)
        num = min(len(mine), len(edits))
        if mine[:num] != edits[:num]:
            return False
        if num == len(edits):
            return True
        # What has another size cannot be had from a place of before.
        is_resized = any(one.size for one in edits[num:])
        return not is_resized and self._job.place(position) <= edits[num].step

    def are_of_one_run(self, positions: tuple[bytes, ...]) -> bool:
        """Whether all can begin together at these."""
        most = max(map(self.edits_at, positions), key=len)
        return all(self.fits(one, most) for one in positions)

    # ---- edits

    def edit(self, server: ServerProcess, fault: Fault, tries: int = TRIES) -> None:
        """Somebody edits the feed at a server, and tries again if that refuses."""
        job, group = self._job, server.group
        if server.is_dead or job.is_resizing:
            return
        factory = group.feed.factory
        change = self._draw(fault)
        before, run, leases = factory.positions, group.feed.run, group.leases
        deal = job.deal._replace(feed=job.deal.feed._replace(edits=self.of_server(server)))
        sent = [one.sent_to.step for one in leases if one.sent_to is not None]
        try:
            step = group.edit(change.change, change.why)
        except (ConfigError, ResumeError) as error:
            if (factory.positions, group.feed.run, group.leases) != (before, run, leases):
                raise Violation(f"edits: one was refused and has changed {server.name}") from error
            job.counted["edits refused"] += 1
            if tries and "has ended" not in str(error):
                job.world.after(TRY_S, server.turn_of, lambda: self.edit(server, fault, tries - 1))
            return
        server.note(f"is edited at step {step}: {change}")
        server.notify()
        if max(sent, default=0) > step:
            raise Violation(f"edits: one lies at {step}, and batches up to {max(sent)} were sent")
        if deal.next_round(step) != step:
            raise Violation(f"edits: one lies at {step}, within a round")
        self._made[step, change.why] = change._replace(step=step)
        job.counted["edits"] += 1
        # Nobody can go on in the run of now from a position of before another size.
        if len(job.world.servers) > 1 or change.size:
            self.is_torn = True

    def _draw(self, fault: Fault) -> Edit:
        job = self._job
        feed, draws = job.deal.feed, job.world.draws(f"edit {fault.at}")
        weights: tuple[int, ...] = ()
        if draws.random() < 0.8 and len(feed.weights) > 1:
            weights = tuple(draws.randint(1, 4) for _ in feed.weights)
        seed = draws.randint(1, 9) if draws.random() < 0.3 else None
        resized = feed.queues == 1 and draws.random() < 0.3
        size = draws.randint(1, 5) if resized else None
        return Edit(0, f"{fault.at:.6f}", weights, size, seed)

    # ---- what follows

    def begin_server(self) -> None:
        """A server begins, which may hear of edits from those alone who have."""
        known = {edits for rank in self._job.ranks for edits in self._known_to(rank)}
        self.is_torn = self.is_torn or len(known) > 1
        if len(known) == 1:
            # What was not saved by anybody is lost.
            self._job.go_on_with(*known)

    def _known_to(self, rank: Any) -> list[Edits]:
        """What a trainer brings, or would if its process were killed."""
        process, newest = rank.process, rank.newest()
        found = [self.edits_at(newest or self._job.start_position(rank))]
        return found if process is None else [*found, process.known]

    def begin_all(self, positions: tuple[bytes | None, ...]) -> Edits:
        """All trainers begin anew at these positions; returns the edits that they have."""
        job = self._job
        servers = [self.of_server(one) for one in job.servers if not one.is_dead]
        if job.origin is not None and not servers:
            servers = [self.edits_at(job.origin)]
        given = [one for one in positions if one is not None]
        self.is_torn = (
            any(not self.fits(one, edits) for one in given for edits in servers)
            or len({*servers}) > 1
            or any(one.size for one in self._made.values())
        )
        return max(map(self.edits_at, given), key=len, default=())

    def check_position(self, position: bytes, edits: Edits, whose: str) -> None:
        """A position of a run with these edits has them."""
        mine = self.edits_at(position)
        num = len(mine)
        if mine != edits[:num] or not (num == len(edits) or any(e.size for e in edits[num:])):
            raise Violation(f"positions: one of {whose} has the edits {mine}, expected {edits}")

    def handed(self, process: TrainerProcess, number: float) -> None:
        """A trainer is handed a batch: it is of the run that the others are in."""
        job = self._job
        for rank in job.ranks:
            other = rank.process
            if other is not None and other.served_by is process.served_by:
                self._check_beside(process, number, other)
        mine, run = process.edits, job.deal.feed.edits
        if mine == run or job.is_resizing:
            return
        num = min(len(mine), len(run))
        is_one = mine[:num] == run[:num]
        if is_one and len(mine) > num:
            is_one = all(rank.after <= mine[num].step for rank in job.ranks)
        elif is_one:
            is_one = number < run[num].step
        if is_one:
            pass
        elif self.is_torn:
            job.counted["batches of two runs, of trainers that were torn apart"] += 1
        else:
            raise Violation(
                f"edits: {process.name} is handed batch {number} of a run with the edits {mine}, "
                f"and others were in one with {run}"
            )
        if len(mine) > len(run):
            job.go_on_with(mine)

    def _check_beside(
        self, process: TrainerProcess, number: float, other: TrainerProcess
    ) -> None:  # fmt: skip
        """One server gives nobody batches of another run than others."""
        mine, others = process.edits, other.edits
        if mine == others:
            return
        num = min(len(mine), len(others))
        is_one = mine[:num] == others[:num]
        if is_one and len(mine) > num:
            is_one = other.step == other.begins_at or other.after <= mine[num].step
        elif is_one:
            is_one = number < others[num].step
        if not is_one:
            raise Violation(
                f"edits: {process.name} is handed batch {number} of a run with the edits {mine}, "
                f"and {other.name} those of one with {others}, by one server"
            )
