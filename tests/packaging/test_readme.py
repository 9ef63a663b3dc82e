"""What the README shows runs as it stands, and its pictures are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 3
    printed: list[str] = []
    names = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    exec(compile("\n".join(blocks), "README.md", "exec"), names)
    assert printed[10] == "10", "the resumed feed goes on after batch 9"
    names.clear()  # Its functions refer to it, so that its batches would wait for the collector.


def test_links_to_files_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert "docs/demo.png" in targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.search(r"@@|TODO|FIXME", README)
