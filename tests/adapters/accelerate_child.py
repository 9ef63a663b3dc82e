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

from feeder.adapters.torch import FeedLoader

NUM, SIZE, EPOCHS = 22, 2, 2


def main(folder: str, save_at: int) -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    net = torch.nn.Linear(1, 1)
    # Rank and world size are those of torch.distributed, which the accelerator has set up.
    loader = FeedLoader([torch.tensor([float(i)]) for i in range(NUM)], SIZE, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters())
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    accelerator.register_for_checkpointing(loader)
    if not save_at:
        accelerator.load_state(folder)
    seen = []
    while loader.epoch < EPOCHS:
        for batch in loader:
            seen.append(batch[:, 0].tolist())
            optimizer.zero_grad()
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            if loader.step == save_at:
                accelerator.save_state(folder)
    weights = [weight.tolist() for weight in net.parameters()]
    # In one write: ranks share the pipe.
    print(json.dumps([accelerator.process_index, seen, weights]) + "\n", end="", flush=True)
    accelerator.end_training()
    loader.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
