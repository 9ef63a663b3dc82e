"""A driver whose feed runs on actors, which ends as it is told: `... driver TOKEN HOW`.

It stores the position after its fourth batch, and prints how many batches there were and which
processes the actors are.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import ray

from feeder import RayActors
from feeds import running
from fetches import make_fetch


def main(path: str, how: str) -> None:
    """Run the feed, and end."""
    ray.init(address="auto", log_to_driver=False)
    with running(make_fetch("seek", "ragged"), epochs=3, executor=RayActors(2), timeout=60.0) as (
        _,
        feed,
    ):
        batches = [next(feed) for _ in range(4)]
        Path(path).write_bytes(batches[-1].cut.token())
        pool = feed.streams[0].pipeline._execution._pool  # type: ignore[union-attr]
        print("driver:", len(batches), *pool.pids(), flush=True)
        if how != "exit":
            threading.Event().wait(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
