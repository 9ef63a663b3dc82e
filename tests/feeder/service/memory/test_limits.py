"""Shared memory that a trainer's own limits keep it from: it goes on with frames."""

from __future__ import annotations

import errno
import mmap
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from feeder.service.memory import mapping
from feeder.service.memory.fdpass import Attachment, OwnLimitError
from small import Aside, Pure, make

pytestmark = pytest.mark.served

NUM = 60


def two_queues() -> feeder.Coordinator:
    return make(Pure(2 * NUM, rows=4), devices=2)


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
def test_who_cannot_map_it_reads_frames_and_holds_nobody_up() -> None:
    with serving(two_queues) as server, ExitStack() as stack:
        left, right = (
            stack.enter_context(reading(server, queue=queue, credit=4)) for queue in range(2)
        )
        assert left.plane == right.plane == "shared"
        others = Aside(lambda: [batch.step for batch in right])
        assert [batch.step for batch in left] == [*range(0, 2 * NUM, 2)]
        assert others.result() == [*range(1, 2 * NUM, 2)]
        assert left.plane == right.plane == "frames"
        (feed,) = server._feeds
        assert feed.stats.opened == 4


def test_one_that_cannot_any_more_goes_on_where_it_was(
    _no_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, serving(two_queues) as server, ExitStack() as stack:
        patch.setattr(mapping, "mmap", mmap)
        left, right = (
            stack.enter_context(reading(server, queue=queue, credit=4)) for queue in range(2)
        )
        steps = [next(left).step for _ in range(3)]
        others = Aside(lambda: [batch.step for batch in right])
        patch.undo()
        # Its server is lost: the next one gives other memory.
        left._loop.call_soon(lambda: left._loop._lose("lost"))
        assert steps + [batch.step for batch in left] == [*range(0, 2 * NUM, 2)]
        assert others.result() == [*range(1, 2 * NUM, 2)]
        assert left.plane == "frames"


@pytest.mark.usefixtures("_no_memory")
def test_before_the_first_batch_a_state_may_still_be_loaded() -> None:
    with make(Pure(2 * NUM, rows=4)) as whole:
        assert len(list(islice(whole["train"], 10))) == 10
        state = whole.state_dict()
    with serving(two_queues) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=queue)) for queue in range(2)]
        while any(one.plane == "shared" for one in both):
            for one in both:
                with suppress(feeder.RemoteError):
                    one.snapshot()
        for one in reversed(both):
            one.load_state_dict(state)
        assert [next(one).step for _ in range(3) for one in both] == [*range(10, 16)]


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
