"""Mutants: what is changed, what is left alone, and that a sample is drawn again alike."""

from __future__ import annotations

import ast

import pytest

from mutation import modules
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
