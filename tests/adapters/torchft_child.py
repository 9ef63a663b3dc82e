"""A job of torchft in one process: a replica trains, and another one joins in the middle.

Prints, for each replica, the samples of the steps that were committed and the sizes of states.
"""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from feeder.adapters.loop import every_epoch
from feeder.adapters.torch import FeedLoader

NUM, SIZE, JOINS_AT, STEPS = 40, 2, 4, 34
PAUSE_S = 0.5
LIMIT = timedelta(seconds=20)


class Replica:
    """Owned by its thread."""

    def __init__(self, rank: int, lighthouse: str) -> None:
        self.rank = rank
        self.loader = FeedLoader(list(range(NUM)), SIZE, shuffle=True, rank=rank, world_size=2)
        self.batches = every_epoch(self.loader)
        self.seen: dict[int, list[int]] = {}
        self.sizes: set[int] = set()
        self.lighthouse = lighthouse

    def join(self) -> None:
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(LIMIT), min_replica_size=1, use_async_quorum=False,
            load_state_dict=None, state_dict=None, timeout=LIMIT, quorum_timeout=LIMIT,
            connect_timeout=LIMIT, rank=0, world_size=1, store_addr="localhost",
            store_port=self.store.port, lighthouse_addr=self.lighthouse,
            replica_id=f"replica{self.rank}",
            init_sync=True,
        )  # fmt: skip
        self.manager.register_state_dict_fn("feed", self.load, self.loader.state_dict)

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)
        self.batches = every_epoch(self.loader)

    def train(self, may_join: threading.Event, takes_part: threading.Event) -> None:
        if self.rank:
            may_join.wait(30)
        self.join()
        while self.manager.current_step() < STEPS:
            # First, since a replica that comes back gets the position here.
            self.manager.start_quorum()
            step = self.manager.current_step()
            batch = next(self.batches)
            self.manager.allreduce(batch.float()).wait()
            if self.manager.should_commit():
                self.seen[step] = batch.tolist()
                self.sizes.add(len(self.loader.state_dict()["feeder"]))
            if self.rank:
                takes_part.set()
            elif step >= JOINS_AT:
                may_join.set()
                # Else all is over before the other one has come.
                takes_part.wait(PAUSE_S)


def main() -> None:
    torch.set_num_threads(1)
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=20_000)
    events = threading.Event(), threading.Event()
    replicas = [Replica(rank, lighthouse.address()) for rank in range(2)]
    threads = [threading.Thread(target=r.train, args=events) for r in replicas]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    for replica in replicas:
        print(json.dumps([replica.seen, sorted(replica.sizes)]), flush=True)
        replica.manager.shutdown(wait=False)
        replica.loader.close()
    lighthouse.shutdown()


if __name__ == "__main__":
    main()
