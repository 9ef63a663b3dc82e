"""Finds code by the definition that it is in, and by its tokens."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""
    (?P<skip>\s+|\#[^\n]*|\\\n)
    |(?P<text>[rRbBfFuU]{0,2}(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}
      |"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    |(?P<word>\w+)
    |(?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_CLOSING = (")", "]", "}")


@dataclass(frozen=True, slots=True)
class Token:
    """A word, a text or a sign, and where it lies in its source."""

    text: str
    start: int
    end: int


def tokens_of(source: str) -> list[Token]:
    """Return the tokens of a piece of Python, which need not be whole: Python's own tokenizer
    refuses a bracket that is not closed."""
    found: list[Token] = []
    for match in _TOKEN.finditer(source):
        if match.lastgroup == "skip":
            continue
        if match[0] in _CLOSING and found and found[-1].text == ",":
            # A formatter puts a comma there where it breaks the line, and takes it away again.
            found.pop()
        found.append(Token(_alike(match), match.start(), match.end()))
    return found


def _alike(match: re.Match[str]) -> str:
    """Return a token as it is compared: a text by its value, whichever quotes it stands in."""
    if match.lastgroup == "text" and not match[0][0].isalpha():
        return repr(ast.literal_eval(match[0]))
    return match[0]


def places_of(source: str, symbol: str) -> list[tuple[int, int]]:
    """Return where the definitions of that qualified name lie; more than one for a property and
    its setter."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    return [
        (lines[node_start - 1], lines[node_end])
        for name, node_start, node_end in _definitions(ast.parse(source), "")
        if name == symbol
    ]


def _definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Yield the qualified name, first and last line of all that is defined in a node."""
    for node in ast.iter_child_nodes(parent):
        names: list[str] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.Assign(targets=targets):
                names = [one.id for one in targets if isinstance(one, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)):
                names = [name]
        for name in names:
            decorators = getattr(node, "decorator_list", ())
            first = min([node.lineno, *(one.lineno for one in decorators)])  # type: ignore[attr-defined]
            yield prefix + name, first, node.end_lineno  # type: ignore[attr-defined]
        is_scope = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        yield from _definitions(node, f"{prefix}{node.name}." if is_scope else prefix)


def find(source: str, symbol: str, code: str) -> list[tuple[int, int]]:
    """Return where code lies within the definitions of a name."""
    wanted = [token.text for token in tokens_of(code)]
    found = []
    for start, end in places_of(source, symbol):
        tokens = tokens_of(source[start:end])
        texts = [token.text for token in tokens]
        for i in range(len(texts) - len(wanted) + 1):
            if texts[i : i + len(wanted)] == wanted:
                found.append((start + tokens[i].start, start + tokens[i + len(wanted) - 1].end))
    return found


def replaced(source: str, place: tuple[int, int], code: str) -> str:
    """Return the source with other code at a place: its first line goes where the place begins,
    and the others keep their distance from the first."""
    start, end = place
    first, *others = code.strip("\n").split("\n")
    shift = _indent(source[source.rfind("\n", 0, start) + 1 :]) - _indent(first)
    lines = [first.lstrip(), *(" " * (_indent(one) + shift) + one.lstrip() for one in others)]
    return source[:start] + "\n".join(lines) + source[end:]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
