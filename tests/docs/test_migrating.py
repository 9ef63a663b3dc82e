"""Every line of code on the right of the migration page's tables runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from docs.pages import ROOT
from needs import needs

pytestmark = pytest.mark.process

needs("PIL")

PAGE = (ROOT / "docs/migrating.md").read_text()
CELLS = [line.split(" | ", 1)[1] for line in PAGE.splitlines() if line.startswith("| ")]
LINES = [
    code
    for cell in CELLS
    for code in re.findall(r"`([^`]+)`", cell)
    if code.startswith(("sources.", "feeder.", "source.", "coordinator.", "next("))
]


@pytest.fixture(autouse=True)
def beside_the_data(scratch: Path) -> None:
    """Run in the folder that holds `data`, and leave no feed in the default coordinator."""


class Iterates:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def fetch(call: feeder.Call) -> list[np.ndarray]:
    if call.index == 30:
        raise StopIteration
    return [np.ones(20), np.ones(20)]


def names_of_the_page() -> dict[str, Any]:
    """What the page says is the reader's."""
    source = feeder.sources.caffe_lmdb("data/caffe")
    return {
        "np": np, "feeder": feeder, "sources": feeder.sources, "source": source, "fetch": fetch,
        "path": "data/caffe", "other": Path("data/caffe"), "path2": "data/caffe2",
        "folder": "data/pictures", "file": "data/tokens.bin", "files": ["data/x.npy"] * 2,
        "f": lambda info: info.idx_in_epoch, "factory": Iterates, "names": ["image", "label"],
        "dataset": [(i, -i) for i in range(10)], "x": np.arange(9), "y": np.arange(9),
        "collate": lambda samples: tuple(map(np.array, zip(*samples, strict=True))),
        "rank": 1, "world": 2,
    }  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_a_line_of_a_table_runs(line: str) -> None:
    names = names_of_the_page()
    if "coordinator" not in line:
        made = eval(line, names)
    else:
        names["coordinator"] = coordinator = feeder.Coordinator()
        for name in ("train", "test"):
            feeder.init_data_input_workers(
                ["x", "y"], fetch, 4, input_source_name=name, coordinator=coordinator
            )
        with coordinator:
            made = eval(line, names)
    assert made is not None
    run(made)


def run(made: Any) -> None:
    """See that what a line makes feeds."""
    if isinstance(made, (feeder.sources.Source, feeder.sources.IterableSource)):
        num = 1 if isinstance(made, feeder.sources.IterableSource) else len(first_rows(made))
        names = [f"column {i}" for i in range(num)]
        made = feeder.init_data_input_workers(names, made, 2, coordinator=feeder.Coordinator())
    if isinstance(made, feeder.Coordinator) and not next(iter(made["train"].streams)).started:
        with made:
            assert next(made["train"].on(0)).rows > 0


def first_rows(source: feeder.sources.Source) -> Any:
    return source(feeder.Call(0, 0, 0, 2, 0))


def test_the_page_has_been_read() -> None:
    assert len(LINES) >= 40
