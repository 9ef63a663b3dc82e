"""The plots are those of the runs that lie beside them, and say when and on what they were."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from docs.pages import ROOT
from needs import needs

pytestmark = pytest.mark.process

needs("matplotlib")

FIGURES = ROOT / "docs/figures"
RUNS = sorted(FIGURES.glob("*.json"))


@pytest.fixture(scope="module")
def drawing(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_plots", ROOT / "docs/draw_plots.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # matplotlib opens its fonts, and keeps them open; a logarithmic axis has further ones.
    for run in RUNS:
        list(module.draw(run, tmp_path_factory.mktemp("fonts")))
    return module


def words(picture: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)</text>", picture)


def goals_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [goal for case in run["cases"] for goal in case["goals"]]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_plot_tells_its_run(path: Path) -> None:
    run = json.loads(path.read_text())
    told = words((FIGURES / f"{path.stem}-goals.svg").read_text())
    asked = [goal for goal in goals_of(run) if goal["asked"]]
    assert [goal["what"] for goal in asked if goal["what"] not in told] == []
    assert all(goal["reached"] for goal in goals_of(run) if not goal["asked"])
    (when,) = [text for text in told if run["date"] in text]
    for value in run["machine"]["cores"], run["machine"]["load"], run["settings"]["repetitions"]:
        assert str(value) in when


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_a_plot_drawn_anew_says_the_same(path: Path, drawing: ModuleType, tmp_path: Path) -> None:
    drawn = list(drawing.draw(path, tmp_path))
    assert [picture.name for picture in drawn] == sorted(
        picture.name for picture in FIGURES.glob(f"{path.stem}-*.svg")
    )
    for picture in drawn:
        shipped = (FIGURES / picture.name).read_text()
        assert words(picture.read_text()) == words(shipped)


def test_the_pages_show_every_plot() -> None:
    pages = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("benchmarks", "peers"))
    files = [path.name for run in RUNS for path in FIGURES.glob(f"{run.stem}*")]
    assert len(files) > len(RUNS)
    assert [name for name in files if f"(figures/{name})" not in pages] == []
