"""Kills and stops servers and trainers, and sees that no batch is lost, doubled or moved.

A campaign is a row of legs. In each a server and three trainers on three queues run a feed from
start to end while faults strike them: at random times and at every named point of the code. What
survives in the trainers' checkpoints is compared with the stream of a naive feeder. Run by
`scripts/nightly chaos`.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from chaos.actors import strike_actors
from chaos.crew import Crew, Wrong
from chaos.crowd import crowds
from chaos.executors import Legs, run_legs
from chaos.faults import BLOWS, TRANSPORTS, Fault, Plan, fits
from chaos.leg import Leg
from chaos.network_legs import strike_networks
from chaos.processes import PLANTS, Hang, Watch
from chaos.servers import strike_servers
from chaos.soak import LEAST, soak
from chaos.streams import FORMS
from feeder.service.faults import POINTS

FAULTS_PER_LEG = 10

_TAIL_LINES = 12


class Campaign:
    """The legs, and what has happened in them."""

    def __init__(
        self, seed: int, transports: Sequence[str], plant: str, only: Sequence[str]
    ) -> None:
        self._transports = transports
        self._plant = plant
        self._dice = random.Random(seed)
        self._plan = Plan(self._dice, only)
        self.hits: Counter[tuple[str, str]] = Counter()
        """Faults by name and transport."""
        self.missed: Counter[str] = Counter()
        self.num_legs = 0

    @property
    def num_faults(self) -> int:
        return self.hits.total()

    def run_leg(self, most: int) -> None:
        """Run a leg of so many faults at most. Raises `Hang` and `Wrong`, having said where."""
        transport = self._transports[self.num_legs % len(self._transports)]
        forms = list(FORMS)
        form = forms[(self.num_legs + self.num_legs // len(forms)) % len(forms)]
        self.num_legs += 1
        plan = list(self._plan.leg(transport, min(FAULTS_PER_LEG, most)))
        dice = random.Random(self._dice.random())
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        started = time.monotonic()
        told = f"leg {self.num_legs}: {form} over {transport}"
        with Watch() as watch:
            leg = Leg(Crew(watch, folder, form, transport, dice, self._plant), plan, dice)
            try:
                leg.run()
            except (Hang, Wrong) as error:
                _say(f"{told}: {error}")
                _tell(leg, folder, plan)
                raise
            finally:
                self.hits.update({(name, transport): n for name, n in leg.done.items()})
                self.missed += leg.missed
        shutil.rmtree(folder)
        _say(f"{told}: {leg.done.total()} faults, equal ({time.monotonic() - started:.1f} s)")

    @property
    def fewest(self) -> int:
        """Of the points that these transports come to, how often the rarest was hit."""
        return min(
            sum(self.hits[point, t] for t in self._transports)
            for point in POINTS
            if any(fits(point, t) for t in self._transports)
        )


def _say(line: str) -> None:
    print(line, flush=True)


def _tell(leg: Leg, folder: Path, plan: Sequence[Fault]) -> None:
    """Say what led to a failure."""
    _say(f"done {dict(leg.done)}")
    for line in (*leg.trace, *(f"  to come {fault}" for fault in plan[len(leg.trace) :])):
        _say(line)
    for log in sorted(folder.glob("*.log")):
        _say(f"--- {log}")
        _say("\n".join(log.read_text().splitlines()[-_TAIL_LINES:]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options; ends the process where they are wrong."""
    parser = argparse.ArgumentParser(prog="scripts/nightly chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=50, metavar="N", help="how many (50)")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the plan (1)")
    parser.add_argument("--plant", default="", choices=PLANTS, help="a bug, to see it caught")
    parser.add_argument("--transport", default="all", choices=("all", *TRANSPORTS))
    parser.add_argument(
        "--only", action="append", default=[], choices=(*BLOWS, *POINTS), metavar="FAULT",
        help="no other faults; may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--soak", type=int, metavar="BATCHES", help="instead: reconnect again and again"
    )
    parser.add_argument(
        "--executors", type=int, metavar="N", help="instead: kill N processes that fetch"
    )
    parser.add_argument(
        "--actors", type=int, metavar="N", help="instead: kill N Ray actors, nodes and drivers"
    )
    parser.add_argument(
        "--networks", type=int, metavar="N", help="instead: N legs on hosts whose network does harm"
    )
    parser.add_argument(
        "--servers", type=int, metavar="N", help="instead: kill each server of one stream N times"
    )
    parser.add_argument(
        "--crowds", type=int, metavar="N", help="instead: N crowds of consumers, on a busy machine"
    )
    parser.add_argument(
        "--crowd", type=int, default=300, metavar="N", help="how many consumers are a crowd (300)"
    )
    options = parser.parse_args(arguments)
    if options.soak is not None and options.soak < LEAST:
        parser.error(f"--soak is {options.soak}, expected {LEAST} or more")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a campaign; returns the exit status: 0 where all was equal, else 1."""
    options = parse(arguments)
    # Told to end, it ends its children too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    if options.soak is not None:
        return soak(options.soak)
    if options.networks is not None:
        return strike_networks(options.networks, options.seed)
    if options.servers is not None:
        return strike_servers(options.servers, options.seed)
    if options.crowds is not None:
        return crowds(options.crowds, options.crowd)
    if options.executors is not None:
        return run_legs(Legs(options.seed), options.executors)
    if options.actors is not None:
        return strike_actors(options.actors, options.seed)
    transports = TRANSPORTS if options.transport == "all" else (options.transport,)
    campaign = Campaign(options.seed, transports, options.plant, options.only)
    started = time.monotonic()
    status = 0
    try:
        while campaign.num_faults < options.faults:
            campaign.run_leg(options.faults - campaign.num_faults)
    except (Hang, Wrong) as error:
        _say(f"FAILED, {type(error).__name__}: {error}")
        status = 1
    seconds = time.monotonic() - started
    _say(
        f"seed {options.seed}: {campaign.num_faults} faults in {campaign.num_legs} legs, {status} "
        f"failures in {seconds:.0f} s; every point hit at least {campaign.fewest} times; not come "
        f"to in time: {dict(campaign.missed)}"
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
