"""Cursors of pure fetch functions: they make the first call after a resume quick.

A pure function is resumed by calling it with the next index. Where finding the rows of an index
takes the longer the further the stream has come, it may have, beside `__call__(call)`,

    cursor(call) -> bytes       what a new function needs to answer the calls after `call` at once
    seek(call, cursor)          takes it, before its first call, which is `call`

A cursor never changes what a call returns. It is asked for when a position is written down, not at
every call; index -1 stands for the place before an epoch's first call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from feeder.workers.stream.batch import Cut
from feeder.workers.errors import ConfigError
from feeder.workers.spec import StreamSpec

MAX_BYTES = 60 * 1024
"""A longer cursor is left out, so that the token stays below its limit; resuming then walks."""


def add_cursor(spec: StreamSpec, encode: Callable[[Cut], bytes]) -> Callable[[Cut], bytes]:
    """The encoder of a stream's cuts, which writes the fetch function's cursor down with them."""
    if not has_cursor(spec):
        return encode
    fetch: Any = spec.fetch

    def encode_with_cursor(cut: Cut) -> bytes:
        cursor = (
            None if cut.finished else fetch.cursor(spec.call(cut.position.epoch, _first(cut) - 1))
        )
        if not isinstance(cursor, bytes | None):
            raise ConfigError(
                f"cursor(call) of the fetch function gave {type(cursor).__name__}, expected bytes"
            )
        marks = (cursor if cursor and len(cursor) <= MAX_BYTES else None,)
        return encode(replace(cut, position=cut.position._replace(marks=marks)))

    return encode_with_cursor


def seek(spec: StreamSpec, cut: Cut) -> None:
    """Give a fetch function the cursor that was written down with a cut; before its first call."""
    cursor = cut.position.marks[0]
    if cursor and has_cursor(spec):
        fetch: Any = spec.fetch
        fetch.seek(spec.call(cut.position.epoch, _first(cut)), cursor)


def has_cursor(spec: StreamSpec) -> bool:
    """Whether the stream's fetch function is pure and has cursors all the same."""
    return spec.pure and all(
        callable(getattr(spec.fetch, name, None)) for name in ("cursor", "seek")
    )


def _first(cut: Cut) -> int:
    """The smallest index that is called when the stream goes on at a cut, the leftover's
    included."""
    index = cut.position.calls[0]
    return index if cut.leftover is None else min(index, cut.leftover.call)
