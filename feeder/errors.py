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

from workers.errors import (
    ChunkError,
    ClosedError,
    ConfigError,
    FeedError,
    FetchError,
    FetchTimeout,
    ForkedError,
    ReplayWarning,
    ResumeError,
    StuckWorkerError,
)

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
    "StuckWorkerError",
    "TransportError",
]


class SnapshotFormatError(ResumeError):
    """Bytes that are no snapshot: unreadable, truncated, corrupt, or of a newer version."""


class CheckpointError(FeedError):
    """Storage failed; the cause is chained."""


class DeviceError(FeedError):
    """A GPU failed, or has not the memory that was asked for; the cause is chained."""


class TransportError(FeedError):
    """Something went wrong between server and consumer."""


class ProtocolError(TransportError):
    """The peer sent what it may not send."""


class ConnectTimeout(TransportError):
    """Nobody answered at the address in time."""


class LeaseLost(TransportError):
    """Another consumer holds the queue; the message names it."""


class AuthError(TransportError):
    """The peer may not connect."""


class RemoteError(TransportError):
    """The server, or a node of a job, failed in a way that is not an error of feeder's."""
