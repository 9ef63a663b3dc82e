"""A feed of rotated pictures, for the notebook beside it.

Run as a program it resumes from a snapshot and saves the batches that are left:

    python rotated.py snapshot rest.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import feeder

PICTURES = Path(__file__).parent / "pictures"
NAMES = ["image", "label", "angle"]
BATCH_SIZE = 3


class Rotated:
    """The pictures of a source, each rotated by an angle of its own, drawn anew in each epoch."""

    def __init__(self, source: feeder.sources.Source) -> None:
        self.source = source

    def __call__(self, call: feeder.Call) -> list[np.ndarray]:
        images, labels = self.source(call)
        # The draw belongs to the record: it does not matter which call or thread makes it.
        records = self.source.indices(call).tolist()
        angles = [call.rng_for(record).uniform(-30, 30) for record in records]
        rotated = [rotate(image, angle) for image, angle in zip(images, angles, strict=True)]
        return [np.stack(rotated), labels, np.array(angles, np.float32)]

    def describe(self) -> dict[str, Any]:
        """What must be the same for a snapshot to fit."""
        return {**self.source.describe(), "rotated": [-30, 30]}


def rotate(image: np.ndarray, angle: float) -> np.ndarray:
    """Rotate an image by an angle in degrees."""
    return np.asarray(Image.fromarray(image).rotate(angle, Image.Resampling.BILINEAR))


def make_feed(resume: Any = None) -> feeder.Coordinator:
    """Two epochs of the pictures, shuffled."""
    return feeder.init_data_input_workers(
        NAMES,
        Rotated(feeder.sources.image_folder(PICTURES, random_shuffle=True)),
        BATCH_SIZE,
        epochs=2,
        seed=2024,
        resume=resume,
        coordinator=feeder.Coordinator(),
    )


def take_rest(coordinator: feeder.Coordinator) -> dict[str, np.ndarray]:
    """All batches from where a feed stands, one array per column."""
    with coordinator:
        batches = list(coordinator["train"])
    return {name: np.stack([batch[name] for batch in batches]) for name in NAMES}


if __name__ == "__main__":
    snapshot, rest = sys.argv[1:]
    np.savez(rest, **take_rest(make_feed(snapshot)))
