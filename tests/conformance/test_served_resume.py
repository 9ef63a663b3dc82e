"""A served feed resumed at any batch: the tests of feeds in process, over wires."""

from __future__ import annotations

import pytest

from conformance import test_resume as there
from conformance import test_resume_ends as ends
from conformance.served import narrowed, over_transports

pytestmark = pytest.mark.served

transport = over_transports(there, ends, THREADS=(2,))

test_resumed_at_every_batch = narrowed(
    there.test_resumed_at_every_batch, pattern=("ragged",), last_batch=("keep", "carry")
)
test_snapshot_does_not_change_when_the_feed_goes_on = (
    there.test_snapshot_does_not_change_when_the_feed_goes_on
)
