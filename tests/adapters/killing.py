"""Jobs of PyTorch DDP that are killed and resumed, and compared with one that was not.

Each rank is a forked child. It trains on batches of a `FeedLoader`, and after each step one rank
writes a checkpoint: model, optimizer, the trainer's own count of epochs, and the loader's state of
that rank alone. The job is killed with SIGKILL at events of its log that a seed chooses: steps,
checkpoints, ends of epochs; often before it has done a step again. What each rank then notes of a
step (the digest of its batch, its loss, the weights) has to be what the undisturbed job noted.

    scripts/nightly kill-trainers --kills 50 --seed 1
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # noqa: F401  (else each child imports it, which takes seconds)
import torch.distributed as dist
import torch.distributed.fsdp  # noqa: F401
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

import feeder
from feeder.adapters.torch import FeedLoader

SAMPLES, SIZE, EPOCHS = 83, 4, 3
EXECUTOR: Any = feeder.Threads(2)
"""What reads ahead; processes with `--processes`."""
START_S = 60.0
"""How long a job may be silent: its start is the longest silence."""

Note = tuple[int, int, str, str, str]
"""Step, epoch, and the digests of batch, loss and weights."""


class Points(Dataset):
    """Sample i: numbers that follow from i, of another length for each batch's padding."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        made = torch.Generator().manual_seed(i)
        return torch.randn(8, generator=made), torch.randn(1, generator=made), i


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


# ---- a rank, in a child


def run_rank(rank: int, num: int, folder: Path, group: str, log: int) -> None:
    """Train to the end, from the checkpoint where there is one."""

    def say(kind: str, *fields: Any) -> None:
        os.write(log, json.dumps([kind, rank, *fields]).encode() + b"\n")

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=num)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    # Else DDP lays its buckets out anew after the first step of a run, and sums of more than two
    # ranks are rounded otherwise.
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = FeedLoader(Points(), SIZE, shuffle=True, executor=EXECUTOR, seed=5)
    first, path = 0, folder / "job.pt"

    def save(epoch: int) -> None:
        # One rank's state is for all, whichever it is.
        if rank == loader.step % num:
            job = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save({**job, "loader": loader.state_dict()}, folder / f"new{rank}")
            os.replace(folder / f"new{rank}", path)
            say("saved", loader.step)

    if path.exists():
        job = torch.load(path)
        net.load_state_dict(job["net"])
        optimizer.load_state_dict(job["optimizer"])
        loader.load_state_dict(job["loader"])
        first = job["epoch"]
    for epoch in range(first, EPOCHS):
        for x, y, ids in loader:
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            weights = digest(*net.parameters())
            say("step", loader.step, epoch, digest(x, y, ids), digest(loss), weights, ids.tolist())
            # What is saved is not done again: each rank has told of the step before one saves it.
            dist.barrier()
            save(epoch)
        save(epoch + 1)
        say("epoch", epoch + 1)
    loader.close()
    dist.destroy_process_group()
    # Here and not by return: the destructor of the process group would join, with the interpreter's
    # lock held, a thread that may wait for that lock.
    os._exit(0)


# ---- a job, in this process


class Failed(AssertionError):
    """A rank ended with an error, or the job said nothing for too long."""


def kill(children: Sequence[int]) -> None:
    """Kill them; those that have ended are known by their numbers until they are waited for."""
    for child in children:
        os.kill(child, signal.SIGKILL)


