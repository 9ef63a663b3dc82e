"""The wheel: what is in it, what it needs, and that it works away from the project's folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import feeder

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
CORE = {"msgpack", "msgspec", "numpy", "pyzmq", "xxhash"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what the wheel holds, which is built from this folder."""
    wheel, folder = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("unpacked")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    subprocess.run([*command, "--directory", wheel], cwd=ROOT, capture_output=True, check=True)
    (path,) = wheel.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def metadata(unpacked: Path) -> Message:
    """Return the wheel's metadata."""
    (path,) = unpacked.glob("*.dist-info/METADATA")
    return Parser().parsestr(path.read_text())


def run_away(unpacked: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python where only the unpacked wheel can be imported as feeder; return what came of it.

    With -P the current folder is not searched, so the path of the environment decides: the
    unpacked wheel stands before the project's folder there.
    """
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=unpacked.parent,
        env={"PYTHONPATH": str(unpacked), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=50,
    )


def files_of(folder: Path) -> set[str]:
    """Return the files of the package in a folder, through its link to the engine, without what
    Python caches."""
    found = (
        Path(at) / name
        for at, _, names in os.walk(folder / "feeder", followlinks=True)
        for name in names
    )
    files = (path.relative_to(folder) for path in found)
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


def test_it_holds_the_package_whole_and_nothing_else(unpacked: Path) -> None:
    assert files_of(unpacked) == files_of(ROOT)
    assert {"feeder/py.typed", "feeder/workers/py.typed"} <= files_of(unpacked)
    names = {path.name for path in unpacked.iterdir()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"feeder"}
    assert len(names) == 2


def test_it_says_who_it_is(unpacked: Path, metadata: Message) -> None:
    assert metadata["Name"] == "feedworks"
    assert metadata["Version"] == feeder.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    (license_file,) = unpacked.glob("*.dist-info/licenses/LICENSE")
    assert license_file.read_text() == (ROOT / "LICENSE").read_text()
    (entry_points,) = unpacked.glob("*.dist-info/entry_points.txt")
    assert "feeder = feeder.cli:main" in entry_points.read_text()


def test_it_needs_five_packages(metadata: Message) -> None:
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert {line.split(">=")[0] for line in needed} == CORE
    assert all(">=" in line for line in needed)


def test_its_api_can_be_imported_and_its_command_runs(unpacked: Path) -> None:
    code = "import feeder; print(feeder.__file__, *(getattr(feeder, n) for n in feeder.__all__))"
    assert run_away(unpacked, "-P", "-c", code).stdout.startswith(str(unpacked / "feeder"))
    assert "demo" in run_away(unpacked, "-P", "-m", "feeder", "--help").stdout
    # The demo is an example in the checkout: a wheel has the command alone.
    done = run_away(unpacked, "-P", "-m", "feeder", "demo", "--quick")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "checkout" in line and "scripts/demo" in line


def test_a_module_of_the_users_may_be_called_workers(unpacked: Path, tmp_path: Path) -> None:
    """A file `workers.py` beside a script is found before whatever is installed."""
    (tmp_path / "workers.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "train.py").write_text(
        "import feeder, sys\n"
        "for name in feeder.__all__: getattr(feeder, name)\n"
        "assert 'workers' not in sys.modules\n"
    )
    done = run_away(unpacked, str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stderr
