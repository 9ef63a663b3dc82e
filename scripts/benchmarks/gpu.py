"""Batches on a GPU, against what its bus can do: a plain loop of asynchronous copies of the same
bytes from pinned memory.

Fetch functions return chunks that were prepared once. All contenders take turns within each
repetition, so that a ratio is one of figures measured at the same time; medians are printed with
the lowest and the highest sample. Where there is no GPU nothing is measured.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial

from command import run_cases
from feeder.devices.cuda.driver import open_driver
from feeder.errors import ConfigError
from gpu_copies import bus, loader, samples, small
from gpu_steps import steps
from harness import Settings
from report import Report

DEVICE = "cuda:0"

CASES: Mapping[str, Callable[[Settings], Report]] = {
    "gpu-20mb": partial(bus, "gpu-20mb", "images"),
    "gpu-154mb": partial(bus, "gpu-154mb", "images-250"),
    "gpu-step": steps,
    "gpu-small": small,
    "gpu-loader": loader,
    "gpu-samples": samples,
}


def main() -> int:
    """Measure; 1 where there is no GPU."""
    try:
        open_driver(DEVICE)
    except ConfigError as error:
        # A command line that only asks for help is answered all the same.
        if not {"-h", "--help"} & set(sys.argv):
            print(f"bench gpu: nothing is measured, {error}", file=sys.stderr)
            return 1
    run_cases("gpu", __doc__, CASES)
    return 0


if __name__ == "__main__":
    # Servers of the benchmark's own come and go.
    logging.getLogger("feeder").setLevel(logging.ERROR)
    sys.exit(main())
