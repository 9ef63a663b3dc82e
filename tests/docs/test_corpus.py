"""The corpus of "Pre-training data": what the page shows is the example, and the example ends equal
though its server and its ranks are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import ROOT, block_titled

pytestmark = pytest.mark.process

FOLDER = ROOT / "examples/corpus"
PAGE = ROOT / "docs/pretraining.md"


def run_it(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(folder / "run.py")], capture_output=True, text=True, timeout=55,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip


def test_the_page_shows_the_example() -> None:
    assert block_titled(PAGE, "corpus.py").code == (FOLDER / "corpus.py").read_text()


def test_ranks_that_are_killed_are_three_that_get_the_same_order() -> None:
    done = run_it(FOLDER)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, killed, resumed, equal = (
        line for line in done.stdout.splitlines() if not line.startswith("serving")
    )
    assert (killed, equal[:17]) == ("2 ranks: steps 0 to 25, killed", "EQUAL: 60 batches")
    # Those after the checkpoint once more, and no others.
    assert resumed == "3 ranks: steps 24 to 59"
    shown = PAGE.read_text()
    assert all(line in shown for line in (killed, resumed, equal))
