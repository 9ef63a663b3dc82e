"""What the house asks for that no linter can say: no array of objects is ever unpickled, and the
page of a package names classes that exist."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import feeder
from project import ROOT

ROOMS = ("examples", "feeder", "workers")
LIBRARY = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))


def unpickling(source: str) -> Iterator[int]:
    """Yield the lines that let NumPy unpickle."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
                yield node.lineno


def test_no_array_of_objects_is_unpickled() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in LIBRARY} >= {"feeder", "workers"}
    assert [path for path in LIBRARY if list(unpickling(path.read_text()))] == []
    assert list(unpickling("a = 1\nnp.load(path, allow_pickle=True)")) == [2]
    assert list(unpickling("np.load(path, allow_pickle=False)  # never pickle")) == []


# ---- pages of packages

PAGES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("README.md"))
_CLAIM = re.compile(r"(?:[a-z_][a-z_0-9]*\.)*(?=\w*[a-z])[A-Z][A-Za-z0-9]+(?:\.\w+)*(?:\(.*\))?")


def claims(page: str) -> Iterator[str]:
    """Yield the names of classes that a page has in backticks, each with the modules before it."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    for quoted in re.findall(r"`([^`\n]+)`", text):
        if _CLAIM.fullmatch(quoted):
            modules = re.match(r"(?:[a-z_][a-z_0-9]*\.)*", quoted)[0]
            yield modules + quoted.removeprefix(modules).split(".")[0].split("(")[0]


@cache
def classes_of(folder: Path) -> set[str]:
    """Return the names of the classes and of the types that are defined under a folder."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.ClassDef(name=name):
                    found.add(name)
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    found.add(name)
    return found


def is_there(claim: str, folder: Path) -> bool:
    """Return whether a name is that of a class of the package, a public one or a builtin; or of
    the module that stands before it, of this project or of another."""
    *modules, name = claim.split(".")
    if not modules:
        return name in classes_of(folder) or hasattr(feeder, name) or hasattr(builtins, name)
    ours = "/".join(modules)
    if any(path.with_suffix("").as_posix().endswith("/" + ours) and name in classes_of_file(path)
           for path in LIBRARY):  # fmt: skip
        return True
    try:
        return hasattr(importlib.import_module(".".join(modules)), name)
    except ImportError:
        return False


@cache
def classes_of_file(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }


def test_the_page_of_a_package_names_classes_that_exist() -> None:
    unknown = [
        f"{page.relative_to(ROOT)}: {claim}"
        for page in PAGES
        for claim in claims(page.read_text())
        if not is_there(claim, page.parent)
    ]
    assert unknown == []


@pytest.mark.parametrize(
    ("claim", "is_right"),
    [
        ("Merge", True), ("Batch", True), ("OSError", True), ("threading.Lock", True),
        ("scheduler.Scheduler", True), ("Scheduler", False), ("scheduler.Merge", False),
        ("Merger", False), ("numpy.Arrays", False), ("nothing.Merge", False),
    ],
)  # fmt: skip
def test_a_claim_is_held_against_the_code(claim: str, is_right: bool) -> None:
    page = f"The `{claim}` holds it; `{claim}.take()` too; `num_rows`, `README.md` and `LIMIT` not."
    assert list(claims(page)) == [claim, claim]
    assert is_there(claim, ROOT / "workers" / "stream") is is_right
