"""What the page on GPUs shows runs as it stands, over a stand-in, and names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from standin.gpu import Machine, assert_sound, installed

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")


def test_the_code_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    printed: list[str] = []
    names = {"print": lambda *values: printed.append(" ".join(map(str, values)))}
    machine = Machine()
    with installed(machine):
        exec(compile(block, "docs/gpu.md", "exec"), names)
    names.clear()
    assert printed[0] == "0 1 (32, 3)"
    assert printed[-1] == "shared registered memory"
    assert_sound(machine)
