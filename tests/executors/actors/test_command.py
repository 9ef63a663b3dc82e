"""Commands on a cluster: `feeder serve --executor ray:N`, and the example."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import feeder
from feeds import assert_same, expected, note
from fetches import make_fetch
from lineage import WAIT_S
from project import ROOT, TESTS, printed

pytestmark = pytest.mark.process

MODULE = """
from feeds import make
from fetches import make_fetch

def feeds():
    return make(make_fetch("seek", "ragged"), epochs=3, timeout=60.0)
"""


def test_a_server_runs_on_actors_and_ends_with_them(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "on_actors.py").write_text(MODULE)
    path = os.pathsep.join(map(str, (ROOT, TESTS, tmp_path)))
    env = {**os.environ, "PYTHONPATH": path, "RAY_ADDRESS": cluster.address}
    address = f"ipc://{tmp_path}/feed.sock"
    command = [
        sys.executable, "-m", "feeder", "serve", "on_actors:feeds", "--bind", address,
        "--executor", "ray:2",
    ]  # fmt: skip
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            with feeder.connect(address) as consumer:
                got = [note(batch) for batch in consumer]
            server.send_signal(signal.SIGTERM)
            assert server.wait(WAIT_S) == 0
        finally:
            server.kill()
    assert_same(got, expected(make_fetch("seek", "ragged"), pure=False, epochs=3))


# ---- the example


def run(cluster: Any, *arguments: str) -> list[str]:
    """Run the example; the steps that it says."""
    example, address = ROOT / "examples/ray_fetch/train.py", cluster.address
    lines = printed(example, *arguments, RAY_ADDRESS=address).splitlines()
    return [line for line in lines if line.startswith("step ")]


def test_the_example_goes_on_where_it_was_stopped(cluster: Any, tmp_path: Path) -> None:
    position = str(tmp_path / "position")
    whole = run(cluster, str(tmp_path / "none"))
    assert len(whole) == 200
    first = run(cluster, position, "--stop-at", "40")
    rest = run(cluster, position, "--actors", "1-3")
    assert first + rest == whole
