"""Every error of feeder.

::

    FeedError
    ├── ConfigError (ValueError)      a setting is wrong; nothing was started
    ├── FetchError                    the fetch function raised: .worker_id .call
    │   ├── ChunkError                it returned the wrong thing: .column .got .expected
    │   └── FetchTimeout              it gave nothing for `timeout` seconds
    ├── ResumeError                   snapshot and feed do not fit
    │   └── SnapshotFormatError       unreadable, truncated, corrupt, or of a newer version
    ├── CheckpointError               storage failed
    ├── TranscriptError               a transcript is damaged, of another run, or cannot be written
    ├── StorageError                  an object that is read cannot be: missing, refused, changed
    ├── DeviceError                   a GPU failed, or has not the memory
    ├── StuckWorkerError              a thread did not end; its stack is in the message
    ├── ForkedError                   used in a forked child
    ├── ClosedError                   used after it was stopped
    └── TransportError                between server and consumer
        ├── ProtocolError             the peer said what it may not say
        ├── ConnectTimeout            nobody answered at the address
        ├── LeaseLost                 another consumer holds the queue
        ├── AuthError                 the peer may not connect
        └── RemoteError               the server failed, or a node of a job
"""

from __future__ import annotations

from feeder.workers.errors import (
    ChunkError,
    ClosedError,
    ConfigError,
    FeedError,
    FetchError,
    FetchTimeout,
    ForkedError,
    ReplayWarning,
    ResumeError,
    StorageError,
    StuckWorkerError,
)
from feeder.workers.public import public

__all__ = [
    "AuthError",
    "CheckpointError",
    "ChunkError",
    "ClosedError",
    "ConfigError",
    "ConnectTimeout",
    "DeviceError",
    "FeedError",
    "FetchError",
    "FetchTimeout",
    "ForkedError",
    "LeaseLost",
    "ProtocolError",
    "RemoteError",
    "ReplayWarning",
    "ResumeError",
    "SnapshotFormatError",
    "StorageError",
    "StuckWorkerError",
    "TranscriptError",
    "TransportError",
]


@public("feeder")
class SnapshotFormatError(ResumeError):
    """Bytes that are no snapshot: unreadable, truncated, corrupt, or of a newer version."""


@public("feeder")
class CheckpointError(FeedError):
    """Storage failed; the cause is chained."""


@public("feeder")
class TranscriptError(FeedError):
    """A transcript is damaged or of another run, or cannot be read or written."""


@public("feeder")
class DeviceError(FeedError):
    """A GPU failed, or has not the memory that was asked for; the cause is chained."""


@public("feeder")
class TransportError(FeedError):
    """Something went wrong between server and consumer."""


@public("feeder")
class ProtocolError(TransportError):
    """The peer sent what it may not send."""


@public("feeder")
class ConnectTimeout(TransportError):
    """Nobody answered at the address in time."""


@public("feeder")
class LeaseLost(TransportError):
    """Another consumer holds the queue; the message names it."""


@public("feeder")
class AuthError(TransportError):
    """The peer may not connect."""


@public("feeder")
class RemoteError(TransportError):
    """The server, or a node of a job, failed in a way that is not an error of feeder's."""


# Two mistakes that readers in process and consumers share, with one text each.


def read_again(feed: str, epochs: int | None) -> ConfigError:
    """The error of a loop that begins over a feed whose batches have all been handed out."""
    once = "one epoch" if epochs == 1 else f"{epochs} epochs"
    return ConfigError(
        f"{feed} has handed out all batches of its {once} and is read once: say how many epochs "
        "in epochs=, and loop over the feed once; batch.cut.epoch counts them"
    )


def looped_again(epochs: int | None) -> ConfigError:
    """The error of a further loop over a loader that has given all of its epochs."""
    return ConfigError(
        f"the loader has given all batches of its epochs={epochs}, and each loop is an epoch: "
        "leave epochs= out for loops without end, or make another loader"
    )


def read_by_two(reader: str) -> FeedError:
    """The error of a second thread that takes the next batch of one reader at the same time."""
    return FeedError(
        f"next() of {reader} was called while another thread is in it: one thread at a time reads, "
        "since batches have an order; let one thread read and hand on batches by a queue.Queue"
    )
