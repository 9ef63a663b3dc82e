"""Each statement of the engine's threads as a point at which another thread may go on.

What is read or written without a lock is seen by no lock. So the functions of those files whose
objects several threads use get a call between their statements, for as long as that is asked for.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from project import ROOT

SHARED = (
    "workers.fetch.queue", "workers.fetch.bound", "workers.fetch.fetcher", "workers.fetch.tickets",
    "workers.fetch.threads", "workers.enqueuer", "workers.pipeline", "workers.stream.placement",
    "workers.stream.loans", "devices.slots", "devices.host", "feeds.device_feed", "feeds.stream",
    "waking",
)  # fmt: skip
_POINT = "_point_of_a_world"


@contextmanager
def between_statements(
    point: Callable[[], None], texts: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Call `point` before each statement of these files; how many functions do. `texts` has other
    texts of files, by their path in the project."""
    before: list[tuple[FunctionType, CodeType]] = []
    for name in SHARED:
        module = importlib.import_module(f"feeder.{name}")
        path = Path(str(module.__file__)).resolve()
        text = (texts or {}).get(str(path.relative_to(ROOT))) or path.read_text()
        setattr(module, _POINT, point)
        codes = {code.co_qualname: code for code in _codes(_pointed(text, path))}
        for function in _functions(module):
            code = codes[function.__code__.co_qualname]
            before.append((function, function.__code__))
            function.__code__ = code
    try:
        yield len(before)
    finally:
        for function, code in before:
            function.__code__ = code


def _pointed(text: str, path: Path) -> CodeType:
    tree = _Points().visit(ast.parse(text))
    return compile(ast.fix_missing_locations(tree), str(path), "exec")


class _Points(ast.NodeTransformer):
    """Puts a call before each statement of a function."""

    _is_in_function = False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        outside = self._is_in_function
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            self._is_in_function = isinstance(node, ast.FunctionDef)
        super().generic_visit(node)
        for field in ("body", "orelse", "finalbody") if self._is_in_function else ():
            body = getattr(node, field, None)
            if isinstance(body, list):
                setattr(node, field, [one for each in body for one in self._before(each)])
        self._is_in_function = outside
        return node

    def _before(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        # `global` and `nonlocal` stand before any use, and there are none to stop at.
        if not isinstance(statement, ast.Global | ast.Nonlocal):
            call = ast.Call(ast.Name(_POINT, ast.Load()), [], [])
            yield ast.copy_location(ast.Expr(call), statement)
        yield statement


def _codes(code: CodeType) -> Iterator[CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield inner
            yield from _codes(inner)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    owners = [module, *(one for one in vars(module).values() if inspect.isclass(one))]
    for owner in owners:
        if owner is not module and owner.__module__ not in (module.__name__, "feeder"):
            continue
        for found in vars(owner).values():
            function: Any = found.fget if isinstance(found, property) else found
            function = inspect.unwrap(function) if callable(function) else function
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield function
