"""What the pages show runs as it stands; no block is left out, and no link leads nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs.pages import DATA, PAGES, ROOT, RUN, Block, blocks_of, num_fences
from docs.story import Story, check_command, commands, is_output
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


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    named = re.findall(r"(?::|-) (\S+\.md)$", navigation, re.MULTILINE)
    docs = ROOT / "docs"
    assert sorted(named) == sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md")
                                   if "pictures" not in page.parts)  # fmt: skip


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


def test_blocks_go_on_where_the_last_ended_and_files_are_written(scratch: Path) -> None:
    story = Story(scratch)
    for one in [
        block("python", "import sys\n\nx = 1\n"),
        block("python", "print(x, 'and', 2)\n"),
        block("output", "1\n...   2\n"),
        block("python", "import math\n", title="some_module.py"),
        block("sh", "python -c 'import some_module, feeder'\nfeeder --version\n"),
        block("output", "feeder ...\n"),
    ]:
        story.do(one)


def test_output_is_compared_word_by_word() -> None:
    assert is_output("one ... three\n", "one\n  two three\n")
    assert not is_output("one three", "one two three")
    assert not is_output("one", "one two")


def test_commands_are_told_apart() -> None:
    code = "A=1 B=2 feeder serve x:y &  # why\nscripts/bench core \\\n  --quick\n"
    assert commands(code) == [["feeder", "serve", "x:y"], ["scripts/bench", "core", "--quick"]]
    check_command(["scripts/bench", "core", "--quick"])


@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("-h", 0), ("biuld", 1)])
def test_the_script_answers_without_an_environment(word: str, status: int, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    done = subprocess.run(
        [ROOT / "scripts/docs", word], env=os.environ | {"FEEDER_VENV": str(environment)},
        capture_output=True, text=True, timeout=20.0,
    )  # fmt: skip
    assert done.returncode == status
    told = done.stdout + done.stderr
    assert [name for name in ("build", "serve", "commands", "map") if name not in told] == []
    assert list(tmp_path.iterdir()) == []
