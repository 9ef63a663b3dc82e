"""Trains on all ranks, and goes on where it was killed, with any number of ranks:

torchrun --nproc-per-node 2 examples/torch_ddp/train.py job.pt
torchrun --nproc-per-node 3 examples/torch_ddp/train.py job.pt --epochs 4
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from feeder.adapters.torch import FeedLoader


class Circles(torch.utils.data.Dataset):  # points, and whether each lies in a circle
    def __len__(self):
        return 1000

    def __getitem__(self, i):
        point = torch.rand(2, generator=torch.Generator().manual_seed(i)) * 2 - 1
        return point, (point.norm() < 0.8).float()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--stop-at", type=int, help="end after so many steps")
    args = parser.parse_args()
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = FeedLoader(Circles(), batch_size=10, shuffle=True)  # ranks: of torch.distributed
    job = {"net": net, "optimizer": optimizer, "loader": loader}
    if os.path.exists(args.file):
        for name, state in torch.load(args.file).items():
            job[name].load_state_dict(state)  # the loader's is rank 0's, for every rank
    while loader.epoch < args.epochs:
        for points, inside in loader:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(points)[:, 0], inside)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loader.step % 10 == 0 and dist.get_rank() == 0:
                torch.save({k: part.state_dict() for k, part in job.items()}, args.file + ".new")
                os.replace(args.file + ".new", args.file)
            if loader.step == args.stop_at:
                return
    norm = torch.cat([weight.flatten() for weight in net.parameters()]).norm()
    line = f"rank {dist.get_rank()}, step {loader.step}: weights {norm:.9f}\n"
    print(line, end="", flush=True)  # in one write, since ranks share the output


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # the model holds the group in a cycle, and PyTorch may abort a rank that exits so
    dist.destroy_process_group()
