"""Transcripts: the file of a run that is killed, moved and resumed is that of one undisturbed."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from feeder.checkpoint import transcribing
from feeder.checkpoint.transcribing import Start, Transcript
from feeder.checkpoint.transcript import (
    StepDigests,
    cells_of,
    compare,
    file_name,
    head,
    parse,
    read_run,
    says_next,
    says_step,
)
from feeder.cli import main
from feeder.errors import ConfigError, TranscriptError
from feeder.workers.stream.batch import Batch
from project import ROOT
from transcripts import change, random_batch

RECORDS = 203


def verifier() -> Any:
    spec = importlib.util.spec_from_file_location(
        "verify_transcript", ROOT / "docs" / "verify_transcript.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def feed(
    folder: Path, resume: Any = None, *, seed: int = 1, wrong: int | None = None, **settings: Any
) -> feeder.Coordinator:
    rows = np.arange(RECORDS)
    if wrong is not None:
        rows[wrong] = -1
    return feeder.init_data_input_workers(
        ["x"], sources.arrays(rows).shuffle(seed=seed), settings.pop("batch_size", 4),
        resume=resume, transcript=folder, coordinator=feeder.Coordinator(),
        epochs=settings.pop("epochs", 2), **settings,
    )  # fmt: skip


def rounds(coordinator: feeder.Coordinator) -> Iterator[list[Batch]]:
    """The batches of a feed, round by round."""
    ends = object()
    devices = [iter(coordinator["train"].on(name)) for name in coordinator["train"].devices]
    while got := [one for one in (next(it, ends) for it in devices) if one is not ends]:
        yield got  # type: ignore[misc]


def read_all(coordinator: feeder.Coordinator, most: int = 10**6) -> list[Batch]:
    with coordinator:
        return [batch for _, got in zip(range(most), rounds(coordinator), strict=False)
                for batch in got]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.transcript"))}


def test_a_file_says_what_was_handed_out(tmp_path: Path) -> None:
    batches = read_all(feed(tmp_path))
    found = verifier().read(tmp_path / "train.0.0.transcript")
    assert found.line["feed"] == "train" and not found.rest
    assert found.digests == {
        b.step: verifier().step_digest(b.step, b.epoch, b.index, b.rows, dict(b)) for b in batches
    }
    assert [step for _, step in found.settings] == [0]


def test_what_was_read_ahead_and_not_handed_out_is_not_told(tmp_path: Path) -> None:
    read_all(feed(tmp_path), 3)
    assert read_run(tmp_path)["train[0]"].steps.tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_the_file_of_a_run_that_is_killed_again_and_again_is_that_of_one_undisturbed(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    read_all(feed(tmp_path / "undisturbed"))
    state, is_over = None, False
    while not is_over:
        coordinator = feed(tmp_path / "killed", state)
        coordinator.start()
        for number in range(draw.randint(0, 30)):
            batch = next(coordinator["train"], None)
            if is_over := batch is None:
                break
            # Steps after the position are handed out again by the next run.
            if draw.random() < 0.5 or not number:
                state = draw.choice(
                    [batch.cut.token(), coordinator.state_dict(), coordinator.snapshot()]
                )
        if is_over or draw.random() < 0.5:
            coordinator.stop()
        else:
            kill(coordinator)
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")


def kill(coordinator: feeder.Coordinator) -> None:
    """End a run as SIGKILL does, for its transcripts: what was not written is lost."""
    for transcript in coordinator["train"].streams[0].transcripts:
        transcript._forget()
    coordinator.stop()


_CHILD = """
import sys
import numpy as np
import feeder
from feeder import sources

resume = bytes.fromhex(sys.argv[2]) or None
coordinator = feeder.init_data_input_workers(
    ["x"], sources.arrays(np.arange(203)).shuffle(seed=1), 4, resume=resume,
    transcript=sys.argv[1], coordinator=feeder.Coordinator(), epochs=2,
)
with coordinator:
    for batch in coordinator["train"]:
        print(batch.cut.token().hex(), flush=True)
