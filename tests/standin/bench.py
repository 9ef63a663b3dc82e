"""`scripts/bench gpu` over a stand-in, to see that its cases run; what they measure means nothing.

To be imported with `scripts/benchmarks` on the path before the tests.
"""

from __future__ import annotations

import gpu
import gpu_steps
from harness import Settings
from report import show, show_goals
from standin.gpu import Machine, installed

LARGEST = "gpu-154mb"


def main() -> None:
    """Run every case once, but the largest, which is another's with larger batches."""
    machine = Machine(gpu_bytes=2**33, pinned_bytes=2**33)
    work = (lambda: None, machine.clockwork.drain_all)
    gpu_steps.make_work = lambda: work
    settings = Settings(
        repetitions=1, timed_s=0.02, warm_s=0.01, warm_batches=2, checked_batches=2, tries=1
    )
    with installed(machine):
        reports = [case(settings) for name, case in gpu.CASES.items() if name != LARGEST]
    for report in reports:
        show(report)
    show_goals(reports)
    assert machine.faults == []
