"""The checking pass: which rows come out, and in which order, apart from any timing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from contenders import Contender, Take, original, product
from fetches import FILLER, NUM_WORKERS, Array, Load, NumberedFetch


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What became of the numbered rows of one pass."""

    fetched: int
    lost: int
    doubled: int
    late: int
    """Rows that came after a later row of the same worker."""
    in_turn: bool
    """Whether all came in the order of turns: one chunk from each worker in turn."""

    @property
    def faults(self) -> int:
        """Rows that are wrong in any way; a stream out of turn is at least one."""
        return max(self.lost + self.doubled + self.late, int(not self.in_turn))

    @property
    def cells(self) -> tuple[str, str]:
        """The rows lost and the rows late, for a table."""
        lost = f"{self.lost:,} ({self.lost / self.fetched:.1%})" if self.lost else "0"
        return lost, f"{self.late:,}"


def audit_product(load: Load, batches: int) -> Audit:
    """What the product does with about so many batches of numbered rows."""
    rows = _rows_per_worker(load, batches)
    return _audit(product(load, lambda: NumberedFetch(load, rows)), load, rows)


def audit_original(load: Load, batches: int) -> Audit:
    """What the original does with them."""
    rows = _rows_per_worker(load, batches)
    return _audit(original(load, lambda: NumberedFetch(load, rows)), load, rows)


def _rows_per_worker(load: Load, batches: int) -> int:
    chunks = -(-batches * load.batch_size // (NUM_WORKERS * load.chunk_rows))
    return chunks * load.chunk_rows


def _audit(contender: Contender, load: Load, rows_per_worker: int) -> Audit:
    with contender() as take:
        rows = _numbered_rows(take, load, NUM_WORKERS * rows_per_worker)
    turns = _turns(load, rows_per_worker)
    seen = len(np.unique(rows, axis=0))
    return Audit(
        fetched=len(turns),
        lost=len(turns) - seen,
        doubled=len(rows) - seen,
        late=sum(_late(rows[rows[:, 0] == worker, 1]) for worker in range(NUM_WORKERS)),
        in_turn=np.array_equal(rows, turns),
    )


def _numbered_rows(take: Take, load: Load, total: int) -> Array:
    """Worker and number of the rows that come out, until all did or none can come any more.

    Once filler of every worker comes out of the original, a numbered row that was put back is
    behind at most a full queue of chunks.
    """
    behind = load.bound * load.chunk_rows // load.batch_size + 1
    parts: list[Array] = []
    done: set[int] = set()
    seen = fillers = 0
    while seen < total and fillers <= behind:
        batch = take()
        assert batch is not None
        cells = batch.reshape(len(batch), -1)[:, :2].astype(np.int64)
        is_numbered = cells[:, 1] != FILLER
        numbered = cells[is_numbered]
        parts.append(numbered)
        seen += len(numbered)
        done.update(cells[~is_numbered, 0].tolist())
        fillers = 0 if len(numbered) or len(done) < NUM_WORKERS else fillers + 1
    return np.concatenate(parts)


def _turns(load: Load, rows_per_worker: int) -> Array:
    """Worker and number of every row, in the order of turns."""
    chunks, workers, rows = np.mgrid[
        : rows_per_worker // load.chunk_rows, :NUM_WORKERS, : load.chunk_rows
    ]
    numbers = chunks * load.chunk_rows + rows
    return np.stack([workers.ravel(), numbers.ravel()], axis=1)


def _late(numbers: Array) -> int:
    """How many numbers are below one that came before them."""
    return int(np.count_nonzero(numbers < np.maximum.accumulate(numbers))) if len(numbers) else 0
