"""The form of the code: what it may not call, and how long files and functions may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIBRARY = sorted(
    path for room in ("examples", "feeder", "workers") for path in (ROOT / room).rglob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SPEAKING_ROOMS = ("feeder/cli", "feeder/__main__.py")
"""Where the product speaks to a terminal: only there may it print."""
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 50
PICKLERS = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def faults(source: str, *, may_print: bool = False) -> list[str]:
    """Return what is wrong with the form of a module."""
    found = list(_wrong_lines(source))
    for node in ast.walk(ast.parse(source)):
        found += [f"line {node.lineno}: {fault}" for fault in _wrong_node(node)]
    return [fault for fault in found if not (may_print and fault.endswith("prints"))]


def _wrong_lines(source: str) -> Iterator[str]:
    lines = source.splitlines()
    if len(lines) > MAX_FILE_LINES:
        yield f"has {len(lines)} lines"
    for number, line in enumerate(lines, 1):
        if "TODO" in line or "FIXME" in line:
            yield f"line {number}: leaves work undone"


def _code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring, which may be as long as it needs."""
    lines = function.end_lineno - function.lineno + 1
    match function.body[0]:
        case ast.Expr(value=ast.Constant(value=str())) as docstring:
            lines -= docstring.end_lineno - docstring.lineno + 1
    return lines


def _wrong_node(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            if (lines := _code_lines(node)) > MAX_FUNCTION_LINES:
                yield f"{node.name} has {lines} lines"
        case ast.Call(func=ast.Name(id="print")):
            yield "prints"
        case ast.Call(func=ast.Name(id="sleep") | ast.Attribute(attr="sleep")):
            yield "sleeps"
        case ast.ExceptHandler(type=None):
            yield "catches everything"
        case ast.Import(names=names) if PICKLERS & {alias.name.split(".")[0] for alias in names}:
            yield "pickles"
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLERS:
            yield "pickles"
        case ast.keyword(arg="allow_pickle", value=value) if ast.unparse(value) != "False":
            yield "pickles"


@pytest.mark.parametrize("path", LIBRARY, ids=name_of)
def test_library_keeps_the_rules(path: Path) -> None:
    may_print = name_of(path).startswith(SPEAKING_ROOMS)
    assert faults(path.read_text(), may_print=may_print) == []


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_tests_do_not_sleep(path: Path) -> None:
    assert [fault for fault in faults(path.read_text()) if fault.endswith("sleeps")] == []


def test_every_room_is_looked_at() -> None:
    assert {name_of(path).split("/")[0] for path in LIBRARY} == {"examples", "feeder", "workers"}


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("import time\ntime.sleep(1)", "line 2: sleeps"),
        ("from time import sleep\nsleep(1)", "line 2: sleeps"),
        ("print('fed')", "line 1: prints"),
        ("import pickle", "line 1: pickles"),
        ("import os, pickle", "line 1: pickles"),
        ("from pickle import loads", "line 1: pickles"),
        ("np.load(path, allow_pickle=True)", "line 1: pickles"),
        ("try:\n    f()\nexcept:\n    pass", "line 3: catches everything"),
        ("# TODO: all of it", "line 1: leaves work undone"),
        ("def f():\n" + "    f()\n" * 50, "line 1: f has 51 lines"),
        ("f()\n" * 801, "has 801 lines"),
    ],
)
def test_a_broken_rule_is_seen(source: str, fault: str) -> None:
    assert faults(source) == [fault]


def test_what_keeps_the_rules_passes() -> None:
    longest = 'def f():\n    """One.\n\n    Two.\n    """\n' + "    f()\n" * 49
    harmless = "np.load(path, allow_pickle=False)  # never pickle\n"
    assert faults(longest + harmless + "f()\n" * (800 - 55)) == []
    assert faults("print('fed')", may_print=True) == []
