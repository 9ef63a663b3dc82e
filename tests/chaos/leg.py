"""One leg of the campaign: a feed from start to end, struck by faults, and compared."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from chaos.crew import RECOVER_S, Crew, Wrong
from chaos.faults import AT_END, Fault
from chaos.processes import Child
from chaos.streams import NUM_QUEUES, chain_of, reference
from chaos.trainer import EVERY

_REACH_S = 6.0
"""How long a process may take to come to a point, before it is said not to."""


class Differs(Wrong):
    """What the trainers saw is not what they should have seen."""


class Leg:
    """Does the faults of a plan, one after the other."""

    def __init__(self, crew: Crew, plan: Sequence[Fault], dice: random.Random) -> None:
        self.crew = crew
        self.done: Counter[str] = Counter()
        """Faults by name."""
        self.missed: Counter[str] = Counter()
        """Points that were not come to in time."""
        self.trace: list[str] = []
        """What was done, and how long it took."""
        self._plan = list(plan)
        self._dice = dice

    def run(self) -> None:
        """Run the feed from start to end. Raises `Hang` and `Wrong`."""
        crew = self.crew
        crew.start_server()
        crew.start_all_trainers()
        while self._plan and not crew.is_over:
            fault = self._plan.pop(0)
            started = time.monotonic()
            if fault.name in AT_END:
                crew.settle()
                crew.hurry()
            elif self._dice.random() < 0.6:
                crew.settle()
            crew.watch.rest(fault.wait_s)
            self._strike(fault)
            self.trace.append(f"{time.monotonic() - started:6.2f} s {fault}")
        started = time.monotonic()
        crew.finish()
        took_s = time.monotonic() - started
        self.trace.append(f"{took_s:6.2f} s finish, {crew.num_brought_back} back")
        check(crew)

    def _strike(self, fault: Fault) -> None:
        if fault.is_point:
            self._strike_at_point(fault)
        else:
            verb, whom = fault.name.split()
            strike = {"kill": self._kill, "stop": self._stop, "usurp": self._usurp}[verb]
            strike(fault, whom)

    # ---- blows

    def _kill(self, fault: Fault, whom: str) -> None:
        crew = self.crew
        self.done[fault.name] += 1
        crew.kill(*self._victims(fault, whom))
        if whom in ("server", "both", "everything"):
            crew.start_server(self._arm(of_server=True))
        if whom in ("all", "everything"):
            crew.start_all_trainers()
        elif whom in ("trainer", "both") and crew.trainers[fault.queue] is None:
            crew.start_trainer(fault.queue, self._arm(of_server=False, queue=fault.queue))

    def _victims(self, fault: Fault, whom: str) -> Iterator[Child | None]:
        if whom in ("server", "both", "everything"):
            yield self.crew.server
        if whom in ("trainer", "both"):
            yield self.crew.trainers[fault.queue]
        if whom in ("all", "everything"):
            yield from self.crew.trainers

    def _stop(self, fault: Fault, whom: str) -> None:
        stopped = [child for child in self._victims(fault, whom) if child is not None]
        self.done[fault.name] += 1
        self._dice.shuffle(stopped)
        for child in stopped:
            child.signal(signal.SIGSTOP)
        for child in stopped:
            self.crew.watch.rest(self._pause_s())
            child.signal(signal.SIGCONT)

    def _usurp(self, fault: Fault, whom: str) -> None:
        """A trainer is taken for dead and replaced, and wakes up."""
        crew = self.crew
        crew.settle()
        # Only now: one that has ended meanwhile is gone, and so is its descriptor.
        old = crew.trainers[fault.queue]
        if old is None:
            return
        self.done[fault.name] += 1
        old.signal(signal.SIGSTOP)
        new = crew.start_trainer(fault.queue, takeover=True)
        crew.watch.wait(lambda: new.said("at") or crew.is_over, RECOVER_S, "take-over")
        old.signal(signal.SIGCONT)
        crew.dismiss(old)

    def _pause_s(self) -> float:
        return self._dice.choice((0.02, 0.1, 0.5)) * self._dice.random()

    # ---- points

    def _arm(self, *, of_server: bool, queue: int = -1) -> str:
        """What a process that starts is told, where the next fault of the plan is a point of it."""
        for fault in self._plan[:1]:
            is_meant = fault.of_server == of_server and (of_server or fault.queue == queue)
            if fault.is_point and is_meant and fault.name not in (*AT_END, "consumer.lost"):
                return fault.setting
        return ""

    def _strike_at_point(self, fault: Fault) -> None:
        crew = self.crew
        child = crew.server if fault.of_server else crew.trainers[fault.queue]
        if child is None:
            return
        if child.armed != fault.setting:
            child = self._restart_armed(fault, child)
        if fault.name == "consumer.lost":
            crew.settle()
            if crew.server is not None:
                self.done["kill server"] += 1
                crew.kill(crew.server)
                crew.start_server()
        self._await_point(fault, child)

    def _restart_armed(self, fault: Fault, child: Child) -> Child:
        crew = self.crew
        self.done["kill server" if fault.of_server else "kill trainer"] += 1
        crew.kill(child)
        if fault.of_server:
            return crew.start_server(fault.setting)
        return crew.start_trainer(fault.queue, fault.setting)

    def _await_point(self, fault: Fault, child: Child) -> None:
        watch = self.crew.watch
        limit_s = RECOVER_S if fault.name in AT_END else _REACH_S
        watch.wait_for(
            lambda: child.stopped or child.status is not None or self.crew.is_over, limit_s
        )
        if child.stopped and fault.how == "stop":
            self.done[fault.name] += 1
            watch.rest(self._pause_s())
            child.signal(signal.SIGCONT)
        elif child.status == -signal.SIGKILL and not fault.how:
            self.done[fault.name] += 1
            self._replace(fault, child)
        elif child.status is None:
            self.missed[fault.name] += 1
            self._replace(fault, child)
        else:
            self.missed[fault.name] += 1
            self.crew.collect()

    def _replace(self, fault: Fault, child: Child) -> None:
        crew = self.crew
        crew.kill(child)
        if fault.of_server:
            crew.start_server(self._arm(of_server=True))
        else:
            crew.start_trainer(fault.queue, self._arm(of_server=False, queue=fault.queue))


def check(crew: Crew) -> None:
    """Compare what the trainers saw with the reference. Raises `Differs`."""
    for queue in range(NUM_QUEUES):
        wanted = reference(crew.form)[queue]
        for name, got in crew.ledgers[queue].records():
            if not got:
                continue
            first = got[0][0] // NUM_QUEUES
            if first % EVERY:
                raise Differs(f"{name} begins at batch {first}, where no checkpoint was")
            for number, (step, mine) in enumerate(got, first):
                if (step, [mine]) != (number * NUM_QUEUES + queue, wanted[number : number + 1]):
                    raise Differs(f"{name}: batch {number} of the queue, step {step}, is another")
        num, chain = crew.results[queue]
        if (num, chain) != (len(wanted), chain_of(wanted).hex()):
            raise Differs(
                f"queue {queue}: hash chain {chain} over {num} batches, the reference has "
                f"{chain_of(wanted).hex()} over {len(wanted)}"
            )
