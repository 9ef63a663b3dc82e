"""What the house asks for that no linter can say: no array of objects is ever unpickled."""

from __future__ import annotations

import ast
from collections.abc import Iterator

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
