"""What an import costs: seen in one fresh interpreter, which imports more and more."""

from __future__ import annotations

import json
import pickle  # noqa: TID251  (users may send what is public through it)
import subprocess
import sys
from typing import Any

import pytest

import feeder
from project import ROOT

pytestmark = [pytest.mark.process, pytest.mark.fresh]

NEVER_FOR_THE_API = {
    *("PIL", "cupy", "lmdb", "matplotlib", "opentelemetry", "prometheus_client", "ray", "rich"),
    *("simplejpeg", "torch", "workers"),
}
IMPORT_MS = 20.0
"""What `import feeder` may take of CPU over the packages that it needs, the best of three."""

STEPS = {
    "help": "import feeder.cli; feeder.cli._make_parser([]).format_help()",
    "feeder": "import feeder",
    "a trainer": "feeder.connect, feeder.init_data_input_workers",
    "jobs": "import feeder.job",
    "sources": "from feeder.sources import caffe_lmdb, image_folder",
    "the API": "for name in feeder.__all__: getattr(feeder, name)",
    # All but /metrics, which asks for its extra when it is first looked at.
    "the status page": """
import numpy
coordinator = feeder.init_data_input_workers(['x'], lambda call: [numpy.ones(4)], 4)
with coordinator, coordinator.serve_status() as port:
    next(coordinator['train'])
    coordinator['train'].stats(), coordinator.figures(), port._board.everything()
""",
}
CHILD = f"""
import json, sys, time
loaded, scope = {{}}, {{}}
for name, code in {STEPS!r}.items():
    exec(code, scope)
    loaded[name] = sorted(sys.modules)
import numpy, zmq, msgpack, msgspec, xxhash
took = []
for _ in range(3):
    for name in [name for name in sys.modules if name.partition('.')[0] == 'feeder']:
        del sys.modules[name]
    began = time.process_time()
    import feeder
    took.append(1e3 * (time.process_time() - began))
print(json.dumps([loaded, took]))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def told() -> Any:
    """What a fresh interpreter has loaded after each step, and how long `import feeder` took."""
    done = run(CHILD)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_step_loads_what_it_needs_and_no_extra(told: Any) -> None:
    loaded = {step: set(modules) for step, modules in told[0].items()}
    tops = {step: {name.partition(".")[0] for name in loaded[step]} for step in loaded}
    assert not tops["the status page"] & NEVER_FOR_THE_API  # nor any step before it
    assert not tops["help"] & {"msgspec", "numpy", "zmq"}
    assert "zmq" not in tops["feeder"]
    assert "http" not in tops["a trainer"] and "http" in tops["the status page"]
    assert "feeder.workers.sources" not in loaded["a trainer"]
    assert "feeder.workers.sources" in loaded["sources"]


def test_importing_feeder_takes_little_time(told: Any) -> None:
    assert min(told[1]) <= IMPORT_MS


def test_errors_have_their_public_names_where_nobody_has_looked_them_up() -> None:
    """One that is unpickled, and one in a traceback."""
    data = pickle.dumps(feeder.ChunkError("three rows", column="x", got=3))
    done = run(
        f"import pickle; error = pickle.loads({data!r}); print(repr(error), error.column)\n"
        "import feeder\n"
        "def fetch(call): raise RuntimeError('no such file')\n"
        "with feeder.init_data_input_workers(['x'], fetch, 4) as feeds: next(feeds['train'])\n"
    )
    assert done.stdout == "ChunkError('three rows') x\n"
    assert "\nfeeder.FetchError: " in done.stderr
    assert "feeder.workers.errors.FetchError" not in done.stderr
