"""Legs on hosts of their own: networks are cut, slow and lossy, and a server comes back elsewhere.

Each fault is followed by a wait for batches at every trainer, which is bounded: what a trainer had
to notice by itself, as a host that is gone without a word, is noticed in that time.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from chaos.crew import Crew, Wrong
from chaos.faults import Fault
from chaos.leg import Leg
from chaos.network import Harm, Network, is_possible
from chaos.processes import Hang, Watch
from chaos.streams import FORMS, NUM_QUEUES, reference

NUM_HOSTS = 2 + NUM_QUEUES
"""Two for the server, one for each trainer."""
SECURITY = ("frames", "curve")
FAULTS_PER_LEG = 4

HARMS = {
    "slow": Harm(delay_s=0.1, jitter_s=0.02),
    "lossy": Harm(lost=0.1),
    "shuffled": Harm(jitter_s=0.05),
    "doubled": Harm(twice=0.3),
    "flipped": Harm(flipped=0.05),
}
"""What befalls all frames for a while."""

KINDS = (
    *(f"{name} network" for name in HARMS), "cut trainer", "deaf trainer", "mute trainer",
    "cut server", "deaf server", "mute server", "vanish server", "move server", "split server",
    "kill server", "kill trainer",
)  # fmt: skip
CUTS_S = (0.5, 3.0, 14.0)
"""How long a host is cut off: unnoticed, longer than a short lease, and until TCP gives up."""


class NetworkLeg(Leg):
    """Does faults of networks, beside the kills of other legs."""

    def _strike(self, fault: Fault) -> None:
        verb, whom = fault.name.split()
        network = self.crew.network
        assert network is not None
        strikes: dict[str, Callable[[], None]] = {
            "vanish": self._vanish, "move": self._move, "split": self._split
        }  # fmt: skip
        if verb in HARMS:
            pairs = [(a, b) for a in range(NUM_HOSTS) for b in range(NUM_HOSTS)]
            network.harm.update(dict.fromkeys(pairs, HARMS[verb]))
            self.crew.watch.rest(self._dice.uniform(1.0, 3.0))
        elif verb in ("cut", "deaf", "mute"):
            crew = self.crew
            host = crew.server_host if whom == "server" else crew.trainer_host(fault.queue)
            network.cut(host, deaf=verb != "mute", mute=verb != "deaf")
            crew.watch.rest(self._dice.choice(CUTS_S))
        elif verb in strikes:
            self.crew.settle()
            strikes[verb]()
        else:
            super()._strike(fault)
            return
        self.done[fault.name] += 1
        network.harm.clear()
        self.crew.settle()

    def _vanish(self) -> None:
        """The server's host is gone without a word, and a server starts on the other one."""
        crew = self.crew
        assert crew.network is not None
        crew.network.cut(crew.server_host)
        crew.kill(crew.server)
        crew.start_server(elsewhere=True)
        crew.settle()

    def _move(self) -> None:
        """The server is killed, and comes back on another host that has its address now."""
        crew = self.crew
        crew.kill(crew.server)
        crew.move_address()
        crew.start_server(elsewhere=False)

    def _split(self) -> None:
        """The server is cut off and lives on, while another one takes its place; it comes back."""
        crew, old = self.crew, self.crew.server
        assert crew.network is not None
        crew.network.cut(crew.server_host)
        crew.start_server(elsewhere=True)
        crew.settle()
        crew.network.harm.clear()
        crew.settle()
        crew.kill(old)


def strike_networks(num: int, seed: int) -> int:
    """Run so many legs; returns the exit status: 0 if all was equal, 2 if no host can be made."""
    if not is_possible():
        print("needs root, `ip`, /dev/net/tun and network namespaces")
        return 2
    done: Counter[str] = Counter()
    dice, started, num_batches = random.Random(seed), time.monotonic(), 0
    kinds: list[str] = []
    for number in range(num):
        form, security = dice.choice(list(FORMS)), dice.choice(SECURITY)
        plan = []
        for _ in range(FAULTS_PER_LEG):
            # Of a shuffled deck, so that some legs have all kinds.
            kinds = kinds or dice.sample(KINDS, len(KINDS))
            plan.append(Fault(kinds.pop(), dice.randrange(NUM_QUEUES), 0.2 * dice.random()))
        told = f"leg {number + 1}: {form}, {security}"
        began, folder = time.monotonic(), Path(tempfile.mkdtemp(prefix="chaos-"))
        with Network(NUM_HOSTS, dice.getrandbits(32)) as network, Watch() as watch:
            leg = NetworkLeg(Crew(watch, folder, form, security, dice, network=network), plan, dice)
            try:
                leg.run()
            except (Hang, Wrong) as error:
                print(f"FAILED, {type(error).__name__} in {told}: {error}; logs in {folder}")
                print(*leg.trace, *plan, sep="\n", flush=True)
                return 1
        shutil.rmtree(folder)
        done += leg.done
        num_batches += sum(map(len, reference(form)))
        took_s = time.monotonic() - began
        print(f"{told}, {', '.join(leg.done)}: equal ({took_s:.1f} s)", flush=True)
    print(
        f"seed {seed}: {num_batches} batches, {done.total()} faults in {num} legs, 0 failures in "
        f"{time.monotonic() - started:.0f} s; {dict(sorted(done.items()))}"
    )
    return 0
