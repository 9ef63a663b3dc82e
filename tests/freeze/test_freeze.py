"""Nothing that users or other versions see has changed by a byte, but by a wanted change.

`python -m freeze.write NAME` in the folder `tests` writes a golden file anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from freeze.golden import FOLDER, FROZEN, OF_FRAMEWORKS, as_text, changes, kept

NEEDS = {
    "checkpoints": ("lmdb",), "sources": ("lmdb", "PIL", "google.protobuf"),
    "helps": ("lmdb", "PIL"),
}  # fmt: skip


def test_every_golden_file_is_made_anew() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(FROZEN)


@pytest.mark.process
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.needs(*NEEDS.get(name, ())))
        for name in FROZEN
        if name not in OF_FRAMEWORKS
    ],
)
def test_is_as_it_was(name: str, tmp_path: Path) -> None:
    made = FROZEN[name](tmp_path)
    assert changes(json.loads(kept(name)), made) == []
    assert as_text(made) == kept(name)


def values(facts: Any, *path: Any) -> Iterator[tuple[Any, ...]]:
    """The path to every value of a golden file."""
    if isinstance(facts, dict | list):
        for key in facts if isinstance(facts, dict) else range(len(facts)):
            yield from values(facts[key], *path, key)
    else:
        yield path


@pytest.mark.served  # as much work as feeds that are served
@pytest.mark.parametrize("name", FROZEN)
def test_any_other_value_is_told_by_its_place(name: str) -> None:
    golden, other = json.loads(kept(name)), json.loads(kept(name))
    for *path, last in values(golden):
        inner = other
        for key in path:
            inner = inner[key]
        was = inner[last]
        inner[last] = f"{was}0"
        (line,) = changes(golden, other)
        assert line.startswith("".join(f"/{key}" for key in (*path, last)) + ": ")
        inner[last] = was


@pytest.mark.parametrize("name", FROZEN)
def test_what_comes_or_goes_is_told(name: str) -> None:
    golden = json.loads(kept(name))
    first = next(iter(golden))
    fewer = {key: value for key, value in golden.items() if key != first}
    for one, another in ((golden, fewer), (fewer, golden)):
        assert [line for line in changes(one, another) if line.startswith(f"/{first}")]
    reordered = {**fewer, first: golden[first]}
    assert changes(golden, reordered) == [": in another order"]
