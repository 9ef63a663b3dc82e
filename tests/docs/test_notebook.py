"""The notebook is what its script does: the same cells, printing the same when run again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import project
from needs import needs
from project import ROOT

pytestmark = pytest.mark.process

for package in ("matplotlib", "PIL"):
    needs(package)

NAME = "dali_notebook"


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cells"]


def printed(cell: dict[str, Any]) -> str:
    outputs = cell.get("outputs", [])
    return "".join("".join(out["text"]) for out in outputs if out["output_type"] == "stream")


def pictures(cell: dict[str, Any]) -> int:
    return sum(out["output_type"] == "display_data" for out in cell.get("outputs", []))


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The cells of the notebook, made again somewhere else."""
    docs = tmp_path_factory.mktemp("again") / "docs"
    shutil.copytree(ROOT / "docs", docs, ignore=shutil.ignore_patterns("*.ipynb", "__pycache__"))
    project.printed(docs / "make_notebook.py", docs / f"{NAME}.py")
    return cells(docs / f"{NAME}.ipynb")


def test_the_notebook_is_its_script_executed(again: list[dict[str, Any]]) -> None:
    shipped = cells(ROOT / f"docs/{NAME}.ipynb")
    for told in (lambda cell: cell["source"], printed, pictures):
        assert list(map(told, shipped)) == list(map(told, again))


def test_it_shows_equal_batches_in_pictures_of_named_origin(again: list[dict[str, Any]]) -> None:
    text = "".join(map(printed, again))
    assert text.count("equal bit for bit: True") == sum(map(pictures, again)) == 3
    assert "bit for bit: False" not in text
    assert "source.num_shards: 1 then, 2 now" in text
    folder = ROOT / "docs/pictures"
    origins = (folder / "README.md").read_text()
    assert [f for f in folder.glob("*/*.jpg") if f"`{f.parent.name}`" not in origins] == []
