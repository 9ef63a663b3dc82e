"""The feeds that are served in benchmarks, as functions for `feeder serve MODULE:ATTR`."""

from __future__ import annotations

from functools import cache, partial

import feeder
from contenders import make_coordinator
from fetches import HUGE, IMAGES, SMALL, VECTORS, Fetch, Load, constant

LOADS = {
    "images": IMAGES,
    "images-7": IMAGES.in_chunks_of(7),
    "images-250": HUGE,
    "vectors": VECTORS,
    "small": SMALL,
    "small-4096": SMALL.in_chunks_of(4096),
}
"""What is served, by name: a child process is told no more than the name."""


@cache
def _prepared(load: Load) -> Fetch:
    return constant(load)


def make(load: Load) -> feeder.Coordinator:
    """A feed without end whose chunks were prepared once: the service is measured, no fetch."""
    return make_coordinator(load, _prepared(load))


small = partial(make, SMALL)
