"""Threads whose order is chosen: each runs until a lock, a wait or a wake, and one is chosen there.

The engine waits by `threading.Lock`, `RLock`, `Condition` and `Thread.join` alone, and looks at
`time.monotonic`. In `World.run` these are a world's own: its threads are greenlets of one real
thread, so a run follows from the choices alone and can be made again. Its clock stands still while
a thread can run, and goes to the next deadline if none can.

At each point there is a list of steps, and what each of them costs. To let the thread that runs go
on costs nothing, and nor does any other if that one has to wait. To stop a thread that could go on
is a preemption, which costs 1, and so does a deadline that passes while a thread could run. To
bound what a schedule costs is to bound preemptions, as in Musuvathi and Qadeer, "Iterative context
bounding for systematic testing of multithreaded programs" (PLDI 2007).
"""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import greenlet

import feeder.api  # noqa: F401  # what a feed is made of is loaded before its threads change
from feeder.workers.fetch.threads import TURNS

LOST_S = 2.0
"""A wake-up was lost if nothing can go on for so long. No program sleeps for half of it, and looks
that would mend what was lost come later."""


class Violation(AssertionError):
    """Threads do not do what they have to, in some schedule."""


class Interrupt(KeyboardInterrupt):
    """What a signal's handler raises in the user's thread."""


def _always() -> bool:
    return True


class Thread:
    """What stands for a `threading.Thread`."""

    def __init__(
        self, target: Callable[..., Any], args: Sequence[Any] = (), name: str = "",
        daemon: bool = True, *, world: World,
    ) -> None:  # fmt: skip
        self.name, self.daemon, self.ident = name, daemon, 0
        self._world, self._body = world, lambda: target(*args)
        self.can_go: Callable[[], bool] = _always
        self.until = math.inf
        self.came: Literal["able", "late", "interrupted"] = "able"
        self.has_ended = self.hears = False
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin at any point from here on."""
        self.ident = len(self._world.threads) + 1
        self.let = greenlet.greenlet(self._run, self._world.hub)
        self._world.threads.append(self)
        self._world.point()

    def _run(self) -> None:
        self._world.here = self
        try:
            self._body()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.has_ended = True

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        self._world.wait(lambda: self.has_ended, timeout)

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self.ident > 0 and not self.has_ended


class Lock:
    """What stands for a `threading.Lock`, and with `owned` for an `RLock`."""

    def __init__(self, world: World, *, owned: bool = False) -> None:
        self._world, self._is_owned = world, owned
        self._owner: Thread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it."""
        here = self._world.here
        if not (self._is_owned and self._count and self._owner is here):
            if not blocking:
                timeout = 0
            if not self._world.wait(lambda: not self._count, None if timeout < 0 else timeout):
                return False
        self._owner = here
        self._count += 1
        return True

    def release(self) -> None:
        """Give it back."""
        if not self._count or (self._is_owned and self._owner is not self._world.here):
            if self._world.is_over:
                return
            raise RuntimeError("release of a lock that is not held")
        self._count -= 1

    def locked(self) -> bool:
        """Whether somebody has it."""
        return self._count > 0

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def let_go(self) -> int:
        """Give it back however often it was taken, which is returned."""
        count, self._count = self._count, 0
        return count

    def take_back(self, count: int) -> None:
        """Take it as often as it was."""
        self.acquire()
        self._count = count


class Condition:
    """What stands for a `threading.Condition`."""

    def __init__(self, lock: Lock, *, world: World) -> None:
        self._lock, self._world = lock, world
        self._waiting: list[object] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for a `notify`; whether it came in time."""
        mark = object()
        self._waiting.append(mark)
        count = self._lock.let_go()
        try:
            return self._world.wait(lambda: mark not in self._waiting, timeout)
        finally:
            if mark in self._waiting:
                self._waiting.remove(mark)
            self._lock.take_back(count)

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until something holds; whether it does."""
        until = math.inf if timeout is None else self._world.now + timeout
        while not predicate():
            if self._world.now >= until:
                return False
            self.wait(None if until == math.inf else until - self._world.now)
        return True

    def notify(self, n: int = 1) -> None:
        """Wake so many."""
        del self._waiting[:n]

    def notify_all(self) -> None:
        """Wake all."""
        self._waiting.clear()


class Step(NamedTuple):
    """What could happen next."""

    cost: int
    ident: int
    """The thread that goes on."""
    how: Literal["able", "late", "interrupted"] = "able"
    """Whether it is able to, or its deadline has passed, or an interrupt comes in it."""


Choose = Callable[[Sequence[Step]], int]
"""Which of several steps comes next, by its number. The first costs nothing."""


