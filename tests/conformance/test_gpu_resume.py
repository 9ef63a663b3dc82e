"""A feed on GPUs resumed at any batch: the tests of feeds on the host, on stand-ins."""

from __future__ import annotations

import pytest

from conformance import test_resume as there
from conformance import test_resume_ends as ends
from conformance.gpus import over_gpus
from conformance.served import narrowed

pytestmark = pytest.mark.served
machine = over_gpus(there, ends, THREADS=(2,))

test_resumed_at_every_batch = narrowed(
    there.test_resumed_at_every_batch, pattern=("ragged",), last_batch=("keep", "carry")
)
test_resumed_again_after_every_batch = narrowed(
    there.test_resumed_again_after_every_batch, carrier=("bytes", "token")
)
test_snapshot_before_the_first_batch_is_the_one_resumed_from = narrowed(
    there.test_snapshot_before_the_first_batch_is_the_one_resumed_from, carrier=("state dict",)
)
test_snapshot_does_not_change_when_the_feed_goes_on = (
    there.test_snapshot_does_not_change_when_the_feed_goes_on
)
test_resumed_with_other_threads_and_buffers = narrowed(
    there.test_resumed_with_other_threads_and_buffers, last_batch=("keep", "pad")
)
test_resumed_with_another_number_of_devices = narrowed(
    there.test_resumed_with_another_number_of_devices, form=("pure",), last_round=("uneven", "pad")
)
test_position_is_the_newest_round_that_every_device_has_taken = (
    there.test_position_is_the_newest_round_that_every_device_has_taken
)
