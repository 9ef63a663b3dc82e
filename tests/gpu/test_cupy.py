"""What is used of CuPy is there, and its arrays keep what they must; this needs CuPy, no GPU."""

from __future__ import annotations

import ast
import gc
import importlib.util
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from feeder.devices.cuda import cupydriver, runtime
from feeder.devices.cuda.leases import Root
from needs import NO_GPU

ADDRESS = 0x100000


@pytest.fixture
def cupy() -> Any:
    if importlib.util.find_spec("cupy") is None:
        pytest.skip(NO_GPU + "CuPy is not installed")
    return cupydriver.import_cupy("cuda:0")


def used(owner: str) -> set[str]:
    """Return the attributes of `self.<owner>` that the driver uses."""
    trees = [ast.parse(inspect.getsource(module)) for module in (cupydriver, runtime)]
    return {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == owner
    }


def test_what_is_used_of_it_is_there(cupy: Any) -> None:
    assert len(used("_runtime")) >= 12 and len(used("_cuda")) >= 5
    assert [name for name in used("_runtime") if not hasattr(cupy.cuda.runtime, name)] == []
    assert [name for name in used("_cuda") if not hasattr(cupy.cuda, name)] == []
    for name in ("malloc", "free", "hostRegister", "hostUnregister", "CUDARuntimeError"):
        assert hasattr(cupy.cuda.runtime, name)
    assert cupy.cuda.runtime.hostAllocPortable == runtime.PORTABLE
    assert issubclass(cupy.cuda.runtime.CUDARuntimeError, RuntimeError)


def lend(cupy: Any) -> tuple[Any, Callable[[], bool]]:
    """Return an array over memory that nobody has, and what tells whether its root lives."""
    root = Root(None)
    memory = cupy.cuda.UnownedMemory(ADDRESS, 4096, root, 0)
    array = cupy.ndarray((4, 8), np.dtype("f4"), cupy.cuda.MemoryPointer(memory, 64))
    reference = weakref.ref(root)
    return array, lambda: reference() is not None


VIEWS: dict[str, Callable[[Any], Any]] = {
    "the array": lambda array: array,
    "a slice": lambda array: array[1:],
    "a slice of a slice": lambda array: array[1:][::2],
    "a row": lambda array: array[2],
    "a column": lambda array: array[:, 1],
    "a new axis": lambda array: array[None],
    "transpose": lambda array: array.T,
    "reshape": lambda array: array.reshape(8, 4),
    "ravel": lambda array: array.ravel(),
    "bytes": lambda array: array.view(np.uint8),
    "its memory": lambda array: array.data,
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_keeps_the_root_and_nothing_else_does(cupy: Any, view: Callable[[Any], Any]) -> None:
    array, lives = lend(cupy)
    kept = view(array)
    del array
    gc.collect()
    assert lives()
    del kept
    gc.collect()
    assert not lives()
