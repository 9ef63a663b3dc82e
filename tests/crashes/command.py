"""Takes the power and the life from processes that save checkpoints, and sees what is left.

`--states` looks at random states of a disk after a loss of power: the store that is shipped, over
a disk that forgets what it may. `--kills` sends SIGKILL to processes that save, at random moments.
Run by `scripts/nightly crash-states`; the exit status is 0 when everything acknowledged was there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from crashes.kills import kill_savers
from crashes.power import lose_power


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 when nothing acknowledged was missing."""
    parser = argparse.ArgumentParser(prog="scripts/nightly crash-states", description=__doc__)
    add = parser.add_argument
    add("--states", type=int, default=20_000, metavar="N", help="states of the disk (20000)")
    add("--kills", type=int, default=200, metavar="N", help="processes killed (200)")
    add("--seed", type=int, default=1, metavar="S", help="of all that is random (1)")
    options = parser.parse_args(arguments)
    power = lose_power(options.states, options.seed)
    print(power, flush=True)
    with tempfile.TemporaryDirectory(prefix="crash-states-") as folder:
        killed = kill_savers(Path(folder) / "store", options.kills, options.seed)
    print(killed)
    num_failed = power.num_failed + killed.num_failed
    print(f"{options.states} states and {options.kills} kills, {num_failed} failures")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
