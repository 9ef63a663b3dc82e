"""What the design's pages name is there: pages, files, classes, tests; and the map is what runs."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import reading, serving
from docs.pages import PAGES as READ
from docs.pages import ROOT, section, table

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
def names_in(paths: tuple[Path, ...], kind: type[ast.AST]) -> frozenset[str]:
    """The names of all definitions of a kind."""
    return frozenset(
        node.name  # type: ignore[attr-defined]
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kind)
    )


@cache
def words_of_code() -> frozenset[str]:
    return frozenset(word for path in CODE for word in re.findall(r"\w+", path.read_text("utf-8")))


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = {}
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node)
    return found


@cache
def attributes(name: str) -> frozenset[str]:
    """What the classes of this name, and those that they are made from, have."""
    found: set[str] = set()
    for made in classes().get(name, []):
        for node in ast.walk(made):
            match node:
                case ast.FunctionDef(name=attribute) | ast.Attribute(attr=attribute):
                    found.add(attribute)
                case ast.AnnAssign(target=ast.Name(id=attribute)) | ast.Name(id=attribute):
                    found.add(attribute)
        for base in made.bases:
            found |= attributes(ast.unparse(base).split(".")[-1].split("[")[0])
    return frozenset(found)


def is_there(name: str, attribute: str) -> bool:
    """Whether there is such a class, or such an attribute of it. What is of Python or of a library
    is known where the code uses it."""
    if attribute and name in classes():
        return attribute in attributes(name)
    return {name, attribute or name} <= words_of_code()


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
    tests = names_in(tuple(TESTS), ast.FunctionDef)
    wrong += [name for name in re.findall(r"`(test_\w+)`", text) if name not in tests]
    return wrong + [
        name for name, attribute in _CLASS.findall(text) if not is_there(name, attribute)
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_is_named_is_there(page: Path) -> None:
    assert missing(page) == []


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_files_that_readers_are_sent_to_are_there(page: Path) -> None:
    assert missing_files(page.read_text(encoding="utf-8"), page.parent) == []


@pytest.mark.parametrize(
    "text",
    [
        "[x](no-such-page.md)",
        "[x](page.md#no-such-heading)",
        "`workers/fetch/no_such_file.py`",
        "`test_no_such_test_is_there`",
        "`NoSuchClass`",
        "`Nosuchclass`",
        "`ThreadGroup.no_such_method`",
        "`ThreadGroup.no_such_method()`",
    ],
)
def test_what_is_not_there_is_seen(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# A heading\n\n[up](#a-heading) `Merge` `ThreadGroup` {text}\n")
    assert len(missing(page)) == 1


def test_the_page_of_a_package_names_its_files() -> None:
    files = [(page, path.name) for page in PACKAGES for path in page.parent.glob("*.py")
             if not path.name.startswith("__")]  # fmt: skip
    assert [(page, name) for page, name in files if name not in text_of(page)] == []


def test_a_rule_has_its_test() -> None:
    pages = [page for page in DESIGN if page.stem not in ("README", "experiments")]
    text = "\n\n".join(map(text_of, pages))
    rules = re.findall(r"^\*\*.+?(?=\n\n|\Z)", text, re.MULTILINE | re.DOTALL)
    assert len(rules) >= 5 * len(pages)
    assert [rule for rule in rules if "`test_" not in rule] == []


def test_a_record_has_its_parts() -> None:
    for record in RECORDS:
        text = record.read_text(encoding="utf-8")
        status = rf"# {int(record.name[:4])}\. .+\n\nStatus: (accepted|proposed|superseded .*\]\(0)"
        assert re.match(status, text), record.name
        headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
        assert headings == ["Context", "Decision", "Consequences", "Tried"], record.name


def test_records_are_numbered_and_listed() -> None:
    assert [int(record.name[:4]) for record in RECORDS] == list(range(1, len(RECORDS) + 1))
    rows = table((DOCS / "adr/README.md").read_text(encoding="utf-8"))
    titles = [re.match(r"# \d+\. (.+)", record.read_text(encoding="utf-8")) for record in RECORDS]
    assert [row[1] for row in rows] == [title[1] for title in titles if title]
    assert [row[0] for row in rows] == [
        f"[{i}]({record.name})" for i, record in enumerate(RECORDS, 1)
    ]


# ---- the map


def draw_map() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_map", DOCS / "draw_map.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_map_is_of_the_modules_that_there_are() -> None:
    """`scripts/docs map` draws it anew."""
    drawn = draw_map()
    assert drawn.MAP.read_text(encoding="utf-8") == drawn.drawing()
    for way in (drawn.IN_PROCESS, drawn.SERVED):
        assert [name for name in way if not (ROOT / name).is_file()] == []


def test_the_ways_are_as_long_as_the_page_says() -> None:
    drawn = draw_map()
    rows = table(section(DOCS / "design/README.md", "Before and after"))
    told = {row[0]: row[1:3] for row in rows if row[0].endswith("on the way")}
    ways = {
        "in process": (drawn.IN_PROCESS_BEFORE, drawn.IN_PROCESS),
        "served": (drawn.SERVED_BEFORE, drawn.SERVED),
    }
    assert told == {
        f"{name}, files on the way": [str(len(way)) for way in both] for name, both in ways.items()
    }
    assert len(drawn.IN_PROCESS) <= 20
    assert len(drawn.SERVED) <= 30


def test_every_package_is_on_the_map() -> None:
    folders = {path.parent.relative_to(ROOT).as_posix() for path in CODE if "__" not in path.name}
    drawn = {folder for _, folders in draw_map().WINGS for folder in folders}
    assert folders == drawn


def fetch(call: feeder.Call) -> list[np.ndarray]:
    return [np.full((7, 100), call.index)]


def make() -> feeder.Coordinator:
    return feeder.init_data_input_workers(["x"], fetch, 32, coordinator=feeder.Coordinator())


def files_that_run(take: Callable[[], Any]) -> set[str]:
    """The files of the code of which some function runs in any thread while `take` is called, from
    threads that are started after this began."""
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _arg: object) -> None:
        if event == "call":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        take()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    paths = {Path(name).resolve() for name in seen if name.endswith(".py")}
    return {path.relative_to(ROOT).as_posix() for path in paths if path.is_relative_to(ROOT)}


def take_in_process() -> None:
    with make() as coordinator:
        for _ in range(100):
            next(coordinator["train"])


def take_served() -> None:
    with serving(make) as server, reading(server) as consumer:
        for _ in range(100):
            next(consumer)


@pytest.mark.served
@pytest.mark.parametrize(
    ("way", "take"),
    [
        ("IN_PROCESS", take_in_process),
        pytest.param("SERVED", take_served, marks=pytest.mark.served),
    ],
)
def test_what_is_on_the_way_runs(way: str, take: Callable[[], None]) -> None:
    ran = files_that_run(take)
    assert [name for name in getattr(draw_map(), way) if name not in ran] == []
