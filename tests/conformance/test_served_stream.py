"""A served feed gives the stream of the naive feeder: the tests of feeds in process, over wires."""

from __future__ import annotations

import pytest

from conformance import test_stream as there
from conformance.served import narrowed, over_transports
from fetches import PATTERNS

pytestmark = pytest.mark.served

SOME = ("ragged", "gaps", "idle")

transport = over_transports(there, THREADS=(2,))

test_stream_is_the_naive_one = narrowed(
    there.test_stream_is_the_naive_one, pattern=tuple(PATTERNS), workers=(3,)
)
test_stream_is_dealt_out_to_queues_in_rounds = narrowed(
    there.test_stream_is_dealt_out_to_devices_in_rounds, pattern=("ragged",)
)
test_each_queue_gets_its_share = (
    there.test_each_device_gets_its_share_in_order_however_far_apart_they_are
)
test_buffers_change_nothing = narrowed(there.test_buffers_change_nothing, pattern=("ragged",))
test_batches_of_any_size = narrowed(there.test_batches_of_any_size, batch_size=(1, 7))
test_what_lies_beyond_the_first_end_is_discarded = narrowed(
    there.test_what_lies_beyond_the_first_end_of_a_pure_function_is_discarded, threads=(3,)
)
test_stream_without_end = there.test_stream_without_end_goes_on_through_the_epochs
test_without_rebatching = narrowed(
    there.test_without_rebatching_each_chunk_with_rows_is_a_batch, pattern=SOME
)
test_rows_may_lie_along_any_axis = narrowed(there.test_rows_may_lie_along_any_axis, pattern=SOME)
