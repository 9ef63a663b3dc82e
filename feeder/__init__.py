"""feeder: exact batches from fetch functions, resumed bit for bit.

This page is the API; everything else may change. Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from feeder import sources
    from feeder.api import init_data_input_workers
    from feeder.checkpoint.policy import Checkpointing
    from feeder.checkpoint.store import CheckpointStore
    from feeder.errors import (
        AuthError,
        CheckpointError,
        ChunkError,
        ClosedError,
        ConfigError,
        ConnectTimeout,
        DeviceError,
        FeedError,
        FetchError,
        FetchTimeout,
        ForkedError,
        LeaseLost,
        ProtocolError,
        RemoteError,
        ReplayWarning,
        ResumeError,
        SnapshotFormatError,
        StorageError,
        StuckWorkerError,
        TranscriptError,
        TransportError,
    )
    from feeder.executors.options import Processes, RayActors, Threads
    from feeder.feeds.coordinator import Coordinator
    from feeder.feeds.device_feed import DeviceFeed
    from feeder.feeds.epochs import Epoch
    from feeder.feeds.feed import Feed
    from feeder.observe.opentelemetry import register_metrics
    from feeder.service.client.connect import connect
    from feeder.service.client.consumer import Consumer
    from feeder.service.server.serve import Server, serve
    from feeder.state.snapshot import Snapshot
    from feeder.workers.sources.far.cache import Cache
    from feeder.workers.stream.batch import Batch, Call
    from feeder.workers.stream.position import Cut

__version__ = "0.1.0"

__all__ = [
    "AuthError",
    "Batch",
    "Cache",
    "Call",
    "CheckpointError",
    "CheckpointStore",
    "Checkpointing",
    "ChunkError",
    "ClosedError",
    "ConfigError",
    "ConnectTimeout",
    "Consumer",
    "Coordinator",
    "Cut",
    "DeviceError",
    "DeviceFeed",
    "Epoch",
    "Feed",
    "FeedError",
    "FetchError",
    "FetchTimeout",
    "ForkedError",
    "LeaseLost",
    "Processes",
    "ProtocolError",
    "RayActors",
    "RemoteError",
    "ReplayWarning",
    "ResumeError",
    "Server",
    "Snapshot",
    "SnapshotFormatError",
    "StorageError",
    "StuckWorkerError",
    "Threads",
    "TranscriptError",
    "TransportError",
    "connect",
    "init_data_input_workers",
    "register_metrics",
    "serve",
    "sources",
]

_HOMES = {
    "Batch": "feeder.workers.stream.batch",
    "Cache": "feeder.workers.sources.far.cache",
    "Call": "feeder.workers.stream.batch",
    "CheckpointStore": "feeder.checkpoint.store",
    "Checkpointing": "feeder.checkpoint.policy",
    "Consumer": "feeder.service.client.consumer",
    "Coordinator": "feeder.feeds.coordinator",
    "Cut": "feeder.workers.stream.position",
    "DeviceFeed": "feeder.feeds.device_feed",
    "Epoch": "feeder.feeds.epochs",
    "Feed": "feeder.feeds.feed",
    "Processes": "feeder.executors.options",
    "RayActors": "feeder.executors.options",
    "Server": "feeder.service.server.serve",
    "Snapshot": "feeder.state.snapshot",
    "Threads": "feeder.executors.options",
    "connect": "feeder.service.client.connect",
    "init_data_input_workers": "feeder.api",
    "register_metrics": "feeder.observe.opentelemetry",
    "serve": "feeder.service.server.serve",
    "sources": "feeder.sources",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'feeder' has no attribute {name!r}")
    home = _HOMES.get(name, "feeder.errors")
    module = importlib.import_module(home)
    value = module if home == f"feeder.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
