"""Conformance tests, with each feed on processes. Those of streams are in test_streams.py."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import feeds
from conformance import test_resume as resume
from conformance import test_resume_ends as ends
from conformance import test_resume_values as values
from conformance import test_rows_per_call as rows
from conformance import test_stream as stream
from conformance.served import narrowed
from feeder import Coordinator, Processes

pytestmark = pytest.mark.process

MODULES: tuple[ModuleType, ...] = (resume, ends, values, rows, stream)
CHANGED = {"THREADS": (2,), "DEVICES": (3,)}
"""Lists that tests run through, shortened: processes start slowly."""
RAGGED = ("ragged",)


@pytest.fixture(autouse=True)
def on_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every feed of a test run on processes, as many as the test asks for threads."""
    make = feeds.make

    def make_on_processes(
        fetch: Callable[..., Any], *, num_threads: int = 2, **settings: Any
    ) -> Coordinator:
        return make(fetch, executor=Processes(num_threads), **settings)

    for module in (feeds, *MODULES):
        for name, value in {"make": make_on_processes, **CHANGED}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)


test_stream_is_dealt_out_to_devices_in_rounds = narrowed(
    stream.test_stream_is_dealt_out_to_devices_in_rounds, pattern=RAGGED, last_round=("pad",)
)
test_each_device_gets_its_share = (
    stream.test_each_device_gets_its_share_in_order_however_far_apart_they_are
)
test_stream_without_end = stream.test_stream_without_end_goes_on_through_the_epochs
test_rows_may_lie_along_any_axis = narrowed(
    stream.test_rows_may_lie_along_any_axis, pattern=RAGGED, form=("pure",)
)

test_resumed_at_every_batch = narrowed(
    resume.test_resumed_at_every_batch, pattern=RAGGED, last_batch=("carry",)
)
test_snapshot_before_the_first_batch_of_all = narrowed(
    resume.test_snapshot_before_the_first_batch_of_all_is_the_start, form=("seek",)
)
test_snapshot_does_not_change = narrowed(
    resume.test_snapshot_does_not_change_when_the_feed_goes_on, form=("replay",)
)
test_resumed_with_other_threads_and_buffers = narrowed(
    resume.test_resumed_with_other_threads_and_buffers, last_batch=("keep",), form=("seek",)
)
test_a_resumed_feed_stamps_the_same_cuts = narrowed(
    resume.test_a_resumed_feed_stamps_the_same_cuts, pattern=RAGGED
)
test_resumed_with_another_number_of_devices = narrowed(
    resume.test_resumed_with_another_number_of_devices, last_round=("drop",), form=("seek",)
)

test_finished_feed_yields_nothing = narrowed(
    ends.test_finished_feed_yields_nothing, pattern=RAGGED, last_batch=("keep",)
)
test_finished_feed_goes_on_with_more_epochs = narrowed(
    ends.test_finished_feed_goes_on_with_more_epochs, pattern=RAGGED, last_batch=("drop",)
)
test_with_carry_a_finished_feed_has_kept_its_last_rows = narrowed(
    ends.test_with_carry_a_finished_feed_has_kept_its_last_rows, pattern=RAGGED
)

test_rows_fetched_again_that_differ_are_named = narrowed(
    values.test_rows_fetched_again_that_differ_are_named, pattern=("large",), carrier=("token",)
)
test_fewer_rows_than_before_are_named = narrowed(
    values.test_fewer_rows_than_before_are_named, carrier=("state dict",)
)
test_an_end_where_rows_came_before_is_named = narrowed(
    values.test_an_end_where_rows_came_before_is_named, carrier=("token",)
)

test_with_rows_per_call_in_rounds = narrowed(
    rows.test_the_stream_is_the_same_in_rounds, last_round=("pad",), rounds=("epoch",)
)
test_with_rows_per_call_a_position_goes_on_with_and_without = narrowed(
    rows.test_a_position_is_the_same_and_goes_on_with_and_without, way=("some",)
)
test_with_rows_per_call_any_number_of_queues = narrowed(
    rows.test_any_number_of_queues_one_after_another, num=(3,)
)
