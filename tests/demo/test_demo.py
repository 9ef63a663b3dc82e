"""The demo: it ends with 0 where the disturbed run is equal, and with 1 where anything differs."""

from __future__ import annotations

import dataclasses
import io
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from feeder import demo
from feeder.demo import supervisor
from feeder.demo.digits import NUM_TRAINING_ROWS, DigitReader, load_digits
from feeder.demo.runs import Life, Result, Run, Step, differences
from feeder.demo.training import chain_digest
from needs import needs

needs("matplotlib")
needs("rich")

QUICK = ["--quick", "--kills=3"]


@pytest.fixture(autouse=True, scope="module")
def fonts() -> None:
    """Have matplotlib open its fonts, which it keeps open, before any test is looked at."""
    from feeder.demo.picture import draw

    draw(make_run(2.0, 1.0), make_killed_run(), equal=False, output=io.BytesIO())


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "curve.png"


def test_quick_demo_ends_equal_and_draws(output: Path) -> None:
    command = [sys.executable, "-m", "feeder", "demo", *QUICK, f"--output={output}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "EQUAL bit for bit" in done.stdout
    assert "NOT EQUAL" not in done.stdout
    assert done.stderr == ""
    picture = output.read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == (1920, 1200)
    assert len(picture) > 60_000  # an empty page of that size has a tenth of it


def meddle_with_checkpoints(
    monkeypatch: pytest.MonkeyPatch, meddle: Callable[[dict[str, np.ndarray]], None]
) -> None:
    """Have `meddle` change each checkpoint that a process is about to begin with."""
    command_of = supervisor.training_command

    def training_command(checkpoint: Path, arguments: Sequence[str]) -> list[str]:
        if checkpoint.exists():
            with np.load(checkpoint, allow_pickle=False) as archive:
                content = dict(archive)
            meddle(content)
            np.savez(checkpoint, **content)
        return command_of(checkpoint, arguments)

    monkeypatch.setattr(supervisor, "training_command", training_command)


def run_expecting_difference(output: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the quick demo in this process; what it printed."""
    assert demo.main([*QUICK, f"--output={output}"]) == 1
    printed = capsys.readouterr().out
    assert "NOT EQUAL" in printed
    assert "EQUAL bit for bit" not in printed
    assert output.exists()
    return " ".join(printed.split())


def test_untouched_checkpoints_are_equal(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the planted faults below are measured against: meddling that changes nothing."""
    meddle_with_checkpoints(monkeypatch, lambda content: None)
    assert demo.main([*QUICK, f"--output={output}"]) == 0
    assert "EQUAL bit for bit" in capsys.readouterr().out


def test_one_bit_of_the_weights_is_noticed(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def flip(content: dict[str, np.ndarray]) -> None:
        content["weights"].view(np.uint64)[20, 3] ^= 1

    meddle_with_checkpoints(monkeypatch, flip)
    printed = run_expecting_difference(output, capsys)
    assert "weights at the end" in printed
    assert "batches at the end" not in printed


def test_an_older_position_in_the_stream_is_noticed(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    oldest: list[np.ndarray] = []

    def rewind(content: dict[str, np.ndarray]) -> None:
        oldest.append(content["snapshot"])
        content["snapshot"] = oldest[0]

    meddle_with_checkpoints(monkeypatch, rewind)
    printed = run_expecting_difference(output, capsys)
    assert len(oldest) > 1
    assert "batches at the end" in printed


def test_a_process_that_fails_by_itself_is_told(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "raise SystemExit('out of luck')"]
    monkeypatch.setattr(supervisor, "training_command", lambda checkpoint, arguments: command)
    assert demo.main([*QUICK, f"--output={output}"]) == 1
    printed = capsys.readouterr().out
    assert "out of luck" in printed
    assert "with code 1" in printed
    assert not output.exists()


def test_a_process_that_hangs_is_ended(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-c", "input()"]
    monkeypatch.setattr(supervisor, "training_command", lambda checkpoint, arguments: command)
    monkeypatch.setattr(supervisor, "LIFE_LIMIT_S", 0.01)
    assert demo.main([*QUICK, f"--output={output}"]) == 1
    assert "it may take 0.01 s" in " ".join(capsys.readouterr().out.split())


def test_training_ends_with_its_supervisor(tmp_path: Path) -> None:
    arguments = ["--epochs=1", "--steps-per-checkpoint=4", "--seed=0"]
    command = supervisor.training_command(tmp_path / "checkpoint.npz", arguments)
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [b'{"event": "start", "step": 0}']
    assert done.stderr == b""


def test_kills_are_where_they_were_planned() -> None:
    arguments = ["--epochs=1", "--steps-per-checkpoint=4", "--seed=7"]
    watched: list[tuple[int, int]] = []
    run = supervisor.run_training(arguments, [1, 7, 14], lambda *seen: watched.append(seen))
    assert [life.end for life in run.lives] == [1, 7, 14, 24]
    assert [life.start for life in run.lives] == [0, 0, 4, 12]
    assert run.num_kills == 3
    assert run.num_repeated == 1 + 3 + 2
    assert watched[:3] == [(0, 1), (1, 1), (1, 2)]


def test_batches_are_those_of_a_naive_feeder() -> None:
    """Both runs could be wrong alike: here the digest is that of rows cut up one after another."""
    images, labels = (column[:NUM_TRAINING_ROWS] for column in load_digits())
    reader = DigitReader(images, labels, num_workers=2, seed=3)
    chunks = []
    for _ in range(2):  # epochs
        live = deque([0, 1])
        while live:
            try:
                chunks.append(reader(live[0], 32))
                live.rotate(-1)
            except StopIteration:
                live.popleft()
    images, labels = (np.concatenate(column) for column in zip(*chunks, strict=True))
    digest = bytes(16)
    for row in range(0, len(labels), 32):
        batch = {"image": images[row : row + 32], "label": labels[row : row + 32]}
        digest = chain_digest(digest, batch)
    arguments = ["--epochs=2", "--steps-per-checkpoint=10", "--seed=3"]
    run = supervisor.run_training(arguments, [23, 31], lambda life, step: None)
    assert run.result.batches == digest.hex()


def test_kill_steps_are_random_apart_and_repeatable() -> None:
    drawn = supervisor.draw_kill_steps(5, 375, 0)
    assert drawn == supervisor.draw_kill_steps(5, 375, 0)
    assert drawn != supervisor.draw_kill_steps(5, 375, 1)
    for num_kills in (1, 5, 50):
        for seed in range(20):
            drawn = supervisor.draw_kill_steps(num_kills, 94, seed)
            assert len(set(drawn)) == num_kills
            assert drawn == sorted(drawn)
            assert 1 <= drawn[0] <= drawn[-1] < 94


def make_run(*losses: float) -> Run:
    """A run of one life with these losses, killed never."""
    steps = tuple(
        Step(number=number, loss=loss, batches=f"{number:032x}")
        for number, loss in enumerate(losses, start=1)
    )
    result = Result(batches="b" * 32, weights="c" * 32, accuracy=0.9)
    return Run(lives=(Life(start=0, steps=steps, result=result),), result=result)


def test_equal_runs_have_no_differences() -> None:
    assert differences(make_run(2.0, 1.0), make_run(2.0, 1.0)) == []


def test_the_last_bit_of_a_loss_is_a_difference() -> None:
    (found,) = differences(make_run(2.0, 1.0), make_run(2.0, float(np.nextafter(1.0, 2.0))))
    assert "number 2" in found


def test_a_missing_step_is_a_difference() -> None:
    (found,) = differences(make_run(2.0, 1.0), make_run(2.0))
    assert found == "the number of steps: 2 undisturbed, 1 disturbed"


@pytest.mark.parametrize("field", ["batches", "weights", "accuracy"])
def test_each_part_of_the_result_counts(field: str) -> None:
    run = make_run(2.0, 1.0)
    other = dataclasses.replace(run, result=dataclasses.replace(run.result, **{field: 0}))
    (found,) = differences(run, other)
    assert found.startswith(f"{field} at the end")


def make_killed_run() -> Run:
    """A run killed after step 2, which it did otherwise the second time."""
    killed = dataclasses.replace(make_run(2.0, 1.0).lives[0], result=None)
    last = make_run(2.0, 1.5, 0.5).lives[0]
    resumed = dataclasses.replace(last, start=1, steps=last.steps[1:])
    return Run(lives=(killed, resumed), result=make_run().result)


def test_a_step_that_differs_when_done_again_is_a_difference() -> None:
    (found,) = differences(make_run(2.0, 1.0, 0.5), make_killed_run())
    assert found.startswith("a step done again after a kill, number 2: loss 1.5")


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
