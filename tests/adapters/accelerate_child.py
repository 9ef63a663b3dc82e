"""A rank of a job of Accelerate with DDP. Prints its batches and weights.

With a step it saves there and goes on; else it goes on from what was saved.
"""

from __future__ import annotations

import json
import sys
import warnings

import torch

warnings.simplefilter("ignore")
from accelerate import Accelerator

from feeder.adapters.torch import DataLoader, FeedLoader

NUM, SIZE, EPOCHS = 22, 2, 2


def main(kind: str, folder: str, save_at: int) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(save_at)
    net = torch.nn.Linear(1, 1)
    # A FeedLoader knows its rank, which the accelerator has set up, and is left as it is; of a
    # DataLoader Accelerate deals the batches out.
    cls = FeedLoader if kind == "feed" else DataLoader
    loader = cls([torch.tensor([float(i)]) for i in range(NUM)], SIZE, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters())
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    if kind == "feed":
        accelerator.register_for_checkpointing(loader)
    if not save_at:
        accelerator.load_state(folder)
    seen = []
    while (loader.epoch if kind == "feed" else loader.iteration) < EPOCHS:
        for batch in loader:
            seen.append(batch[:, 0].tolist())
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            if len(seen) == save_at:
                accelerator.save_state(folder)
    weights = [weight.tolist() for weight in net.parameters()]
    # In one write: ranks share the pipe.
    print(json.dumps([accelerator.process_index, seen, weights]) + "\n", end="", flush=True)
    # Else the model keeps threads of the process group, and PyTorch may abort a rank at its exit.
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()
    if kind == "feed":
        loader.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
