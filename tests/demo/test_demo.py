"""The demo: it ends with 0 where the disturbed run is equal, and with 1 where anything differs; and
the digits that come with it."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import demo
from demo import supervisor
from demo.digits import load_digits
from demo.runs import EVERYBODY, SERVER, Kill, Life, Result, Run, Step, Training
from needs import needs

pytestmark = pytest.mark.process

needs("matplotlib")
needs("rich")

QUICK = ["--quick", "--kills=4"]
"""Kills the server, each trainer, and all at once."""


@pytest.fixture(autouse=True, scope="module")
def fonts() -> None:
    """Have matplotlib open its fonts, which it keeps open, before any test is looked at."""
    from demo.picture import draw

    calm = Run(trainings=(make_run(2.0, 1.0), make_run(2.0, 1.0)), kills=())
    kills = (Kill(step=1, victims=(SERVER,)), Kill(step=2, victims=EVERYBODY))
    killed = Run(trainings=(make_killed_run(), make_killed_run()), kills=kills)
    draw(calm, killed, equal=False, output=io.BytesIO())


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "curve.png"


def test_quick_demo_ends_equal_and_draws(output: Path) -> None:
    """And it names the page on which it can be watched."""
    command = [sys.executable, "-u", "-m", "feeder", "demo", *QUICK, f"--output={output}"]
    environment = os.environ | {"COLUMNS": "100"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment) as demo:
        assert demo.stdout is not None and demo.stderr is not None
        first = demo.stdout.readline()
        assert re.search(r"http://127\.0\.0\.1:[0-9]+/", first), first
        said, errors = demo.stdout.read(), demo.stderr.read()
    assert (demo.returncode, errors) == (0, ""), said
    assert "EQUAL bit for bit" in said
    assert "NOT EQUAL" not in said
    picture = output.read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == (1920, 1440)
    assert len(picture) > 60_000  # an empty page of that size has a tenth of it


def meddle_with_checkpoints(
    monkeypatch: pytest.MonkeyPatch, meddle: Callable[[dict[str, np.ndarray]], None]
) -> None:
    """Have `meddle` change each checkpoint that a process is about to begin with."""
    command_of = supervisor.training_command

    def training_command(checkpoint: Path, *arguments: Any) -> list[str]:
        if checkpoint.exists():
            with np.load(checkpoint, allow_pickle=False) as archive:
                content = dict(archive)
            meddle(content)
            np.savez(checkpoint, **content)
        return command_of(checkpoint, *arguments)

    monkeypatch.setattr(supervisor, "training_command", training_command)


def run_expecting_difference(output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the quick demo in this process; what it printed."""
    assert demo.main([*QUICK, f"--output={output}"]) == 1
    printed = capsys.readouterr().out
    assert "NOT EQUAL" in printed
    assert "EQUAL bit for bit" not in printed
    assert output.exists()
    return " ".join(printed.split())


def test_one_bit_of_the_weights_is_noticed(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flip(content: dict[str, np.ndarray]) -> None:
        content["weights"].view(np.uint64)[20, 3] ^= 1

    meddle_with_checkpoints(monkeypatch, flip)
    printed = run_expecting_difference(output, capsys)
    assert "weights at the end" in printed
    assert "batches at the end" not in printed


@pytest.mark.parametrize(
    ("which", "code", "limit_s", "told"),
    [
        ("training_command", "raise SystemExit('out of luck')", 60.0, "with code 1"),
        ("training_command", "input()", 0.01, "it may take 0.01 s"),
        ("server_command", "raise SystemExit('no server today')", 4.0, "no server today"),
    ],
)
def test_a_process_that_fails_by_itself_or_hangs_is_told(
    which: str, code: str, limit_s: float, told: str, output: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(supervisor, which, lambda *arguments: [sys.executable, "-c", code])
    monkeypatch.setattr(supervisor, "RUN_LIMIT_S", limit_s)
    assert demo.main([*QUICK, f"--output={output}"]) == 1
    assert told in " ".join(capsys.readouterr().out.split())
    assert not output.exists()


def make_run(*losses: float) -> Training:
    """A training of one life with these losses, killed never."""
    steps = tuple(
        Step(number=number, loss=loss, batches=f"{number:032x}")
        for number, loss in enumerate(losses, start=1)
    )
    result = Result(batches="b" * 32, weights="c" * 32, accuracy=0.9)
    return Training(lives=(Life(start=0, steps=steps, result=result),), result=result)


def make_killed_run() -> Training:
    """A training killed after step 2, which it did otherwise the second time."""
    killed = dataclasses.replace(make_run(2.0, 1.0).lives[0], result=None)
    last = make_run(2.0, 1.5, 0.5).lives[0]
    resumed = dataclasses.replace(last, start=1, steps=last.steps[1:])
    return Training(lives=(killed, resumed), result=make_run().result)


@pytest.mark.parametrize("package", ["matplotlib", "rich"])
def test_a_missing_extra_is_named(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert demo.main(QUICK) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert package in line
    assert 'pip install "feedworks[demo]"' in line


@pytest.mark.parametrize(
    "argument", ["--kills=0", "--kills=51", "--kills=x", "--seed=-1", "--output=/no/such/place.png"]
)
def test_bad_options_end_with_2(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        demo.main([argument])
    assert stopped.value.code == 2
    assert argument.partition("=")[0] in capsys.readouterr().err


SOURCE_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"


@pytest.mark.served
def test_digits_are_as_in_their_source() -> None:
    """The checksum of the source's table: one line a row, 64 pixels and the label in decimals."""
    images, labels = load_digits()
    table = np.column_stack([images.reshape(-1, 64), labels])
    text = "".join(",".join(map(str, row)) + "\n" for row in table.tolist())
    assert hashlib.sha256(text.encode()).hexdigest() == SOURCE_SHA256
