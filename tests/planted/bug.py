"""Planted bugs: mistakes that somebody could make in the library, and who is there to find them.

They are data, in `bugs.toml`. A bug is planted in the text of a file, found by the definition that
it is in and by its tokens, so that other code of the file may move and may look the same.
"""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import unwrap
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any

from project import ROOT


class PlantError(Exception):
    """A bug cannot be planted, or the tests cannot be run."""


@dataclass(frozen=True, slots=True)
class Bug:
    """A mistake, and who has to find it."""

    name: str
    at: str
    """The file, from the project's folder, and the definition by its qualified name, or the name of
    a constant: `workers/stream/merge.py: Merge._round`."""
    old: str
    """Code that is in this definition exactly once. Indentation, line breaks and the commas before
    a closing bracket do not count."""
    new: str
    """What takes its place, put at the indentation of the line that is replaced."""
    tests: tuple[str, ...] = ()
    """Node ids of pytest. Each of them, run by itself, has to fail; of a parametrised test one
    case."""
    by: tuple[str, ...] = ()
    """Who else finds it: `simulation`, `simulation of epochs`, `simulation of sources`, `chaos`,
    `schedules`."""
    seed: int | None = None
    """A seed with which the simulator finds it, where one is known."""

    @property
    def file(self) -> str:
        return self.at.partition(": ")[0]

    @property
    def symbol(self) -> str:
        return self.at.partition(": ")[2]


def read() -> dict[str, Bug]:
    """All planted bugs by their names."""
    found = tomllib.loads(Path(__file__).with_name("bugs.toml").read_text())["bugs"]
    bugs = [Bug(**one | {key: tuple(one.get(key, ())) for key in ("tests", "by")}) for one in found]
    assert len({bug.name for bug in bugs}) == len(bugs), "a name twice"
    return {bug.name: bug for bug in bugs}


BUGS = read()


def planted_text(bug: Bug, folder: Path = ROOT) -> str:
    """Return the text of the bug's file with the bug in it; raises `PlantError`."""
    text = (folder / bug.file).read_text()
    found = find(text, bug.symbol, bug.old)
    if len(found) != 1:
        raise PlantError(
            f"{bug.name}: {bug.symbol} of {bug.file} holds {bug.old!r} {len(found)} times, "
            "expected once"
        )
    start, end = found[0]
    line = text[text.rfind("\n", 0, start) + 1 :]
    indent = " " * (len(line) - len(line.lstrip(" ")))
    return text[:start] + bug.new.replace("\n", "\n" + indent) + text[end:]


def find(text: str, symbol: str, code: str) -> list[tuple[int, int]]:
    """Return where code lies within the definitions of a name: more than one for a property and its
    setter."""
    words = re.findall(r"\w+|[^\w\s]", re.sub(r",(?=\s*[)\]}])", "", code))
    # A formatter puts a comma before a closing bracket where it breaks the line.
    tokens = [r",?\s*" * (word in ")]}") + re.escape(word) for word in words]
    # No word is found within a longer one.
    first, last = (r"(?<!\w)" * words[0][0].isalnum(), r"(?!\w)" * words[-1][-1].isalnum())
    pattern = re.compile(first + r"\s*".join(tokens) + last)
    return [
        match.span()
        for span in _spans(text).get(symbol, ())
        for match in pattern.finditer(text, *span)
    ]


@cache
def _spans(text: str) -> dict[str, list[tuple[int, int]]]:
    """Where all that is defined in a text lies, by its qualified name."""
    starts = [0, *(match.end() for match in re.finditer(r"\n", text)), len(text)]
    found: dict[str, list[tuple[int, int]]] = {}

    def look(parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            name, first = "", getattr(node, "lineno", 0)
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    first = min([first, *(one.lineno for one in node.decorator_list)])
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name))
                ):
                    pass
            if name:
                last = starts[node.end_lineno or first]  # type: ignore[attr-defined]
                found.setdefault(prefix + name, []).append((starts[first - 1], last))
            is_scope = isinstance(node, ast.FunctionDef | ast.ClassDef)
            look(node, f"{prefix}{name}." if is_scope else prefix)

    look(ast.parse(text), "")
    return found


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """The bug is in this process: its function has the code that it has in the planted text."""
    name = bug.file.removesuffix(".py").replace("/", ".")
    # Under its bare name a module of the engine would be another one.
    module = importlib.import_module(f"feeder.{name}" if name.startswith("workers.") else name)
    found: Any = attrgetter(bug.symbol)(module)
    function: Any = unwrap(found.fget if isinstance(found, property) else found)
    code = compile(planted_text(bug), str(ROOT / bug.file), "exec")
    for name in bug.symbol.split("."):
        inner = [one for one in code.co_consts if isinstance(one, CodeType)]
        (code,) = (one for one in inner if one.co_name == name)
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before
