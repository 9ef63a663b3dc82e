"""`scripts/bench exactness` asks PyTorch's loader and feeder's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from needs import needs_framework
from project import PATHS, ROOT, printed

needs_framework("torch")

LOADERS = ("feeder_data_loader", "data_loader")
QUESTIONS = ("killed", "behind_epoch", "skipped")


@pytest.mark.fresh
def test_loaders_are_asked(tmp_path: Path) -> None:
    out = tmp_path / "answers.json"
    printed(
        "-m", "exactness", "--loaders", *LOADERS, "--questions", *QUESTIONS, "--json", out,
        PYTHONPATH=os.pathsep.join((str(ROOT / "scripts"), PATHS)), limit_s=110.0,
    )  # fmt: skip
    ours, theirs = json.loads(out.read_text()).values()
    assert [ours[name] for name in QUESTIONS] == ["exact"] * 3
    assert [theirs[name] for name in QUESTIONS] == ["not supported", "exact", "not supported"]
