"""The feed of the examples: the handwritten digits that the demo of feeder brings along."""

from __future__ import annotations

from feeder.demo.digits import DigitReader, load_digits


def read_digits(
    num_workers: int, seed: int = 0, shard_id: int = 0, num_shards: int = 1
) -> DigitReader:
    """A fetch function of columns image, (rows, 8, 8), and label; one for each run of the feed."""
    images, labels = load_digits()
    shard = slice(shard_id, None, num_shards)
    return DigitReader(images[shard], labels[shard], num_workers, seed)
