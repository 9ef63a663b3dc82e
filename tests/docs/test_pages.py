"""What the pages show runs as it stands; no block is left out, and no link leads nowhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from docs.pages import DATA, PAGES, RUN, blocks_of, num_fences
from docs.story import Story
from needs import needs

pytestmark = pytest.mark.process

needs("PIL")

KNOWN = RUN | DATA | {"output", "text"}


def name_of(page: Path) -> str:
    return page.name


# Some pages run a dozen commands.
@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_does_what_it_says(
    page: Path, scratch: Path, caplog: pytest.LogCaptureFixture
) -> None:
    story, modules = Story(scratch), set(sys.modules)
    for block in blocks_of(page):
        story.do(block)
    # Its functions refer to its names, so that its batches would wait for the collector; and what
    # was logged refers to tracebacks.
    story.names.clear()
    caplog.clear()
    for name in set(sys.modules) - modules:
        if (scratch / f"{name}.py").exists():
            del sys.modules[name]


def test_every_fence_is_a_block_of_a_known_kind() -> None:
    for page in PAGES:
        blocks = blocks_of(page)
        assert num_fences(page) == 2 * len(blocks)
        assert [str(block) for block in blocks if block.language not in KNOWN] == []
        for last, block in zip([None, *blocks], blocks, strict=False):
            if block.language == "output":
                assert last is not None and last.language in RUN, str(block)
