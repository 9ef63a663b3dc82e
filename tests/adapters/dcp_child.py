"""A rank of a job that saves and loads by `torch.distributed.checkpoint`.

Prints the batches that it would have gone on with, and those that it goes on with after the load.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from feeder.adapters.torch import FeedLoader

NUM, SIZE, AT = 26, 3, 2


def rest(loader: FeedLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def main(folder: str, mode: str, rank: str, num: str) -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store-{mode}", rank=int(rank), world_size=int(num)
    )
    # Rank and world size are those of the group.
    first = FeedLoader(list(range(NUM)), SIZE, shuffle=True)
    path = f"{folder}/{mode.removeprefix('load-')}"
    gone: list[Any] = []
    if not mode.startswith("load-"):
        loop = iter(first)
        for _ in range(AT):
            next(loop)
        states = {"weights": torch.ones(3), "loader": first}
        if mode == "async":
            done = dcp.async_save(states, checkpoint_id=path)
            # The job goes on while it is written.
            gone.append(next(loop).tolist())
            done.result()
        else:
            dcp.save(states, checkpoint_id=path)
        gone += [batch.tolist() for batch in loop]
    second = FeedLoader(list(range(NUM)), SIZE, shuffle=True)
    dcp.load({"weights": torch.zeros(3), "loader": second}, checkpoint_id=path)
    print(json.dumps([gone, rest(second)]))
    first.close()
    second.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
