"""The feed of the examples: made-up digits, each one of ten shapes of 8 x 8 pixels with noise."""

from __future__ import annotations

import numpy as np

from feeder import sources

NUM_ROWS = 1800


def make_digits(seed: int = 0, shard_id: int = 0, num_shards: int = 1) -> sources.Source:
    """A fetch function of columns image, (rows, 8, 8) with values 0..16, and label, 0..9."""
    random = np.random.default_rng(0)  # the same data on each node, which reads its own shard of it
    shapes = random.integers(0, 17, (10, 8, 8))
    labels = random.integers(0, 10, NUM_ROWS)
    noise = random.integers(-8, 9, (NUM_ROWS, 8, 8))
    images = np.clip(shapes[labels] + noise, 0, 16).astype(np.uint8)
    return sources.arrays(
        images,
        labels.astype(np.uint8),
        random_shuffle=True,
        seed=seed,
        shard_id=shard_id,
        num_shards=num_shards,
    )
