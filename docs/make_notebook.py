"""Runs a script whose cells begin with `# %%` and writes it, with what it printed and drew, as a
notebook: python docs/make_notebook.py docs/dali_notebook.py
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

_DPI = 80


def cells_of(script: str) -> list[tuple[str, str]]:
    """The cells of a script: "markdown" or "code", and the text."""
    cells = []
    for part in script.split("# %%")[1:]:
        head, _, text = part.partition("\n")
        if head.strip() == "[markdown]":
            lines = [line.removeprefix("#").removeprefix(" ") for line in text.strip().split("\n")]
            cells.append(("markdown", "\n".join(lines)))
        else:
            cells.append(("code", text.strip()))
    return cells


def run_cell(code: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell, and return what it printed and drew as outputs of a notebook."""
    printed, outputs = io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "cell", "exec"), namespace)
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(text)})
    for number in plt.get_fignums():
        outputs.append({"output_type": "display_data", "data": _picture(number), "metadata": {}})
    plt.close("all")
    return outputs


def _picture(number: int) -> dict[str, str]:
    file = io.BytesIO()
    plt.figure(number).savefig(file, format="jpeg", dpi=_DPI)
    return {"image/jpeg": base64.b64encode(file.getvalue()).decode()}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def notebook_of(script: str) -> dict[str, Any]:
    """The notebook of a script, executed."""
    # Nothing is shown on a screen; the figures of a cell are taken when it has run.
    plt.show = lambda: None
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells: list[dict[str, Any]] = []
    count = 0
    for i, (kind, text) in enumerate(cells_of(script)):
        cell = {"id": f"cell-{i}", "cell_type": kind, "metadata": {}, "source": _lines(text)}
        if kind == "code":
            count += 1
            cell |= {"execution_count": count, "outputs": run_cell(text, namespace)}
        cells.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": cells,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def main(path: Path) -> None:
    """Write the notebook beside the script."""
    script, target = path.read_text(), path.with_suffix(".ipynb").resolve()
    os.chdir(path.parent)
    sys.path.insert(0, os.getcwd())
    target.write_text(json.dumps(notebook_of(script), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
