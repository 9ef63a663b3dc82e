"""Where the workers of a fetch function stood before anybody called them.

A position has no cursor of a worker that gave nothing up to there. A new function object stands
where such a worker has to be; one that has been called, ahead of the position or for an earlier
stream, has to be put back. So the first cursors are kept for as long as the function is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any

Origins = dict[int, bytes | None]
"""By worker id the cursor before its first call; None where it had none then."""

_known: dict[int, tuple[weakref.ref[Any], Origins]] = {}


def origins_of(fetch: Any, cursor: Any) -> Origins:
    """What is known of a fetch function, to be read and written by who calls it: of the object
    that its cursor is a method of, however often the method was looked up. Any thread may ask."""
    owner = getattr(cursor, "__self__", fetch)
    key = id(owner)
    # By identity: what a function object is equal to is its own affair.
    if (known := _known.get(key)) is not None and known[0]() is owner:
        return known[1]
    origins: Origins = {}
    # What cannot be referred to weakly is known for as long as one stream.
    with contextlib.suppress(TypeError):
        _known[key] = (weakref.ref(owner, lambda _: _known.pop(key, None)), origins)
    return origins


def begin_anew(fetch: Any, cursor: Any, worker_ids: Iterable[int]) -> None:
    """A stream begins that goes on from no other: where the function stands now is where these
    workers begin, whoever has called them."""
    origins = origins_of(fetch, cursor)
    for worker_id in worker_ids:
        origins.pop(worker_id, None)
