"""What the design's pages name is there: pages, files, classes, tests; and the map is of them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from docs.pages import PAGES as READ
from docs.pages import ROOT, script

DOCS = ROOT / "docs"
DESIGN = sorted((DOCS / "design").glob("*.md"))
RECORDS = sorted((DOCS / "adr").glob("[0-9]*.md"))
WINGS = [ROOT / "workers", ROOT / "feeder"]
PACKAGES = sorted(page for wing in WINGS for page in wing.rglob("README.md"))
PAGES = [
    *DESIGN, *RECORDS, DOCS / "adr/README.md", DOCS / "glossary.md", ROOT / "CONTRIBUTING.md",
    ROOT / "examples/README.md",
    *PACKAGES,
]  # fmt: skip
CODE = sorted(path for wing in WINGS for path in wing.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CLASS = re.compile(r"`([A-Z]\w*[a-z]\w*)(?:\.(\w+))?(?:\([^`]*\))?`")


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The links within a page that its headings make."""
    headings = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def words_of(pattern: str, *paths: Path) -> frozenset[str]:
    """What a pattern finds in files."""
    return frozenset(one for path in paths for one in re.findall(pattern, path.read_text("utf-8")))


def missing_files(text: str, folder: Path) -> list[str]:
    """The links and files of a page in that folder that lead nowhere."""
    linked = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    roots = "deploy|docs|feeder|scripts|tests|workers"
    named = re.findall(rf"`((?:{roots})/[\w./@-]*)`", text)
    return [name for name in linked if not (folder / name).exists()] + [
        name for name in named if not (ROOT / name).exists()
    ]


def missing(page: Path) -> list[str]:
    """What a page names that is not there."""
    text = text_of(page)
    wrong = missing_files(text, page.parent)
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text):
        there = page.parent / target if target else page
        if there.exists() and anchor not in anchors(there):
            wrong.append(f"{target}#{anchor}")
    tests = words_of(r"def (test_\w+)", *TESTS)
    wrong += [name for name in re.findall(r"`(test_\w+)`", text) if name not in tests]
    # What is of Python or of a library is known where the code uses it.
    words = words_of(r"\w+", *CODE)
    return wrong + [
        name for name, attribute in _CLASS.findall(text) if not {name, attribute or name} <= words
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_named_is_there(page: Path) -> None:
    assert missing(page) == []


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_files_that_readers_are_sent_to_are_there(page: Path) -> None:
    assert missing_files(page.read_text(encoding="utf-8"), page.parent) == []


def test_the_page_of_a_package_names_its_files() -> None:
    files = [(page, path.name) for page in PACKAGES for path in page.parent.glob("*.py")
             if not path.name.startswith("__")]  # fmt: skip
    assert [(page, name) for page, name in files if name not in text_of(page)] == []


def test_a_rule_has_its_test() -> None:
    pages = [page for page in DESIGN if page.stem not in ("README", "experiments", "wire-protocol")]
    text = "\n\n".join(map(text_of, pages))
    rules = re.findall(r"^\*\*.+?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(rules) >= 5 * len(pages)
    assert [rule for rule in rules if "`test_" not in rule] == []


# ---- the map


def test_the_map_is_of_the_modules_that_there_are() -> None:
    """`scripts/docs map` draws it anew."""
    drawn = script("draw_map")
    assert drawn.MAP.read_text(encoding="utf-8") == drawn.drawing()
    for way in (drawn.IN_PROCESS, drawn.SERVED):
        assert [name for name in way if not (ROOT / name).is_file()] == []


def test_every_package_is_on_the_map() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in CODE if "__" not in path.name}
    drawn = {folder for _, folders in script("draw_map").WINGS for folder in folders}
    assert folders == drawn
