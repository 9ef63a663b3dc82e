"""The handwritten digits, and the fetch function that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

NUM_TRAINING_ROWS = 1500
LARGEST_CHUNK_ROWS = 41


def load_digits() -> tuple[Bytes, Bytes]:
    """All images, (1797, 8, 8) with values 0..16, and their labels, (1797,) with values 0..9."""
    with (
        resources.files(__package__).joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        return archive["images"], archive["labels"]


class DigitReader:
    """A fetch function over rows of digits: each worker reads its own part, shuffled each epoch.

    Chunks have 1 to 41 rows, so that they seldom end where a batch ends. A worker's chunk follows
    from its cursor alone, (epoch, row), so that a resume seeks instead of reading again. Workers
    share nothing and may be called from different threads.
    """

    def __init__(self, images: Bytes, labels: Bytes, num_workers: int, seed: int) -> None:
        """Deal the rows out to `num_workers` workers; `seed` fixes their order in every epoch."""
        self._images = images
        self._labels = labels
        self._seed = seed
        self._parts = np.array_split(np.arange(len(labels)), num_workers)
        self._cursors = [(0, 0)] * num_workers

    def __call__(self, worker_id: int, batch_size: int) -> list[Bytes]:
        """The worker's next images and labels; StopIteration at the end of each epoch."""
        epoch, row = self._cursors[worker_id]
        order = self._order(worker_id, epoch)
        if row >= len(order):
            self._cursors[worker_id] = (epoch + 1, 0)
            raise StopIteration
        chunk = order[row : row + self._chunk_rows(worker_id, epoch, row)]
        self._cursors[worker_id] = (epoch, row + len(chunk))
        return [self._images[chunk], self._labels[chunk]]

    def cursor(self, worker_id: int) -> tuple[int, int]:
        """Where the worker stands: its epoch and the row that comes next."""
        return self._cursors[worker_id]

    def seek(self, worker_id: int, cursor: Sequence[int]) -> None:
        """Go on from `cursor`, in constant time."""
        epoch, row = cursor
        self._cursors[worker_id] = (epoch, row)

    def _order(self, worker_id: int, epoch: int) -> npt.NDArray[np.int64]:
        key = np.array([self._seed, worker_id << 32 | epoch], dtype=np.uint64)
        return np.random.Generator(np.random.Philox(key=key)).permutation(self._parts[worker_id])

    @staticmethod
    def _chunk_rows(worker_id: int, epoch: int, row: int) -> int:
        return 1 + (7 * row + 13 * epoch + 5 * worker_id) % LARGEST_CHUNK_ROWS
