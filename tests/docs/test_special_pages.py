"""Pages that need more than a folder: a stand-in for GPUs, a Ray of their own, and a server and
ranks that are killed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from docs.pages import block_titled, blocks_of
from project import ROOT, printed
from standin.gpu import Machine, assert_sound, installed

pytestmark = pytest.mark.process

PAGES = ROOT / "docs"
PRETRAINING = PAGES / "pretraining.md"
CORPUS = ROOT / "examples/corpus"


def test_the_page_on_gpus_runs_over_a_stand_in(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (block,) = [one.code for one in blocks_of(PAGES / "gpu.md") if one.language == "python"]
    printed: list[str] = []
    names = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    machine = Machine()
    with installed(machine):
        exec(compile(block, "docs/gpu.md", "exec"), names)
    names.clear()
    assert printed[0] == "0 1 (32, 3)"
    assert printed[-1] == "shared registered memory"
    assert_sound(machine)


@pytest.mark.needs("ray")
def test_the_page_on_jobs_runs_on_a_ray_of_its_own(scratch: Path) -> None:
    """In a process of its own: where Ray has been, descriptors are left."""
    (scratch / "my_job.py").write_text(block_titled(PAGES / "jobs.md", "my_job.py").code)
    blocks = [block.code for block in blocks_of(PAGES / "jobs.md") if block.language == "python"]
    session = next(code for code in blocks if "RaySession(" in code)
    code = f"{blocks[1]}\n{session}\nimport ray; assert not ray.is_initialized()"
    path = os.pathsep.join([str(scratch), *sys.path])
    printed("-c", code, PYTHONPATH=path, HOME=str(scratch), RAY_TMPDIR=str(scratch))


def test_the_page_shows_the_example_of_the_corpus() -> None:
    assert block_titled(PRETRAINING, "corpus.py").code == (CORPUS / "corpus.py").read_text()


def test_ranks_that_are_killed_are_three_that_get_the_same_order() -> None:
    told = printed(CORPUS / "run.py", limit_s=55.0)
    *_, killed, resumed, equal = (
        line for line in told.splitlines() if not line.startswith("serving")
    )
    assert (killed, equal[:17]) == ("2 ranks: steps 0 to 25, killed", "EQUAL: 60 batches")
    # Those after the checkpoint once more, and no others.
    assert resumed == "3 ranks: steps 24 to 59"
    shown = PRETRAINING.read_text()
    assert all(line in shown for line in (killed, resumed, equal))
