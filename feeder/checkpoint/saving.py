"""The thread that writes a coordinator's checkpoints while its feeds go on."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from feeder.checkpoint.feed_meta import check_step
from feeder.checkpoint.policy import Checkpointing
from feeder.checkpoint.triggers import CheckpointTriggers
from feeder.errors import CheckpointError, ConfigError, FeedError
from feeder.state.snapshot import Snapshot
from feeder.workers.errors import in_words
from feeder.workers.fetch.threads import ThreadGroup, Wakes

# ---- SIGTERM: a position is stored before the signal takes its course


class Termination:
    """At the first SIGTERM `ask` is called; the second one takes the course that the first would
    have taken. `pass_on` sends that second one, when what was asked for is done.

    The main thread owns it: only there can handlers be set."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._before: Any = None
        self._installed = self._asked = False

    def install(self) -> None:
        """Wait for the signal from now on. Raises `ConfigError` outside the main thread, which
        alone may."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "on_sigterm is True, and the coordinator is started outside the main thread; "
                "start it there, or leave on_sigterm at False"
            )
        self._before = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL
        self._installed, self._asked = True, False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # It may interrupt whatever the main thread is doing: `ask` must take no lock.
        if not self._asked:
            self._asked = True
            self._ask()
            return
        self.restore()
        signal.raise_signal(signal.SIGTERM)

    def pass_on(self) -> None:
        """Send the signal again, now that the position is stored. From any thread."""
        os.kill(os.getpid(), signal.SIGTERM)

    def restore(self) -> None:
        """Leave the signal to whoever had it before, unless somebody else has taken it since.
        Outside the main thread, which alone may do so, the next one takes that course."""
        self._asked = True
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)


logger = logging.getLogger("feeder")

# As long as a trainer waits for a batch before its log says so.
_SLOW_S = 10.0

# What wakes the writing thread.
_ASKED, _DUE, _TOLD_TO_END, _CLOSED = "asked", "due", "told to end", "closed"


class Wanted(NamedTuple):
    """A position that is to be stored."""

    snapshot: Snapshot
    step: int | None
    """The trainer's own step number, where it gave one."""
    is_asked: bool
    """Whether somebody asked for it, not the policy."""


