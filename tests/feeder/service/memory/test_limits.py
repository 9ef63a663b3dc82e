"""Shared memory that a trainer's own limits keep it from: it goes on with frames."""

from __future__ import annotations

import errno
import mmap
import socket
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.service.memory import mapping
from feeder.service.memory.fdpass import Attachment, OwnLimitError
from small import Pure, make

pytestmark = pytest.mark.served

NUM = 60


@pytest.fixture
def _no_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As with a limit of address space (`ulimit -v`)."""

    def fail(*args: Any, **settings: Any) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        own = SimpleNamespace(mmap=fail, PROT_READ=mmap.PROT_READ, PAGESIZE=mmap.PAGESIZE)
        patch.setattr(mapping, "mmap", own)
        yield


@pytest.mark.usefixtures("_no_memory")
def test_who_would_have_nothing_else_is_told_and_leaves_its_queue() -> None:
    with (
        serving(lambda: make(Pure(NUM, rows=4))) as server,
        feeder.connect(server.addresses[0], plane="shared") as consumer,
    ):
        with pytest.raises(feeder.TransportError, match=r"^\d+ bytes of shared memory cannot"):
            next(consumer)
        with reading(server) as other:
            assert [batch.step for batch in islice(other, 3)] == [0, 1, 2]


def test_a_descriptor_that_there_was_no_room_for_is_a_limit_of_ones_own() -> None:
    sock: Any = SimpleNamespace(recvmsg=lambda *args: (bytes(24), [], socket.MSG_CTRUNC, None))
    with pytest.raises(OwnLimitError, match=r"no descriptor left for it; .*ulimit -n"):
        Attachment(sock, "/there").receive()