"""


@pytest.mark.process
def test_a_run_that_sigkill_ends_goes_on_in_the_same_file(tmp_path: Path) -> None:
    read_all(feed(tmp_path / "undisturbed"))
    token, draw = "", random.Random(0)
    for most in (*(draw.randint(1, 30) for _ in range(3)), 10**6):
        words = [sys.executable, "-c", _CHILD, str(tmp_path / "killed"), token]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for _, line in zip(range(most), child.stdout, strict=False):
                token = line.strip()
            if most < 10**6:
                child.kill()
        assert child.returncode == (-9 if most < 10**6 else 0)
    assert contents(tmp_path / "killed") == contents(tmp_path / "undisturbed")


def test_a_position_finds_all_steps_before_it_in_the_file(tmp_path: Path) -> None:
    for take in (
        lambda coordinator, batch: batch.cut.token(),
        lambda coordinator, batch: coordinator.state_dict(),
        lambda coordinator, batch: coordinator.checkpoint(tmp_path / "position"),
    ):
        coordinator = feed(tmp_path / "run")
        coordinator.start()
        batches = [next(coordinator["train"]) for _ in range(10)]
        take(coordinator, batches[-1])
        (transcript,) = coordinator["train"].streams[0].transcripts
        assert not transcript._waiting
        kill(coordinator)
        assert len(read_run(tmp_path / "run")["train[0]"].steps) == 10


@pytest.mark.parametrize("seed", range(5))
def test_any_number_of_queues_tells_the_same_steps(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    wanted = {b.step: says_step(StepDigests().of(b)) for b in read_all(feed(tmp_path / "one"))}
    state, is_over = None, False
    while not is_over:
        with feed(tmp_path / "many", state, devices=draw.randint(1, 4)) as coordinator:
            of_run, is_over = rounds(coordinator), True
            for _, _ in zip(range(draw.randint(1, 9)), of_run, strict=False):
                is_over = False
            state = coordinator.state_dict()
            # These come again, perhaps to other queues.
            for _ in zip(range(draw.randint(0, 3)), of_run, strict=False):
                pass
    found = read_run(tmp_path / "many")["train[0]"]
    assert dict(zip(found.steps.tolist(), map(bytes, found.digests), strict=True)) == wanted


def test_files_of_queues_that_are_no_more_are_cut_off(tmp_path: Path) -> None:
    with feed(tmp_path, devices=4) as coordinator:
        of_run = rounds(coordinator)
        next(of_run), next(of_run)
        state = coordinator.state_dict()
        next(of_run)
    read_all(feed(tmp_path, state, devices=2), 1)
    assert read_run(tmp_path)["train[0]"].steps.tolist() == [*range(10)]


def test_what_other_queues_had_of_a_round_stays(tmp_path: Path) -> None:
    batches = read_all(feed(tmp_path, devices=3), 4)
    # The position of the first queue: the others have had their batches of the round.
    read_all(feed(tmp_path, batches[6].cut.token(), devices=3), 1)
    assert read_run(tmp_path)["train[0]"].steps.tolist() == [*range(12)]


def test_an_edited_run_goes_on_in_the_same_chain(tmp_path: Path) -> None:
    with feed(tmp_path) as coordinator:
        before = [next(coordinator["train"]) for _ in range(5)]
        state = coordinator.state_dict()
    for _ in range(2):
        edited = feed(tmp_path, state, batch_size=3, edit="smaller")
        read_all(edited, 4)
    found = verifier().read(tmp_path / "train.0.0.transcript")
    assert [step for _, step in found.settings] == [0, 5]
    assert sorted(found.digests) == [*range(9)]
    assert found.digests[4] == says_step(StepDigests().of(before[4]))


def edited(place: Path, folder: Path, state: Any, way: str, size: int, **settings: Any) -> Any:
    """The position of a run that is edited before its next step, so that its batches have other
    sizes: by the command, at a start, or while it runs."""
    if way == "command":
        state.write(place / "then")
        size_is = "--batch-size", str(size)
        given = "edit", str(place / "then"), "--output", str(place / "now"), "--why", way
        assert main([*given, *size_is]) == 0
        return feeder.Snapshot.read(place / "now")
    at_start = {} if way == "live" else {"edit": way, "batch_size": size}
    with feed(folder, state, **{**settings, **at_start}) as coordinator:
        if way == "live":
            coordinator["train"].edit(batch_size=size, why=way)
        return coordinator.snapshot()


@pytest.mark.parametrize(
    "ways", [["command"], ["start"], ["live"], ["start", "note", "live", "command"],
             ["command", "start", "live"], ["live", "command", "note"]], ids=" ".join,
)  # fmt: skip
def test_a_run_goes_on_however_often_it_was_edited_before_its_next_step(
    tmp_path: Path, ways: list[str]
) -> None:
    with feed(tmp_path / "run") as coordinator:
        deque(islice(coordinator["train"], 5), 0)
        state, size = coordinator.snapshot(), 4
    for way in ways:
        now = size + (way != "note")
        state = edited(tmp_path, tmp_path / "run", state, way, now, batch_size=size)
        size = now
    read_all(feed(tmp_path / "run", state, batch_size=size), 3)
    found = verifier().read(tmp_path / "run" / "train.0.0.transcript")
    assert [step for _, step in found.settings] == [0, 5]
    assert sorted(found.digests) == [*range(8)]


def test_an_edit_makes_no_other_run_its_own(tmp_path: Path) -> None:
    read_all(feed(tmp_path / "run"), 10)
    with feed(tmp_path / "other", seed=2) as coordinator:
        deque(islice(coordinator["train"], 5), 0)
        other = coordinator.snapshot()
    with pytest.raises(TranscriptError, match="is of another run: at step 5"):
        feed(tmp_path / "run", other, seed=2, batch_size=3, edit="smaller").start()
    # Behind the edit the run that was not edited is another one, too.
    with feed(tmp_path / "edited") as coordinator:
        deque(islice(coordinator["train"], 5), 0)
        state = coordinator.snapshot()
    with feed(tmp_path / "edited", state, batch_size=3, edit="smaller") as coordinator:
        next(coordinator["train"])
        state = coordinator.snapshot()
    with pytest.raises(TranscriptError, match="is of another run: at step 6"):
        feed(tmp_path / "run", state, batch_size=3).start()


def test_a_run_that_leaves_out_rounds_says_which_step_comes_next(tmp_path: Path) -> None:
    with feed(tmp_path) as coordinator:
        state = [next(coordinator["train"]).cut.token() for _ in range(12)][5]
    read_all(feed(tmp_path, state, skip=3), 2)
    assert read_run(tmp_path)["train[0]"].steps.tolist() == [*range(6), 9, 10]


# ---- Files that cannot go on


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    read_all(feed(tmp_path), 3)
    before = contents(tmp_path)
    with pytest.raises(TranscriptError, match="is of another run: at step 0"):
        feed(tmp_path, seed=2).start()
    state = read_all(feed(tmp_path / "other", seed=2), 5)[2].cut.token()
    with pytest.raises(TranscriptError, match="is of another run: at step 3"):
        feed(tmp_path, state, seed=2).start()
    assert contents(tmp_path) == before


def test_a_file_that_is_being_written_is_refused(tmp_path: Path) -> None:
    with feed(tmp_path) as coordinator:
        next(coordinator["train"])
        with pytest.raises(TranscriptError, match="is being written by another feed"):
            feed(tmp_path).start()
        next(coordinator["train"])
    assert len(read_run(tmp_path)["train[0]"].steps) == 2


def test_a_file_that_was_changed_before_the_position_is_refused_and_kept(tmp_path: Path) -> None:
    state = read_all(feed(tmp_path), 10)[7].cut.token()
    path = tmp_path / "train.0.0.transcript"
    data = bytearray(path.read_bytes())
    data[-32 * 6] ^= 1
    path.write_bytes(data)
    with pytest.raises(TranscriptError, match=r"is damaged at byte .*, after step 3"):
        feed(tmp_path, state).start()
    assert path.read_bytes() == data
    with pytest.raises(TranscriptError, match="is damaged"):
        read_run(tmp_path)
    assert verifier().main([str(path)]) == 2


@pytest.mark.parametrize("place", ["digest", "chain", "cut", "zeros"])
def test_the_verifier_says_that_the_end_of_a_file_does_not_fit(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    read_all(feed(tmp_path), 10)
    path, other = tmp_path / "train.0.0.transcript", tmp_path / "other"
    whole = path.read_bytes()
    other.write_bytes(whole[:-32])
    ends: dict[str, tuple[bytes, int]] = {
        "digest": (bytes([whole[-32] ^ 1]) + whole[-31:], 32),
        "chain": (whole[-32:-1] + bytes([whole[-1] ^ 1]), 32),
        "cut": (whole[-32:-5], 27),
        "zeros": (bytes(64), 64),
    }
    end, num = ends[place]
    path.write_bytes(whole[:-32] + end)
    assert verifier().main([str(path)]) == 3
    says = f"the last {num} bytes do not fit the chain: a cut write or a change\n"
    assert capsys.readouterr().out.endswith(says)
    # The steps before are equal; and a step that differs comes first.
    assert verifier().main([str(other), str(path)]) == 3
    other.write_bytes(whole)
    assert verifier().main([str(other), str(path)]) == 1
    assert "step 9 is the first that differs" in capsys.readouterr().out
    assert verifier().main([str(other), str(other)]) == 0


def test_steps_that_are_missing_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batches = read_all(feed(tmp_path), 10)
    path = tmp_path / "train.0.0.transcript"
    path.write_bytes(path.read_bytes()[: -32 * 3 - 5])
    read_all(feed(tmp_path, batches[8].cut.token()), 2)
    assert "ends before step 6, and the run goes on with step 9" in caplog.text
    assert read_run(tmp_path)["train[0]"].steps.tolist() == [*range(6), 9, 10]


@pytest.mark.parametrize("then", [2, 3])
@pytest.mark.parametrize("now", [1, 2, 3])
def test_steps_of_one_queue_that_are_missing_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, then: int, now: int
) -> None:
    with feed(tmp_path, devices=then) as coordinator:
        of_run = rounds(coordinator)
        for _ in range(6):
            next(of_run)
        state = coordinator.state_dict()
    read_all(feed(tmp_path, state, devices=now), 1)
    assert "missing" not in caplog.text
    path = tmp_path / f"train.0.{min(then, now) - 1}.transcript"
    path.write_bytes(path.read_bytes()[: -32 * 3])
    read_all(feed(tmp_path, state, devices=now), 1)
    assert f"{path.name!s}' ends before step" in caplog.text


def test_queues_without_a_batch_of_an_epochs_last_round_miss_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fetch(call: feeder.Call) -> Any:
        # Epochs of four batches, of one and of one: two queues have none in two rounds on end.
        if call.index >= (4, 1, 1)[call.epoch % 3]:
            raise StopIteration
        return [np.full(2, call.index)]

    state = None
    for most in (2, 1, 1, 3):
        made = feeder.init_data_input_workers(
            ["x"], fetch, 2, resume=state, transcript=tmp_path, coordinator=feeder.Coordinator(),
            devices=3, rounds="epoch", epochs=6,
        )  # fmt: skip
        with made as coordinator:
            for _, _ in zip(range(most), rounds(coordinator), strict=False):
                state = coordinator.state_dict()
    assert "missing" not in caplog.text


def test_every_prefix_of_a_file_is_read(tmp_path: Path) -> None:
    read_all(feed(tmp_path), 6)
    data = (tmp_path / "train.0.0.transcript").read_bytes()
    begins = data.index(b"\n") + 1
    for size in range(begins, len(data)):
        for tail in (b"", bytes(100)):
            found = parse(data[:size] + tail, "a prefix")
            assert found.was_cut_off
            assert len(found.steps) == max(0, (size - begins) // 32 - 2)
    for size in range(begins):
        with pytest.raises(TranscriptError, match="is no transcript"):
            parse(data[:size], "a prefix")


def test_steps_without_a_sound_number_are_refused() -> None:
    line = head("train", 0, 0)
    for says in ([b"\1" * 16], [says_next(2**63, 1), b"\1" * 16]):
        with pytest.raises(TranscriptError, match="says no sound number of its steps"):
            parse(line + cells_of(sha256(line), says), "a file")


def test_a_disk_that_is_full_ends_no_run_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_full = transcribing._write_at, True

    def fails(file: int, data: bytes, at: int) -> None:
        # A part of it is written, as a disk does that becomes full.
        write(file, data[:40] if is_full else data, at)
        if is_full:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(transcribing, "_write_at", fails)
    monkeypatch.setattr(transcribing, "_MOST_WAITING", 3)
    with feed(tmp_path) as coordinator:
        steps = [next(coordinator["train"]).step for _ in range(2)]
        with pytest.raises(TranscriptError, match=r"cannot be written: .*No space left"):
            next(coordinator["train"])
        is_full = False
        steps += [batch.step for batch in coordinator["train"]]
    assert steps == [*range(len(steps))]
    read_all(feed(tmp_path / "undisturbed"))
    assert contents(tmp_path) == contents(tmp_path / "undisturbed")


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Transcript, "note"),
        (Transcript, "flush"),
        (Transcript, "_after"),
        (transcribing, "_write_at"),
    ],
)
def test_an_interrupt_anywhere_tells_each_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_done: bool
) -> None:
    function, calls = getattr(owner, name), iter(range(10**6))

    def interrupted(*arguments: Any) -> Any:
        is_now = next(calls) % 5 == 3
        if is_now and not is_done:
            raise KeyboardInterrupt
        result = function(*arguments)
        if is_now:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    monkeypatch.setattr(transcribing, "_MOST_WAITING", 3)
    steps: list[int] = []
    with feed(tmp_path / "interrupted") as coordinator:
        while True:
            try:
                steps += [batch.step for batch in [next(coordinator["train"])]]
            except KeyboardInterrupt:
                continue
            except StopIteration:
                break
        monkeypatch.undo()
    assert steps == [*range(len(steps))]
    read_all(feed(tmp_path / "undisturbed"))
    assert contents(tmp_path / "interrupted") == contents(tmp_path / "undisturbed")


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for folder in ("s3://bucket/run", "", 3):
        with pytest.raises(ConfigError, match="expected a folder of a file system"):
            feed(folder)  # type: ignore[arg-type]


# ---- Digests


def test_every_changed_row_is_found() -> None:
    # 10^5 of them, and more, are tried by `scripts/nightly transcripts`.
    for seed in range(2000):
        assert change(np.random.default_rng(seed)), seed


def test_a_digest_is_of_values_and_not_of_how_they_lie() -> None:
    digests = StepDigests()
    rows = np.arange(24, dtype=np.int32).reshape(4, 6)
    wide = np.zeros((4, 12), np.int32)
    wide[:, ::2] = rows
    padded = np.zeros(4, np.dtype({"names": ["a", "b"], "formats": ["u1", "f8"],
                                   "offsets": [0, 8], "itemsize": 16}))  # fmt: skip
    other = padded.copy()
    other.view(np.uint8).reshape(4, 16)[:, 3] = 7
    for same in ((rows, np.asfortranarray(rows), wide[:, ::2]), (padded, other)):
        assert len({digests.of(batch_of(one)) for one in same}) == 1
        assert digests.of(batch_of(same[0])) == StepDigests().of(batch_of(same[0]))


def batch_of(array: np.ndarray) -> Batch:
    return Batch(("x",), (array,), None, 0, 3, 3, len(array))


@pytest.mark.parametrize("seed", range(200))
def test_the_verifier_computes_the_same_digest(seed: int) -> None:
    batch = random_batch(np.random.default_rng(seed))
    told = batch.step, batch.epoch, batch.index, batch.rows
    assert says_step(StepDigests().of(batch)) == verifier().step_digest(*told, dict(batch))


def test_a_digest_that_begins_with_a_zero_is_a_step_too(tmp_path: Path) -> None:
    assert says_step(b"\0" + bytes(range(15))) == b"\x80" + bytes(range(15))
    transcript = Transcript(str(tmp_path), "a/b", 0, 0)
    transcript.begin(Start(0, 1, {b"settings"}, b"settings"))
    transcript._digest = lambda batch: bytes(16)  # type: ignore[method-assign]
    transcript.note(batch_of(np.zeros(3)))
    transcript.close()
    found = parse(Path(transcript.path).read_bytes(), "")
    assert found.line["feed"] == "a/b" and Path(transcript.path).name == file_name("a/b", 0, 0)
    assert found.digests.tolist() == [[128, *[0] * 15]]
    assert len(head("a" * 100, 0, 0)) % 32 == 0


# ---- Two runs


def test_compare_names_the_first_step_that_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    batches = read_all(feed(one))
    read_all(feed(other, wrong=17, devices=3))
    steps = [batch.step for batch in batches if 17 in batch["x"]]
    assert main(["compare", str(one), str(one)]) == 0
    assert capsys.readouterr().out == f"train[0]: {len(batches)} steps are equal\n"
    assert main(["compare", str(one), str(other)]) == 1
    assert f"step {steps[0]} is the first that differs, of 2; its records: feeder which STATE " in (
        capsys.readouterr().out
    )
    assert main(["compare", str(one), str(other), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)["train[0]"]
    assert told == {
        "num_equal": len(batches) - 2, "first": steps[0], "num_different": 2, "only_one": [],
        "only_other": [], "is_equal": False,
    }  # fmt: skip
    paths = [str(one / "train.0.0.transcript"), str(other / "train.0.0.transcript")]
    assert verifier().main(paths) == 1


def test_compare_tells_steps_that_one_run_alone_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = read_all(feed(tmp_path / "one"), 9)[3].cut.token()
    read_all(feed(tmp_path / "other", state), 1)
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "other")]) == 1
    assert "  in A alone: steps 0 to 3, 5 to 8\n" in capsys.readouterr().out
    found = read_run(tmp_path / "one")["train[0]"]
    assert compare(found, None).only_one == [(0, 8)]
    assert main(["compare", str(tmp_path / "one"), str(tmp_path / "none")]) == 2
    (tmp_path / "empty").mkdir()
    assert main(["compare", str(tmp_path / "empty"), str(tmp_path / "one")]) == 2


def test_two_files_that_differ_in_a_step_are_of_two_runs(tmp_path: Path) -> None:
    for name, wrong in (("a", None), ("b", 17)):
        read_all(feed(tmp_path / name, wrong=wrong))
    (tmp_path / "b" / "train.0.0.transcript").rename(tmp_path / "a" / "train.0.1.transcript")
    with pytest.raises(TranscriptError, match="two files have step"):
        read_run(tmp_path / "a")
