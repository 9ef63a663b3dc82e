"""`scripts/demo --torch`: a job of PyTorch DDP on real digits, killed and gone on with other ranks.

Two ranks train and are killed in the middle of an epoch; two go on, and are killed again; three go
on from there to the end. The samples come in the order that an undisturbed job of two ranks reads
them in, and as long as there are two ranks, every loss is the same, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
import torch._dynamo  # noqa: F401  (else each child imports it, which takes seconds)
import torch.distributed as dist
from matplotlib.figure import Figure
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from demo.digits import NUM_TRAINING_ROWS, load_digits
from demo.panels import INK, LIFE_COLOURS
from demo.picture import ALARM, DOTS_PER_INCH, STYLE
from feeder.adapters.torch import FeedLoader

BATCH, SAVE_EVERY, SILENT_S = 10, 10, 60.0
LEGS, KILL_AT = (2, 2, 3), (47, 83, None)
"""Ranks of each start, and how many steps they tell before they are killed."""
Steps = dict[int, dict[int, Any]]
"""By step, what each rank said of it: its epoch, its loss, and the samples of its batch."""


def train(rank: int, num: int, epochs: int, folder: Path, group: str, log: int) -> None:
    """One rank, from the newest checkpoint to the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=num)
    torch.manual_seed(0)
    images, labels = (torch.from_numpy(a[:NUM_TRAINING_ROWS].copy()) for a in load_digits())
    dataset = TensorDataset(images.flatten(1) / 16, labels.long(), torch.arange(len(labels)))
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model, optimizer = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
    loader = FeedLoader(dataset, BATCH, shuffle=True)
    job, path = {"net": net, "optimizer": optimizer, "loader": loader}, folder / "job.pt"
    if path.exists():
        for name, state in torch.load(path).items():
            job[name].load_state_dict(state)
    while loader.epoch < epochs:
        for x, y, ids in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            said = [rank, loader.step, loader.epoch, loss.item(), ids.tolist()]
            os.write(log, json.dumps(said).encode() + b"\n")
            # One rank's state is for all, whichever it is.
            if loader.step % SAVE_EVERY == 0 and rank == loader.step // SAVE_EVERY % num:
                torch.save({name: part.state_dict() for name, part in job.items()}, f"{path}.new")
                os.replace(f"{path}.new", path)


def run(num: int, epochs: int, folder: Path, kill_at: int | None) -> Steps:
    """Start `num` ranks, and kill them once one of them has told so many steps."""
    reads, writes = os.pipe()
    group, children = tempfile.mktemp(dir=folder), []
    for rank in range(num):
        children.append(os.fork())
        if not children[-1]:
            try:
                train(rank, num, epochs, folder, group, writes)
            except BaseException:
                traceback.print_exc()
            os._exit(0)
    os.close(writes)
    steps: Steps = {}
    left = b""
    while kill_at is None or len(steps) < kill_at:
        if not select.select([reads], [], [], SILENT_S)[0]:
            raise TimeoutError(f"the job said nothing for {SILENT_S} s")
        if not (got := os.read(reads, 1 << 16)):
            break
        *lines, left = (left + got).split(b"\n")
        for rank, step, *said in map(json.loads, lines):
            steps.setdefault(step, {})[rank] = said
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
    os.close(reads)
    return {step: said for step, said in steps.items() if len(said) == num}


def order(steps: Steps) -> dict[int, list[int]]:
    """The samples of each epoch in the order of the job; what fills up its last round left out."""
    found: dict[int, list[int]] = {}
    for step in sorted(steps):
        for _, (epoch, _, ids) in sorted(steps[step].items()):
            found.setdefault(epoch, []).extend(ids)
    return {epoch: ids[:NUM_TRAINING_ROWS] for epoch, ids in found.items()}


def losses(steps: Steps) -> dict[int, float]:
    """The mean loss of the ranks at each step."""
    return {step: sum(loss for _, loss, _ in ranks.values()) / len(ranks)
            for step, ranks in steps.items()}  # fmt: skip


def draw(whole: Steps, legs: list[Steps], file: Path, *, equal: bool) -> None:
    """The loss of the undisturbed job, and that of each start of the other one on top of it."""

    def x(steps: Steps, before: int) -> list[int]:
        sizes = [sum(len(ids) for *_, ids in steps[step].values()) for step in sorted(steps)]
        return [before + sum(sizes[: i + 1]) for i in range(len(sizes))]

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 5), dpi=DOTS_PER_INCH, layout="constrained")
        axes = figure.add_subplot()
        found = losses(whole)
        axes.plot(x(whole, 0), [found[s] for s in sorted(whole)], color="#d3d8e2", linewidth=5,
                  label=f"undisturbed: 2 ranks, batches of {2 * BATCH}")  # fmt: skip
        for i, (num, steps) in enumerate(zip(LEGS, legs, strict=True)):
            # Only the last start has another number of ranks: all steps before it are of 2.
            at, found = x(steps, (min(steps) - 1) * LEGS[0] * BATCH), losses(steps)
            said = f"start {i + 1}: {num} ranks, batches of {num * BATCH}"
            (line,) = axes.plot(at, [found[s] for s in sorted(steps)], color=LIFE_COLOURS[i],
                                linewidth=1.2, label=said)  # fmt: skip
            if i < len(legs) - 1:
                axes.plot(at[-1:], [found[max(steps)]], "X", color=line.get_color(), markersize=11)
                axes.annotate("SIGKILL", (at[-1], found[max(steps)]), (10, 14), color=INK,
                              textcoords="offset points")  # fmt: skip
        said = "in the same order" if equal else "NOT in the same order"
        axes.set_title(f"DDP job killed twice, and gone on with 3 ranks: every sample {said}",
                       loc="left", color=INK if equal else ALARM, weight="bold")  # fmt: skip
        axes.set_xlabel("samples trained on")
        axes.set_ylabel("loss, mean of the ranks")
        axes.legend(frameon=False)
        figure.savefig(file)


def main(argv: Sequence[str] | None = None) -> int:
    """Run both jobs, compare, print and draw: 0 where they are equal."""
    parser = argparse.ArgumentParser(prog="demo --torch", description=__doc__)
    parser.add_argument("--epochs", type=int, default=4, help="of each job (default: 4)")
    parser.add_argument("--output", type=Path, default=Path("feeder-torch-demo.png"), metavar="PNG")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        whole = run(LEGS[0], options.epochs, Path(folder), None)
    kept: Steps = {}
    legs: list[Steps] = []
    with tempfile.TemporaryDirectory() as folder:
        for num, kill_at in zip(LEGS, KILL_AT, strict=True):
            legs.append(run(num, options.epochs, Path(folder), kill_at))
            print(f"{num} ranks: steps {min(legs[-1])} to {max(legs[-1])}"
                  f"{', killed' if kill_at else ''}")  # fmt: skip
            # What came after the newest checkpoint is done again.
            kept = {s: said for s, said in kept.items() if s < min(legs[-1])} | legs[-1]
    same = all(whole[s] == said for leg in legs[:-1] for s, said in leg.items())
    equal = same and order(kept) == order(whole)
    draw(whole, legs, options.output, equal=equal)
    print(f"picture: {options.output}")
    print("EQUAL: the order of all samples, and every loss of 2 ranks" if equal else "NOT EQUAL")
    return not equal


if __name__ == "__main__":
    raise SystemExit(main())
