"""What a consumer is given by a server, what it is told, and what it leaves behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import zmq

import feeder
import small
from conformance.served import reading, serving
from feeder.service.net.listener import Peer
from feeder.service.protocol import messages as say
from feeder.service.ratelimited_log import RateLimitedLog
from feeder.service.server.io_loop import ServerLoop
from feeder.service.server.outbox import Outbox
from feeds import make
from peers import WAIT_S
from watching import around

pytestmark = pytest.mark.served

CHILD = """
import os, sys, signal, numpy as np, feeder
def fetch(call):
    if call.index == 0:
        reads, writes = os.pipe()
        if os.fork() == 0:
            os.write(writes, b".")
            signal.pause()
        os.read(reads, 1)  # What is done in a child after a fork is done.
    return [np.full(4, call.index)]
def factory():
    return feeder.init_data_input_workers(
        ["id"], fetch, 4, epochs=None, coordinator=feeder.Coordinator())
with feeder.serve(factory, sys.argv[1]) as server:
    print(server.addresses[0], flush=True)
    sys.stdin.read()
"""


def large(rows: int = 200_000) -> feeder.Coordinator:
    return make(
        lambda call: [np.full(rows, call.index)],
        input_blob_names=["id"],
        batch_size=rows,
        epochs=None,
        num_worker_threads=1,
    )


def test_the_arena_of_a_newcomer_is_made_for_its_own_wishes() -> None:
    with serving(large) as server:
        with reading(server, hold=20) as first:
            next(first)
            state = first.state_dict()
        with reading(server, hold=20, resume=state) as second:
            kept = [next(second) for _ in range(15)]
        assert [int(batch["id"][0]) for batch in kept] == list(range(1, 16))


def test_a_text_that_utf8_cannot_hold_is_told() -> None:
    def fetch(call: feeder.Call) -> Any:
        raise ValueError("bad file caf\udce9.jpg")

    with (
        serving(lambda: make(fetch, input_blob_names=["id"])) as server,
        reading(server) as consumer,
        pytest.raises(feeder.FetchError, match=r"bad file caf\\udce9"),
    ):
        next(consumer)


def test_a_consumer_that_is_forgotten_gives_its_queue_back() -> None:
    with serving(large) as server:
        consumer = feeder.connect(server.addresses[0])
        thread = next(t for t in threading.enumerate() if t.name == "feeder consumer")
        next(consumer)
        del consumer
        gc.collect()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        with reading(server) as consumer:
            next(consumer)


@pytest.mark.process
@pytest.mark.parametrize("address", ["ipc://{}/forks", "tcp://127.0.0.1:0"])
def test_a_fetch_function_that_forks_blocks_neither_failover_nor_restart(
    address: str, tmp_path: Path
) -> None:
    address = address.format(tmp_path)

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", CHILD, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            process_group=0,
        )  # fmt: skip

    servers = [start()]
    try:
        assert servers[0].stdout is not None
        address = servers[0].stdout.readline().decode().strip()
        with feeder.connect(address) as consumer:
            steps = [next(consumer).step for _ in range(5)]
            servers[0].kill()
            servers[0].wait(WAIT_S)  # Until then it holds its address.
            servers.append(start())
            steps += [next(consumer).step for _ in range(2000)]
            assert steps == list(range(2005))
            assert consumer.stats()["reconnects"] == 1
    finally:
        for server in servers:
            kill_group(server)


def kill_group(server: subprocess.Popen[bytes]) -> None:
    """End a server and the children that it forked, which are in its group."""
    os.killpg(server.pid, signal.SIGKILL)
    with server:
        server.wait(WAIT_S)


# ---- the feeds of a coordinator that runs already: `with coordinator, feeder.serve(...)`


@pytest.mark.parametrize("fetch", [small.Pure, small.Seekable])
@pytest.mark.parametrize("taken", [0, 3])
def test_a_feed_that_runs_is_served_from_where_its_user_stands(fetch: Any, taken: int) -> None:
    whole = small.make(fetch(7, 3))
    with whole:
        expected = small.ids(whole["train"])
    with small.make(fetch(7, 3)) as coordinator:
        got = [int(row) for _ in range(taken) for row in next(coordinator["train"])["id"]]
        with serving(coordinator) as server, reading(server) as consumer:
            assert got + small.ids(consumer) == expected
        with pytest.raises(feeder.ClosedError):
            next(coordinator["train"])


def test_one_that_cannot_be_put_back_is_refused_and_runs_on() -> None:
    with small.make(small.Counted(7, 3)) as coordinator:
        with pytest.raises(feeder.ConfigError, match="is started already, and its fetch function"):
            feeder.serve(coordinator, "tcp://127.0.0.1:0")
        assert next(coordinator["train"]).step == 0


def test_a_factory_that_uses_the_coordinator_of_the_process_is_refused_at_once() -> None:
    """At the second connection it would find the feed of its first call there."""

    def made_without() -> feeder.Coordinator:
        return feeder.init_data_input_workers(["id"], small.Pure(), 4)

    for _ in range(2):
        with pytest.raises(feeder.ConfigError) as caught:
            feeder.serve(made_without, "tcp://127.0.0.1:0")
        assert str(caught.value) == (
            "'made_without' adds its feeds to the coordinator of the process, and is called again "
            "when a feed goes back: give init_data_input_workers coordinator=feeder.Coordinator()"
        )


@pytest.mark.parametrize(("errno", "is_told"), [(zmq.EHOSTUNREACH, False), (zmq.EAGAIN, True)])
def test_a_consumer_that_is_gone_is_no_warning(
    errno: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def send(*_: Any) -> None:
        raise zmq.ZMQError(errno)

    listener = SimpleNamespace(router=SimpleNamespace(send=send))
    loop = cast("ServerLoop", SimpleNamespace(_listeners=[listener], _log=RateLimitedLog()))
    assert not ServerLoop.send(loop, Peer(0, b"gone"), say.Bye(generation=bytes(16)), ())
    assert ("a consumer is not sent to" in caplog.text) is is_told


def test_the_first_batch_may_come_as_the_server_looks_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, there = threading.Event(), threading.Event()

    def fetch(call: feeder.Call) -> Any:
        assert asked.wait(WAIT_S)
        if call.index == 3:
            raise StopIteration
        return [np.full(4, call.index)]

    def look(_: Outbox) -> None:
        # The thread that makes batches looks there, too.
        if threading.current_thread().name.startswith("feeder server"):
            asked.set()
            assert there.wait(WAIT_S)

    around(monkeypatch, Outbox, "put", after=lambda *_: there.set())
    around(monkeypatch, Outbox, "__len__", before=look)
    with serving(lambda: small.make(fetch)) as server, reading(server) as consumer:
        assert small.ids(consumer) == [index for index in range(3) for _ in range(4)]
