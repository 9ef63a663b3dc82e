"""`scripts/bench gpu` over a stand-in, to see that its rows run; what they measure means nothing.

To be imported with `scripts` on the path before the tests.
"""

from __future__ import annotations

from benchmarks import gpu
from benchmarks.harness import Settings, interleave
from benchmarks.report import HEAD, cells, table
from standin.gpu import Machine, installed

LARGEST = "154 MB"


def main() -> None:
    """Run every row once, but the largest, which are others with larger batches."""
    machine = Machine(gpu_bytes=2**33, pinned_bytes=2**33)
    work = (lambda: None, machine.clockwork.drain_all)
    gpu.step_work = lambda: work
    settings = Settings(repetitions=1, timed_s=0.02, warm_s=0.01, warm_batches=2, tries=1)
    rows = [
        row for row in gpu.LOAD.rows if row.is_possible and not row.name.startswith(LARGEST)
    ]  # fmt: skip
    with installed(machine):
        samples = interleave(rows, settings)
    print(table(HEAD, [cells(row, samples) for row in rows]))
    assert machine.faults == []
