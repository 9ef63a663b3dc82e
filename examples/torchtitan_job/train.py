"""Trains with torchtitan's loader, configuration and checkpoints, and goes on where it was killed,
with any number of ranks. Its Trainer needs GPUs, and takes the same `dataloader=`.

torchrun --nproc-per-node 2 examples/torchtitan_job/train.py runs
torchrun --nproc-per-node 3 examples/torchtitan_job/train.py runs
"""

import gc
import sys

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torchtitan.components.checkpoint import CheckpointManager

from feeder.adapters.torchtitan import FeedDataLoader


def samples(tokenizer, seq_len):  # each token follows from the one before it
    def sample(i):
        tokens = [(i + 5 * at) % 16 for at in range(seq_len + 1)]
        return {"input": torch.tensor(tokens[:-1])}, torch.tensor(tokens[1:])

    return [sample(i) for i in range(256)]


def main(folder, stop_at=None):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(16, 32), torch.nn.Linear(32, 16))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)  # counts steps, too
    rank, num = dist.get_rank(), dist.get_world_size()
    config = FeedDataLoader.Config(samples=samples, epochs=6)
    loader = config.build(dp_world_size=num, dp_rank=rank, seq_len=8, local_batch_size=4)
    manager = CheckpointManager.Config(enable=True, interval=10, folder=folder).build(
        dataloader=loader,
        model_parts=[net],
        optimizers=optimizer,
        lr_schedulers=schedule,
        states={},
        sd_adapter=None,
    )
    manager.load()  # the loader's state is one rank's, for every rank
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs["input"]).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        manager.save(schedule.last_epoch)
        if schedule.last_epoch == stop_at:
            return
    # The line and its end in one write, since ranks share the output.
    print(f"rank {rank}, step {schedule.last_epoch}: {loss:.9f}\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
    gc.collect()  # the model holds the group in a cycle, and PyTorch may abort a rank that exits so
    dist.destroy_process_group()
