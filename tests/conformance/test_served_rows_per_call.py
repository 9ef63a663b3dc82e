"""With `rows_per_call` a served stream is the same: fetch functions write into the slots of shared
memory. The tests of feeds in process, over it."""

from __future__ import annotations

import pytest

from conformance import test_rows_per_call as there
from conformance.served import narrowed, over_transports

pytestmark = pytest.mark.served

transport = over_transports(there, transports=("shared",), THREADS=(3,), DEVICES=(1, 2))

test_the_stream_is_the_same = narrowed(
    there.test_the_stream_is_the_same, rows=(2, 8), last_batch=("keep", "pad")
)
test_the_stream_is_the_naive_one = there.test_the_stream_is_the_naive_one
test_a_position_is_the_same_and_goes_on_with_and_without = narrowed(
    there.test_a_position_is_the_same_and_goes_on_with_and_without, way=("mixed",)
)
