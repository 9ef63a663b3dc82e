"""A trainer whose feed runs on processes or actors, of which it kills some after each batch.

Arguments: a folder and the settings as JSON. It goes on from the folder, where it stores after each
batch the digests of all batches and the position after them; it prints how many batches there are
and how many processes it has killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import feeder
from chaos.streams import digest
from feeds import Record, deal, note, running
from fetches import make_fetch
from lineage import descendants
from remote import pause


class Store:
    """Batches and the position after them, replaced at once."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "state.json"
        self.digests: list[str] = []
        self.token: bytes | None = None
        with contextlib.suppress(FileNotFoundError):
            state = json.loads(self.path.read_text())
            self.digests, self.token = state["digests"], bytes.fromhex(state["token"])

    def add(self, record: Record, token: bytes) -> None:
        """Store one more batch."""
        self.digests.append(digest(record).hex())
        self.token = token
        state = {"digests": self.digests, "token": token.hex()}
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(self.path)


def strike(dice: random.Random, most: int, pids: list[int]) -> int:
    """Kill some of the processes, at times with the one that has forked them; returns how many."""
    struck = dice.sample(pids, min(len(pids), dice.randint(1, most)))
    for pid in struck:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(struck)


def main(folder: str, settings: dict[str, Any]) -> None:
    """Run until the end of the stream."""
    dice = random.Random(settings.pop("seed"))
    form, pattern, num = (settings.pop(name) for name in ("form", "pattern", "processes"))
    every, most = settings.pop("every"), settings.pop("most")
    store, kills = Store(Path(folder)), 0
    # The same call may be struck again and again.
    retries = {} if form == "replay" else {"retries": 1000}
    executor: Any = feeder.Processes(num)
    if on_actors := settings.pop("on_actors", False):
        import ray

        ray.init(address="auto", log_to_driver=False, configure_logging=False)
        executor = feeder.RayActors(num, num_cpus=0)
    with running(
        make_fetch(form, pattern, pause), resume=store.token, executor=executor,
        timeout=60, **retries, **settings,
    ) as (_, feed):  # fmt: skip
        pool: Any = feed.streams[0].pipeline._execution
        for i, batch in enumerate(deal(feed), 1):
            store.add(note(batch), batch.cut.token())
            if i % every == 0:
                pids = pool._pool.pids() if on_actors else list(descendants(os.getpid()))
                kills += strike(dice, most, pids)
            # At once: Ray prints there too.
            sys.stdout.write(f"{len(store.digests)} {kills}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
