"""A job: trainers, servers, and whoever begins them again; what holds of all together is checked
here."""

from __future__ import annotations

from dataclasses import replace

from feeder.errors import ConfigError, ConnectTimeout, LeaseLost, ResumeError
from simulation.faults import Fault, Plan
from simulation.server import ServerProcess
from simulation.stream import factory_of
from simulation.trainer import TrainerProcess, step_of
from simulation.world import BEGIN, Violation, World

CHECK_S = 0.25
"""How often the stored position is looked at."""


class Rank:
    """What is known of one trainer, whichever process it runs in."""

    def __init__(self, queue: int) -> None:
        self.queue = queue
        self.process: TrainerProcess | None = None
        self.num = 0
        self.saved: dict[int, bytes] = {}
        """Its positions by step, since the job was last put back."""
        self.is_done = False
        self.num_errors = 0
        """Errors since it was last handed a batch."""
        self.most_handed = 0
        """The step after the last batch that any of its processes was handed."""
        self.handed = 0
        """The same, since the job was last put back."""
        self.may_be_fenced = False
        """Whether another process may have taken its queue."""


class Job:
    """The whole of a run. Owned by the world's one thread."""

    def __init__(self, plan: Plan) -> None:
        self.world = world = World.current
        self.plan = plan
        self._draws = world.draws("job")
        self.addresses = ("ipc:///first", "ipc:///second")
        self.ranks = [Rank(queue) for queue in range(plan.feed.queues)]
        self.servers: list[ServerProcess] = []
        self.origin: bytes | None = None
        """Where a new server has trainers begin that come without a position."""
        self.origin_step = 0
        self.asks = 0.02
        """How often a trainer asks for a snapshot."""
        self.is_quiet = False
        """Whether no fault comes any more."""
        self.has_foreign = False
        """Whether a trainer has come with a position of another run."""
        self._age = 0
        self._num_servers = 0
        self._first_done_at: float | None = None
        for fault in plan.faults:
            world.at(BEGIN + fault.at, self._fault, fault)
        world.at(BEGIN + plan.quiet_s, self._be_quiet)
        world.after(CHECK_S, self._check)
        self._processes: list[TrainerProcess] = []
        self._begin_server(0)
        for rank in self.ranks:
            world.after(self._draws.random() * 0.1, self._begin, rank, self._age)

    def note(self, what: str) -> None:
        if self.world.history is not None:
            self.world.note("job", what)

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
        server = ServerProcess(self.plan, self._num_servers, address, self.origin)
        server.note(f"begins at {address}")
        server.at_end = self._check_end
        self.servers.append(server)

    def _begin(
        self, rank: Rank, age: int, position: bytes | None = None, *, rejoins: bool = False,
        takes_over: bool = False,
    ) -> None:  # fmt: skip
        """Begin a trainer's process, unless the job was put back meanwhile."""
        if age != self._age or rank.is_done or rank.process is not None:
            return
        rank.num += 1
        if position is not None:
            step = step_of(self, position)
        else:
            step = 0 if rejoins else self.origin_step
        rank.process = TrainerProcess(
            self, rank.queue, rank.num, position=position,
            step=first_step(step, rank.queue, self.plan), rejoins=rejoins,
            takes_over=takes_over, loads=self.plan.undecided and not rejoins,
        )  # fmt: skip
        rank.process.note(f"begins at batch {rank.process.step}{', rejoins' * rejoins}")

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
        rank = self.ranks[process.queue]
        rank.num_errors = 0
        rank.most_handed = max(rank.most_handed, process.step)
        rank.handed = max(rank.handed, process.step)

    def save(self, process: TrainerProcess, position: bytes) -> None:
        """A trainer has stored its position."""
        rank = self.ranks[process.queue]
        if rank.process is process:
            rank.saved[process.step] = position

    def ended(self, process: TrainerProcess) -> None:
        """A process is gone."""
        rank = self.ranks[process.queue]
        if rank.process is not process:
            return  # Another one has its place.
        rank.process = None
        if process.is_foreign:
            position = self._quiet_saved(rank)
            return self._again(rank, 0.1, self._age, position, rejoins=position is not None)
        if process.has_all:
            rank.is_done = True
            self._first_done_at = self._first_done_at or self.world.now
            return
        error, age = process.error, self._age
        # Sometimes it takes so long that the others go on.
        wait_s = 0.05 + self._draws.random() * self._draws.choice((1.0, 1.0, 15.0))
        if error is None:
            # Killed: the launcher begins it again, where it was saved last.
            position = self._quiet_saved(rank)
            return self._again(rank, wait_s, age, position, rejoins=self._rejoins(position))
        rank.num_errors += 1
        if rank.num_errors > 40:
            raise Violation(f"waits: trainer {rank.queue} gets one error after the other: {error}")
        position, rejoins = process.position, process.rejoins
        if process.step > process.begins_at:
            position, rejoins = self._quiet_saved(rank), True
        if isinstance(error, LeaseLost):
            self._again(rank, wait_s, age, position, rejoins=rejoins)
        elif isinstance(error, ResumeError):
            if rejoins and not (self.has_foreign or process.is_foreign):
                raise Violation(f"errors: {process.name} comes back and is refused: {error}")
            # Others may be about to be put back, too; if they are not, it comes back alone.
            comes_back = rank.num_errors > 3
            self._again(rank, wait_s, age, position, rejoins=rejoins or comes_back)
        elif isinstance(error, ConfigError):
            raise Violation(f"errors: {process.name} got {error!r}")
        else:
            if isinstance(error, ConnectTimeout) and self.is_quiet and self.world.servers:
                rank.num_errors += 5
            self._again(rank, wait_s, age, position, rejoins=rejoins)

    def _rejoins(self, position: bytes | None) -> bool:
        # Whoever had saved nothing and starts with all others may still be waited for.
        return position is not None or self._draws.random() < 0.7

    def _again(
        self, rank: Rank, seconds: float, age: int, position: bytes | None, *, rejoins: bool
    ) -> None:
        def begin() -> None:
            self._begin(rank, age, position, rejoins=rejoins)

        self.world.after(seconds, begin)

    def _quiet_saved(self, rank: Rank) -> bytes | None:
        if rank.saved:
            return rank.saved[max(rank.saved)]
        return None

    # ---- faults

    def _fault(self, fault: Fault) -> None:
        self.note(f"fault: {fault.kind} ({fault.seconds:.3f} s, {fault.share:.2f})")
        rank = self.ranks[fault.queue % len(self.ranks)]
        process = rank.process
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
            server.note("is closed")
            server.close()
            self.world.after(fault.seconds, self._begin_server, self._next_address(fault))

    def _do_stop_server(self, fault: Fault, rank: Rank, process: object) -> None:
        server = self._server(fault)
        if server is not None:
            server.pause()
            self.world.after(fault.seconds, server.go_on)

    def _do_second_server(self, fault: Fault, rank: Rank, process: object) -> None:
        self._begin_server(self.plan.addresses - 1)

    def _do_roll_back(self, fault: Fault, rank: Rank, process: object) -> None:
        """All trainers go back to a checkpoint that all have."""
        rounds = self._complete_rounds()
        at = rounds[int(fault.share * len(rounds))]
        self._put_back(at, fault.seconds * 0.2)

    def _complete_rounds(self) -> list[int]:
        """The rounds of which all have saved a position; 0 is the beginning."""
        num = len(self.ranks)
        sets = [{step // num for step in rank.saved} for rank in self.ranks]
        ends = -(-self.plan.feed.num_batches // num)
        found = {at for at in set.intersection(*sets) if at < ends}
        return sorted(found | {self.origin_step // num})

    def _put_back(self, at_round: int, seconds: float, *, with_positions: bool = True) -> None:
        num = len(self.ranks)
        self.note(f"all go back to round {at_round}")
        self._age += 1
        for server in self.servers:
            server.known_ended.clear()
        for rank in self.ranks:
            process, rank.process = rank.process, None
            rank.is_done = False
            rank.num_errors = rank.handed = 0
            if process is not None:
                process.kill()
            step = num * at_round + rank.queue
            rank.saved = {s: token for s, token in rank.saved.items() if s <= step}
            position = rank.saved.get(step) if with_positions else None
            wait_s = seconds * self._draws.random()
            self._again(rank, wait_s, self._age, position, rejoins=False)

    def _do_usurp(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """Somebody begins a second process for a queue, which takes it over."""
        rank.process, rank.may_be_fenced = None, True
        if self._draws.random() < 0.5:
            self.world.after(fault.seconds, process.kill)
        position = self._quiet_saved(rank)
        self._begin(rank, self._age, position, rejoins=True, takes_over=True)
        new = rank.process
        if new is not None and self._draws.random() < 0.4:
            # It is gone again about when it has asked.
            self.world.after(self._draws.random() * 3 * self.plan.delay_s, new.kill)

    def _do_stray(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """Somebody begins a second process for a queue, by mistake. It may have the queue once its
        holder is silent for as long as a lease, or is gone."""
        rank.num += 1
        # A holder that is silent, cut off or between two connections may lose its queue.
        rank.may_be_fenced = rank.may_be_fenced or self.plan.has_silence
        position = self._quiet_saved(rank)
        step = 0 if position is None else step_of(self, position)
        stray = TrainerProcess(
            self, rank.queue, rank.num, position=position, rejoins=True, is_stray=True,
            step=first_step(step, rank.queue, self.plan),
        )  # fmt: skip
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
        position = server.desk.state().token
        resume = factory_of(self.plan.feed).find(position, rejoins=True)
        assert resume is not None
        if resume.cut.finished or resume.cut.step % len(self.ranks):
            return
        for one in self.servers:
            if not one.is_dead:
                one.kill()
        self.origin, self.origin_step = position, resume.cut.step
        self._put_back(
            resume.cut.step // len(self.ranks), fault.seconds * 0.2, with_positions=False
        )
        for one_rank in self.ranks:
            one_rank.saved = {}
        self._begin_server(0)

    def _do_other_run(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        """A trainer is begun again with the position of another run."""
        position = None if not rank.saved else self._of_other_run(self._quiet_saved(rank))
        if position is None:
            return
        rank.process, self.has_foreign = None, True
        process.kill()
        rank.num += 1
        step = first_step(step_of(self, position), rank.queue, self.plan)
        rank.process = TrainerProcess(
            self, rank.queue, rank.num, position=position, step=step, rejoins=True,
            is_foreign=True,
        )  # fmt: skip
        rank.process.note("begins with a position of another run")

    def _of_other_run(self, position: bytes | None) -> bytes | None:
        """The same position, but of a stream with other rows; None where it has no digest."""
        factory = factory_of(self.plan.feed)
        resume = factory.find(position, rejoins=True)
        feed = self.plan.feed
        if resume is None or resume.cut.leftover is None:
            return None
        if resume.cut.index == feed.num_batches // feed.epochs:
            return None  # What is left over at the end of an epoch is dropped.
        left = resume.cut.leftover
        return replace(resume.cut, leftover=left._replace(digest=left.digest ^ 1)).token()

    def _do_ask(self, fault: Fault, rank: Rank, process: TrainerProcess) -> None:
        if not process.is_paused:
            process.ask()

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

    def _check_end(self) -> None:
        """A server ends by itself: all users have been handed everything."""
        num, ranks = self.plan.feed.num_batches, self.ranks
        # Who has heard of nobody since the job was put back ends for those before.
        if not any(one.is_done or (one.process and one.process.was_connected) for one in ranks):
            return
        for rank in ranks:
            stands = 0 if rank.process is None else rank.process.step
            step = first_step(max(rank.handed, stands), rank.queue, self.plan)
            if not rank.is_done and step < num:
                raise Violation(
                    f"stored: a server ends, and trainer {rank.queue} was handed batches up to "
                    f"{rank.handed} of {num}"
                )

    def _check_stored(self, server: ServerProcess) -> None:
        place = server.desk.low_watermark._place
        if place is None:
            return
        step = place.step
        for rank in self.ranks:
            if step > max(first_step(rank.most_handed, rank.queue, self.plan), self.origin_step):
                raise Violation(
                    f"stored: {server.name} would store {step}, and trainer {rank.queue} was "
                    f"handed batches up to {rank.most_handed}"
                )

    def _help(self) -> None:
        """Who starts is told for whom it waits. Where those have had everything, people begin it
        again, to come back: nobody else can know."""
        done = {rank.queue for rank in self.ranks if rank.is_done}
        for rank in self.ranks:
            process = rank.process
            if process is None or process.is_ending or process.is_dead:
                continue
            session = process.loop._session
            if session.waits_for_others and not session.rejoins and done & {*session._waiting}:
                process.note("waits for queues that are done, and is begun again")
                position = process.position
                if process.step > process.begins_at:
                    position = self._quiet_saved(rank)
                rank.process = None
                process.kill()
                self._again(rank, 0.1, self._age, position, rejoins=True)


ALWAYS = ("kill server", "close server", "stop server", "second server", "roll back", "store")
"""Faults that concern no single trainer."""


def first_step(step: int, queue: int, plan: Plan) -> int:
    """The number of a queue's first batch at or after a step."""
    return step + (queue - step) % plan.feed.queues
