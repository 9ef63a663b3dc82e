"""The errors of the stream, from the most general to the most particular.

::

    FeedError
    ├── ConfigError (ValueError)      a setting is wrong; nothing was started
    ├── FetchError                    the fetch function raised
    │   ├── ChunkError                it returned the wrong thing
    │   └── FetchTimeout              it gave nothing for `timeout` seconds
    ├── ResumeError                   position and feed do not fit
    ├── StorageError                  an object of a store cannot be read
    ├── StuckWorkerError              a thread did not end
    ├── ForkedError                   a feed was used in a forked child
    └── ClosedError                   a feed was used after it was stopped

`feeder.errors` adds the errors of snapshots, checkpoints and the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from feeder.workers.public import public


@public("feeder")
class FeedError(Exception):
    """Anything that feeder raises on purpose."""


@public("feeder")
class ConfigError(FeedError, ValueError):
    """A setting is wrong. Nothing was started."""

    # A ValueError too: callers that know nothing of feeder expect one for a wrong argument.


@public("feeder")
class FetchError(FeedError):
    """The fetch function raised; its exception is the cause (`__cause__`).

    It takes the place in the stream where its chunk would have been: the batches before it
    arrive, then the user's `next()` raises it.
    """

    worker_id: int
    """The worker whose call failed."""
    call: int
    """The number of the call: the worker's own for `fetch(worker_id, batch_size)`, counted from
    the start of the stream; the index in the epoch for `fetch(call)`."""

    # Keywords with defaults: errors are pickled between processes, which calls this with the
    # message alone and sets the attributes after.
    def __init__(self, message: str, *, worker_id: int = -1, call: int = -1) -> None:
        super().__init__(message)
        self.worker_id = worker_id
        self.call = call


@public("feeder")
class ChunkError(FetchError):
    """The fetch function returned something that is not a chunk of this feed."""

    column: str | None
    """The column at fault, or None where the chunk as a whole is."""
    got: Any
    """What was returned, in a form that can be printed."""
    expected: Any
    """What the feed expected in its place."""

    def __init__(
        self,
        message: str,
        *,
        worker_id: int = -1,
        call: int = -1,
        column: str | None = None,
        got: Any = None,
        expected: Any = None,
    ) -> None:
        super().__init__(message, worker_id=worker_id, call=call)
        self.column = column
        self.got = got
        self.expected = expected


@public("feeder")
class FetchTimeout(FetchError):
    """The fetch function gave no chunk for `timeout` seconds while a batch was waited for."""


@public("feeder")
class ResumeError(FeedError):
    """The position to resume from and the feed do not fit."""


@public("feeder")
class StorageError(FeedError):
    """An object of a store cannot be read: it is missing, refused or another one than when the
    source was made, or the store has not answered for as long as it is asked again."""


@public("feeder")
class StuckWorkerError(FeedError):
    """A thread did not end in time; the message holds its name and its stack."""

    names: tuple[str, ...]
    """The names of the threads that are still alive."""

    def __init__(self, message: str, *, names: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.names = tuple(names)


@public("feeder")
class ForkedError(FeedError):
    """A feed was used in a forked child, where its threads do not exist."""


@public("feeder")
class ClosedError(FeedError):
    """A feed, queue or coordinator was used after it was stopped."""


class CallLost(Exception):
    """A call could not be made, or its process ended in it too often: not the fetch function's own
    exception. It is not made again; users see a `FetchError`."""


def in_words(error: BaseException) -> str:
    """The class and the text of an exception, cut where the text is very long."""
    # A user's exception may have a `__str__` that raises: that must not hide the first error.
    try:
        return f"{type(error).__name__}: {bounded(str(error))}"
    except Exception:
        return f"{type(error).__name__}, of which the text cannot be had"


MOST_TEXT = 20_000
"""Characters of a text in an error. One that held its rows came with 200 MB, in each log line."""


def bounded(text: str) -> str:
    """A text without its middle if it is very long: its beginning says what was wrong, the end of a
    traceback where."""
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


@public("feeder")
class ReplayWarning(UserWarning):
    """A feed is resumed by calling its fetch function again and discarding what it returns."""
