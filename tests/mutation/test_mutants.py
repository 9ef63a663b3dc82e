"""Mutants: what is changed, what is left alone, that a sample is drawn again alike, and that what
was killed before and is no more is found."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mutation import campaign, modules
from mutation.mutants import mutants, sample
from project import ROOT

CASES = {
    "a < b": {"(a <= b)", "(a >= b)"},
    "a is b": {"(a is not b)"},
    "x in y": {"(x not in y)"},
    "a and b and c": {"(a or b or c)", "(b and c)", "(a and c)", "(a and b)"},
    "not a": {"a"},
    "a + b": {"(a - b)"},
    "a // b": {"(a % b)"},
    "a + [b]": set(),
    "True": {"False"},
    "7": {"8", "6"},
    "0.5": {"2.0"},
    "'text'": set(),
    "f'{a + 1}'": set(),
    "min(a)": {"(max(a))"},
    "sorted(a)": {"(list(a))"},
    "call(a, b)": {"(call(b, a))"},
    "isinstance(a, b)": set(),
    "ConfigError(a, b)": set(),
    "_log.warning(a, b)": set(),
    "a if b else c": {"(not b)"},
    "[a for a in b if c]": {"(not c)"},
}


@pytest.mark.parametrize("code", CASES)
def test_an_expression_has_these_mutants(code: str) -> None:
    source = f"value = {code}\n".encode()
    assert {mutant.new for mutant in mutants("x.py", source)} == CASES[code]


def test_statements_are_left_out_and_conditions_turned() -> None:
    source = (
        b'def f(a: int = 3) -> None:\n    "text"\n    if a:\n        raise KeyError(a)\n'
        b"    self.a = a\n    a += b\n    go(a)\n    return a\n"
    )
    found = {(mutant.line, mutant.new) for mutant in mutants("x.py", source)}
    deleted = {(line, "pass") for line in (4, 5, 6, 7, 8)}
    assert found == deleted | {(1, "4"), (1, "2"), (3, "(not a)"), (6, "a -= b")}


@pytest.mark.served  # as much work as feeds that are served
def test_a_mutant_of_every_module_compiles_and_is_another_program() -> None:
    for file in [*modules.CORE, *modules.ADAPTERS]:
        source = (ROOT / file).read_bytes()
        for mutant in sample(file, source, "1", 2):
            changed = mutant.apply(source)
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant


def test_the_tests_of_every_module_are_there() -> None:
    for tests in [*modules.CORE.values(), *modules.ADAPTERS.values()]:
        for test in tests:
            assert (ROOT / test).exists(), test


def test_a_mutant_is_spliced_in_behind_text_of_several_bytes() -> None:
    source = 'text = "é→"\nvalue = "é", a + b\n'.encode()
    (mutant,) = mutants("x.py", source)
    assert mutant.apply(source).decode() == 'text = "é→"\nvalue = "é", (a - b)\n'


def test_a_sample_is_that_of_its_seed() -> None:
    source = b"value = a + b, a < b, not a, 7\n"
    drawn = {seed: [mutant.new for mutant in sample("x.py", source, seed, 3)] for seed in "12"}
    assert drawn == {"1": ["8", "(a >= b)", "6"], "2": ["(a <= b)", "8", "6"]}


@pytest.mark.parametrize(
    ("before", "after", "status", "told"),
    [
        ("ka", "kak", 0, "killed before and alive after: 0; judged after alone: 1"),
        ("ka", "aa", 1, "killed before and alive after: 1; judged after alone: 0"),
        ("kak", "k", 1, "of 3 mutants that were judged before, 2 were not after"),
        ("", "k", 1, "before has 0 results"),
        ("k", "", 1, "after has 0 results"),
    ],
)
def test_what_was_killed_and_now_lives_or_is_not_judged_is_found(
    before: str, after: str, status: int, told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """`k` is a mutant that was killed; where there is none, there is no file."""
    words = ["mutate", "--compare"]
    for name, states in (("before", before), ("after", after)):
        words.append(str(tmp_path / name))
        for i, state in enumerate(states):
            one = dict.fromkeys(("file", "line", "symbol", "old", "new"), "x")
            with open(words[-1], "a") as file:
                file.write(json.dumps({**one, "id": i, "killed_by": state.strip("a")}) + "\n")
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        campaign.main()
    assert told in capsys.readouterr().out and ended.value.code == status
    monkeypatch.setattr(sys, "argv", ["mutate", "--only", "no/such", "--list"])
    with pytest.raises(SystemExit, match="0 modules have 'no/such'"):
        campaign.main()


def test_a_mutant_is_in_the_copy_for_as_long_as_its_tests_run(tmp_path: Path) -> None:
    source = b"is_less = 1 < 2\n"
    (tmp_path / "a.py").write_bytes(source)
    compiled = tmp_path / "__pycache__" / "a.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    copy = object.__new__(campaign.Copy)
    copy.folder = tmp_path
    mutant = next(iter(mutants("a.py", source)))
    with copy.planted(mutant):
        assert (tmp_path / "a.py").read_bytes() == mutant.apply(source) != source
        assert not compiled.exists()
    assert (tmp_path / "a.py").read_bytes() == source


@pytest.mark.process
@pytest.mark.fresh
def test_a_campaign_of_one_mutant_finds_who_kills_it(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    words = ["--only", "state/token", "--mutants", "1", "--jobs", "1", "--results", str(results)]
    done = subprocess.run(
        [sys.executable, "-m", "mutation.campaign", *words],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests"), "TMPDIR": str(tmp_path)},
        capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert (done.returncode, "mutants killed: 1 of 1" in done.stdout) == (0, True), done.stdout
    (one,) = campaign.read(results)
    assert one["killed_by"].startswith(("tests/feeder/state", "tests/conformance"))
