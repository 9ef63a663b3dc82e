"""A server that is closed under its consumer lets go of everything that it held of it."""

from __future__ import annotations

import numpy as np
import pytest

import feeder
from conformance.served import TRANSPORTS, serving
from feeds import make
from leaks import held


def endless() -> feeder.Coordinator:
    return make(
        lambda call: [np.full(4, call.index)], input_blob_names=["id"], batch_size=4, epochs=None
    )


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_server_closed_under_its_consumer_keeps_no_descriptor_of_it(transport: str) -> None:
    scheme, plane = TRANSPORTS[transport]
    before = held().descriptors["file descriptor of anon_inode:[pidfd]"]
    with serving(endless, scheme) as server:
        consumer = feeder.connect(server.addresses[0], plane=plane)
        next(consumer)
    assert held().descriptors["file descriptor of anon_inode:[pidfd]"] == before
    consumer.close()
