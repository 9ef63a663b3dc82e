"""The page on jobs: what ends up in files, and what needs a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import ROOT, block_titled, blocks_of

pytestmark = pytest.mark.process

PAGE = ROOT / "docs/jobs.md"


@pytest.mark.needs("ray")
def test_the_page_runs_on_a_ray_of_its_own(scratch: Path) -> None:
    """In a process of its own: where Ray has been, descriptors are left."""
    (scratch / "my_job.py").write_text(block_titled(PAGE, "my_job.py").code)
    blocks = [block.code for block in blocks_of(PAGE) if block.language == "python"]
    session = next(code for code in blocks if "RaySession(" in code)
    code = f"{blocks[1]}\n{session}\nimport ray; assert not ray.is_initialized()"
    path = os.pathsep.join([str(scratch), *sys.path])
    environment = os.environ | {
        "PYTHONPATH": path,
        "HOME": str(scratch),
        "RAY_TMPDIR": str(scratch),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
