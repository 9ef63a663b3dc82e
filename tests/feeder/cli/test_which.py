"""`feeder which` and `feeder when`, by a position alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feeder import cli, sources
from small import make


def composed() -> Any:
    web, code = sources.arrays(np.arange(60)).shuffle(), sources.arrays(np.arange(100, 124))
    parts = {"web": (web, 0.7), "code": (code.exclude([5]).shuffle(), 0.3)}
    return sources.mix(parts, on_exhausted="repeat")


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command at the position of a run of two ranks, after so many rounds."""
    path = tmp_path / "feed.snapshot"

    def run(command: str, *words: str, source: Any = None, rounds: int = 3, **settings: Any) -> Any:
        settings = {"epochs": None, "devices": 2, **settings}
        with make(composed() if source is None else source, ["x"], 4, **settings) as coordinator:
            feed = coordinator["train"]
            rows = {}
            for _ in range(rounds):
                for device in feed.devices:
                    batch = next(feed.on(device))
                    rows[batch.step] = batch["x"].tolist()
            coordinator.checkpoint(path)
        status = cli.main([command, str(path), *words])
        out, err = capsys.readouterr()
        return (rows, out) if status == 0 else (status, err)

    return run


def values(told: dict[str, Any]) -> list[int]:
    return [one["number"] + 100 * (one["source"] == "code") for (one,) in told["rows"]]


def test_a_step_is_told(ask: Any) -> None:
    rows, out = ask("which", "3", "--json")
    told = json.loads(out)
    assert values(told) == rows[3]
    assert (told["step"], told["queue"], told["queues"], told["has_come"]) == (3, 1, 2, True)
    rows, out = ask("which", "3")
    assert out.startswith("step 3 of train, queue 1 of 2:\n  row 0: record ")


def test_a_rank_counts_its_own_batches(ask: Any) -> None:
    rows, out = ask("which", "2", "--rank", "1", "--json")
    assert values(json.loads(out)) == rows[5]
    assert ask("which", "2", "--rank", "2") == (2, "feeder: rank is 2, expected 0 to 1\n")


def test_a_step_to_come_is_told(ask: Any) -> None:
    rows, _ = ask("which", "0", rounds=9)
    _, out = ask("which", "17", "--json")
    assert values(json.loads(out)) == rows[17]
    assert not json.loads(out)["has_come"]
    assert "step 17 of train, queue 1 of 2, to come:" in ask("which", "17")[1]


def test_a_record_is_found_again(ask: Any) -> None:
    rows, out = ask("when", "code", "7", "--json", rounds=12)
    *past, last = json.loads(out)["steps"]
    assert [(one["step"], one["row"]) for one in past] == [
        (step, row) for step, of in sorted(rows.items()) for row, n in enumerate(of) if n == 107
    ]
    assert past
    assert last["step"] >= 24
    assert not last["has_come"]
    assert ", to come" in ask("when", "code", "7")[1].splitlines()[-1]


def test_a_source_without_a_name_is_left_out(ask: Any) -> None:
    rows, out = ask("when", "9", source=sources.arrays(np.arange(40)).shuffle(), devices=1)
    step, row = out.split(", epoch")[0].removeprefix("step ").split(", row ")
    assert rows.get(int(step), [0] * 4)[int(row)] in (9, 0)
    assert "epoch 0" in out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("which", "-1"), "step is -1, expected a whole number"),
        (("when", "wub", "1"), "source is 'wub', and the feed has ['web', 'code']"),
        (("when", "1"), "source is '', and the feed has ['web', 'code']"),
        (("when", "web", "60"), "record is 60, and source 'web' has 60 records"),
        (("when", "code", "5"), "record 5 of source 'code' is excluded: no step has it"),
        (("which", "0", "--feed", "test"), "holds the feeds ['train[0]']: name one with --feed"),
    ],
)
def test_wrong_questions_are_named(ask: Any, words: tuple[str, ...], why: str) -> None:
    status, err = ask(*words)
    assert status == 2
    assert why in err


