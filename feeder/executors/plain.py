"""Exceptions and log records as plain values, on their way from a process to the one that asks it.

An actor sends from another host, and what it sends is never unpickled, since a pickle may run
anything. So an exception travels as the name of its class and the plain values that it is made of,
and an actor's word imports no module. Processes on this host use the same form.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys
import traceback
from typing import Any

from feeder import errors
from feeder.state import codec
from feeder.workers.errors import bounded

_MOST_BYTES = 1024 * 1024
"""An exception that takes more is told by its words alone."""


class CallError(Exception):
    """Stands for an exception of a fetch function that cannot be sent out of its process."""


class CursorError(Exception):
    """No position can hold the cursor of a worker."""


def write_error(error: BaseException) -> bytes:
    """An exception with the traceback that it has here, as a note."""
    text = bounded("".join(traceback.format_exception(error)).rstrip())
    note = f"in process {os.getpid()}:\n{text}"
    if isinstance(error, MemoryError):
        error = MemoryError(*filter(None, [_text(error)]))  # NumPy's is made of a dtype.
    kind = type(error)
    name = kind.__module__, kind.__qualname__
    # Whatever a class of the user's does wrong: its words are told then.
    with contextlib.suppress(Exception):
        reduced: Any = error.__reduce_ex__(2)
        made_by, args, *state = reduced
        if made_by is kind:
            _make(kind, args, state)
            written = codec.pack((*name, args, state, _in_words(error), note))
            if len(written) <= _MOST_BYTES:
                return written
    return codec.pack((*name, None, [], _in_words(error), note))


def read_error(written: bytes, *, imports: bool) -> BaseException:
    """The reverse of `write_error`. A `CallError` stands for an exception that cannot be made here;
    if its class is in a module that is not imported yet, `imports` says whether to import it."""
    module, name, args, state, words, note = codec.unpack(written)
    error: BaseException = CallError(words)
    with contextlib.suppress(Exception):
        kind = _class(module, name, imports=imports)
        if args is not None and kind is not None:
            error = _make(kind, args, state)
    error.add_note(note)
    return error


def _make(kind: type[BaseException], args: Any, state: list[Any]) -> BaseException:
    """An exception as its pickle would make it."""
    error = kind(*args)
    if state and state[0]:
        error.__setstate__(state[0])
    return error


def _class(module: str, name: str, *, imports: bool) -> type[BaseException] | None:
    # The package loads its errors late, from here.
    found: Any = errors if module == "feeder" else sys.modules.get(module)
    if found is None and imports:
        found = importlib.import_module(module)
    for part in name.split("."):
        # Not `getattr`: a module may import others when it is asked for a name.
        found = vars(found).get(part)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def write_record(record: logging.LogRecord) -> bytes:
    """A log record whose message is complete; attributes that are no plain values as text."""
    return codec.pack({name: _plain(value) for name, value in record.__dict__.items()})


def read_record(written: bytes) -> logging.LogRecord:
    """The reverse of `write_record`."""
    return logging.makeLogRecord(codec.unpack(written))


def _plain(value: Any) -> Any:
    try:
        codec.pack(value)
    except (TypeError, ValueError):
        return _text(value)
    return value


def _in_words(error: BaseException) -> str:
    name, text = type(error).__name__, _text(error)
    return f"{name}: {text}" if text is not None else name


def _text(value: Any) -> str | None:
    try:
        return bounded(str(value))
    except Exception:
        return None
