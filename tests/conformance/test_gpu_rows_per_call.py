"""With `rows_per_call` a feed on GPUs gives the same stream, written into pinned slots."""

from __future__ import annotations

from conformance import test_rows_per_call as there
from conformance.gpus import over_gpus
from conformance.served import narrowed

machine = over_gpus(there, seeds=(2,), THREADS=(2,), DEVICES=(1, 3))

test_the_stream_is_the_naive_one = there.test_the_stream_is_the_naive_one
test_buffers_change_nothing = narrowed(there.test_buffers_change_nothing, way=("out", "mixed"))
test_a_call_beyond_the_end_writes_into_no_batch = narrowed(
    there.test_a_call_beyond_the_end_writes_into_no_batch, threads=(2,)
)
test_a_position_is_the_same_and_goes_on_with_and_without = narrowed(
    there.test_a_position_is_the_same_and_goes_on_with_and_without, way=("out",)
)
