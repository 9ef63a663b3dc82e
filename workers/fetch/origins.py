"""Where the workers of a fetch function stood before anybody called them.

A position has no cursor of a worker that gave nothing up to there. A new function object stands
where such a worker has to be; one that has been called, ahead of the position or for an earlier
stream, has to be put back. So the first cursors are kept for as long as the function is.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

Origins = dict[int, bytes | None]
"""By worker id, of those that may have been called, the cursor before the first call; None where it
is not known, or no longer which first call is meant."""

_known: dict[int, tuple[Callable[[], Any], Origins]] = {}


def origins_of(fetch: Any, cursor: Any) -> Origins:
    """What is known of a fetch function, to be read and written by who calls it: of the object
    that its cursor, or itself, is a method of, however often the method was looked up. Any thread
    may ask."""
    methods = (function for function in (cursor, fetch) if isinstance(function, types.MethodType))
    owner = next((method.__self__ for method in methods), fetch)
    key = id(owner)
    # By identity: what a function object is equal to is its own affair.
    if (known := _known.get(key)) is not None and known[0]() is owner:
        return known[1]
    origins: Origins = {}
    refer: Callable[[], Any]
    try:
        refer = weakref.ref(owner, lambda _: _known.pop(key, None))
    except TypeError:
        # It cannot be referred to weakly: kept, since rows would be lost if it were forgotten.
        def refer() -> Any:
            return owner

    _known[key] = (refer, origins)
    return origins


def begin_anew(fetch: Any, cursor: Any, worker_ids: Iterable[int]) -> None:
    """A stream begins that goes on from no other, where the function stands. Of workers that have
    been called there are two beginnings from now on, and no position says which it means."""
    origins = origins_of(fetch, cursor)
    for worker_id in worker_ids:
        if worker_id in origins:
            origins[worker_id] = None