class Saver:
    """Stores positions when it is asked to, and when its policy says so.

    `ask` is for any thread and returns at once: where writing is slower than asking, the newest
    takes the place of one that waits, which is counted. So memory is bounded by one position when a
    disk hangs. `_lock` guards that position and the counts; all else belongs to the writing thread,
    or to the one that starts and closes.
    """

    def __init__(
        self,
        policy: Checkpointing,
        take: Callable[[], Snapshot],
        fail: Callable[[FeedError], None],
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        """`settle` is called before a position is stored: what belongs to it is stored first."""
        self.policy = policy
        self.store = policy.place
        self._take = take
        self._fail = fail
        self._settle = settle
        self._threads = ThreadGroup()
        self._termination = Termination(lambda: self._tell(_TOLD_TO_END))
        self._lock = threading.Lock()
        self._wanted: Wanted | None = None
        # Signal handlers put into it, which may take no lock that can be held: this one takes none.
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        # The queue itself is not waited for: see `Wakes`.
        self._wakes = Wakes()
        self._due = 0.0
        # The tokens of what was stored last: nothing is written twice for a clock.
        self._saved: list[bytes] | None = None
        self.is_running = False
        self._stored_at = time.monotonic()
        self._stats: dict[str, Any] = {
            "saves": 0, "failed_saves": 0, "skipped_saves": 0, "last_save_s": 0.0, "last_save": "",
        }  # fmt: skip

    # ---- life

    def start(self) -> None:
        """Start the thread. Raises `CheckpointError` where another process writes there, and with
        `on_save_error="raise"` where nobody can."""
        try:
            self.store.claim()
        except CheckpointError as error:
            if self.policy.on_save_error == "raise" or isinstance(error.__cause__, BlockingIOError):
                raise
            logger.warning("checkpoints will not be written: %s", error)
        if self.policy.on_sigterm:
            self._termination.install()
        self.is_running = True
        self._stored_at = time.monotonic()
        self._due = self._stored_at + (self.policy.every_s or 0.0)
        self._threads.start("feeder checkpoints", run_saver, self)

    def close(self, deadline_s: float) -> None:
        """Write what is still asked for, and end the thread. Raises `StuckWorkerError`."""
        if self.is_running:
            self.is_running = False
            self._termination.restore()
            self._tell(_CLOSED)
        self._threads.close(deadline_s)
        self.store.close()

    def after_fork(self) -> None:
        """This is a forked child, which has no such thread."""
        self.is_running = False
        self._lock = threading.Lock()

    def triggers(self, num_devices: int) -> CheckpointTriggers | None:
        """At which batches of a stream its position is stored."""
        policy = self.policy
        if policy.every_batches is None and policy.every_s is None:
            return None
        return CheckpointTriggers(policy.every_batches, num_devices, self.save_soon)

    # ---- asking

    def ask(self, snapshot: Snapshot, step: int | None = None) -> None:
        """Have a position stored soon. Raises `CheckpointError` where `step` is none."""
        check_step(step)
        with self._lock:
            late, self._wanted = self._wanted, Wanted(snapshot, step, True)
            self._stats["skipped_saves"] += late is not None
        self._tell(_ASKED)
        if late is not None and late.is_asked:
            logger.warning(
                "checkpoints are asked for faster than they are written: that of step %r is left "
                "out", late.step,
            )  # fmt: skip

    def save_soon(self) -> None:
        """Have the position of now stored soon, because the policy says so. What somebody has
        asked for goes first."""
        snapshot = self._take()
        with self._lock:
            late = self._wanted
            self._stats["skipped_saves"] += late is not None
            if late is None or not late.is_asked:
                self._wanted = Wanted(snapshot, None, False)
        self._tell(_ASKED)

    def save_now(self, snapshot: Snapshot, step: int | None) -> None:
        """Store a position in this thread. Raises `CheckpointError`."""
        check_step(step)
        try:
            self._store(snapshot, step)
        finally:
            # Without the thread nobody else would let go of the writer's lock.
            if not self.is_running:
                self.store.close()

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what was done: saves, failed and left out ones; the name of the last,
        and the seconds that it took."""
        return dict(self._stats)

    @property
    def age_s(self) -> float:
        """Seconds since a position was stored last, or since the start. Any thread may ask."""
        return time.monotonic() - self._stored_at

    # ---- the thread

    def wait(self) -> str:
        """Wait until there is something to do, and say what."""
        every_s = self.policy.every_s
        while True:
            with contextlib.suppress(queue.Empty):
                return self._news.get_nowait()
            if every_s is None:
                self._wakes.wait()
            elif (now := time.monotonic()) < self._due:
                self._wakes.wait(self._due - now)
            else:
                # From now on, where writing took longer than the interval: no burst makes up for
                # it.
                self._due = max(self._due + every_s, now)
                return _DUE

    def _tell(self, news: str) -> None:
        """Have the thread look at news. Any thread, and signal handlers."""
        self._news.put(news)
        self._wakes.wake()

    def act(self, news: str) -> None:
        """Do what there is to do."""
        with self._lock:
            wanted, self._wanted = self._wanted, None
        # What was asked for comes first; at the end of the process the position of now comes too.
        try:
            if wanted is not None:
                self._save(wanted.snapshot, wanted.step)
            if news in (_DUE, _TOLD_TO_END):
                self._save(self._take(), None)
        finally:
            if news == _TOLD_TO_END:
                self._termination.pass_on()

    def _save(self, snapshot: Snapshot, step: int | None) -> None:
        """Store a position, unless nothing has happened since the last was stored, or there are no
        feeds yet: nobody could resume from that."""
        if step is None and (tokens := _tokens(snapshot)) in ([], self._saved):
            # What is stored is the position of now.
            if tokens:
                self._stored_at = time.monotonic()
            return
        try:
            self._store(snapshot, step)
        except CheckpointError as error:
            logger.warning("a checkpoint is missing: %s", error)
            if self.policy.on_save_error == "raise":
                self._fail(error)

    def _store(self, snapshot: Snapshot, step: int | None) -> None:
        started = time.monotonic()
        try:
            self._settle()
            name = self.store.save(snapshot, step)
        except CheckpointError:
            self._count(failed_saves=1)
            raise
        self._saved, self._stored_at = _tokens(snapshot), time.monotonic()
        seconds = self._stored_at - started
        self._count(saves=1, last_save=name, last_save_s=seconds)
        if seconds >= _SLOW_S:
            logger.warning(
                "checkpoint %s took %.0f s to store in %r: the disk or the store is slow",
                name, seconds, self.store,
            )  # fmt: skip

    def _count(self, *, saves: int = 0, failed_saves: int = 0, **last: Any) -> None:
        with self._lock:
            self._stats["saves"] += saves
            self._stats["failed_saves"] += failed_saves
            self._stats.update(last)

    def give_up(self, error: Exception) -> None:
        """Something failed that input and output cannot do: the user is told."""
        logger.exception("the thread that writes checkpoints failed")
        failed = CheckpointError(f"checkpoints are not written any more: {in_words(error)}")
        failed.__cause__ = error
        self._fail(failed)


def _tokens(snapshot: Snapshot) -> list[bytes]:
    return [state.token for state in snapshot.states]


def run_saver(saver: Saver) -> None:
    """Thread body: store what is asked for, until closed."""
    news = ""
    while news != _CLOSED:
        try:
            news = saver.wait()
            saver.act(news)
        except Exception as error:
            saver.give_up(error)
