"""The page of far data says how well orders shuffle, as they do."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from project import ROOT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_shuffle", ROOT / "docs/draw_shuffle.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_and_the_picture_are_what_is_measured(script: ModuleType) -> None:
    measured = {name: script.epoch(source) for name, source in script.ORDERS.items()}
    assert "\n".join(script.table(measured)) in (ROOT / "docs/far-data.md").read_text()
    assert script.PICTURE.read_text() == script.drawn(measured)
    # Each record comes once, whatever the order.
    for order in measured.values():
        assert sorted(order.tolist()) == [*range(script.SIZE)]
