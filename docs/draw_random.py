"""Draws figures/random-transforms.svg: augmentations of feeder and of PyTorch's DataLoader.

Both read the dataset of docs/random-transforms.md, each in three fresh runs, the third with another
number of processes, and in one that is resumed in the middle of the second epoch. Needs torch,
torchdata and matplotlib; run it from docs/ as `python draw_random.py`.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from torchdata.stateful_dataloader import StatefulDataLoader

import feeder
from feeder import sources

INK, GREY, LINE, PAPER = "#22252b", "#6d727c", "#d5d7dc", "#ffffff"
MET, SHORT = "#1f5fa8", "#d1602b"
STYLE: Any = {
    "font.family": "DejaVu Sans", "font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "feeder",
    "text.color": INK, "axes.edgecolor": LINE, "axes.labelcolor": GREY, "figure.facecolor": PAPER,
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "xtick.color": LINE, "xtick.labelcolor": GREY, "ytick.color": LINE, "ytick.labelcolor": INK,
}  # fmt: skip
PICTURE = Path(__file__).with_name("figures") / "random-transforms.svg"
SIZE, BATCH = 60, 8
EPOCH = 1  # the second one
BEFORE = 3  # batches of that epoch before the run is resumed


class Images:
    """The dataset of the page."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> tuple[np.ndarray, int]:
        pixels = np.linspace(0, 1, 64).reshape(8, 8) * (i + 1) / SIZE
        if random.random() < 0.5:
            pixels = pixels[:, ::-1]
        return np.float32(pixels * np.random.uniform(0.8, 1.2)), i


def brightness(batches: list[tuple[Any, Any]]) -> dict[int, float]:
    """By record, how much it was brightened."""
    found = {}
    for pixels, labels in batches:
        for image, label in zip(np.asarray(pixels), np.asarray(labels), strict=True):
            found[int(label)] = float(image.mean() / ((label + 1) / SIZE / 2))
    return found


def of_feeder(processes: int, *, is_resumed: bool = False) -> dict[int, float]:
    """One run with feeder."""

    def make(resume: Any = None) -> feeder.Coordinator:
        source = sources.records(Images(), random_shuffle=True)
        return feeder.init_data_input_workers(
            ["image", "label"], source, BATCH, epochs=EPOCH + 1, seed=1, resume=resume,
            executor=feeder.Processes(processes), coordinator=feeder.Coordinator(),
        )  # fmt: skip

    per_epoch, batches = -(-SIZE // BATCH), []
    with make() as coordinator:
        for batch in coordinator["train"]:
            batches.append((batch["image"].copy(), batch["label"].copy()))
            if is_resumed and len(batches) == per_epoch * EPOCH + BEFORE:
                break
        state = coordinator.state_dict()
    if is_resumed:
        with make(state) as coordinator:
            batches += [
                (batch["image"].copy(), batch["label"].copy()) for batch in coordinator["train"]
            ]
    return brightness(batches[per_epoch * EPOCH :])


def of_torch(processes: int, *, is_resumed: bool = False) -> dict[int, float]:
    """One run with the DataLoader that saves its state, seeded as its manual says."""
    import torch

    def make() -> StatefulDataLoader:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        return StatefulDataLoader(Images(), BATCH, shuffle=True, num_workers=processes)

    loader, batches = make(), []
    for _ in range(EPOCH):
        list(loader)
    for batch in loader:
        batches.append(batch)
        if is_resumed and len(batches) == BEFORE:
            break
    if is_resumed:
        state, loader = loader.state_dict(), make()
        loader.load_state_dict(state)
        batches += list(loader)
    return brightness(batches)


def main() -> None:
    """Draw the picture."""
    ways = (
        ("first run, 2 processes", 2, False), ("second run, 2 processes", 2, False),
        ("third run, 3 processes", 3, False), ("resumed in the epoch", 2, True),
    )  # fmt: skip
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        for column, (name, run) in enumerate(
            (("feeder", of_feeder), ("StatefulDataLoader", of_torch))
        ):
            runs = [run(number, is_resumed=is_resumed) for _, number, is_resumed in ways]
            for row, (found, (way, _, _)) in enumerate(zip(runs, ways, strict=True)):
                axes = figure.add_subplot(len(ways), 2, 2 * row + column + 1)
                same = found == runs[0]
                axes.bar(
                    list(range(SIZE)), [found.get(i, 1.0) - 1 for i in range(SIZE)],
                    color=MET if same else SHORT,
                )  # fmt: skip
                axes.set_ylim(-0.22, 0.22)
                axes.set_xticks([])
                axes.set_yticks([])
                axes.axhline(0, color="#d5d7dc", linewidth=0.8)
                said = "as the first" if same else "other draws"
                said = way if row == 0 else f"{way}: {said}"
                axes.set_title(said, loc="left", color=INK, fontsize=9)
                if row == 0:
                    axes.set_title(f"{name}\n{said}", loc="left", color=INK, fontsize=9)
        figure.supxlabel("records of the second epoch; the bar is how much each was brightened")
        figure.savefig(PICTURE, metadata={"Date": None})
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