class World:
    """Threads, and a clock, in the order that `choose` gives."""

    def __init__(self, choose: Choose) -> None:
        self._choose = choose
        self.now = 1000.0
        self.threads: list[Thread] = []
        self.here: Thread | None = None
        """The thread that runs."""
        self.hub = greenlet.getcurrent()
        self.is_over = False
        self.num_points = 0
        self.interrupted: Thread | None = None
        """The thread that one interrupt may come in, at any point."""
        self._failure: Violation | None = None

    def run(self, main: Callable[[World], Any]) -> Any:
        """What a program gives in threads of this world. Raises what it raises, and `Violation`."""
        found: list[Any] = []
        with self._installed():
            first = Thread(lambda: found.append(main(self)), name="user", world=self)
            try:
                first.start()
                while any(thread.is_alive() for thread in self.threads):
                    if (thread := self._next()) is not None:
                        thread.let.switch()
                    if self._failure is not None:
                        raise self._failure
            finally:
                self.is_over = True
                for thread in self.threads:
                    if not thread.has_ended:
                        thread.let.throw(greenlet.GreenletExit)
        if first.error is not None:
            raise first.error
        return found[0]

    def thread(self, body: Callable[..., Any], *args: Any) -> Thread:
        """One more thread of a program, begun."""
        thread = Thread(body, args, "other user", world=self)
        thread.start()
        return thread

    def sleep(self, seconds: float) -> None:
        """Let time pass, as a call does that takes long."""
        self.wait(lambda: False, seconds)

    # ---- the points at which another thread may go on

    def point(self) -> None:
        """The thread that runs could go on."""
        self.wait(_always)

    def statement(self) -> None:
        """The same between two statements, where no interrupt comes: Python looks for signals at
        calls, and those of locks are points."""
        self.wait(_always, hears=False)

    def wait(
        self, can_go: Callable[[], bool], seconds: float | None = None, *, hears: bool = True
    ) -> bool:  # fmt: skip
        """The thread that runs can go on once something holds, or after a time; whether it does.
        `hears`: an interrupt may come in it here."""
        here = self.here
        if self.is_over or here is None:
            return True
        self.num_points += 1
        here.can_go, here.hears = can_go, hears
        here.until = math.inf if seconds is None else self.now + seconds
        chosen = self._next()
        if chosen is not here:
            # Without a next step the hub says why.
            (self.hub if chosen is None else chosen.let).switch()
            if self.is_over:
                raise greenlet.GreenletExit
            self.here = here
        if here.came == "interrupted":
            raise Interrupt
        return here.came == "able"

    def _next(self) -> Thread | None:
        """The thread whose step comes next; None if there is no step, which has failed."""
        here = self.here if self.here is not None and not self.here.has_ended else None
        alive = [thread for thread in self.threads if not thread.has_ended]
        able = [thread for thread in alive if thread.can_go()]
        late = [t for t in alive if t not in able and t.until <= self.now + LOST_S]
        late.sort(key=lambda thread: thread.until)
        if not (able or late):
            waiting = "\n".join(f"{t.name}: {_where(t)}" for t in alive)
            self._failure = Violation(f"no thread can go on, a wake-up is lost:\n{waiting}")
            return None
        # In turns, so that a thread that is stopped is not the first to go on.
        first = 0 if here is None else here.ident
        able.sort(key=lambda thread: (thread is not here, thread.ident <= first, thread.ident))
        stop = int(here in able)
        steps = [Step(stop if thread is not here else 0, thread.ident) for thread in able]
        steps += [Step(int(bool(able) or i > 0), t.ident, "late") for i, t in enumerate(late)]
        if self.interrupted is not None and self.interrupted.hears:
            steps.append(Step(1, self.interrupted.ident, "interrupted"))
        step = steps[self._choose(steps) if len(steps) > 1 else 0]
        thread = self.threads[step.ident - 1]
        thread.came = step.how
        if step.how == "late":
            self.now = max(self.now, thread.until)
        if step.how == "interrupted":
            self.interrupted = None
        return thread

    # ---- in place of the standard library's

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Modules of feeder that are loaded find the world's threads, and its time."""
        stands_for = _Threading(self)
        modules = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("feeder") and getattr(module, "threading", None) is threading
        ]
        monotonic = time.monotonic
        # A finaliser of an older run would come at a moment that nobody has chosen.
        gc.disable()
        for module in modules:
            module.threading = stands_for  # type: ignore[attr-defined]
        time.monotonic = lambda: self.now
        TURNS.reset()
        try:
            yield
        finally:
            time.monotonic = monotonic
            for module in modules:
                module.threading = threading  # type: ignore[attr-defined]
            TURNS.reset()
            gc.enable()


class _Threading:
    """The module `threading` as a world has it."""

    TIMEOUT_MAX = threading.TIMEOUT_MAX

    def __init__(self, world: World) -> None:
        self._world = world

    def Lock(self) -> Lock:
        return Lock(self._world)

    def RLock(self) -> Lock:
        return Lock(self._world, owned=True)

    def Condition(self, lock: Lock) -> Condition:
        return Condition(lock, world=self._world)

    def Thread(self, **options: Any) -> Thread:
        return Thread(**options, world=self._world)

    def current_thread(self) -> Any:
        return self._world.here or threading.current_thread()

    def get_ident(self) -> int:
        return 0 if self._world.here is None else self._world.here.ident

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a world has no threading.{name}")


def _where(thread: Thread) -> str:
    frame, lines = thread.let.gr_frame, []
    while frame is not None and len(lines) < 8:
        lines.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)
