"""A feed on GPUs gives the stream of the naive feeder: the tests of feeds on the host, on
stand-ins."""

from __future__ import annotations

from conformance import test_stream as there
from conformance.gpus import over_gpus
from conformance.served import narrowed
from fetches import PATTERNS

SOME = ("ragged", "gaps", "idle")

machine = over_gpus(there, seeds=(2,), THREADS=(2,))

test_stream_is_the_naive_one = narrowed(
    there.test_stream_is_the_naive_one, pattern=tuple(PATTERNS), workers=(3,)
)
test_stream_is_dealt_out_to_gpus_in_rounds = narrowed(
    there.test_stream_is_dealt_out_to_devices_in_rounds, pattern=("ragged",)
)
# How far one GPU may be ahead of another is bounded by its slots: so one alone.
test_a_gpu_gets_its_share = narrowed(
    there.test_each_device_gets_its_share_in_order_however_far_apart_they_are, devices=(1,)
)
test_buffers_change_nothing = narrowed(there.test_buffers_change_nothing, pattern=("ragged",))
test_batches_of_any_size = narrowed(there.test_batches_of_any_size, batch_size=(1, 7, 64))
test_what_lies_beyond_the_first_end_is_discarded = narrowed(
    there.test_what_lies_beyond_the_first_end_of_a_pure_function_is_discarded, threads=(3,)
)
test_stream_without_end = there.test_stream_without_end_goes_on_through_the_epochs
test_without_rebatching = narrowed(
    there.test_without_rebatching_each_chunk_with_rows_is_a_batch, pattern=SOME
)
test_rows_may_lie_along_any_axis = narrowed(there.test_rows_may_lie_along_any_axis, pattern=SOME)