@pytest.mark.parametrize("others", [{}, {"code": 0}, {"code": 0, "books": 0}])
@pytest.mark.parametrize("is_nested", [False, True])
def test_the_only_source_that_is_read_of_a_mixture_has_its_name(
    ask: Any, others: dict[str, int], is_nested: bool
) -> None:
    def mixed() -> Any:
        weights = {"web": 1, **others}
        inner = {name: (sources.arrays(np.arange(20)), weight) for name, weight in weights.items()}
        if not is_nested:
            return sources.mix(inner)
        return sources.mix({"texts": (sources.mix(inner), 2), "code": (inner["web"][0], 0)})

    name = "texts/web" if is_nested else "web"
    assert mixed().sizes_of() == {name: 20}
    out = ask("which", "3", "--json", source=mixed())[1]
    assert {one["source"] for (one,) in json.loads(out)["rows"]} == {name}
    told = json.loads(ask("when", name, "7", "--json", source=mixed())[1])["steps"]
    assert [(one["step"], one["row"]) for one in told[:1]] == [(1, 3)]
    with make(mixed(), ["x"], 4) as coordinator:
        feed = coordinator["train"]
        assert {one.source for (one,) in next(feed).records()} == {name}
        assert [*feed.records_in([0])] == [name]


UNREADABLE: dict[str, Any] = {
    "missing": lambda whole: None,
    "empty": lambda whole: b"",
    "text": lambda whole: b"no position",
    "cut": lambda whole: whole[:-9],
    "flipped": lambda whole: whole[:60] + bytes([whole[60] ^ 1]) + whole[61:],
    "newer": lambda whole: whole[:8] + b"\xff" + whole[9:],
}


@pytest.mark.parametrize("made", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_position_that_cannot_be_read_is_a_wrong_argument(
    made: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "feed.snapshot"
    with make(composed(), ["x"], 4, epochs=None) as coordinator:
        coordinator.checkpoint(path)
    data = made(path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    edit = ["--output", str(tmp_path / "new"), "--why", "no"]
    commands = {"which": ["0"], "when": ["web", "0"], "log": [], "inspect": [], "edit": edit}
    for command, words in commands.items():
        assert cli.main([command, str(path), *words]) == 2, command
        assert capsys.readouterr().err.startswith("feeder: ")


def is_even(record: Any) -> bool:
    return bool(record % 2 == 0)


def thirds_fail(record: Any) -> Any:
    if record % 3 == 0:
        raise ValueError("a third")
    return record


class Own:
    """A fetch function that describes itself."""

    def __call__(self, call: Any) -> Any:
        return [np.arange(4)]

    def describe(self) -> dict[str, Any]:
        return {"source": "own"}


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (sources.arrays(np.arange(40)).filter(is_even), "which records a filter leaves out"),
        (sources.mix({"a": sources.arrays(np.ones((40, 2)))}, unit="tokens"), "mixture by tokens"),
        (
            sources.arrays(np.arange(40)).map(thirds_fail, on_error="skip"),
            "after records were left out (on_error='skip'), such as row 0",
        ),
        (Own(), "it describes no source of feeder.sources"),
        (lambda call: [np.arange(4)], "is of a fetch function, whose rows are its own"),
    ],
)
def test_what_a_position_does_not_hold_is_named(ask: Any, source: Any, why: str) -> None:
    status, err = ask("which", "0", source=source)
    assert status == 2
    assert why in err


def test_the_end_of_a_stream_is_known(ask: Any) -> None:
    assert ask("which", "99", epochs=1) == (
        2,
        "feeder: step is 99, and the feed has ended before it\n",
    )


@pytest.mark.parametrize("shuffles", [False, True])
def test_the_file_of_a_record_is_told_if_the_position_knows_it(
    ask: Any, tmp_path: Path, shuffles: bool
) -> None:
    firsts = {"a.jsonl": 0, "b.jsonl": 5, "c.jsonl": 6}
    for (name, first), end in zip(firsts.items(), (5, 6, 30), strict=True):
        (tmp_path / name).write_text("".join(f'{{"x": {n}}}\n' for n in range(first, end)))
    source = sources.jsonl([str(tmp_path / name) for name in firsts])
    rows, out = ask("which", "3", "--json", source=source.shuffle() if shuffles else source)
    for value, (record,) in zip(rows[3], json.loads(out)["rows"], strict=True):
        file = max((name for name in firsts if firsts[name] <= value), key=firsts.__getitem__)
        assert record["number"] == value
        assert record["name"] == f"{file!r}, record {value - firsts[file]}"
    _, out = ask("which", "0", source=source)
    assert out.splitlines()[1] == "  row 0: record 0, pass 0: 'a.jsonl', record 0"
