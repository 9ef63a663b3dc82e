"""The pages of the documentation, and the blocks of code on them.

What a block is for is told by its language, and by what stands before it:

- ``python`` is executed. A block that begins with an import stands for itself; any other goes on
  where the one before it ended. With ``title="x.py"`` it is written to a file of that name too.
  After a comment ``not run: why`` it is compiled and no more.
- ``sh`` is run by bash, in the folder where those files are. After a comment ``not run: why`` its
  commands are looked at and not run: they exist, and their arguments are understood.
- ``output`` is what the block before it prints. Blanks and line breaks do not count, and three
  dots stand for anything.
- ``toml``, ``json`` and ``yaml`` can be parsed; with a title they are written to a file.
- ``text`` is not code: drawings, layouts, messages.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "docs/design/wire-protocol.md",
]
RUN = {"python", "sh"}
DATA = {"json", "toml", "yaml"}

_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<why>[^\n]+?) -->\n\n?)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"\n]+)")?\n(?P<code>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    """The line of the page that its first line is."""
    language: str
    title: str | None
    """The file that it is."""
    why_not: str | None
    """Why it is not run; None where it is."""
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=page,
            line=text.count("\n", 0, found.start("code")) + 1,
            language=found["language"],
            title=found["title"],
            why_not=found["why"],
            code=found["code"],
        )
        for found in _BLOCK.finditer(text)
    ]


def num_fences(page: Path) -> int:
    """How many lines of a page begin or end a block."""
    return len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE))


def block_titled(page: Path, title: str) -> Block:
    """The block of a page that is a file."""
    return next(block for block in blocks_of(page) if block.title == title)


def section(page: Path, heading: str) -> str:
    """What stands under a heading, up to the next heading that is not below it."""
    text = page.read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(heading)}$", text, re.MULTILINE)
    assert found is not None, f"{page.name} has no section {heading!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest if end is None else rest[: end.start()]


def table(text: str) -> list[list[str]]:
    """The cells of the rows of the first table in a text, without its head."""
    rows = []
    for line in text[text.index("\n|") + 1 :].splitlines():
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("| "))])
    return rows[2:]


def script(name: str) -> ModuleType:
    """The module of the folder `docs` that makes a page."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
