"""What becomes of arrays that are kept, of forks, and of consumers that are another user's."""

from __future__ import annotations

import errno
import mmap
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import feeder
from conformance.served import TRANSPORTS, reading, served, serving
from feeder import Coordinator
from feeder.service.memory import mapping
from feeder.service.protocol import messages as say
from feeds import make
from peers import peer_of
from small import Calls

pytestmark = pytest.mark.served

NUM_BATCHES, ROWS = 100, 4
transports = pytest.mark.parametrize("transport", TRANSPORTS)


fetch = Calls(
    NUM_BATCHES,
    lambda call: [np.full((ROWS, 100), call.index + 1), np.arange(ROWS) + 1000 * call.index],
)


def factory() -> Coordinator:
    return make(fetch, input_blob_names=["value", "id"], batch_size=ROWS)


def assert_whole(batches: list[Any]) -> None:
    for i, batch in enumerate(batches):
        assert (batch["value"] == i + 1).all(), i
        assert batch["id"].tolist() == [1000 * i + row for row in range(ROWS)], i


@transports
def test_list_of_a_consumer_holds_every_batch(
    transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole and read-only, also when the consumer and its server are gone and others come."""
    with served(transport, factory) as seen:
        batches = list(seen)
        assert len(batches) == NUM_BATCHES
        kept = [batch["value"][1:, ::2] for batch in batches[:3]]
    for array in batches[0].arrays():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    # One warning in all, and none where memory is the consumer's own.
    warnings = [record for record in caplog.records if "batches are kept" in record.message]
    assert len(warnings) == (1 if transport == "shared" else 0)
    with served(transport, factory) as seen:
        list(seen)
    assert_whole(batches)
    assert [int(array.min()) for array in kept] == [1, 2, 3] == [int(a.max()) for a in kept]


def test_who_is_kept_from_shared_memory_by_its_own_limit_and_takes_nothing_else_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a limit of address space (`ulimit -v`); and it leaves its queue."""

    def fail(*args: Any, **settings: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    own = SimpleNamespace(**{**vars(mmap), "mmap": fail})
    monkeypatch.setattr(mapping, "mmap", own)
    with serving(factory) as server:
        with (
            reading(server, plane="shared") as consumer,
            pytest.raises(feeder.TransportError, match=r"^\d+ bytes of shared memory cannot"),
        ):
            next(consumer)
        with reading(server) as other:
            assert_whole(list(islice(other, 3)))
            assert other.plane == "frames"


def test_batches_under_way_are_bounded_by_credit_beside_the_buffers() -> None:
    """Who has used nothing is sent half of its credit at once, however few may be buffered; the
    server takes its time with the other half."""

    def small() -> Coordinator:
        return make(fetch, input_blob_names=["value", "id"], batch_size=ROWS,
                    max_buffered_batches=1)  # fmt: skip

    with serving(small) as server, peer_of(server.addresses[0]) as peer:
        generation = peer.opens(feed="", credit=20).generation
        peer.say(say.Attached(generation=generation, plane="frames", reason=""))
        steps = [peer.hear(say.Batches).groups[0].step for _ in range(10)]
    assert steps == list(range(10))
