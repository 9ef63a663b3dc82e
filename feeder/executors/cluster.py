"""Ray, as far as an executor uses it: actors are started, asked and killed, and room is reckoned.

No other module of the executors names Ray; it is imported when a feed is made that asks for actors.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Callable
from typing import Any

from feeder.errors import ConfigError
from feeder.executors.actor import Greeting, Invitation
from feeder.executors.options import RayActors
from feeder.workers.sources.extras import load

OLDEST = (2, 40)
"""The version that the extra `ray` asks for."""

_KNOCK_S = 5.0
"""How long the cluster's head may take to let this process in."""

_LOOK_S = 1.0
"""How long a stack is waited for."""


def load_ray() -> Any:
    """Ray. Raises `ConfigError` where it is not installed, or is too old."""
    ray = load("ray", "ray")
    found = tuple(int(part) for part in re.findall(r"\d+", ray.__version__)[:2])
    if found < OLDEST:
        raise ConfigError(
            f"Ray is {ray.__version__}, expected {'.'.join(map(str, OLDEST))} or newer: "
            "pip install -U 'feedworks[ray]'"
        )
    return ray


def _knock(address: str) -> None:
    """Raise `OSError` where nobody listens: Ray would end this process."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), _KNOCK_S).close()


class Cluster:
    """The cluster that this process is connected to. Any thread."""

    def __init__(self, options: RayActors) -> None:
        self._options = options
        self._ray = load_ray()
        self._class: Any = None

    def check(self) -> None:
        """See to it that this process is connected: by itself, or here where `RAY_ADDRESS` says
        to which cluster. Raises `ConfigError`."""
        if self._ray.is_initialized():
            return
        if not os.environ.get("RAY_ADDRESS"):
            raise ConfigError(
                "executor is feeder.RayActors, and this process is connected to no Ray cluster: "
                "call ray.init() first, or name the cluster in RAY_ADDRESS"
            )
        address = os.environ["RAY_ADDRESS"]
        try:
            _knock(address)
            self._ray.init(address="auto", log_to_driver=False, configure_logging=False)
        except Exception as error:
            raise ConfigError(
                f"the Ray cluster of RAY_ADDRESS={address} cannot be reached: {error}; start one "
                "(ray start --head), or correct the address"
            ) from error

    def host(self) -> str:
        """The address of this host, as the cluster's hosts know it."""
        return str(self._ray.util.get_node_ip_address())

    # ---- actors

    def start(self) -> Any:
        """Ask for an actor; its handle."""
        if self._class is None:
            self._class = _actor_class(self._ray, self._options.per_actor)
        options = self._options
        told = dict(options.resources or {})
        asked: dict[str, Any] = {"num_cpus": options.num_cpus * options.per_actor}
        if "GPU" in told:
            asked["num_gpus"] = told.pop("GPU")
        if "memory" in told:
            asked["memory"] = told.pop("memory")
        if options.runtime_env is not None:
            asked["runtime_env"] = dict(options.runtime_env)
        path = [place for place in sys.path if isinstance(place, str)]
        return self._class.options(
            **asked,
            resources=told,
            scheduling_strategy="SPREAD" if options.placement == "spread" else "DEFAULT",
            # Tickets are asked for again by us: a call that Ray made again would be made twice.
            max_restarts=0,
            max_task_retries=0,
        ).remote(path, options.runtime_env is not None, options.per_actor)

    def hello(
        self, handle: Any, generation: int, told: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Ask who an actor is, or have it fork a process; `told` is called with a `Greeting` or
        with what went wrong."""
        self._when(handle.hello.remote(generation), lambda found: Greeting(*found), told)

    def serve(
        self, handle: Any, invitation: Invitation, told: Callable[[Any, BaseException | None], None]
    ) -> None:
        """Have an actor come here, or its process; `told` is called when it has left, with how
        that was."""
        # A function that one process alone calls is called by its main thread.
        several = self._options.per_actor > 1
        serve = handle.serve.options(concurrency_group="serve") if several else handle.serve
        self._when(serve.remote(*invitation), lambda found: found, told)

    def stack(self, handle: Any, generation: int) -> str:
        """Where an actor, or its process, is in its call; empty where it does not say."""
        with contextlib.suppress(Exception):
            asked = handle.stack.options(concurrency_group="look").remote(generation)
            return str(self._ray.get(asked, timeout=_LOOK_S))
        return ""

    def end(self, handle: Any, generation: int) -> None:
        """End one process of an actor; harmless where it has ended."""
        with contextlib.suppress(Exception):
            handle.end.options(concurrency_group="look").remote(generation)

    def kill(self, handle: Any) -> None:
        """End an actor; harmless where it has ended, or the cluster has."""
        with contextlib.suppress(Exception):
            self._ray.kill(handle)

    def _when(
        self,
        ref: Any,
        made: Callable[[Any], Any],
        told: Callable[[Any, BaseException | None], None],
    ) -> None:
        def done(future: Any) -> None:
            error = future.exception()
            told(None if error is not None else made(future.result()), error)

        # The reference lives as long as its future does, which Ray holds until it is done.
        ref.future().add_done_callback(done)

    # ---- what is told

    def how(self, error: BaseException | None) -> tuple[str, bool]:
        """How an actor ended, in some words; and whether its whole node has."""
        if error is None:
            return "has left", False
        text = str(error)
        cause = getattr(error, "cause", None)
        if isinstance(cause, BaseException):
            return f"raised {type(cause).__name__}: {cause}", False
        detail = re.search(r"Worker exit detail: (.*?)(?:\. Some common causes|\n|$)", text)
        reason = re.search(r"The actor is dead because (.*?)(?:\n|$)", text)
        said = detail or reason
        found = said.group(1) if said else " ".join(text.split())
        # Ray's own sentences of a node that is gone.
        is_node = bool(re.search(r"\bnode\b.*\b(died|dead|failed|terminated|removed)", text, re.I))
        return f"has ended: {found[:300].rstrip('. ')}", is_node

    def room(self) -> tuple[str, bool]:
        """What the cluster has for one more actor, in words; and whether it has enough."""
        options = self._options
        cpus = float(options.num_cpus * options.per_actor)
        asked = {"CPU": cpus, **dict(options.resources or {})}
        try:
            has, free = self._ray.cluster_resources(), self._ray.available_resources()
        except Exception as error:
            return f"the cluster does not say what it has: {error}", False
        parts = [
            f"{name}: {num:g} asked for each, {free.get(name, 0.0):g} of {has.get(name, 0.0):g} "
            "free"
            for name, num in asked.items()
            if num
        ]
        missing = [name for name, num in asked.items() if num > free.get(name, 0.0)]
        lacks = f"; it lacks {', '.join(missing)}" if missing else ""
        told = f"the cluster has {'; '.join(parts) or 'no limit for them'}{lacks}"
        return told, not missing


def _actor_class(ray: Any, num: int) -> Any:
    """The actor, of so many processes, as Ray starts it. Made inside a function, it travels by
    value: so it can tell where feeder is found before it is imported."""

    class FeederActor:
        """What Ray makes in an actor's process: the actor itself, imported there. Ray calls it on
        the actor's threads."""

        def __init__(self, path: list[str], own_first: bool, num: int) -> None:
            import os
            import sys

            own = list(sys.path)
            first, second = (own, path) if own_first else (path, own)
            sys.path[:] = [*first, *(place for place in second if place not in first)]
            sys.path_importer_cache.clear()
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            from feeder.executors.actor import Actor, Seats

            self._actor: Any = Actor() if num == 1 else Seats()

        def hello(self, generation: int) -> Any:
            import ray

            node = ray.get_runtime_context().get_node_id()
            return tuple(self._actor.hello(node, generation))

        def serve(self, *told: Any) -> Any:
            from feeder.executors.actor import Invitation

            return self._actor.serve(Invitation(*told))

        def end(self, generation: int) -> None:
            self._actor.end(generation)

        def stack(self, generation: int) -> Any:
            return self._actor.stack(generation)

    # Of their own: `serve` does not return while its process lives. Another one may have the place
    # of a process that is not gone yet.
    return ray.remote(concurrency_groups={"look": 1, "serve": 2 * num})(FeederActor)
