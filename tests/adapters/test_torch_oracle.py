"""feeder's DataLoader and PyTorch's over random programs: each row, class, error and draw."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from needs import needs_framework
from parts import examples

needs_framework("torch")

from adapters.torch_programs import Program, compare, programs


@settings(max_examples=examples(640))
@given(programs(0))
def test_a_program_runs_as_on_pytorchs_loader(program: Program) -> None:
    compare(program)


# JAX says so of each fork once another test has imported it.
@pytest.mark.filterwarnings("ignore:os.fork")
@settings(max_examples=examples(160))
@given(programs(3))
def test_a_program_with_workers_runs_as_on_pytorchs_loader(program: Program) -> None:
    compare(program)
