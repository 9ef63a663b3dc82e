"""Any stream, taken in any runs one after another, is the naive one."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given

import parts
from property.campaign import run
from property.programs import Program, check, programs

pytestmark = [
    pytest.mark.timeout(600),  # of many examples
    # A finaliser that is interrupted says so to nobody else.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def examples(num: int) -> hypothesis.settings:
    """The same ones each time; many more in the full part."""
    return hypothesis.settings(
        derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink), max_examples=10 * num if parts.is_full else num,
    )  # fmt: skip


@examples(200)
@given(programs())
def test_every_batch_position_and_error_is_that_of_the_naive_stream(program: Program) -> None:
    check(program)


@examples(60)
@given(programs("arrival"))
def test_rows_in_order_of_arrival_are_neither_lost_nor_doubled(program: Program) -> None:
    check(program)


def test_a_campaign_counts_its_programs() -> None:
    done = run(seed=1, examples=5)
    assert done["programs by ticket"] == done["programs by arrival"] == 5 <= done["runs"]
