"""8 KB batches, passed and copied, beside a queue that hands over and does nothing else."""

from __future__ import annotations

from contenders import copyto, handover, product, timed
from fetches import SMALL, constant, fresh
from harness import Settings, interleave
from report import Goal, Report, rate_cells, spread

QUEUE = "queue.Queue(100)"
REFERENCE_PER_S = 450_000
"""What that queue did per second where the figures asked for were set."""
ASKED_PER_S = {"passed": 80_000, "copied": 45_000}


def small_batches(settings: Settings) -> Report:
    """Fresh arrays of a full batch are passed, a constant array is copied."""
    rates = interleave(
        [
            timed("passed", product(SMALL, lambda: fresh(SMALL)), settings),
            timed("copied", product(SMALL, lambda: constant(SMALL)), settings),
            timed(QUEUE, handover, settings),
            timed("copyto", copyto(SMALL), settings),
        ],
        settings.repetitions,
    )
    ratios = {name: rates[name].per(rates[QUEUE]) for name in ASKED_PER_S}
    return Report(
        case="small-batches",
        title=f"batches of {SMALL.name} (8 KB) from chunks of {SMALL.chunk_rows}",
        head=("contender", "batches/s", "GB/s", "of copyto"),
        rows=tuple(
            (name, *rate_cells(rate, rates["copyto"], SMALL.batch_bytes))
            for name, rate in rates.items()
        ),
        measures=rates,
        goals=tuple(
            Goal(
                what=f"small-batches: {name}, where the queue does {REFERENCE_PER_S:,} /s",
                asked=ASKED_PER_S[name],
                measured=ratio.times(REFERENCE_PER_S),
                unit="/s",
            )
            for name, ratio in ratios.items()
        ),
        notes=tuple(f"{name} / {QUEUE}: {spread(ratio, '×')}" for name, ratio in ratios.items()),
    )
