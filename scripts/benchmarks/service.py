"""The service: a server and its consumer in two processes, against what it must reach.

Beside it run a copy by one thread, ZeroMQ as one writes it by hand without copies, and, where it is
installed, PyTorch's DataLoader with two workers. Fetch functions return chunks that were prepared
once, so that the service is measured and not the fetch. All contenders take turns within each
repetition, so that a ratio is one of figures measured at the same time; medians are printed with
the lowest and the highest sample. Everything stays on this host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from busy import consumers_beside_busy
from command import run_cases
from harness import Settings
from hostile import beside_hostile
from latencies import connecting, failover, killed_consumer, readiness
from replicas import shared_queue
from report import Report
from throughput import checksums, images_frames, images_shared, small_shared, vectors_shared

CASES: Mapping[str, Callable[[Settings], Report]] = {
    "images-shared": images_shared,
    "images-frames": images_frames,
    "vectors-shared": vectors_shared,
    "small-shared": small_shared,
    "replicas": shared_queue,
    "checksums": checksums,
    "busy": consumers_beside_busy,
    "connect": connecting,
    "ready": readiness,
    "killed-consumer": killed_consumer,
    "failover": failover,
    "hostile": beside_hostile,
}


if __name__ == "__main__":
    # Consumers whose server is killed say so.
    logging.getLogger("feeder").setLevel(logging.ERROR)
    run_cases("service", __doc__, CASES)