@dataclass
class Job:
    """Jobs of one folder, one after another. Owner: the thread that runs them."""

    folder: Path
    notes: dict[int, dict[int, Note]] = field(default_factory=dict)
    """By step, what each rank noted."""
    ids: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    """By step, the samples of each rank."""
    num_legs: int = 0

    def run(self, num: int, kill_at: int | None) -> bool:
        """Run `num` ranks to the end, or until so many events were read; whether it ended."""
        self.num_legs += 1
        reads, writes = os.pipe()
        # Another file for each: what a killed job wrote there is not for the next one.
        group = tempfile.mktemp(dir=self.folder)
        children = [self._fork(rank, num, group, writes, reads) for rank in range(num)]
        os.close(writes)
        try:
            return self._read(reads, children, kill_at)
        finally:
            kill(children)
            for child in children:
                os.waitpid(child, 0)
            os.close(reads)

    def _fork(self, rank: int, num: int, group: str, writes: int, reads: int) -> int:
        sys.stdout.flush()
        child = os.fork()
        if child:
            return child
        os.close(reads)
        try:
            run_rank(rank, num, self.folder, group, writes)
        except BaseException:
            os.write(writes, json.dumps(["failed", rank, traceback.format_exc()]).encode() + b"\n")
        finally:
            os._exit(0)

    def _read(self, reads: int, children: list[int], kill_at: int | None) -> bool:
        """Note what the ranks say, also what they said before they died; whether they ended."""
        left, num, is_killed = b"", 0, False
        poll = select.poll()
        poll.register(reads, select.POLLIN)
        while True:
            if not poll.poll(START_S * 1000):
                raise Failed(f"the job said nothing for {START_S} s")
            got = os.read(reads, 1 << 16)
            if not got:
                return not is_killed
            *lines, left = (left + got).split(b"\n")
            for line in lines:
                kind, rank, *fields = json.loads(line)
                if kind == "failed" and not is_killed:
                    raise Failed(f"rank {rank}: {fields[0]}")
                if kind == "step":
                    *note, ids = fields
                    self._note(rank, tuple(note), ids)  # type: ignore[arg-type]
                num += 1
            if not is_killed and kill_at is not None and num >= kill_at:
                kill(children)
                is_killed = True

    def _note(self, rank: int, note: Note, ids: list[int]) -> None:
        before = self.notes.setdefault(note[0], {}).setdefault(rank, note)
        # A step that was done again after a kill is the same again.
        if before != note:
            raise Failed(f"rank {rank}: step {note[0]} was {before}, and after a kill {note}")
        self.ids.setdefault(note[0], {})[rank] = ids

    def order(self) -> list[int]:
        """The samples in the order of the job, whatever the number of ranks was."""
        return [i for step in sorted(self.ids) for rank in sorted(self.ids[step])
                for i in self.ids[step][rank]]  # fmt: skip


def undisturbed(num: int) -> Job:
    """A job that nobody kills."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        job.run(num, None)
    return job


def killed(num: int, kills: int, seed: int) -> Job:
    """A job that is killed so many times, and then run to its end."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder))
        done = 0
        while done < kills:
            # Sometimes before its first step, so that one checkpoint is resumed twice in a row; now
            # and then where an epoch ends.
            if job.run(num, dice.choice([1, 1, 2, *range(3, 40)])):
                # It came to its end: killed there, it begins anew and repeats all of it.
                (Path(folder) / "job.pt").unlink()
            done += 1
        job.run(num, None)
    return job


def resized(sizes: Sequence[int], seed: int) -> list[int]:
    """The order of the samples of a job that goes on with other numbers of ranks."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        seen: list[int] = []
        for leg, num in enumerate(sizes):
            job = Job(Path(folder))
            is_last = leg == len(sizes) - 1
            job.run(num, None if is_last else num * dice.randint(3, 8))
            # What was done after the newest checkpoint is done again by the next leg.
            saved = torch.load(Path(folder) / "job.pt")
            loader = FeedLoader(Points(), SIZE, shuffle=True, seed=5, rank=0, world_size=1)
            loader.load_state_dict(saved["loader"])
            reached = loader.step if not is_last else max(job.ids)
            first = min(job.ids, default=0)
            job.ids = {step: job.ids[step] for step in range(first, reached + 1) if step in job.ids}
            seen += job.order()
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/nightly kill-trainers", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="how often the job is killed")
    parser.add_argument("--seed", type=int, default=1, help="which events it is killed at")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="of each start in turn")
    parser.add_argument("--processes", type=int, help="each rank reads by so many processes")
    args = parser.parse_args()
    if args.processes:
        global EXECUTOR
        EXECUTOR = feeder.Processes(args.processes, preload=["feeder.adapters.torch"])
    started = time.monotonic()
    if len(args.ranks) > 1:
        with FeedLoader(Points(), SIZE, shuffle=True, seed=5, rank=0, world_size=1) as loader:
            order = [i for _, _, ids in loader for i in ids.tolist()]
        if resized(args.ranks, args.seed)[:SAMPLES] != order:
            sys.exit(f"the samples came in another order: seed {args.seed}")
        print(f"ranks {args.ranks}: the samples come in one order, seed {args.seed}")
        return
    (num,) = args.ranks
    expected = undisturbed(num)
    found = killed(num, args.kills, args.seed)
    if found.notes != expected.notes:
        differ = [s for s in expected.notes if found.notes.get(s) != expected.notes[s]]
        sys.exit(f"steps {differ} differ from the undisturbed job's: seed {args.seed}")
    print(
        f"{args.kills} kills of {num} ranks, {len(expected.notes)} steps: batches, losses and "
        f"weights are equal ({time.monotonic() - started:.0f} s, seed {args.seed})"
    )


if __name__ == "__main__":
    main()
