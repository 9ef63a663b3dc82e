"""With `rows_per_call` a served stream is the same: the tests of feeds in process, over wires."""

from __future__ import annotations

import pytest

from conformance import test_rows_per_call as there
from conformance.served import narrowed, over_transports

pytestmark = pytest.mark.served

transport = over_transports(there, THREADS=(3,), DEVICES=(1, 2))

test_the_stream_is_the_same = narrowed(
    there.test_the_stream_is_the_same, rows=(2, 8), last_batch=("keep", "pad")
)
test_the_stream_is_the_same_in_rounds = narrowed(
    there.test_the_stream_is_the_same_in_rounds, rounds=("stream",)
)
test_buffers_change_nothing = narrowed(there.test_buffers_change_nothing, way=("out", "mixed"))
test_the_stream_is_the_naive_one = there.test_the_stream_is_the_naive_one
test_a_call_beyond_the_end_writes_into_no_batch = narrowed(
    there.test_a_call_beyond_the_end_writes_into_no_batch, threads=(2,)
)
test_a_position_is_the_same_and_goes_on_with_and_without = narrowed(
    there.test_a_position_is_the_same_and_goes_on_with_and_without, way=("out", "mixed")
)
