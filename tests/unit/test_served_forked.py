"""Batches that a forked child has too, while its parent goes on."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from feeder.protocol import messages as say
from feeder.transport import forking
from feeder.transport.desk import Desk
from feeder.transport.plane import Plane
from unit.small import Aside, make

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

ROWS = 1000
"""Slots of 8,000 bytes, which share pages."""


def factory(rows: int = ROWS) -> feeder.Coordinator:
    return make(lambda call: [np.full(rows, call.index)], batch_size=rows, epochs=None)


def child(what: Callable[[], None]) -> int:
    """Fork, and let the child do something; its process id."""
    if (pid := os.fork()) == 0:
        status = 1
        try:
            what()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def check(*batches: feeder.Batch) -> None:
    """That they are what was fetched for them."""
    for batch in batches:
        assert batch["id"].tolist() == [batch.step] * len(batch["id"])


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The slots that consumers have told to be free."""
    slots: list[int] = []
    use = Desk.use

    def note(desk: Desk, lease: Any, message: say.Used) -> None:
        slots.extend(message.slots)
        use(desk, lease, message)

    monkeypatch.setattr(Desk, "use", note)
    return slots


@pytest.mark.parametrize(
    ("plane", "rows"), [("shared", ROWS), ("shared", 100_000), ("frames", ROWS)]
)
def test_a_child_keeps_what_it_looks_at(plane: Any, rows: int) -> None:
    has_gone_on, goes_on = os.pipe()
    with serving(lambda: factory(rows)) as server, reading(server, plane=plane, hold=4) as consumer:
        held = [next(consumer) for _ in range(3)]
        parts = [held[1]["id"][5:]]

        def look() -> None:
            os.close(goes_on)
            assert os.read(has_gone_on, 1) == b""
            check(*held)
            assert parts[0].tolist() == [1] * (rows - 5)
            with pytest.raises(feeder.ForkedError):
                next(consumer)

        pid = child(look)
        held.clear()
        parts.clear()
        for step in range(3, 300):
            check(batch := next(consumer))
            assert batch.step == step
        os.close(goes_on)
        assert os.waitpid(pid, 0)[1] == 0
    os.close(has_gone_on)


def test_until_it_has_copied_them_its_parent_tells_of_none(
    monkeypatch: pytest.MonkeyPatch, told: list[int]
) -> None:
    is_there, comes = os.pipe()
    keep = Plane.keep

    def wait(plane: Plane) -> None:
        os.close(comes)
        assert os.read(is_there, 1) == b""
        keep(plane)

    monkeypatch.setattr(Plane, "keep", wait)
    try:
        with serving(factory) as server, reading(server, hold=4, credit=4) as consumer:
            held = [next(consumer) for _ in range(3)]
            pid = child(lambda: check(*held))
            num = len(told)
            held.clear()
            next(consumer)
            # It is answered after what was told before it.
            consumer.snapshot()
            assert len(told) == num
            os.close(comes)
            assert [next(consumer).step for _ in range(100)] == [*range(4, 104)]
            assert len(told) > num
            assert os.waitpid(pid, 0)[1] == 0
    finally:
        os.close(is_there)
        with contextlib.suppress(OSError):
            os.close(comes)


def test_a_child_that_dies_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Plane, "keep", lambda plane: os.kill(os.getpid(), signal.SIGKILL))
    with serving(factory) as server, reading(server) as consumer:
        held = next(consumer)
        pid = child(lambda: None)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        check(held)
        assert [next(consumer).step for _ in range(100)] == [*range(1, 101)]


def test_nor_is_one_that_could_not_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no more room for processes."""
    with serving(factory) as server, reading(server) as consumer:
        next(consumer)
        forking._begin()
        forking._end_in_parent()
        assert [next(consumer).step for _ in range(100)] == [*range(1, 101)]


def test_children_that_several_threads_make_at_once() -> None:
    with serving(factory) as server, reading(server) as consumer:
        held = next(consumer)

        def fork_often() -> list[int]:
            pids = [child(lambda: check(held)) for _ in range(10)]
            return [os.waitpid(pid, 0)[1] for pid in pids]

        forks = [Aside(fork_often) for _ in range(3)]
        assert [next(consumer).step for _ in range(500)] == [*range(1, 501)]
        assert [fork.result() for fork in forks] == [[0] * 10] * 3
        assert not forking._under_way
