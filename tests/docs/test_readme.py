"""The README's first use runs as it stands, over a stand-in for PyTorch, and is resumed."""

from __future__ import annotations

import pickle  # noqa: TID251  (as torch.save does)
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from docs.pages import ROOT, blocks_of
from needs import needs

pytestmark = pytest.mark.process

needs("PIL")

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
