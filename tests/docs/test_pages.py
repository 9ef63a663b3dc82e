"""What the pages show runs as it stands; no block is left out, and no link leads nowhere."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from docs.pages import DATA, PAGES, RUN, Block, blocks_of, num_fences
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


def block(language: str, code: str, **fields: str) -> Block:
    settings = {"title": None, "why_not": None} | fields
    return Block(page=Path("page.md"), line=1, language=language, code=code, **settings)


@pytest.mark.parametrize(
    ("blocks", "wrong"),
    [
        ([block("python", "print(1)\n\n1 / 0\n")], "by zero"),
        ([block("python", "print(1)\n"), block("output", "2\n")], "the block before it printed"),
        ([block("python", "import os\nx = 1\n"), block("python", "import sys\nx\n")], "'x'"),
        ([block("sh", "false | true\n")], "exit status 1"),
        ([block("sh", "feeder doktor\n", why_not="slow")], "2"),
        ([block("sh", "feeder serve x:y --quues 2\n", why_not="slow")], "2"),
        ([block("sh", "scripts/bench coer\n", why_not="slow")], "no bench 'coer'"),
        ([block("sh", "no-such-command --now\n", why_not="slow")], "no command"),
        ([block("toml", "[feed\n")], "Expected"),
        ([block("perl", "1;\n")], "no language 'perl'"),
    ],
)
def test_a_wrong_block_is_seen(blocks: list[Block], wrong: str, scratch: Path) -> None:
    story = Story(scratch)
    with pytest.raises((Exception, SystemExit), match=re.escape(wrong)):
        for one in blocks:
            story.do(one)
