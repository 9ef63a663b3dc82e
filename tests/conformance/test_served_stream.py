"""A served feed gives the stream of the naive feeder over every way there is, and goes on anywhere,
from whatever its position travels in, with any number of queues."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conformance import test_stream as there
from conformance.served import TRANSPORTS, narrowed, over_transports, served
from feeds import assert_same, expected, make, note
from fetches import FORMS, make_fetch
from naive import naive_dealing

pytestmark = pytest.mark.served

EPOCHS = 2


class Case(NamedTuple):
    """A feed, how it is served, and where it goes on."""

    transport: str
    form: str
    pattern: str
    batch_size: int
    last_batch: str
    rounds: str
    last_round: str
    nums: tuple[int, int]
    """Queues, before and after."""
    used: int
    """Rounds that are used before."""
    whose: int
    carrier: str

    @property
    def settings(self) -> dict[str, Any]:
        carries = self.rounds == "epoch" and self.last_batch == "carry"
        return {
            "epochs": EPOCHS, "batch_size": self.batch_size, "rounds": self.rounds,
            "last_batch": "keep" if carries else self.last_batch, "last_round": self.last_round,
        }  # fmt: skip


CASES = st.builds(
    Case,
    transport=st.sampled_from([*TRANSPORTS]),
    form=st.sampled_from([*FORMS]),
    pattern=st.sampled_from(("whole", "single", "small", "large", "ragged", "gaps")),
    batch_size=st.sampled_from((1, 7, 8)),
    last_batch=st.sampled_from(("keep", "drop", "pad", "carry")),
    rounds=st.sampled_from(("stream", "epoch")),
    last_round=st.sampled_from(("uneven", "drop", "pad")),
    nums=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    used=st.integers(1, 9),
    whose=st.integers(0, 2),
    carrier=st.sampled_from(("state dict", "snapshot", "token")),
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(CASES)
def test_every_queue_is_dealt_what_the_naive_feeder_deals(case: Case) -> None:
    plain = case.settings
    stream = expected(
        make_fetch(case.form, case.pattern), pure=case.form == "pure", epochs=EPOCHS,
        batch_size=case.batch_size, last_batch=plain["last_batch"],
    )  # fmt: skip
    at, state = 0, None
    for num, used in zip(case.nums, (case.used, None), strict=True):
        with served(
            case.transport, lambda: make(make_fetch(case.form, case.pattern), **plain),
            num_queues=num, resume=state,
        ) as seen:  # fmt: skip
            batches: list[Any] = []
            wanted = naive_dealing(stream, at, num, case.rounds, case.last_round)
            for end, dealt in islice(wanted, used):
                batches = [next(queue) for queue in seen.consumers[: len(dealt)]]
                assert_same([note(batch) for batch in batches], dealt, num, at)
                at = end
            if used is None or not batches:
                assert [next(queue, None) for queue in seen.consumers] == [None] * num
                return
            whose = case.whose % len(batches)
            state = {
                "state dict": seen.consumers[whose].state_dict,
                "snapshot": seen.consumers[whose].snapshot,
                "token": batches[whose].cut.token,
            }[case.carrier]()


# ---- what no case of above has

transport = over_transports(there, transports=("shared",), THREADS=(2,))

test_each_queue_gets_its_share = (
    there.test_each_device_gets_its_share_in_order_however_far_apart_they_are
)
test_what_lies_beyond_the_first_end_is_discarded = narrowed(
    there.test_what_lies_beyond_the_first_end_of_a_pure_function_is_discarded, threads=(3,)
)
test_stream_without_end = narrowed(
    there.test_stream_without_end_goes_on_through_the_epochs, form=("seek",)
)
test_without_rebatching = narrowed(
    there.test_without_rebatching_each_chunk_with_rows_is_a_batch, pattern=("gaps",)
)
test_rows_may_lie_along_any_axis = narrowed(
    there.test_rows_may_lie_along_any_axis, pattern=("ragged",), form=("pure",)
)
