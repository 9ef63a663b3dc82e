"""How soon the service is there: for a new consumer, after a start, after a kill."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import feeder
from children import ROLE, Child, Process, address_for, bounded
from contenders import COLUMN, make_coordinator
from factories import LOADS
from feeder import cli
from feeder.service.memory.arena import ArenaSlots
from fetches import constant
from harness import Measures, Settings, Spread, interleave, time_of
from report import Goal, Report, spread
from served import CONNECT_S, connect
from stopping import CountedFetch

CONNECT_ASKED_MS = 15
READY_ASKED_S = 0.6
FREE_ASKED_MS = 10
FAILOVER_ASKED_S = 1.0
FREE, GOES_ON = "slots free", "the enqueuer has one"
RESTART = "restart"
FAILOVER_LOAD = "vectors"
_NAMES = ("small", "vectors", "images")
_LOOK_EVERY_S = 0.001
_COMMAND = ("-m", "feeder", "serve", "factories:small", "--bind")
_CALL = (*ROLE, "serve", "small")


# ---- from connect to the first batch


def connecting(settings: Settings) -> Report:
    """From `feeder.connect` to the first batch of a server that runs."""
    times = _timed([partial(_connect, name, settings.tries) for name in _NAMES], settings)
    return _report(
        "connect", "from feeder.connect to the first batch of a running server", "ms", times,
        CONNECT_ASKED_MS, tuple(times),
    )  # fmt: skip


def _connect(name: str, tries: int) -> Measures:
    """A server's first consumer finds nothing begun; for the next ones the feed goes back."""
    with address_for("ipc") as address, Child("serve", name, address) as server:
        times = [_first_batch(server.address) * 1e3 for _ in range(1 + tries)]
    title = LOADS[name].name
    return {f"{title}, first": times[0], f"{title}, next": statistics.median(times[1:])}


def _first_batch(address: str) -> float:
    with ExitStack() as stack:
        return time_of(lambda: next(stack.enter_context(connect(address)))[COLUMN].item(0))


# ---- from the start of a server until it is ready


def readiness(settings: Settings) -> Report:
    """From the start of a server's process until a consumer has been answered."""
    has_command = "serve" in cli.COMMANDS
    name = "feeder serve" if has_command else "a process that calls feeder.serve"
    command = _COMMAND if has_command else _CALL
    times = _timed([lambda: {name: _become_ready(command)}], settings)
    title = "from the start of the process until it has answered a consumer"
    return _report("ready", title, "s", times, READY_ASKED_S, (name,))


def _become_ready(command: Sequence[str]) -> float:
    with address_for("ipc") as address, Process([*command, address]) as process:
        try:
            # The socket's file is there when the server listens.
            while not Path(address.removeprefix("ipc://")).is_socket():
                time.sleep(_LOOK_EVERY_S)  # noqa: TID251  (nothing tells of a file's coming)
            with connect(address):
                return time.monotonic() - process.started_at
        finally:
            process.terminate()


# ---- from the death of a consumer until its slots are free


def killed_consumer(settings: Settings) -> Report:
    """A consumer is killed while the enqueuer waits for a slot."""
    times = _timed([partial(_kill_consumer, name) for name in _NAMES], settings)
    judged = tuple(name for name in times if name.endswith(FREE))
    return _report(
        "killed-consumer", "from the kill of a consumer until its slots are free", "ms", times,
        FREE_ASKED_MS, judged,
    )  # fmt: skip


def _kill_consumer(name: str) -> Measures:
    """The server is in this process, where its slots can be watched. Of small ones there are more
    than batches may be buffered, and nobody waits for one."""
    load = LOADS[name]
    fetch = CountedFetch(constant(load))
    with (
        _watched("retire") as retired,
        _watched("take") as taken,
        address_for("ipc") as address,
        feeder.serve(make_coordinator(load, fetch), address),
        Child("hold", address) as consumer,
    ):
        fetch.wait_until_still()
        retired.clear()
        taken.clear()
        killed_at = consumer.kill()
        times = {f"{load.name}, {FREE}": (retired.wait() - killed_at) * 1e3}
        if name != "small":
            times[f"{load.name}, {GOES_ON}"] = (taken.wait() - killed_at) * 1e3
        return times


class Moment:
    """When something was done first, once or since the last `clear`."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._at = math.nan

    def mark(self) -> None:
        """It has been done."""
        if not self._done.is_set():
            self._at = time.monotonic()
            self._done.set()

    def clear(self) -> None:
        """Wait for the next time."""
        self._done.clear()

    def wait(self) -> float:
        """When it was done, in seconds; waits until it is."""
        if not self._done.wait(CONNECT_S):
            raise RuntimeError(f"what was waited for did not happen within {CONNECT_S} s")
        return self._at


@contextmanager
def _watched(method: str) -> Iterator[Moment]:
    """When a method of the server's slots has returned."""
    moment, real = Moment(), getattr(ArenaSlots, method)

    def watching(*arguments: Any) -> Any:
        result = real(*arguments)
        moment.mark()
        return result

    with mock.patch.object(ArenaSlots, method, watching):
        yield moment


# ---- from the death of a server until the trainer goes on


def failover(settings: Settings) -> Report:
    """A server is killed and started again; the trainer's loop sees nothing but a pause."""
    ways = {"ipc": "shared", "tcp": "frames"}
    times = _timed([partial(_fail_over, *way) for way in ways.items()], settings)
    judged = tuple(name for name in times if RESTART not in name)
    return _report(
        "failover", "from the kill of a server to the trainer's next batch, without the time from "
        "the start of the next server until it is ready", "s", times, FAILOVER_ASKED_S, judged,
    )  # fmt: skip


def _fail_over(scheme: str, plane: str) -> Measures:
    title = f"{scheme}, {plane}"
    with (
        address_for(scheme) as address,
        Child("serve", FAILOVER_LOAD, address) as first,
        connect(first.address, plane=plane) as consumer,
    ):
        last = next(consumer).step
        killed_at = first.kill()
        first.close()
        while consumer.stats()["prefetched_batches"]:
            last = _next_step(consumer, last)
        with Child("serve", FAILOVER_LOAD, first.address) as second:
            # What was still on its way from the first server comes at once.
            while not consumer.stats()["reconnects"]:
                last = _next_step(consumer, last)
            resumed_at = time.monotonic()
            _next_step(consumer, last)
        restart_s = second.ready_at - second.started_at
        return {title: resumed_at - killed_at - restart_s, f"{title}: {RESTART}": restart_s}


def _next_step(consumer: feeder.Consumer, last: int) -> int:
    step = next(consumer).step
    if step != last + 1:
        raise RuntimeError(f"batch {step} came after batch {last}")
    return step


# ---- shared


def _timed(contenders: Sequence[Callable[[], Measures]], settings: Settings) -> dict[str, Spread]:
    return interleave([bounded()(contender) for contender in contenders], settings.repetitions)


def _report(
    case: str, title: str, unit: str, times: dict[str, Spread], asked: float, judged: Sequence[str]
) -> Report:
    return Report(
        case=case,
        title=title,
        head=("", unit),
        rows=tuple((name, spread(time)) for name, time in times.items()),
        measures=times,
        goals=tuple(
            Goal(what=f"{case}: {name}", asked=asked, measured=times[name], unit=unit, at_most=True)
            for name in judged
        ),
    )
