"""The page on jobs: its blocks run one after another, as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import jobs

PAGE = (Path(__file__).parents[2] / "docs/jobs.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
MODULE = "# my_job.py\n"


@pytest.fixture(autouse=True)
def beside_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_job", raising=False)


def test_the_page_runs(tmp_path: Path) -> None:
    Path("my_job.py").write_text(BLOCKS[0])
    names = {"__name__": "page"}
    for block in BLOCKS[1:]:
        if "RaySession" not in block:
            exec(compile(block, "jobs.md", "exec"), names)
    assert (tmp_path / "trainer_1.uploaded").read_bytes() == (
        tmp_path / "checkpoints/trainer_1.4"
    ).read_bytes()
    assert (tmp_path / "nodes/trainer_0/output.log").read_text() == ""


@pytest.mark.slow
@pytest.mark.needs("ray")
def test_the_page_runs_on_a_ray_of_its_own(tmp_path: Path) -> None:
    """In a process of its own: where Ray has been, descriptors are left."""
    Path("my_job.py").write_text(BLOCKS[0])
    session = next(block for block in BLOCKS if "RaySession" in block)
    code = f"{BLOCKS[1]}\n{session}\nimport ray; assert not ray.is_initialized()"
    path = os.pathsep.join([str(tmp_path), *sys.path])
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        environment = os.environ | {"PYTHONPATH": path, "HOME": folder, "RAY_TMPDIR": folder}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
    assert done.returncode == 0, done.stderr


def test_the_page_has_been_read() -> None:
    assert len(BLOCKS) == PAGE.count("```python") == 7
    assert BLOCKS[0].startswith(MODULE)
    assert f"{jobs.TOTALS[-1]})" in BLOCKS[1]
