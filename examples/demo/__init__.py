"""`feeder demo`: a training run on real digits, killed and resumed, and equal bit for bit."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

NEEDED_PACKAGES = ("matplotlib", "rich")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; 0 where both runs are equal, 1 where not, 2 where it could not start."""
    options = parse_options(argv)
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"feeder demo needs {' and '.join(missing)}, not installed here: "
            'pip install "feedworks[demo]"\n'
        )
        return 2
    from demo.show import run_demo  # needs the extra

    return run_demo(
        num_kills=options.kills, seed=options.seed, output=options.output, quick=options.quick
    )


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The demo's command line; exits with 2 where it is wrong."""
    parser = argparse.ArgumentParser(
        prog="feeder demo",
        description="Train on handwritten digits twice, with a server and two trainers: once "
        "undisturbed, and once with servers and trainers killed again and again; compare the two "
        "bit for bit and draw them.",
    )
    add = parser.add_argument
    add("--kills", type=int, default=5, metavar="N", help="how often to kill (default: 5)")
    add("--seed", type=int, default=0, help="of the digits' order and the kills (default: 0)")
    add(
        "--output",
        type=Path,
        default=Path("feeder-demo.png"),
        metavar="PNG",
        help="where to draw the loss curves (default: ./feeder-demo.png)",
    )
    add("--quick", action="store_true", help="a quarter of the epochs")
    options = parser.parse_args(argv)
    if not 1 <= options.kills <= 50:
        parser.error(f"--kills is {options.kills!r}, expected 1 to 50")
    if not 0 <= options.seed < 2**63:
        parser.error(f"--seed is {options.seed!r}, expected 0 to 2**63 - 1")
    if not options.output.parent.is_dir():
        parser.error(f"--output is in {str(options.output.parent)!r}, which is not a folder")
    return options
