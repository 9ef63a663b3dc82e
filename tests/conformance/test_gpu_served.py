"""A served feed on consumers' GPUs: the tests of feeds in process, over wires and stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import feeds
from conformance import test_resume, test_stream
from conformance.served import TRANSPORTS, narrowed, running_over
from standin.gpu import Machine, assert_sound, installed

pytestmark = pytest.mark.served

WAYS = [(transport, True) for transport in TRANSPORTS] + [("shared", False)]
"""Every transport, and shared memory that the driver does not register."""


@pytest.fixture(params=WAYS, ids=str, autouse=True)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    transport, registers = request.param
    running = running_over(transport, device="cuda", credit=2)
    modules: list[ModuleType] = [feeds, test_stream, test_resume]
    for module in modules:
        monkeypatch.setattr(module, "running", running)
        if "THREADS" in vars(module):
            monkeypatch.setattr(module, "THREADS", (2,))
    with installed(Machine(num_gpus=4, seed=3, registers=registers)) as made:
        yield made
    assert made.num_copies
    assert_sound(made)


def only(test: Any, **values: Any) -> Any:
    return narrowed(test, form=("seek",), pattern=("ragged",), **values)


test_stream_is_the_naive_one = only(test_stream.test_stream_is_the_naive_one, workers=(3,))
test_stream_is_dealt_out_to_gpus_in_rounds = narrowed(
    test_stream.test_stream_is_dealt_out_to_devices_in_rounds, form=("pure",), pattern=("ragged",)
)
test_without_rebatching = narrowed(
    test_stream.test_without_rebatching_each_chunk_with_rows_is_a_batch,
    form=("pure",), pattern=("gaps",),
)  # fmt: skip
test_rows_may_lie_along_any_axis = narrowed(
    test_stream.test_rows_may_lie_along_any_axis, form=("pure",), pattern=("ragged",)
)
test_resumed_at_every_batch = only(
    test_resume.test_resumed_at_every_batch, last_batch=("keep", "carry")
)
test_snapshot_does_not_change_when_the_feed_goes_on = narrowed(
    test_resume.test_snapshot_does_not_change_when_the_feed_goes_on, form=("pure",)
)
