"""`feeder demo`: runs `examples/demo` of the checkout that this package lies in."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
"""A folder of the checkout, and not of the wheel: the demo is run once, if at all."""


def main(argv: Sequence[str]) -> int:
    """Run the demo with its own command line; 2 where the demo is not there."""
    # Looked up by the demo's data: site-packages may hold another project's `examples`.
    if not (EXAMPLES / "demo/digits.npz").is_file():
        print(
            "feeder demo: the demo comes with the sources of feedworks, and not with its wheel: "
            "run scripts/demo in a checkout",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(EXAMPLES))
    status: int = importlib.import_module("demo").main(argv)
    return status
