"""A job: trainers, servers, and whoever begins them again; what holds of all together is checked
here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from feeder.errors import ConfigError, ConnectTimeout, FeedError, FetchError, ResumeError
from feeder.state.snapshot import Snapshot
from feeder.state.state_dict import unpack_position
from simulation.disk import Host
from simulation.editing import Editor, Edits
from simulation.faults import OF_SOURCES, RESIZE, Fault, Plan
from simulation.fleet import MINUTE_S
from simulation.server import ServerProcess
from simulation.stream import Deal, factory_of, positions_of
from simulation.trainer import TrainerProcess, cut_of
from simulation.world import BEGIN, Violation, World

CHECK_S = 0.25
"""How often the stored position is looked at."""
MOST_SEATS = 6
"""Trainers of the largest job."""


class Rank:
    """What is known of one trainer, whichever process it runs in."""

    def __init__(self, seat: int, name: str, deal: Deal, host: Host | None) -> None:
        self.seat, self.name, self.deal = seat, name, deal
        self.queue, self.replica = divmod(seat, deal.feed.replicas)
        self.host = host
        """Its disk; None where its positions are kept by magic."""
        self.process: TrainerProcess | None = None
        self.num = 0
        self.saved: dict[int, bytes] = {}
        """Its positions by step, since the job was last put back."""
        self.is_done = False
        self.num_errors = 0
        """Errors since it was last handed a batch."""
        self.most_handed = deal.begins
        """The step after the last batch that any of its processes was handed."""
        self.handed = 0
        """The same, since the job was last put back."""
        self.after = 0
        """The number after the last batch that its process was handed; at first of its position."""
        self.may_be_fenced = False
        """Whether another process may have taken its queue."""
        self.lacks_start_s = 0.0
        """What its next process is to have (`TrainerProcess.lacks_start_s`)."""

    def newest(self) -> bytes | None:
        """The position that its next process is given; None where there is none."""
        if self.host is not None:
            return self.host.newest()
        return self.saved[max(self.saved)] if self.saved else None


class Start(NamedTuple):
    """Where all trainers began when they last began together."""

    positions: tuple[bytes | None, ...] = ()
    """The position that each was given."""
    skip: int = 0
    """Rounds that were left out there."""


class Job:
    """The whole of a run. Owned by the world's one thread."""

    def __init__(self, plan: Plan) -> None:
        self.world = world = World.current
        self.plan = plan
        self._draws = world.draws("job")
        self.addresses = ("ipc:///first", "ipc:///second")
        self.deal = Deal(plan.feed)
        """How batches are dealt to trainers; of a feed that is edited, with the edits of the run
        that they are in."""
        self.editor = Editor(self)
        self._num_deals = 0
        self.ranks = self._make_ranks()
        self.servers: list[ServerProcess] = []
        self.origin: bytes | None = None
        """Where a new server has trainers begin that come without a position."""
        self.origin_at = self.origin_step = 0
        """The number of the next batch there, and of the first one that is dealt out."""
        self._start = Start((None,) * len(self.ranks))
        self.asks = 0.02
        """How often a trainer asks for a snapshot."""
        self.is_quiet = False
        """Whether no fault comes any more."""
        self.handed_by: list[int] = []
        """Batches that trainers had been handed after each minute, where actors make the calls."""
        self.has_foreign = False
        """Whether a trainer has come with a position of another run."""
        self.counted = Counter[str]()
        """What came of edits and of calls that fail."""
        self._age = 0
        self._num_servers = 0
        self._first_done_at: float | None = None
        for fault in plan.faults:
            world.at(BEGIN + fault.at, self._fault, fault)
        world.at(BEGIN + plan.quiet_s, self._be_quiet)
        world.after(CHECK_S, self._check)
        if plan.workers is not None:
            world.after(MINUTE_S, self._count)
        self._processes: list[TrainerProcess] = []
        self._begin_server(0)
        for rank in self.ranks:
            world.after(self._draws.random() * 0.1, self._begin, rank, self._age)

    def _make_ranks(self) -> list[Rank]:
        """The trainers, in the order of their seats."""
        self._num_deals += 1
        ranks = []
        for seat in range(self.deal.feed.num_seats):
            name, host = str(seat) + "'" * (self._num_deals - 1), None
            if self.plan.has_disks:
                host = Host(self.world.draws(f"disk {name}"))
            ranks.append(Rank(seat, name, self.deal, host))
        return ranks

    def note(self, what: str) -> None:
        if self.world.history is not None:
            self.world.note("job", what)

    @property
    def is_resizing(self) -> bool:
        """Whether servers deal to another number of queues than the trainers that live were one
        of: whoever is to begin them anew has not done so yet."""
        return self.ranks[0].deal is not self.deal

    @property
    def is_over(self) -> bool:
        """Whether all trainers have had everything and are gone."""
        return all(rank.is_done for rank in self.ranks)

    # ---- processes

    def _begin_server(self, number: int) -> None:
        address = self.addresses[number]
        if address in self.world.servers or self.is_over:
            return
        self._num_servers += 1
        factory = factory_of(self.deal.feed)
        if self.origin is not None:
            factory.begin_at(unpack_position(self.origin))
        self.editor.begin_server()
        server = ServerProcess(self.plan, factory, self._num_servers, address)
        server.note(f"begins at {address}")
        server.at_end = partial(self._check_end, server)
        self.servers.append(server)

    def place(self, position: bytes) -> int:
        """The number of the first batch at a position that is dealt to somebody: a start leaves
        batches to nobody."""
        cut, feed = cut_of(self, position), self.deal.feed
        if cut.finished:
            # Batches of a round that was dropped at the end of the stream stay so.
            return max(cut.step, feed.num_batches)
        step = cut.step + positions_of(feed).within(cut)[0]
        if feed.rounds == "epoch":
            # A round ends with its epoch, which the position need not know.
            step = min(step, (cut.epoch + 1) * feed.batches_per_epoch)
        return step

    def _round_at(self, position: bytes) -> int:
        """The number of the batch with which the round begins that follows a position."""
        return self.deal.next_round(max(self.place(position), self.deal.begins))

    def first_batch(
        self, rank: Rank, position: bytes | None, *, skip: int = 0, rejoins: bool = False
    ) -> int:
        """The number of the first batch that a trainer is to be handed."""
        deal, step = self.deal, 0 if rejoins else self.origin_step
        step = deal.next_round(step) if position is None else self._round_at(position)
        if skip and not rejoins:
            step = deal.start_of(deal.round_of(step) + skip)
        return deal.first(step, rank.queue)

    def _begin(
        self, rank: Rank, age: int, position: bytes | None = None, *, skip: int = 0,
        rejoins: bool = False, takes_over: bool = False,
    ) -> None:  # fmt: skip
        """Begin a trainer's process, unless the job was put back meanwhile."""
        if age != self._age or rank.is_done or rank.process is not None:
            return
        rank.process = process = TrainerProcess(
            self, rank, position=position, skip=skip, rejoins=rejoins, takes_over=takes_over,
            loads=self.plan.undecided and not rejoins,
        )  # fmt: skip
        rank.after = process.begins_after
        if not rejoins:
            rank.most_handed = max(rank.most_handed, process.begins_at)
        process.note(f"begins at batch {process.step}{', rejoins' * rejoins}")

    def add(self, process: TrainerProcess) -> None:
        """A process begins."""
        self._processes.append(process)

    def end_others(self) -> None:
        """Kill the processes that are not wanted any more."""
        wanted = [rank.process for rank in self.ranks]
        for process in self._processes:
            if not process.is_dead and process not in wanted:
                process.kill()

    def forget(self) -> None:
        """The run is over: let go of what the process would keep."""
        for server in self.servers:
            server.descriptors.close()
        for process in self._processes:
            if process.consumer is not None:
                process.consumer._forgotten.detach()

    def handed(self, process: TrainerProcess) -> None:
        """A user was handed a batch."""
        rank = process.rank
        rank.num_errors = 0
        rank.most_handed = max(rank.most_handed, process.step)
        rank.handed = max(rank.handed, process.step)
        rank.after = process.after

    def go_on_with(self, edits: Edits) -> None:
        """The run that trainers are in has these edits from now on."""
        before, feed = self.deal, self.deal.feed._replace(edits=edits)
        self.deal = before._replace(feed=feed)
        for rank in self.ranks:
            if rank.deal is before:
                rank.deal = self.deal

    def start_position(self, rank: Rank) -> bytes | None:
        """The position with which a trainer began when all last began together."""
        positions = self._start.positions
        return positions[rank.seat] if rank.seat < len(positions) else None

    def _count(self) -> None:
        num = self.deal.feed.queues
        self.handed_by.append(sum((one.most_handed - one.queue) // num for one in self.ranks))
        self.world.after(MINUTE_S, self._count)

    def save(self, process: TrainerProcess, step: int, position: bytes) -> None:
        """A trainer has stored its position before a batch."""
        if process.rank.process is process:
            process.rank.saved[step] = position

    def ended(self, process: TrainerProcess) -> None:
        """A process is gone."""
        rank = process.rank
        if rank.process is not process:
            return  # Another one has its place.
        rank.process = None
        if process.has_all:
            rank.is_done = True
            self._first_done_at = self._first_done_at or self.world.now
            return
        if self.is_resizing:
            return  # All are begun anew soon.
        if process.is_foreign:
            return self._go_on(rank, 0.1, rejoins=False)
        # Sometimes it takes so long that the others go on.
        wait_s = 0.05 + self._draws.random() * self._draws.choice((1.0, 1.0, 15.0))
        if process.error is None:
            # Killed: the launcher begins it again, where it was saved last. Whoever had saved
            # nothing and starts with all others may still be waited for.
            return self._go_on(rank, wait_s, rejoins=self._draws.random() < 0.7)
        self._end_with(process.error, process, wait_s)

    def _end_with(self, error: FeedError, process: TrainerProcess, wait_s: float) -> None:
        """A process has got an error: the launcher begins it again."""
        rank = process.rank
        rank.num_errors += 1
        if rank.num_errors > 40:
            raise Violation(f"waits: trainer {rank.name} gets one error after the other: {error}")
        is_known = not isinstance(error, FetchError) or self.counted["calls that failed"]
        if isinstance(error, ConfigError) or not is_known:
            raise Violation(f"errors: {process.name} got {error!r}")
        rejoins = process.rejoins
        if isinstance(error, ResumeError) and self.editor.is_torn:
            return self._mend(wait_s)
        if isinstance(error, ResumeError):
            if rejoins and not (self.has_foreign or process.is_foreign):
                raise Violation(f"errors: {process.name} comes back and is refused: {error}")
            # Others may be about to be put back, too; if they are not, it comes back alone.
            rejoins = rejoins or rank.num_errors > 3
        elif isinstance(error, ConnectTimeout) and self.is_quiet and self.world.servers:
            rank.num_errors += 5
        if process.step > process.begins_at:
            return self._go_on(rank, wait_s, rejoins=True)
        self.world.after(wait_s, self._begin_again, process, self._age, rejoins)

    def _mend(self, seconds: float) -> None:
        """Some trainers are in a run with an edit of which others have not heard: all are begun
        anew, and servers with them, which then hear of it from all."""
        self.counted["jobs begun anew, torn"] += 1
        if self.counted["jobs begun anew, torn"] > 20:
            raise Violation("waits: trainers are of two runs again and again")
        for one in self.servers:
            if not one.is_dead:
                one.kill()
        self._begin_all(self._older(self._draws.random()), seconds)
        self.end_others()
        self._begin_server(0)

    def _begin_again(self, process: TrainerProcess, age: int, rejoins: bool) -> None:
        """Begin a process as another one was begun."""
        skip = 0 if rejoins else process.skip
        self._begin(process.rank, age, process.position, skip=skip, rejoins=rejoins)

    def _go_on(self, rank: Rank, wait_s: float, *, rejoins: bool) -> None:
        """Begin a process where its trainer was saved last. Where nothing was saved, it starts as
        it started, or it comes back to the beginning of its queue."""
        self.world.after(wait_s, self._begin_where_saved, rank, self._age, rejoins)

    def _begin_where_saved(self, rank: Rank, age: int, rejoins: bool) -> None:
        if age != self._age:
            return  # The job was put back meanwhile.
        position, start = rank.newest(), self._start
        came_with = start.positions[rank.seat]
        if position is not None:
            self._begin(rank, age, position, rejoins=True)
        elif rejoins and came_with is None and not self.deal.begins:
            self._begin(rank, age, rejoins=True)
        else:
            self._begin(rank, age, came_with, skip=start.skip)

    # ---- faults

    def _fault(self, fault: Fault) -> None:
        self.note(f"fault: {fault.kind} ({fault.seconds:.3f} s, {fault.share:.2f})")
        rank = self.ranks[fault.queue % len(self.ranks)]
        process = rank.process
        if self.is_resizing and fault.kind not in OF_LIFE:
            return
        do = getattr(self, "_do_" + fault.kind.replace(" ", "_"))
        if process is not None or fault.kind in ALWAYS:
            do(fault, rank, process)

    def _do_kill_trainer(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        process.kill()

    def _do_stop_trainer(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        process.pause()
        self.world.after(fault.seconds, process.go_on)

    def _do_trainer_leaves(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        if not process.is_paused:
            process.leave()

    def _do_break(
        self, fault: Fault, rank: Rank, process: TrainerProcess, up: float = 0.0, down: float = 0.0
    ) -> None:
        link = process.link
        if link is not None:
            link.break_off(up, down)

    def _do_break_again(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """It breaks, and the next one while the queue is asked for."""
        process.breaks_early = True
        self._do_break(fault, rank, process)

    def _do_break_late(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """It breaks once the trainer has had everything."""
        process.breaks_late = True

    def _do_break_above(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """The server learns of it first."""
        self._do_break(fault, rank, process, 0.0, fault.seconds)

    def _do_break_below(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """The consumer learns of it first."""
        self._do_break(fault, rank, process, fault.seconds * 4, 0.0)

    def _do_slow(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        link = process.link
        if link is not None:
            link.slow_s = fault.seconds * 0.3

    def _do_cut_off(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """For some time no connection can be made."""
        process.is_cut_off = True

        def end() -> None:
            process.is_cut_off = False

        self.world.after(fault.seconds, end)
        self._do_break(fault, rank, process)

    def _server(self, fault: Fault) -> ServerProcess | None:
        alive = [server for server in self.servers if not server.is_dead]
        return alive[int(fault.share * len(alive))] if alive else None

    def _do_kill_server(self, fault: Fault, rank: Rank, process: object) -> None:
        server = self._server(fault)
        if server is not None:
            server.note("is killed")
            server.kill()
            self.world.after(fault.seconds, self._begin_server, self._next_address(fault))

    def _next_address(self, fault: Fault) -> int:
        return int(fault.share * 7) % self.plan.addresses

    def _do_close_server(self, fault: Fault, rank: Rank, process: object) -> None:
        server = self._server(fault)
        if server is not None and not server.is_paused:
            server.closes_in_send = self._draws.random() < 0.5
            if not server.closes_in_send:
                self._close(server)
            self.world.after(fault.seconds, self._close, server)
            self.world.after(fault.seconds, self._begin_server, self._next_address(fault))

    def _close(self, server: ServerProcess) -> None:
        if not (server.is_dead or server.is_paused):
            server.note("is closed")
            server.close()

    def _do_stop_server(self, fault: Fault, rank: Rank, process: object) -> None:
        server = self._server(fault)
        if server is not None:
            server.pause()
            self.world.after(fault.seconds, server.go_on)

    def _do_second_server(self, fault: Fault, rank: Rank, process: object) -> None:
        self._begin_server(self.plan.addresses - 1)

    def _do_roll_back(self, fault: Fault, rank: Rank, process: object) -> None:
        """All trainers go back to a checkpoint that all have."""
        start = self._older(fault.share)
        step = self.place(start.positions[0]) if start.positions[0] else self.origin_step
        how = self._draws.random()
        if how < 0.2:
            # A state of any rank is valid for all.
            start = Start((self._draws.choice(start.positions),) * len(self.ranks))
        elif how < 0.4 and self.deal.feed.rounds == "stream":
            skip = self._draws.randint(1, 3)
            if self.deal.round_of(step) + skip + 1 < self.deal.num_rounds:
                start = start._replace(skip=skip)
        self._begin_all(start, fault.seconds * 0.2)

    def _do_late_start(self, fault: Fault, rank: Rank, process: object) -> None:
        """All trainers go back, and one of them is cut off while the others begin."""
        rank.lacks_start_s = fault.seconds
        self._begin_all(self._older(fault.share), fault.seconds * 0.2)

    def _older(self, share: float) -> Start:
        """One of the places at which all can start: the last start, or a checkpoint of all."""
        deal, starts = self.deal, [self._start]
        for begins in map(deal.start_of, range(deal.num_rounds)):
            found = [rank.saved.get(deal.first(begins, rank.queue)) for rank in self.ranks]
            positions = tuple(one for one in found if one is not None)
            # Who has no batch of an epoch's last round stands before that round when it is over.
            of_one_round = {*map(self._round_at, positions)} == {begins}
            if len(positions) != len(found) or not of_one_round:
                continue
            if self.editor.are_of_one_run(positions):
                starts.append(Start(positions))
        return starts[int(share * len(starts))]

    def _begin_all(self, start: Start, seconds: float) -> None:
        """All trainers begin anew, together."""
        self._age += 1
        self._start = start
        edits = self.editor.begin_all(start.positions)
        self.go_on_with(edits)
        for server in self.servers:
            server.known_ended.clear()
        for rank, position in zip(self.ranks, start.positions, strict=True):
            process, rank.process = rank.process, None
            rank.is_done = False
            rank.num_errors = rank.handed = rank.after = 0
            if process is not None:
                process.kill()
            first = self.first_batch(rank, position)
            # What was left out is lost with what was saved before.
            saved = {} if start.skip else rank.saved
            rank.saved = {
                step: token for step, token in saved.items()
                if step <= first and self.editor.fits(token, edits)
            }  # fmt: skip
            if position is not None and not start.skip:
                rank.saved[first] = position
            if rank.host is not None:
                rank.host.begin_run(None if start.skip else position)
            wait_s = seconds * self._draws.random()
            self.note(f"{rank.name} goes back to {first}, and leaves out {start.skip} rounds")
            self.world.after(wait_s, self._start_one, rank, self._age, position, start.skip)

    def _start_one(self, rank: Rank, age: int, position: bytes | None, skip: int) -> None:
        self._begin(rank, age, position, skip=skip)

    def _do_other_number(self, fault: Fault, rank: Rank, process: object) -> None:
        """All are begun again, from a position of any trainer, with another number of queues. A
        launcher ends all processes of the job before, also those that nobody wanted."""
        self._begin_as_dealt(self._other_number(fault), fault.seconds * 0.2)

    def _other_number(self, fault: Fault) -> bytes | None:
        """End all servers, and deal to another number of queues and trainers from a position of any
        trainer on, which is returned."""
        position = self._draws.choice(self._older(fault.share).positions)
        step = self.origin_step if position is None else self.place(position)
        begins = self.deal.next_round(step)
        for one in self.servers:
            if not one.is_dead:
                one.kill()
        num, feed = self._draws.randint(1, MOST_SEATS), self.deal.feed
        if (feed.rounds, feed.last_round) == ("epoch", "drop"):
            num = min(num, feed.batches_per_epoch)  # An epoch without a whole round is an error.
        shared = self._draws.choice((1, 1, 2)) if 2 * num <= MOST_SEATS else 1
        self.deal = Deal(feed._replace(queues=num, replicas=shared), begins)
        self.note(f"from batch {begins} on there are {num} queues for {shared} trainers each")
        return position

    def _begin_as_dealt(self, position: bytes | None, seconds: float) -> None:
        """Begin all trainers of the number of queues that there is now."""
        for one_rank in self.ranks:
            one_rank.process = None
        self.end_others()
        self.ranks = self._make_ranks()
        self._begin_all(Start((position,) * len(self.ranks)), seconds)
        if not self.world.servers:
            self._begin_server(0)

    def _do_resize(self, fault: Fault, rank: Rank, process: object) -> None:
        """The server is replaced by one with another number, and somebody notices later: until then
        trainers that had a queue get an error, or nothing."""
        before = self.deal.feed
        position = self._other_number(fault)
        if self.deal.feed == before:
            return self._begin_as_dealt(position, 0.0)
        self._age += 1  # Nobody is begun as before.
        for one in self.ranks:
            if one.process is not None and not one.process.is_dealt:
                one.process, new = None, one.process
                new.kill()
        self.end_others()
        self._begin_server(self._next_address(fault))
        self.world.after(
            fault.seconds, self._begin_as_dealt, position, fault.seconds * 0.2
        )  # fmt: skip

    def _do_usurp(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """Somebody begins a second process for a queue, which takes it over."""
        position = rank.newest()
        if position is None:
            return
        rank.process, rank.may_be_fenced = None, True
        if self._draws.random() < 0.5:
            self.world.after(fault.seconds, process.kill)
        self._begin(rank, self._age, position, rejoins=True, takes_over=True)
        new = rank.process
        if new is not None and self._draws.random() < 0.4:
            # It is gone again about when it has asked.
            self.world.after(self._draws.random() * 3 * self.plan.delay_s, new.kill)

    def _do_stray(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """Somebody begins a second process for a queue, by mistake. It may have the queue once its
        holder is silent for as long as a lease, or is gone."""
        position = rank.newest()
        if position is None:
            return
        # A holder that is silent, cut off or between two connections may lose its queue.
        rank.may_be_fenced = rank.may_be_fenced or self.plan.has_silence
        stray = TrainerProcess(self, rank, position=position, rejoins=True, is_stray=True)
        stray.note("begins, and is not wanted")
        self.world.after(fault.seconds, self._end_stray, stray)

    def _end_stray(self, stray: TrainerProcess) -> None:
        if not stray.is_dead:
            stray.kill()

    def _do_store(self, fault: Fault, rank: Rank, process: object) -> None:
        """All are begun again: the server where it had stored, trainers without a position."""
        server = self._server(fault)
        if server is None or server.is_paused:
            return
        state = server.group.state()
        position = bytes(Snapshot((state,))) if self.editor.of_server(server) else state.token
        cut = cut_of(self, position)
        if cut.finished or cut.step < self.deal.begins:
            return  # All is done, or nobody has come to this server yet.
        for one in self.servers:
            if not one.is_dead:
                one.kill()
        self.origin, self.origin_at = position, cut.step
        self.origin_step = self.deal.next_round(self.place(position))
        for one_rank in self.ranks:
            one_rank.saved = {}
        self._begin_all(Start((None,) * len(self.ranks)), fault.seconds * 0.2)
        self._begin_server(0)

    def _do_other_run(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """A trainer is begun again with the position of another run."""
        position = None
        if rank.saved:
            position = self._of_other_run(rank.saved[max(rank.saved)])
        if position is None:
            return
        rank.process, self.has_foreign = None, True
        process.kill()
        rank.process = TrainerProcess(self, rank, position=position, rejoins=True, is_foreign=True)
        rank.process.note("begins with a position of another run")

    def _of_other_run(self, position: bytes) -> bytes | None:
        """The same position, but of a stream with other rows; None where it has no digest."""
        feed, cut = self.plan.feed, cut_of(self, position)
        left = cut.leftover
        if left is None or cut.index == feed.batches_per_epoch:
            return None  # What is left over at the end of an epoch is dropped.
        token = replace(cut, leftover=left._replace(digest=left.digest ^ 1)).token()
        if not self.editor.edits_at(position):
            return token
        (state,) = Snapshot.from_bytes(position).states
        return bytes(Snapshot((state._replace(token=token, rows=None),)))

    def _do_edit(self, fault: Fault, rank: Rank, process: object) -> None:
        server = self._server(fault)
        if server is not None:
            server.turn_of(lambda: self.editor.edit(server, fault))

    def _do_calls_fail(self, fault: Fault, rank: Rank, process: object) -> None:
        """For some time a part of the calls of the fetch function fails, in every server."""
        ends, draws = self.world.now + fault.seconds, self.world.draws(f"calls {fault.at}")

        def breaks(epoch: int, index: int) -> None:
            if self.world.now < ends and draws.random() < fault.share:
                self.counted["calls that failed"] += 1
                raise OSError(f"call {index} of epoch {epoch} cannot be made")

        self.world.breaks = breaks

    def _do_ask(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        if not process.is_paused:
            process.ask()

    def _do_power(self, fault: Fault, rank: Rank, process: object) -> None:
        """The power of a trainer's host goes, or of all hosts."""
        is_of_all = fault.share < 0.3
        for one in self.ranks if is_of_all else [rank]:
            if one.host is not None:
                one.host.lose_power()
            if one.process is not None:
                one.process.kill()
        if is_of_all:
            self._do_kill_server(fault, rank, process)

    def _do_die_in_save(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        process.die_in_save(int(fault.share * 30))

    def _do_full_disk(self, fault: Fault, rank: Rank, process: object) -> None:
        host = rank.host
        if host is not None:
            host.is_full = True

            def end() -> None:
                host.is_full = False

            self.world.after(fault.seconds, end)

    def _do_slow_disk(self, fault: Fault, rank: Rank, process: object) -> None:
        if rank.host is not None:
            rank.host.slow_s = 0.3 * fault.seconds

    def _do_damage(self, fault: Fault, rank: Rank, process: object) -> None:
        if rank.host is not None:
            rank.host.damage()

    def _do_no_memory(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        process.has_no_memory = True

    # ---- the second phase

    def _be_quiet(self) -> None:
        """No fault comes any more; what was broken is mended."""
        self.note("no fault comes any more")
        self.is_quiet = True
        for server in self.servers:
            if server.is_paused:
                server.go_on()
        for rank in self.ranks:
            process = rank.process
            if rank.host is not None:
                rank.host.is_full, rank.host.slow_s = False, 0.0
            if process is not None:
                process.is_cut_off = False
                process.go_on()
        self.end_others()
        if not self.world.servers:
            self._begin_server(0)

    def _check(self) -> None:
        """Now and then: what would be stored, and who waits for somebody that is done."""
        for server in self.servers:
            if not server.is_dead and not server.is_paused:
                self._check_stored(server)
        if self.is_quiet:
            if not self.world.servers:
                self._begin_server(0)
            self._help()
        if not (self.is_over and self.is_quiet):
            self.world.after(CHECK_S if not self.is_quiet else 2.0, self._check)

    def _check_end(self, server: ServerProcess) -> None:
        """A server ends by itself: all users have been handed everything, or calls fail."""
        if self.is_resizing:
            return  # It has heard of others than those that it is for.
        if isinstance(server.loop.exit_condition.failure, FetchError):
            self.world.after(0.2, self._begin_server, 0)
            return
        feed = self.deal.feed._replace(edits=self.editor.of_server(server))
        deal, ranks = self.deal._replace(feed=feed), self.ranks
        # Who has heard of nobody since the job was put back ends for those before.
        if not any(one.is_done or (one.process and one.process.was_connected) for one in ranks):
            return
        for rank in ranks:
            stands = 0 if rank.process is None else rank.process.step
            step = deal.first(max(rank.handed, stands), rank.queue)
            if not rank.is_done and step < deal.end:
                raise Violation(
                    f"stored: a server ends, and trainer {rank.name} was handed batches up to "
                    f"{rank.handed} of {deal.end}"
                )

    def _check_stored(self, server: ServerProcess) -> None:
        edits = self.editor.of_server(server)
        if edits:
            stored = bytes(Snapshot((server.group.state(),)))
            # One of before all trainers were put back stands until they have used a round.
            if self.editor.fits(stored, edits):
                self.editor.check_position(stored, edits, server.name)
        place = server.group.low_watermark.place
        if place is None:
            return
        step = place.step
        for rank in self.ranks:
            if step > max(self.deal.first(rank.most_handed, rank.queue), self.origin_step):
                raise Violation(
                    f"stored: {server.name} would store {step}, and trainer {rank.name} was "
                    f"handed batches up to {rank.most_handed}"
                )

    def _help(self) -> None:
        """Who starts is told for whom it waits. Where those have had everything, people begin it
        again, to come back: nobody else can know."""
        done = {rank.seat for rank in self.ranks if rank.is_done}
        for rank in self.ranks:
            process = rank.process
            if process is None or process.is_ending or process.is_dead:
                continue
            machine, is_new = process.loop.machine, process.loop.inbox.num_opened == 1
            starts = machine.state == "joined" or (is_new and not process.rejoins)
            if machine.waits_for_others and starts and done & {*machine._waiting}:
                process.note("waits for queues that are done, and is begun again")
                rank.process = None
                process.kill()
                if process.step > process.begins_at:
                    self._go_on(rank, 0.1, rejoins=True)
                else:
                    self.world.after(0.1, self._begin_again, process, self._age, True)


ALWAYS = (
    "kill server", "close server", "stop server", "second server", "roll back", "store",
    "late start", "other number", RESIZE, "power", "full disk", "slow disk", "damage", *OF_SOURCES,
)  # fmt: skip
"""Faults that concern no single process of a trainer."""

OF_LIFE = (
    "kill trainer", "stop trainer", "trainer leaves", "break", "break again", "break late",
    "break above", "break below", "slow", "cut off", "kill server", "close server", "stop server",
    "second server", "ask", "no memory", "calls fail",
)  # fmt: skip
"""Faults that begin no trainer."""
