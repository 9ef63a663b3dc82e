"""The API page and what an import costs."""

from __future__ import annotations

import ast
import inspect
import json
import pickle  # noqa: TID251  (users may send what is public through it)
import subprocess
import sys
import types
from pathlib import Path

import pytest

import feeder
import feeder.errors
import feeder.job
import feeder.sources

ROOT = Path(__file__).parents[2]
NEVER_FOR_THE_API = {"cupy", "lmdb", "matplotlib", "prometheus_client", "ray", "rich", "torch"}
NOT_AT_IMPORT = NEVER_FOR_THE_API | {"zmq"}
NEEDED = "import numpy, zmq, msgpack, msgspec, xxhash"
IMPORT_MS = 20.0
"""What `import feeder` may take over the packages that it needs."""
MEMBERS = (types.FunctionType, classmethod, property, staticmethod)
PUBLIC = [
    (module.__name__, name)
    for module in (feeder, feeder.sources, feeder.job)
    for name in module.__all__
    if not isinstance(getattr(module, name), types.ModuleType)
]
"""Each public class and function with the module by which users know it."""
ERRORS = [name for name in feeder.errors.__all__ if name != "ReplayWarning"]
FRONT_DOOR = {"Batch", "Call", "Coordinator", "Feed", "Snapshot", "init_data_input_workers"}


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that a fresh interpreter has loaded after `code`."""
    tell = "import sys, json; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    command = [sys.executable, "-c", f"{code}\n{tell}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.process
def test_importing_feeder_is_light() -> None:
    loaded = modules_after("import feeder")
    assert "feeder" in loaded
    assert loaded & NOT_AT_IMPORT == set()


@pytest.mark.process
def test_the_whole_api_needs_no_extra() -> None:
    loaded = modules_after("import feeder\nfor name in feeder.__all__: getattr(feeder, name)")
    assert "workers" not in loaded
    assert loaded & NEVER_FOR_THE_API == set()


@pytest.mark.process
def test_statistics_and_the_status_page_need_no_extra() -> None:
    """All but /metrics, which asks for its extra when it is first looked at."""
    loaded = modules_after(
        "import feeder, numpy\n"
        "coordinator = feeder.init_data_input_workers(['x'], lambda call: [numpy.ones(4)], 4)\n"
        "with coordinator, coordinator.serve_status() as port:\n"
        "    next(coordinator['train'])\n"
        "    coordinator['train'].stats(), coordinator.figures(), port._board.everything()"
    )
    assert "http" in loaded
    assert loaded & NEVER_FOR_THE_API == set()


@pytest.mark.process
def test_a_trainer_loads_no_status_page() -> None:
    loaded = modules_after("import feeder; feeder.connect, feeder.init_data_input_workers")
    assert "http" not in loaded
    assert loaded & NEVER_FOR_THE_API == set()


@pytest.mark.process
def test_importing_feeder_takes_little_time() -> None:
    """By the interpreter's own account, the best of three."""
    assert min(import_ms() for _ in range(3)) <= IMPORT_MS


def import_ms() -> float:
    """Milliseconds that `import feeder` takes where what it needs is there already."""
    command = [sys.executable, "-X", "importtime", "-c", f"{NEEDED}; import feeder"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stderr.splitlines() if line.endswith("| feeder")]
    return float(line.split("|")[1]) / 1e3


def test_public_names_are_sorted_and_complete() -> None:
    errors = {
        name
        for name, value in vars(feeder.errors).items()
        if inspect.isclass(value) and issubclass(value, (feeder.errors.FeedError, Warning))
    }
    assert feeder.__all__ == sorted(set(feeder.__all__))
    assert set(feeder.__all__) >= FRONT_DOOR | errors
    assert set(dir(feeder)) >= set(feeder.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        feeder.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", feeder.__all__)
def test_public_name_is_documented(name: str) -> None:
    value = getattr(feeder, name)
    assert value.__doc__, f"feeder.{name} has no docstring"
    silent = [
        member
        for member, code in vars(value).items()
        if not member.startswith("_")
        and isinstance(code, MEMBERS)
        and not inspect.getdoc(getattr(value, member))
    ]
    assert silent == [], f"feeder.{name} has members without a docstring"


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_a_public_name_reports_its_public_module(module: str, name: str) -> None:
    value = getattr(sys.modules[module], name)
    assert (value.__module__, value.__qualname__) == (module, name)
    assert pickle.loads(pickle.dumps(value)) is value
    assert not isinstance(value, types.FunctionType) or inspect.signature(value).parameters


@pytest.mark.process
def test_a_traceback_shows_the_public_name() -> None:
    """In a process where nobody has looked up `feeder.FetchError`, before or after the error."""
    code = (
        "import feeder\n"
        "def fetch(call): raise RuntimeError('no such file')\n"
        "with feeder.init_data_input_workers(['x'], fetch, 4) as feeds: next(feeds['train'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.startswith("feeder.FetchError: ")], done.stderr
    assert "feeder.workers.errors.FetchError" not in done.stderr


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_pickled_by_its_public_name(name: str) -> None:
    kind = getattr(feeder, name)
    fields = {"worker_id": 3, "call": 7} if issubclass(kind, feeder.FetchError) else {}
    data = pickle.dumps(kind("what happened", **fields), protocol=0)
    assert f"cfeeder\n{name}\n".encode() in data
    again = pickle.loads(data)
    assert (type(again), str(again)) == (kind, "what happened")
    assert {field: getattr(again, field) for field in fields} == fields


@pytest.mark.process
def test_an_error_can_be_unpickled_where_it_was_never_looked_up() -> None:
    data = pickle.dumps(feeder.ChunkError("three rows", column="x", got=3))
    code = f"import pickle; error = pickle.loads({data!r}); print(repr(error), error.column)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "ChunkError('three rows') x\n"


def imported_by(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {a.name for node in nodes if isinstance(node, ast.Import) for a in node.names}
    from_ = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.split(".")[0] for name in plain | from_}


def test_workers_needs_numpy_and_xxhash_alone() -> None:
    files = sorted((ROOT / "workers").rglob("*.py"))
    imported = set().union(*map(imported_by, files))
    assert imported - sys.stdlib_module_names <= {"feeder", "numpy", "xxhash"}
    assert "numpy" in imported
