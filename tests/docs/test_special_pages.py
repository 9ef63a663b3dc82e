"""Pages that need more than a folder: stand-ins for GPUs and PyTorch, a Ray of their own, and a
server and ranks that are killed."""

from __future__ import annotations

import os
import pickle  # noqa: TID251  (as torch.save does)
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
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
    (block, _) = [one.code for one in blocks_of(PAGES / "gpu.md") if one.language == "python"]
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


# ---- the README's first use, over a stand-in for PyTorch, and resumed

(BLOCK,) = [b.code for b in blocks_of(ROOT / "README.md") if b.code.startswith("import torch\n")]
# The test's six pictures stand for many, small batches for large ones.
SMALLER = {"crop=224": "crop=64", "batch_size=32": "batch_size=2", "epochs=90": "epochs=4",
           "% 1000 == 999": "% 5 == 4"}  # fmt: skip
for given, smaller in SMALLER.items():
    assert given in BLOCK
    BLOCK = BLOCK.replace(given, smaller)


class Tensor(np.ndarray):
    """What the block does to a tensor: it is made of a writable array, and cast."""

    def float(self) -> np.ndarray:
        return self.astype(np.float32)


def from_numpy(array: np.ndarray) -> Tensor:
    assert array.flags.writeable  # PyTorch warns about an array that it may not write into
    return array.view(Tensor)


def save(value: Any, path: str) -> None:
    Path(path).write_bytes(pickle.dumps(value))


def run(block: str) -> list[tuple[bytes, bytes]]:
    """Run the block; the images and labels that its training was given."""
    seen: list[tuple[bytes, bytes]] = []

    def train(image: np.ndarray, label: np.ndarray) -> None:
        seen.append((image.tobytes(), label.tobytes()))

    names = {"train": train, "model": SimpleNamespace(state_dict=dict)}
    exec(compile(block, "README.md", "exec"), names)
    return seen


@pytest.mark.needs("PIL")
def test_the_first_use_runs_and_resumes(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    vars(torch).update(from_numpy=from_numpy, save=save)
    monkeypatch.setitem(sys.modules, "torch", torch)
    (scratch / "photos").symlink_to(scratch / "data/pictures")
    whole = run(BLOCK)
    saved = pickle.loads((scratch / "job.pt").read_bytes())
    assert set(saved) == {"model", "feed"}
    last = 5 * (len(whole) // 5)
    monkeypatch.setattr("feeder.api._default", None)
    again = BLOCK.replace("resume=None", f"resume={saved['feed']!r}")
    assert again != BLOCK
    assert run(again) == whole[last:] != []
