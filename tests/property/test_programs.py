"""Any stream, taken in any runs one after another, is the naive one."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import HealthCheck, example, given

import parts
from property.campaign import run
from property.programs import (
    Leg,
    Program,
    Stream,
    alike,
    check,
    check_places,
    programs,
    served_programs,
)

pytestmark = [
    pytest.mark.timeout(600),  # of many examples
    # A finaliser that is interrupted says so to nobody else.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def examples(num: int) -> hypothesis.settings:
    """The same ones each time; many more in the full part."""
    return hypothesis.settings(
        derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        max_examples=10 * num if parts.is_full else num,
    )  # fmt: skip


SHORT_LAST_CALL = Stream(
    form="source", epochs=[[[3], [], []], [[5], [], []]], columns=(), size=2, is_global=False,
    per_call=0, workers=2, seed=0, last_batch="keep", last_round="drop", rounds="stream",
    dont_rebatch=False, repeatable=True, beyond="end",
)  # fmt: skip


CARRIED_END = SHORT_LAST_CALL._replace(
    form="replay", epochs=[[[2], [], []], [[2, 1], [], []], [[2], [], []]], workers=1,
    last_batch="carry", last_round="uneven", order="ticket",
)  # fmt: skip
CARRIED_LEGS = [Leg(2, 1, epochs=2, carrier="token"), Leg()]
LEFT_OUT = SHORT_LAST_CALL._replace(
    form="pure", epochs=[[[12], [], []], [[12], [], [2]], [[12], [], []]], size=12, workers=1,
    is_global=True, last_batch="drop", last_round="uneven", rounds="epoch", order="ticket",
)  # fmt: skip


@examples(30)
@given(programs())
# Rounds are skipped from an epoch's end, whose last call is shorter than the others.
@example(Program(SHORT_LAST_CALL, [Leg(4, 1, 1), Leg(4, 1, 2), Leg(6, 1)], 0))
# A run of two epochs ends in the middle of a round, with rows that go on to the third otherwise.
@example(Program(CARRIED_END, [Leg(1, 1, carrier="token"), *CARRIED_LEGS], 0))
@example(Program(CARRIED_END._replace(form="pure"), [Leg(1, 1, carrier="token"), *CARRIED_LEGS], 0))
# A batch of one queue leaves out two rows, which are one of six queues.
@example(Program(LEFT_OUT, [Leg(1, 2, carrier="bytes"), Leg(6, 1), Leg()], 0))
def test_every_batch_position_and_error_is_that_of_the_naive_stream(program: Program) -> None:
    check(program)


@examples(10)
@given(programs("arrival"))
def test_rows_in_order_of_arrival_are_neither_lost_nor_doubled(program: Program) -> None:
    check(program)


@examples(20)
@given(alike())
def test_a_place_is_the_same_token_whatever_run_came_to_it(program: Program) -> None:
    check_places(program)


# ---- the same, of more programs: as much work as feeds that are served


@pytest.mark.served
@examples(200)
@given(programs())
def test_it_is_that_of_the_naive_stream_in_many_programs(program: Program) -> None:
    check(program)


@pytest.mark.served
@examples(60)
@given(programs("arrival"))
def test_no_row_is_lost_or_doubled_in_many_programs(program: Program) -> None:
    check(program)


@pytest.mark.served
@examples(50)
@given(served_programs())
def test_it_is_that_of_the_naive_stream_where_runs_are_served(program: Program) -> None:
    check(program)


@pytest.mark.served
@pytest.mark.parametrize("whose", [0, 1])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_source_goes_on_in_the_last_round_of_fewer_epochs_where_it_is_served(
    rounds: int, whose: int
) -> None:
    stream = SHORT_LAST_CALL._replace(
        epochs=[[[11], [], []], [[7], [], []]], workers=1, last_round="uneven"
    )
    legs = [Leg(3, rounds, epochs=1, carrier="token", whose=whose), Leg(2, 2, transport="ipc")]
    check(Program(stream, [*legs, Leg()], 0))


@pytest.mark.served
def test_a_campaign_counts_its_programs() -> None:
    done = run(seed=1, examples=5)
    assert done["programs by ticket"] == done["programs by arrival"] == 5 <= done["runs"]
