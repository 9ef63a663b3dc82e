"""What peers that misbehave cost a good consumer."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from annoying import KINDS, PER_SECOND
from children import Child, address_for, bounded
from factories import LOADS
from fetches import Array
from harness import Measures, Settings, interleave
from report import Goal, Report, figure, spread
from served import connect

ASKED = 2.0
QUIET = "nobody"
_LOAD = "vectors"
_WAYS = {"ipc": "shared", "tcp": "frames"}


def beside_hostile(settings: Settings) -> Report:
    """Each kind of peer for itself, at a steady pace, beside a consumer that takes what it gets."""
    pairs = [(kind, scheme) for kind in (QUIET, *KINDS) for scheme in _WAYS]
    times = interleave(
        [partial(bounded()(_percentile), *pair, settings) for pair in pairs], settings.repetitions
    )
    ratios = {
        pair: times[_name(*pair)].per(times[_name(QUIET, pair[1])])
        for pair in pairs if pair[0] != QUIET
    }  # fmt: skip
    return Report(
        case="hostile",
        title=f"the 99th percentile of a good consumer's waits for {LOADS[_LOAD].name}, in µs, "
        f"beside {PER_SECOND} connections or messages a second",
        head=("peers", *(cell for s, p in _WAYS.items() for cell in (f"{s}, {p}", "of quiet"))),
        rows=tuple(
            (kind, *(
                cell for scheme in _WAYS for cell in (
                    spread(times[_name(kind, scheme)]),
                    figure(ratios[kind, scheme].median) if kind != QUIET else "",
                )
            ))
            for kind in (QUIET, *KINDS)
        ),
        measures=times,
        goals=tuple(
            Goal(
                what=f"hostile: {kind}, {scheme}: 99th percentile, of the quiet one",
                asked=ASKED, measured=ratio, unit="×", at_most=True,
            )
            for (kind, scheme), ratio in ratios.items()
        ),
    )  # fmt: skip


def _name(kind: str, scheme: str) -> str:
    return f"{kind}, {scheme}"


def _percentile(kind: str, scheme: str, settings: Settings) -> Measures:
    with (
        address_for(scheme) as address,
        Child("serve", _LOAD, address) as server,
        connect(server.address, plane=_WAYS[scheme]) as consumer,
    ):
        next(consumer)
        if kind == QUIET:
            waits = _waits(consumer, settings)
        else:
            with Child("annoy", kind, server.address):
                waits = _waits(consumer, settings)
        if consumer.stats()["reconnects"]:
            raise RuntimeError(f"{kind}: the good consumer lost its connection")
    return {_name(kind, scheme): float(np.percentile(waits, 99)) * 1e6}


def _waits(consumer: Any, settings: Settings) -> Array:
    """How long each batch was waited for, in seconds, after a warm-up."""
    _arrivals(consumer, settings.warm_s)
    return np.diff(_arrivals(consumer, settings.timed_s))


def _arrivals(consumer: Any, seconds: float) -> list[float]:
    """When each batch was there that came within so many seconds."""
    at = [time.perf_counter()]
    while at[-1] < at[0] + seconds:
        next(consumer)
        at.append(time.perf_counter())
    return at
