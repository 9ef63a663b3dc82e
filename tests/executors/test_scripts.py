"""Functions of a script, or of a notebook, run in processes that never run the script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from feeder import Processes
from feeds import assert_same, drain
from project import ROOT, TESTS, printed
from remote import plain

pytestmark = [pytest.mark.fresh, pytest.mark.process]

WAIT_S = 60.0

HEAD = """
import numpy as np
import feeder
from feeder import Call
from feeder.workers import sources

print("the script runs")

def run(fetch, names=("x",), executor=feeder.Processes(2), **settings):
    feeder.init_data_input_workers(
        list(names), fetch, 4, num_worker_threads=2, timeout=30, executor=executor,
        coordinator=(coordinator := feeder.Coordinator()), **settings,
    )
    with coordinator:
        return [batch["x"].tolist() for batch in coordinator["train"]]
"""

TAIL = {
    "a function": """
FACTOR = 3

def fetch(call: Call):
    if call.index == 5:
        raise StopIteration
    return [FACTOR * np.arange(2) + 10 * call.index]
""",
    "a lambda": """
fetch = lambda call: next(iter(())) if call.index == 5 else [np.arange(2) + 10 * call.index]
""",
    "a closure": """
def make(factor):
    def fetch(call: Call):
        if call.index == 5:
            raise StopIteration
        return [factor * np.arange(2) + 10 * call.index]
    return fetch

fetch = make(7)
""",
    "an object with cursors": """
class Fetch:
    def __init__(self):
        self.at = {}
    def __call__(self, worker_id, batch_size):
        at = self.at.get(worker_id, 0)
        if at == 5:
            raise StopIteration
        self.at[worker_id] = at + 1
        return [np.arange(2) + 10 * at + 1000 * worker_id]
    def cursor(self, worker_id):
        return self.at.get(worker_id, 0)
    def seek(self, worker_id, cursor):
        self.at[worker_id] = cursor

fetch = Fetch()
again = Fetch()
""",
    "a dataset": """
class Dataset:
    def __len__(self):
        return 10
    def __getitem__(self, i):
        return (i * i,)

fetch = sources.records(Dataset())
""",
}

RUN = """
threads = run(globals().pop("again", fetch), executor=None)
print(run(fetch) == threads != [])
"""

REFUSED = """
try:
    run(fetch)
except feeder.ConfigError as error:
    print(error)
"""


def run_script(folder: Path, text: str, flags: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """Run a script; returns its exit status and output."""
    path = folder / "script.py"
    path.write_text(text)
    places = [str(ROOT), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *flags, str(path)],
        env={**os.environ, "PYTHONPATH": ":".join(places)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.needs("cloudpickle")
def test_an_unguarded_script(tmp_path: Path) -> None:
    """Each function of it, and it runs once."""
    text = HEAD + "".join(tail + RUN for tail in TAIL.values())
    status, out, err = run_script(tmp_path, text)
    assert (status, out, err) == (0, "the script runs\n" + "True\n" * len(TAIL), "")


def test_without_cloudpickle_the_ways_out_are_told(tmp_path: Path) -> None:
    head = "import sys\nsys.modules['cloudpickle'] = None\n"
    text = head + HEAD + "".join(tail + REFUSED for tail in TAIL.values())
    status, out, err = run_script(tmp_path, text)
    assert (status, err) == (0, "")
    _, *errors = out.splitlines()
    assert len(errors) == len(TAIL)
    for error in errors:
        assert error.startswith("fetch_fun ")
        assert "stands in the script itself, or in a notebook; there are three ways out" in error


def test_a_module_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import numpy as np\n"
        "def fetch(call):\n"
        "    if call.index == 5:\n        raise StopIteration\n"
        "    return [np.arange(2) + 10 * call.index]\n"
    )
    for how in ("from beside import fetch\n", "fetch = 'beside:fetch'\n"):
        text = HEAD + how + "from beside import fetch as again\n" + RUN
        status, out, err = run_script(tmp_path, text)
        assert (status, out, err) == (0, "the script runs\nTrue\n", "")


def test_processes_have_the_flags_of_the_interpreter(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text(
        "import sys\nimport numpy as np\n"
        "def fetch(call):\n"
        "    if call.index == 1:\n        raise StopIteration\n"
        "    return [np.array([sys.flags.optimize, len(sys.warnoptions)])]\n"
    )
    text = HEAD + "from beside import fetch\nprint(run(fetch))\n"
    status, out, err = run_script(tmp_path, text, ("-O", "-W", "error::ImportWarning"))
    assert (status, out, err) == (0, "the script runs\n[[1, 1]]\n", "")


def test_a_working_directory_with_names_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "socket", "typing"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('another one')\n")
    monkeypatch.chdir(tmp_path)
    # Where the script looks for modules its processes do, too: not in this directory.
    places = [place for place in sys.path if place]
    monkeypatch.setattr(sys, "path", places)
    assert_same(drain(plain, executor=Processes(1)), drain(plain))


CLOSED = """
import os
for descriptor in {closed}:
    os.close(descriptor)
from feeder import Processes
from feeds import drain
from remote import ROWS, Big, warned
one = {{"input_blob_names": ["x"], "batch_size": ROWS}}
got = drain(warned, executor=Processes(2), **one)
os._exit(0 if got == drain(Big(6), **one) else 3)
"""


@pytest.mark.parametrize("closed", ((0,), (1, 2), (0, 1, 2)), ids=str)
def test_a_script_without_standard_files(closed: tuple[int, ...], tmp_path: Path) -> None:
    # What is opened there gets these numbers, and what a library writes to them.
    status, _, _ = run_script(tmp_path, CLOSED.format(closed=closed))
    assert status == 0


NOTEBOOK = """
import sys, nbclient, nbformat
cells = [nbformat.v4.new_code_cell(text) for text in sys.argv[1:]]
notebook = nbformat.v4.new_notebook(cells=cells)
nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
# What one call prints comes in several outputs if the kernel sends in between, as every 0.2 s.
print("".join([printed["text"] for printed in notebook.cells[-1].outputs]))
"""


@pytest.mark.needs("cloudpickle", "nbclient", "ipykernel")
def test_a_notebook(tmp_path: Path) -> None:
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
    told = printed(
        "-c", NOTEBOOK, HEAD, TAIL["a function"], RUN, limit_s=WAIT_S, PYTHONPATH=path,
        IPYTHONDIR=str(tmp_path),
    )  # fmt: skip
    assert told.strip() == "True"
