"""Writes golden files anew: `python -m freeze.write [NAME...]`, all of them without a name;
`loaders` and `trainings` with the Python of `.venv-adapters`.

A golden file is written anew only where a change is wanted, and the commit says which.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from freeze.golden import FROZEN, OF_FRAMEWORKS, as_text, keep

if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(FROZEN.keys() - set(OF_FRAMEWORKS)):
        with tempfile.TemporaryDirectory(prefix="feeder-") as folder:
            keep(name, as_text(FROZEN[name](Path(folder))))
