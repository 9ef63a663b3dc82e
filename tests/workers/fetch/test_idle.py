"""Who is woken of the fetchers that have nothing to do."""

from __future__ import annotations

import threading

from feeder.workers.fetch.threads import WaitQueue
from small import WAIT_S, Aside


class Waiters:
    """Threads that wait one after another."""

    def __init__(self, num: int) -> None:
        self.lock = threading.Lock()
        self.idle = WaitQueue(self.lock)
        self.woken: list[int] = []
        self._changed = threading.Condition(self.lock)
        self.asides = []
        for i in range(num):
            self.asides.append(Aside(lambda i=i: self._run(i)))
            with self.lock:
                assert self._changed.wait_for(lambda i=i: len(self.idle) == i + 1, WAIT_S)

    def _run(self, i: int) -> None:
        with self.lock:
            # The lock is held until this one waits: who is told now looks after that.
            self._changed.notify_all()
            self.idle.wait(WAIT_S)
            self.woken.append(i)
            self._changed.notify_all()

    def wake(self) -> None:
        """Wake one, and wait until it has gone on."""
        with self.lock:
            num = len(self.woken)
            self.idle.notify()
            assert self._changed.wait_for(lambda: len(self.woken) == num + 1, WAIT_S)


def test_who_came_last_is_woken_first() -> None:
    waiters = Waiters(4)
    for _ in range(4):
        waiters.wake()
    assert waiters.woken == [3, 2, 1, 0]


def test_each_is_woken_once() -> None:
    """Two wake-ups in a row are for two threads, even before the first has gone on."""
    waiters = Waiters(3)
    with waiters.lock:
        waiters.idle.notify()
        waiters.idle.notify()
        assert len(waiters.idle) == 1
    for aside in waiters.asides[1:]:
        aside.result()
    assert sorted(waiters.woken) == [1, 2]
    waiters.wake()
    waiters.asides[0].result()


def test_who_was_woken_is_coming_until_it_has_gone_on() -> None:
    waiters = Waiters(3)
    with waiters.lock:
        waiters.idle.notify()
        waiters.idle.notify()
        assert waiters.idle.coming == 2
    for aside in waiters.asides[1:]:
        aside.result()
    with waiters.lock:
        assert waiters.idle.coming == 0
        waiters.idle.notify_all()
        waiters.idle.notify()
        assert waiters.idle.coming == 1
    waiters.asides[0].result()
    assert waiters.idle.coming == 0


def test_all_are_woken() -> None:
    waiters = Waiters(5)
    with waiters.lock:
        waiters.idle.notify_all()
        assert len(waiters.idle) == 0
        waiters.idle.notify()  # Nobody: that is nothing.
    for aside in waiters.asides:
        aside.result()
    assert sorted(waiters.woken) == [0, 1, 2, 3, 4]


def test_who_has_waited_for_long_enough_waits_no_more() -> None:
    lock = threading.Lock()
    idle = WaitQueue(lock)
    with lock:
        idle.wait(0.001)
        assert (len(idle), idle.coming) == (0, 0)
