"""Places for checkpoints: a folder, memory, and an S3 server in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_numbers = count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of a server, with a bucket named 'bucket'; one for all tests."""
    command = [sys.executable, "-m", "objects.server"]
    env = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    with subprocess.Popen(
        command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        host, port = process.stdout.readline().split()
        address = f"http://{host}:{port}"
        with urllib.request.urlopen(urllib.request.Request(f"{address}/bucket", method="PUT")):
            pass
        yield address
        process.stdin.close()
        process.wait(20)


@pytest.fixture(scope="module", autouse=True)
def endpoint(s3_server: str) -> Iterator[str]:
    """The server's address, which is also in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        use(patch, s3_server)
        warm_up()
        yield s3_server


def use(patch: pytest.MonkeyPatch, address: str) -> None:
    """Put into the environment what obstore needs to find a server."""
    patch.setenv("AWS_ENDPOINT_URL", address)
    patch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_ALLOW_HTTP", "true")


def warm_up() -> None:
    """Have obstore start the threads that it keeps, with their descriptors."""
    import feeder

    feeder.CheckpointStore("s3://bucket/warm").names()


@pytest.fixture(params=["folder", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A place that holds nothing yet."""
    make: dict[str, Callable[[], str]] = {
        "folder": lambda: str(tmp_path / "store"),
        "memory": lambda: f"memory://{next(_numbers)}",
        "s3": lambda: f"s3://bucket/run/{next(_numbers)}",
    }
    return make[request.param]()
