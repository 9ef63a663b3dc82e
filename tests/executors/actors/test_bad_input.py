"""What is wrong with actors is told in words that say what to do."""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import feeder
import remote
from feeder import ConfigError, FetchError, RayActors
from feeder.executors import actor, actors, cluster
from feeder.executors.actors import DATA
from feeder.executors.options import executor_of
from feeder.workers.fetch import queue
from feeds import drain, make, note, running
from lineage import WAIT_S
from project import ROOT, TESTS

pytestmark = pytest.mark.process

TIMEOUT_S = 60.0


# ---- Without a cluster


@pytest.mark.parametrize(
    "given, made",
    (
        ("ray:4", RayActors(4)),
        ("ray:1-8", RayActors((1, 8))),
        ({"ray": [1, 8], "num_cpus": 2}, RayActors((1, 8), num_cpus=2)),
        ({"ray": 3, "resources": {"disk": 1}}, RayActors(3, resources={"disk": 1})),
        ({"ray": [1, 3], "per_actor": 4}, RayActors((1, 3), per_actor=4)),
    ),
)
def test_how_it_is_written(given: Any, made: RayActors) -> None:
    assert executor_of(given) == made
    assert made.fewest <= made.most


@pytest.mark.parametrize(
    "given, told",
    (
        ("ray:0", "whole number from 1 to 4096"),
        ("ray:8-1", "the fewest and the most"),
        ("ray:1-2-3", "fewest and the most"),
        ("ray:", "executor is 'ray:'"),
        ({"ray": 2, "num_cpu": 1}, "executor has the key 'num_cpu', expected one of ray, "),
        ({"ray": 2, "num_cpus": -1}, "num_cpus is -1"),
        ({"ray": 2, "resources": {"disk": "one"}}, "a dict of numbers"),
        ({"ray": 2, "placement": "near"}, "'spread' or 'pack'"),
        ({"ray": 2, "runtime_env": "pip"}, "runtime_env is 'pip'"),
        ({"ray": 2, "seed_globals": 1}, "seed_globals is 1"),
        *(
            ({"ray": 1, "per_actor": n}, "per_actor is .* from 1 to 256")
            for n in (0, 1.5, "2", 257)
        ),
    ),
)
def test_options_are_checked(given: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        executor_of(given)


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"ray is not installed: pip install 'feedworks\[ray\]'"):
        make(remote.plain, executor=RayActors(1))


def test_ray_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        __version__ = "2.9.3"

    monkeypatch.setattr(cluster, "load", lambda package, extra: Old())
    with pytest.raises(ConfigError, match=r"Ray is 2.9.3, expected 2.40 or newer"):
        make(remote.plain, executor=RayActors(1))


def test_the_oldest_is_that_of_the_extra() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'ray = ["ray>={cluster.OLDEST[0]}.{cluster.OLDEST[1]}"]' in text


