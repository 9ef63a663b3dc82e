"""What every command and script says to `--help`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from freeze.internals import run_command

ROOT = Path(__file__).parents[2]
WIDTH = "10000"
"""Columns of the terminal, so that no line is broken."""
WITHOUT_HELP = (
    "check", "check-deploy", "docs", "gpu-report", "lib.sh", "test",
)  # fmt: skip
"""Scripts that have none, or only that of another tool."""

BENCHMARKS = ("core", "pair")
"""A load, whose arguments all loads have, and the other benchmark."""


def make(folder: Path) -> dict[str, Any]:
    return {**commands(), **scripts(folder)}


def lines(text: str) -> list[str]:
    """A help's lines, as every Python's argparse writes them."""
    # Python 3.13 names the value once, after the last of an option's names.
    text = re.sub(r"(-\w) ([A-Z]+), (--[\w-]+) \2", r"\1, \3 \2", text)
    # What is far to the right goes on with the line above: where it begins differs too.
    return [" ".join(line.split()) for line in re.split(r"\n(?! {6})", text) if line.strip()]


# ---- commands


def commands(*words: str) -> dict[str, list[str]]:
    """The help of a command and of those below it."""
    said = lines(help_of(*words))
    found = {" ".join(("feeder", *words)): said}
    for name in names_below(help_of(*words)):
        found |= commands(*words, name)
    return found


def help_of(*words: str) -> str:
    said = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=WIDTH),
        contextlib.redirect_stdout(said),
        contextlib.suppress(SystemExit),
    ):
        run_command([*words, "--help"])
    return said.getvalue()


def names_below(text: str) -> list[str]:
    """The commands that a help lists, each with a line of its own below their metavar."""
    listed = re.search(r"^  (?:COMMAND|ACTION)\n((?:    .*\n)+)", text, re.MULTILINE)
    return re.findall(r"^ {4}(\S+)", listed[1], re.MULTILINE) if listed else []


# ---- scripts


def scripts(folder: Path) -> dict[str, list[str]]:
    """The help of the scripts, and of the benchmarks that one of them lists."""
    environment = prepared(folder)
    names = sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file())
    calls = [[name] for name in names if name not in (*WITHOUT_HELP, "bench")]
    calls += [["bench", name] for name in BENCHMARKS]
    with ThreadPoolExecutor(2) as pool:
        said = pool.map(lambda call: script_help(call, environment), calls)
    return {
        " ".join(("scripts/" + call[0], *call[1:])): text
        for call, text in zip(calls, said, strict=True)
    }


def prepared(folder: Path) -> dict[str, str]:
    """An environment for the scripts that is made already, around the Python that runs here."""
    venv = folder / "venv"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin/python"
    path = os.pathsep.join(sys.path)
    python.write_text(f'#!/bin/sh\nPYTHONPATH=$PYTHONPATH:{path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    for extra in ("bench", "demo", "dev", "docs", "test"):
        (venv / f"has-{extra}").touch()
    environment = {**os.environ, "FEEDER_VENV": str(venv), "COLUMNS": WIDTH}
    done = subprocess.run(
        ["bash", "-c", ". scripts/lib.sh; purpose"],
        cwd=ROOT, env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    (venv / "made-for").write_text(done.stdout)
    return environment


def script_help(call: list[str], environment: dict[str, str]) -> list[str]:
    done = subprocess.run(
        [ROOT / "scripts" / call[0], *call[1:], "--help"],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return lines(done.stdout)
