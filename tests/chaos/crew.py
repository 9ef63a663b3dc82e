"""The processes of one leg of the campaign: a server, three trainers, and who restarts them."""

from __future__ import annotations

import json
import random
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from chaos.ledger import Ledger
from chaos.network import Network
from chaos.processes import PLANT, Child, Hang, Holds, Watch, members
from chaos.streams import NUM_QUEUES
from chaos.trainer import FENCED, HURRY
from feeder.service.faults import VARIABLE as FAULT
from feeder.service.net.keys import make_keys

START_S = 10.0
"""How long a process may take to start."""
RECOVER_S = 20.0
"""How long it may take until batches flow again."""
FINISH_S = 60.0
"""How long the rest of the stream may take."""

_PATIENCE_S = 2.5

_MOST_DESCRIPTORS = 48
_MOST_ARENAS = 8
"""Arenas that a process may hold for each consumer: its own, and retired ones for a while."""


class Wrong(Exception):
    """Something is not as it has to be."""


class Crew:
    """Starts, strikes and restarts the processes of one leg."""

    def __init__(
        self, watch: Watch, folder: Path, form: str, transport: str, dice: random.Random,
        plant: str = "", network: Network | None = None,
    ) -> None:  # fmt: skip
        """With a network the server is on one of its first two hosts, each trainer on its own."""
        self.watch = watch
        self.folder = folder
        self.form = form
        self.transport = transport
        self._dice = dice
        self._plant = plant
        self._addresses = addresses(folder, transport, dice)
        self.network = network
        self._security: dict[str, object] = {}
        self._hosts: dict[str, int] = {}
        if network is not None:
            port = dice.randrange(20_000, 32_000)
            self._hosts = {f"tcp://{network.ip(host)}:{port}": host for host in (0, 1)}
            self._addresses = list(self._hosts)
            if transport == "curve":
                make_keys(folder / "keys", "trainers")
                self._security = {"keys": str(folder / "keys")}
        self._lease_s = dice.choice((0.3, 30.0))
        self._pauses = [dice.uniform(0.003, 0.008) for _ in range(NUM_QUEUES)]
        self._num_kept = [dice.randrange(5) for _ in range(NUM_QUEUES)]
        self.ledgers = [Ledger(folder, queue) for queue in range(NUM_QUEUES)]
        self.server: Child | None = None
        self.trainers: list[Child | None] = [None] * NUM_QUEUES
        self.results: dict[int, tuple[int, str]] = {}
        """Of each trainer that is done the number of batches and the hash chain."""
        self.num_starts = 0
        self.num_brought_back = 0
        """Trainers that were done and had to tell a new server so."""

    # ---- starting

    def _start(
        self, name: str, module: str, settings: dict[str, object], fault: str, host: int
    ) -> Child:
        env = {"TMPDIR": str(self.folder), PLANT: self._plant}
        inside: tuple[str, ...] = ()
        if self.network is not None:
            inside = self.network.inside(host)
            # A host's processes do not see what others have in their runtime folder.
            own = self.folder / f"host-{host}"
            own.mkdir(mode=0o700, exist_ok=True)
            env["XDG_RUNTIME_DIR"] = str(own)
        if fault:
            env[FAULT] = fault
        self.num_starts += 1
        log = self.folder / f"{name.replace(' ', '-')}.log"
        with log.open("a") as file:
            file.write(f"--- start {self.num_starts} {fault}\n")
        return self.watch.start(name, module, json.dumps(settings), env, log, inside)

    def start_server(self, fault: str = "", *, elsewhere: bool | None = None) -> Child:
        """Start the server, mostly where the last one was."""
        if self._dice.random() < 0.3 if elsewhere is None else elsewhere:
            self._addresses.reverse()
        settings = {
            "form": self.form, "addresses": self._addresses[:1], "lease_s": self._lease_s,
            "security": self._security or {"insecure": self.network is not None},
        }  # fmt: skip
        self.server = self._start("server", "chaos.server", settings, fault, self.server_host)
        return self.server

    @property
    def server_host(self) -> int:
        """The host of the network that the server is on."""
        return self._hosts.get(self._addresses[0], 0)

    @staticmethod
    def trainer_host(queue: int) -> int:
        """The host of the network that the trainer of a queue is on."""
        return 2 + queue

    def move_address(self) -> None:
        """The other host has the server's address from now on."""
        assert self.network is not None
        address, old = self._addresses[0], self.server_host
        self._hosts[address] = 1 - old
        self.network.move(address.split("/")[2].split(":")[0], old, 1 - old)

    def _bring_back(self) -> None:
        """Start the trainers again that were done, to tell the server so: it waits for them where
        the old one died before anybody else had heard of it."""
        for queue in list(self.results):
            del self.results[queue]
            self.num_brought_back += 1
            self.start_trainer(queue)

    def start_trainer(
        self, queue: int, fault: str = "", *, at: int | None = None, takeover: bool = False
    ) -> Child:
        """Start a trainer from its newest checkpoint, or all together from the one `at`."""
        settings = {
            "folder": str(self.folder), "queue": queue, "addresses": sorted(self._addresses),
            "plane": "shared" if self.transport == "shared" else "frames",
            "pause_s": self._pauses[queue], "num_kept": self._num_kept[queue], "start": at,
            "takeover": takeover, "security": self._security,
        }  # fmt: skip
        name, host = f"trainer {queue}", self.trainer_host(queue)
        child = self._start(name, "chaos.trainer", settings, fault, host)
        self.trainers[queue] = child
        return child

    def start_all_trainers(self) -> None:
        """Start all trainers from the newest checkpoint that all of them have."""
        at = max(set.intersection(*(ledger.rounds() for ledger in self.ledgers)))
        for ledger in self.ledgers:
            ledger.forget_after(at)
        self.results.clear()
        for queue in range(NUM_QUEUES):
            self.start_trainer(queue, at=at)

    # ---- ending

    def kill(self, *children: Child | None) -> None:
        """Kill processes that live, at once, and see that nothing is left of them."""
        alive = [child for child in children if child is not None]
        for child in alive:
            child.signal(signal.SIGKILL)
        for child in alive:
            self.watch.wait(lambda c=child: c.status is not None, 5.0, f"end of {child.name}")
            self._bury(child)

    def _bury(self, child: Child) -> None:
        """Forget a process that has ended; raises `Wrong` where it left another behind."""
        self.watch.end(child)
        if child is self.server:
            self.server = None
        self.trainers = [None if t is child else t for t in self.trainers]
        if left := members(child.pid):
            raise Wrong(f"{child.name} was killed and left processes behind: {left}")

    def collect(self) -> None:
        """Take note of trainers that are done; raises `Wrong` where a process ended by itself."""
        for queue, child in enumerate(self.trainers):
            if child is not None and child.status is not None and not child.struck:
                self.watch.wait(lambda c=child: not c.read(), 5.0, f"last word of {child.name}")
                if child.status or not child.said("done"):
                    raise Wrong(f"{child.name} ended with status {child.status}")
                _, num, chain = child.lines[-1]
                self.results[queue] = int(num), chain
                self._bury(child)
        server = self.server
        if server is not None and server.status is not None and not server.struck:
            raise Wrong(f"the server ended with status {server.status}")

    def dismiss(self, child: Child) -> None:
        """See a trainer end whose queue was taken over."""
        self.watch.wait(lambda: child.status is not None, RECOVER_S, f"end of fenced {child.name}")
        if child.status not in (FENCED, 0):
            raise Wrong(f"{child.name} was fenced and ended with status {child.status}")
        self._bury(child)

    # ---- waiting

    @property
    def is_over(self) -> bool:
        """Whether all trainers are done."""
        self.collect()
        return len(self.results) == NUM_QUEUES

    def settle(self) -> None:
        """Wait until every trainer that is not done has had batches since now, or until a process
        comes to the point that it was told, and check what they hold."""
        since = {child.pid: len(child.lines) for child in self._all() if child is not self.server}

        def flows() -> bool:
            self.collect()
            found = self._all()
            return any(child.struck for child in found) or all(
                len(child.lines) > since.get(child.pid, 0) for child in found
                if child is not self.server
            )  # fmt: skip

        self._wait_ready()
        self._wait(flows, RECOVER_S, "a batch at every trainer")
        self._check_holds()

    def _wait(self, happened: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Wait for batches; where none come and trainers are done, see whether these are missed."""
        if not self.watch.wait_for(happened, _PATIENCE_S):
            self._bring_back()
            self.watch.wait(happened, timeout_s, what)

    def _wait_ready(self) -> None:
        server = self.server
        assert server is not None

        def is_ready() -> bool:
            self.collect()
            return server.said("ready") or server.struck

        self.watch.wait(is_ready, START_S, "start of the server")

    def _all(self) -> list[Child]:
        return [child for child in (self.server, *self.trainers) if child is not None]

    def finish(self) -> None:
        """Let the rest of the stream pass without pauses, and stop the server as one should."""
        self.hurry()
        if self.server is not None and self.server.armed:
            self.kill(self.server)
            self.start_server()
        self._wait(lambda: self.is_over, FINISH_S, "end of the stream")
        self._wait_ready()
        server = self.server
        assert server is not None
        server.signal(signal.SIGTERM)
        self.watch.wait(lambda: server.status is not None, 6.0, "stop of the server")
        if server.status:
            raise Wrong(f"the server was stopped and ended with status {server.status}")
        self._bury(server)
        if Path(self._addresses[0].removeprefix("ipc://")).exists():
            raise Wrong(f"the server was stopped and left {self._addresses[0]} behind")

    def hurry(self) -> None:
        """No more pauses."""
        Path(self.folder, HURRY).touch()

    # ---- what is held

    def _check_holds(self) -> None:
        for child in self._all():
            try:
                holds = Holds(child.pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
            most = _MOST_ARENAS * (NUM_QUEUES if child is self.server else 1)
            told = f"{child.name} holds {vars(holds)}"
            if holds.descriptors > _MOST_DESCRIPTORS or holds.named:
                raise Wrong(f"{told}, expected at most {_MOST_DESCRIPTORS} descriptors")
            if max(holds.arenas, holds.mappings) > most:
                raise Wrong(f"{told}, expected at most {most} arenas")


def addresses(folder: Path, transport: str, dice: random.Random) -> list[str]:
    """Return two addresses that are free."""
    if transport != "tcp":
        return [f"ipc://{folder}/{name}.sock" for name in ("a", "b")]
    return [f"tcp://127.0.0.1:{free_port(dice)}" for _ in range(2)]


def free_port(dice: random.Random) -> int:
    """Return a port that nobody has, below those that the system gives to connections."""
    for _ in range(100):
        port = dice.randrange(20_000, 32_000)
        with socket.socket() as sock:
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Hang("no free port was found")
