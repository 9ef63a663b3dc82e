"""`feeder.serve` and `Server`: the front door of the service, which puts its parts together."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import xxhash
from msgspec import Meta

from feeder.checkpoint.parts import store_of
from feeder.checkpoint.policy import Checkpointing
from feeder.checkpoint.saving import Saver
from feeder.checkpoint.store import CheckpointStore
from feeder.closing import Closing
from feeder.errors import ConfigError, FeedError, ForkedError, RemoteError
from feeder.executors.options import Processes, RayActors, Threads, executor_of
from feeder.feeds.coordinator import Coordinator
from feeder.observe.figures import Figures, with_checkpoints
from feeder.service.memory.arena import ArenaSlots
from feeder.service.memory.fdpass import DescriptorListener, remove_stale
from feeder.service.memory.forking import close_sockets
from feeder.service.net.addresses import (
    Address,
    check_binds,
    default_address,
    open_to_users,
    parse,
    private_file,
)
from feeder.service.net.claims import claim
from feeder.service.net.kernel import check_limit
from feeder.service.net.keys import ServerKeys
from feeder.service.net.listener import open_listeners
from feeder.service.net.security import Security
from feeder.service.server.factory import (
    FeedFactory,
    begin_at,
    make_coordinator,
    make_feed_factories,
)
from feeder.service.server.group import ConsumerGroup
from feeder.service.server.io_loop import ServerLoop
from feeder.service.server.part import read_queues
from feeder.service.server.run import ServedFeed
from feeder.settings import NonNegativeInt, Seconds, check
from feeder.state.snapshot import Snapshot
from feeder.waking import Waker
from feeder.workers import forks
from feeder.workers.fetch.threads import ThreadGroup
from feeder.workers.public import public
from feeder.workers.stream.spec import Part

# ---- The arguments of `feeder.serve`: checked before anything is opened


SAVE_EVERY_S = 30.0
"""How often a server stores the committed position by default."""


def check_arguments(
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], list[Address], ServerKeys | None]:
    """Check arguments of `serve`; returns them with numbers as Python's own, their addresses and
    keys. Raises `ConfigError`."""
    told = check(serve, given)
    told["queues"], told["part"] = read_queues(told["queues"])
    executor_of(told["executor"])
    # Imported where it is wanted: a server without a status page does without an HTTP server.
    if told["status"] is not None:
        from feeder.observe.status.port import parse_place

        parse_place(told["status"])
    addresses, keys = told["addresses"], told["keys"]
    texts = (addresses,) if isinstance(addresses, str) else addresses
    found = [default_address()] if texts is None else [parse(text) for text in texts]
    check_binds(found, curve=keys is not None, insecure=told["insecure"])
    if not told["insecure"] and (ports := open_to_users(found, curve=keys is not None)):
        logger.warning(
            "every user of this host may connect at %s, read the batches and take queues: give "
            "keys=, or serve at a unix socket; insecure=True says that this is meant",
            ", ".join(ports),
        )  # fmt: skip
    return told, found, None if keys is None else ServerKeys.from_directory(keys)


def check_checkpoints(given: Any) -> Checkpointing | None:
    """When and where a server stores the committed position; raises `ConfigError`."""
    if given is None:
        return None
    policy = Checkpointing.of(given)
    if policy.every_batches is not None:
        raise ConfigError(
            f"every_batches is {policy.every_batches}, which a server cannot keep to, since its "
            "consumers stand at different batches; use every_s"
        )
    return policy if policy.every_s is not None else replace(policy, every_s=SAVE_EVERY_S)


logger = logging.getLogger("feeder")

# Below the 5 s that `close` promises. The makers join their runs in 3.5 s of these.
STOP_S = 4.5
"""How long a stop waits for all threads, fetch functions included."""

# Beyond the 5 s: a stored position is worth more than a quick end, and a disk may be slow.
SAVE_S = 10.0
"""How long the end of a server waits for the last checkpoint to be stored."""

# A page that shows that the I/O thread hangs is worth more than one that hangs with it.
_LOOK_S = 2.0
"""How long `figures` waits for the I/O thread."""


@public("feeder")
class Server(Closing):
    """Feeds that are being served; made by `feeder.serve`. A context manager.

    Any thread may call its methods. It holds no state of the service: the I/O thread owns that, in
    `ServerLoop`, and each feed has a maker thread, in `ServedFeed`.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        factory: Callable[[], Any] | None,
        addresses: Sequence[Address],
        *,
        queues: int | None,
        part: Part | None = None,
        keys: ServerKeys | None,
        lease_s: float,
        exit_when: str,
        status: str | int | None = None,
        checkpoints: Checkpointing | None = None,
        resume: Any = None,
        replicas: int = 1,
        skip: int = 0,
        executor: Any = None,
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._threads = ThreadGroup()
        self._waker = Waker()
        self._over = threading.Event()
        self._groups: dict[str, ConsumerGroup] = {}
        self._saver: Saver | None = None
        self._forked = False
        try:
            factories = make_feed_factories(coordinator, factory, queues, replicas, executor, part)
            check_limit(sum(len(one.own_queues) * one.replicas for one in factories))
            store = None if checkpoints is None else checkpoints.place
            if checkpoints is not None:
                own = store_of(checkpoints.place, factories[0].part)
                checkpoints = replace(checkpoints, store=own)
            begin_at(factories, resume, store, skip)
            run_id = os.urandom(16)
            # A fresh fencing token of 16 bytes, so that no lease of an earlier server is mistaken
            # for one of this. And all feeds before the saver: a checkpoint has all of them in it,
            # or no server could start from it.
            self._feeds = [self._feed(factory, run_id, lease_s) for factory in factories]
            if checkpoints is not None:
                self._saver = self._keep(checkpoints)
            self._open(addresses, keys, exit_when, status)
        except BaseException:
            self._stack.close()
            raise

    def _open(
        self, addresses: Sequence[Address], keys: ServerKeys | None, exit_when: str,
        status: str | int | None,
    ) -> None:  # fmt: skip
        # Claimed before they are bound: a unix socket that a killed server left is taken over, one
        # of a living server is not.
        claims = [self._stack.enter_context(claim(address)) for address in addresses]
        security = self._stack.enter_context(Security(keys, is_server=True))
        self._allowed = security.allowed
        listeners = open_listeners(security, addresses)
        for held in claims:
            held.protect()
        self.addresses = tuple(
            str(address) for listener in listeners for address in listener.addresses
        )
        """Where it listens, with the ports that the system chose."""
        descriptors = self._listen()
        self._places = {
            a.port if a.scheme == "tcp" else a.path for one in listeners for a in one.addresses
        }
        self._places.add(descriptors.path)
        forks.call_in_child(self.abandon_in_child)
        self.queues = {name: group.num_queues for name, group in self._groups.items()}
        """The number of queues of each feed, by its name."""
        self.own_queues = self._feeds[0].factory.own_queues
        """Those of them whose batches it makes."""
        self.replicas = self._feeds[0].factory.replicas
        """How many consumers are given the batches of each queue."""
        self._loop = ServerLoop(
            self._groups, listeners, descriptors, self._waker, exit_when=exit_when
        )
        self.status_url = self._show_status(status)
        """The address of the status page; None if there is none."""
        try:
            for feed in self._feeds:
                # Memory is written to now, and not in the first consumer's time: 8 of the 18 ms
                # from its `connect` to its first batch of 20 MB. A consumer cannot come before.
                feed.slots.reserve(feed.factory.own_queues)
                self._threads.start(f"feeder {feed.name} maker", feed.run_maker)
            self._threads.start("feeder server", self._run)
        except BaseException:
            self.close()
            raise

    def _keep(self, checkpoints: Checkpointing) -> Saver:
        """Start a thread that stores the committed position of all feeds."""
        saver = Saver(checkpoints, self._position, lambda error: logger.error("%s", error))
        self._stack.callback(saver.close, SAVE_S)
        saver.start()
        if self._feeds[0].factory.part is not None:
            saver.save_soon()  # So that others know from now on where these queues begin.
        return saver

    def _position(self) -> Snapshot:
        return Snapshot(tuple(group.state() for group in self._groups.values()))

    def _feed(self, factory: FeedFactory, run_id: bytes, lease_s: float) -> ServedFeed:
        # A call upwards: slots ask the group for their number when the first batch shows its size.
        groups = self._groups
        slots = ArenaSlots(
            len(factory.config.devices),
            lambda queue, slot_bytes: groups[factory.name].num_slots(queue, slot_bytes),
            replicas=factory.replicas,
        )
        feed = ServedFeed(factory, slots, self._waker.wake)
        groups[factory.name] = ConsumerGroup(feed, run_id, lease_s)
        return feed

    def _listen(self) -> DescriptorListener:
        """The unix socket where consumers of this host fetch descriptors. It is named after the
        first address, which one server holds at a time, so a file that a killed server left is its
        own. Containers may share the folder and not the network, and have the same port each."""
        name = xxhash.xxh3_64_hexdigest(f"{self.addresses[0]} {_network()}".encode())
        remove_stale(private_file(f"{name}.arenas").parent)
        listener = DescriptorListener(str(private_file(f"{name}.arenas")))
        self._stack.callback(listener.close)
        return listener

    def _show_status(self, place: str | int | None) -> str | None:
        if place is None:
            return None
        from feeder.observe.status.port import StatusPort

        port = StatusPort(place, self.figures)
        self._stack.callback(port.close)
        return port.url

    def figures(self) -> Figures:
        """The figures of all feeds; any thread may ask. Raises `ClosedError` when the server is
        closed, and `RemoteError` if its I/O thread does not answer."""
        self._check_forked()
        future = self._loop.monitors.ask()
        self._waker.wake()
        try:
            figures = future.result(_LOOK_S)
        except TimeoutError:
            future.cancel()
            raise RemoteError(
                f"the server's own thread has not answered for {_LOOK_S:.0f} s"
            ) from None
        if self._saver is None:
            return figures
        return with_checkpoints(figures, self._saver.age_s, self._saver.stats())

    def _run(self) -> None:
        try:
            self._loop.run()
        finally:
            self._over.set()

    def places(self) -> set[Any]:
        """Where its sockets are bound: forked children find their copies by these, to close
        them."""
        return self._places

    def abandon_in_child(self) -> None:
        """This is a forked child: the sockets and the threads are the parent's."""
        self._forked = True
        close_sockets(self.places())

    def read_keys(self) -> bool:
        """Read again which clients may connect, and return whether there are keys. A server does so
        by itself when a newcomer comes after a change; those that are connected stay."""
        self._check_forked()
        if self._allowed is not None:
            self._allowed.read()
        return self._allowed is not None

    def _check_forked(self) -> None:
        if self._forked:
            raise ForkedError(
                "the server was made in the parent process; make it after the fork, or start "
                "children with the spawn method"
            )

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the server is over; returns whether it is. It is over when it is closed and,
        with `exit_when="acknowledged"`, when every consumer has used everything or a feed has
        failed (`failure`)."""
        self._check_forked()
        return self._over.wait(timeout)

    @property
    def failure(self) -> FeedError | None:
        """Why the server ended by itself before everything was used, else None: the error of a feed
        that its consumers were sent (`exit_when="acknowledged"`), or that of its I/O thread."""
        return self._loop.exit_condition.failure

    def close(self) -> None:
        """Stop serving, within 5 s; consumers look for a server again. Raises `StuckWorkerError`
        if a fetch function does not return. In a forked child it does nothing."""
        if self._forked:
            return
        # Feeds first: their threads need most of the time. The loop goes on sending meanwhile.
        for feed in self._feeds:
            feed.close()
        self._loop.stop("it was closed")
        try:
            self._threads.close(STOP_S)
        finally:
            # Only now: the loop has heard what consumers used until the end.
            if self._saver is not None and self._saver.is_running:
                self._saver.save_soon()
            # Sockets before unix connections: a hang-up must not overtake the last messages.
            self._stack.close()
            self._loop.close()
        for feed in self._feeds:
            if feed.stuck is not None:
                raise feed.stuck

    def __repr__(self) -> str:
        return f"<Server at {', '.join(self.addresses)}>"


@public("feeder")
def serve(
    feeds: Coordinator | Callable[[], Any],
    addresses: str | Sequence[str] | None = None,
    *,
    queues: int | str | None = None,
    replicas: Annotated[int, Meta(ge=1, le=1024, description="a whole number from 1 to 1024")] = 1,
    keys: str | os.PathLike[str] | None = None,
    insecure: bool = False,
    lease: Seconds = 30.0,
    exit_when: Annotated[
        str, Literal["never", "acknowledged"], Meta(description="'never' or 'acknowledged'")
    ] = "never",
    status: str | int | None = None,
    checkpoints: Checkpointing | CheckpointStore | str | os.PathLike[str] | None = None,
    resume: Any = None,
    skip: NonNegativeInt = 0,
    executor: Threads | Processes | RayActors | Mapping[str, Any] | str | None = None,
) -> Server:
    """Serve feeds to consumers in other processes, on this host or others.

    The first sentence about a setting is also the help of its flag.

    Args:
        feeds: A factory: a function without arguments that returns a coordinator, as
            `init_data_input_workers` does. It is called again when a feed has to go back. Or a
            coordinator that is not started: its feeds can go back where their fetch functions
            can be put back.
        addresses: Where to listen: ``tcp://HOST:PORT``, ``ipc:///PATH`` or ``ipc://NAME`` (default:
            a unix socket in a directory of this user's own). One, or a list.
        queues: Queues of each feed (default: as many as it has devices), or some of so many, as
            ``0-7/64``, if other servers make the others. Batch `step` goes to queue `step` modulo
            their number. See docs/serving.md#several-servers-one-stream.
        replicas: Trainers that are given the batches of each queue (default: 1). They work on one
            batch together; on one host they share one copy. See docs/serving.md#shared-queues.
        keys: Of `feeder keygen`: only its clients come in. A directory; TCP is encrypted then.
        insecure: Let other hosts in without keys. Otherwise an address that other hosts can reach
            needs `keys`.
        lease: For how long a consumer need not be heard of (default: 30). Seconds, after which
            another consumer may take its place.
        exit_when: `acknowledged`: end by itself once every batch has been used, or a feed has
            failed and its consumers were told (default: never). `wait` returns then. See
            docs/serving.md#what-happens-when.
        status: Show a page, `/metrics`, `/healthz` and `/readyz` there (default: nowhere; without
            HOST to this host alone). ``[HOST:]PORT``, or a port. See
            docs/watching.md#the-status-page.
        checkpoints: Where the newest round that all consumers have used is stored: a
            `Checkpointing` with `every_s`, or a store, path or URL for every 30 s. It is stored
            at the end too. See docs/checkpoints.md#a-servers.
        resume: Where consumers without a position of their own begin: whatever
            `init_data_input_workers` takes as `resume`; "latest" is the newest of `checkpoints`.
            A trainer's own position goes before it.
        skip: Leave out so many rounds of all queues there, once, as after a loss spike. Later
            positions contain the skip. See docs/positions.md#any-number-of-devices.
        executor: What fetch functions run on: ``threads:N``, ``processes:N``, ``processes`` for as
            many as there are cores, ``ray:N`` or ``ray:MIN-MAX`` for actors on the host's Ray
            cluster (default: what each feed says). Or what `init_data_input_workers` takes. See
            docs/processes.md.

    Returns:
        The server, which serves until it is closed. It raises the limit of its process to 65,536
        descriptors, where the system allows it.

    Raises:
        ConfigError: An argument is wrong, or an address is taken.
        ResumeError: `resume` does not fit a feed.
        CheckpointError: `resume` cannot be read, or somebody else writes to `checkpoints`.
    """
    told, found, server_keys = check_arguments(locals())
    if isinstance(feeds, Coordinator):
        factory, coordinator = None, feeds
    elif callable(feeds):
        factory, coordinator = feeds, make_coordinator(feeds)
    else:
        raise ConfigError(
            f"feeds is {type(feeds).__name__}, expected a coordinator or a function that "
            "returns one"
        )
    return Server(
        coordinator, factory, found, queues=told["queues"], lease_s=told["lease"],
        exit_when=exit_when, status=status, keys=server_keys, resume=resume,
        checkpoints=check_checkpoints(checkpoints), replicas=told["replicas"], skip=told["skip"],
        executor=executor, part=told["part"],
    )  # fmt: skip


def _network() -> int:
    """The number of the network namespace of this process."""
    return os.stat("/proc/self/ns/net").st_ino
