"""What the pages on frameworks show runs with the frameworks."""

from __future__ import annotations

import importlib
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from docs.pages import ROOT, blocks_of
from needs import needs_framework

needs_framework("torch")

WHY = "scripts/test adapters runs it"
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if WHY in page.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_does_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = [b for b in blocks_of(page) if WHY in (b.why_not or "") and b.language == "python"]
    assert blocks
    for block in blocks:
        if re.match(r"(import|from) ", block.code):
            names = {"__name__": "page"}
        with warnings.catch_warnings():
            # What other frameworks warn of is theirs.
            is_ours = page.name.startswith(("torch", "variable"))
            warnings.simplefilter("error" if is_ours else "ignore")
            # JAX says so of each fork once another test has imported it.
            warnings.filterwarnings("ignore", "os.fork")
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)


IMPORTED = {
    "FeedCheckpoint": "lightning", "FeedTrainer": "hf", "FeedDataLoader": "torchtitan",
    "ExternalLoader": "megatron", "global_batches": "jax", "dataset": "tensorflow",
    "FeedState": "tensorflow",
}  # fmt: skip


def test_what_is_to_be_imported_in_place_of_others_is_there() -> None:
    text = (ROOT / "docs" / "migrating.md").read_text()
    table = text[text.index("## One line") : text.index("## PyTorch: ")]
    lines = re.findall(r"`(from feeder\.adapters[^`]+)`", table)
    assert len(lines) == 2
    for line in lines:
        exec(line, {})
    for name, module in IMPORTED.items():
        assert f"{name}(" in table or f"{name}.Config(" in table
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert hasattr(importlib.import_module(f"feeder.adapters.{module}"), name)


def test_there_are_pages() -> None:
    found = {page.name for page in PAGES}
    assert {"torch.md", "torch-ddp.md", "tensorflow.md", "torchtitan.md", "megatron.md"} <= found