def in_child(code: str, **env: str) -> str:
    """Run a script that is connected to no cluster; what it says at last."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}", **env}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=WAIT_S,
        check=False,
    )  # fmt: skip
    return done.stderr


START = "import feeder, remote; from feeds import drain; "
START += "drain(remote.plain, executor=feeder.RayActors(1))"


def test_nobody_has_connected() -> None:
    pytest.importorskip("ray")
    assert (
        "ConfigError: executor is feeder.RayActors, and this process is connected to no Ray "
        in (in_child(START, RAY_ADDRESS=""))
    )


def test_the_cluster_cannot_be_reached() -> None:
    pytest.importorskip("ray")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
        told = in_child(START, RAY_ADDRESS=address)
    assert f"the Ray cluster of RAY_ADDRESS={address} cannot be reached" in told


@pytest.mark.served
def test_an_actor_that_does_not_reach_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "_JOIN_S", 0.3)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        told = actor.Invitation(1, b"", f"tcp://127.0.0.1:{sock.getsockname()[1]}", b"0" * 40)
        with pytest.raises(ConnectionError, match=rf"cannot reach the driver at {told.tcp}"):
            actor.Actor().serve(told)


# ---- On a cluster


def test_no_room(
    cluster: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "_ROOM_TOLD_S", 0.5)
    monkeypatch.setattr(actors, "_ROOM_S", 1.5)
    with pytest.raises(FetchError, match=r"no actor .* has room: .*it lacks disk.*add hosts"):
        drain(
            remote.plain, executor=RayActors(2, resources={"disk": 1.0, "first": 1.0}),
            timeout=TIMEOUT_S,
        )  # fmt: skip
    assert "disk: 1 asked for each, 0 of 0 free; first: 1 asked for each, 8 of 8" in caplog.text
    assert "waiting" in caplog.text


def test_room_for_some_is_enough(cluster: Any) -> None:
    stream = drain(remote.plain, epochs=2)
    # Three fit to the one node, and there is no fourth.
    executor = RayActors(4, num_cpus=0, resources={"first": 2.5})
    assert drain(remote.plain, epochs=2, executor=executor, timeout=TIMEOUT_S) == stream


def test_a_class_that_an_actor_cannot_have(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "only_here.py").write_text("def fetch(call):\n    raise StopIteration\n")
    sys.path.insert(0, str(tmp_path))
    try:
        function = importlib.import_module("only_here").fetch
    finally:
        sys.path.remove(str(tmp_path))
        del sys.modules["only_here"]
    with pytest.raises(FetchError, match="No module named 'only_here'"):
        sys.modules["only_here"] = sys  # Or it could not be pickled by its name here.
        try:
            sys.fetch = function  # type: ignore[attr-defined]
            drain(function, executor=RayActors(1), timeout=TIMEOUT_S)
        finally:
            del sys.modules["only_here"], sys.fetch  # type: ignore[attr-defined]


def test_an_environment_that_cannot_be_made(cluster: Any) -> None:
    executor = RayActors(1, runtime_env={"working_dir": "/nowhere/at/all"})
    with pytest.raises(FetchError, match="no actor could be started"):
        drain(remote.plain, executor=executor, timeout=TIMEOUT_S)


def test_variables_of_an_environment_are_there(cluster: Any) -> None:
    variables = {"FEEDER_TEST": "here"}
    executor = RayActors(
        1, runtime_env={"env_vars": {**variables, "PYTHONPATH": f"{ROOT}:{TESTS}"}}
    )
    fetch = remote.At(2, remote.look_at_environment, variables)
    assert len(drain(fetch, epochs=1, executor=executor, timeout=TIMEOUT_S)) > 1


def test_an_unknown_way(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA, "pigeons")
    with pytest.raises(ConfigError, match="FEEDER_RAY_DATA is 'pigeons', expected mapped"):
        drain(remote.plain, executor=RayActors(1))


@pytest.mark.parametrize("way", ("mapped", "frames"))
def test_what_is_no_array_is_refused(
    cluster: Any, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA, way)
    with pytest.raises(FetchError, match="cannot be sent: it is an int; return a list"):
        drain(remote.Gives(remote.no_tuple, 5), executor=RayActors(2), timeout=TIMEOUT_S)


@pytest.mark.parametrize(("per_actor", "who"), ((1, "actor 1 (process "), (2, "")))
def test_a_call_that_hangs_is_told_with_its_stack(
    cluster: Any, per_actor: int, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A new limit counts from the next look.
    monkeypatch.setattr(queue, "_SLOW_LOOK_S", 0.2)
    door = remote.door(tmp_path)
    fetch = remote.At(7, remote.hang_in_a_place_of_its_own, door)
    executor = RayActors(1, per_actor=per_actor)
    with running(fetch, executor=executor, timeout=TIMEOUT_S) as (_, feed):
        # An actor may take any time to start: the limit counts from when the call has begun.
        remote.wait_at(door)
        feed.streams[0].pipeline.queue._timeout_s = 1.0
        with pytest.raises(feeder.FetchTimeout) as caught:
            list(feed)
    told = "".join(caught.value.__notes__)
    assert "hang_in_a_place_of_its_own" in told and who in told


def test_a_stranger_with_another_key_is_not_let_in(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who knows address and public key of the driver hears nothing without a key of an actor."""
    import zmq

    monkeypatch.setenv(DATA, "frames")
    with running(remote.plain, epochs=None, executor=RayActors(1), timeout=TIMEOUT_S) as (_, feed):
        note(next(feed))
        ports = feed.streams[0].pipeline._execution._pool.launcher.ports  # type: ignore[union-attr]
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.curve_publickey, dealer.curve_secretkey = zmq.curve_keypair()
            dealer.curve_serverkey = ports.public
            events = dealer.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
            dealer.connect(ports.address)
            dealer.send(actor.HELLO.pack(1))
            assert events.poll(60_000)
            assert not dealer.poll(0)
            dealer.disable_monitor()
            events.close()
        note(next(feed))
