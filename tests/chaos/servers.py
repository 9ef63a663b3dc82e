"""Several servers of one stream are killed, replaced and made fewer, and all queues together get
the one order.

Each server makes the batches of its own queues. The consumers are threads here: each has all
addresses and finds whoever serves its queue. Now and then a server takes the queues of a killed one
as well. Then all consumers go on, from the position of one of them, at half as many servers.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import feeder
import feeds
from chaos.crew import START_S
from chaos.processes import Child, Hang, Watch
from chaos.streams import digest, make_rows
from feeder import sources

SERVERS, QUEUES = 4, 16
_ROWS, _BATCH = 9001, 8
_PAUSE_S = 0.01
"""How long a step of training takes."""
_ROUNDS_AFTER = 40
"""Rounds that are read from half as many servers."""
_WAIT_S = 60.0


def make() -> feeder.Coordinator:
    """The feed: shuffled, and its epochs end within a batch and within a round."""
    source = sources.arrays(*make_rows(0, 0, 0, _ROWS).values(), random_shuffle=True, seed=3)
    return feeds.make(
        source, input_blob_names=["id", "vector", "label"], batch_size=_BATCH, epochs=None,
        timeout=_WAIT_S,
    )  # fmt: skip


def main() -> None:
    """A server process; its argument is JSON: its address and its queues."""
    address, queues = json.loads(sys.argv[1])
    with feeder.serve(make, address, queues=queues) as server:
        print("ready", flush=True)
        server.wait()


class Readers:
    """The consumers of all queues, each in a thread, up to the end of a round that is set later."""

    def __init__(self, addresses: list[str], resume: Any) -> None:
        self.found: dict[int, bytes] = {}
        """The digest of each batch, by its step."""
        self.state: Any = None
        self.failures: list[str] = []
        self._addresses, self._resume = addresses, resume
        self._at = [0] * QUEUES
        self._until: int | None = None
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(QUEUES)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, queue: int) -> None:
        try:
            with feeder.connect(
                self._addresses, queue=queue, resume=self._resume, timeout=_WAIT_S,
                reconnect=_WAIT_S,
            ) as consumer:  # fmt: skip
                while self._may_go_on(queue):
                    batch = next(consumer)
                    if batch.step in self.found or batch.step % QUEUES != queue:
                        self.failures.append(f"queue {queue} had step {batch.step}")
                    self.found[batch.step] = digest(feeds.note(batch))
                    threading.Event().wait(_PAUSE_S)
                # Any queue's position is one for all.
                self.state = consumer.state_dict()
        except Exception as error:
            self.failures.append(f"queue {queue}: {error!r}")

    def _may_go_on(self, queue: int) -> bool:
        with self._changed:
            self._at[queue] += 1
            return self._until is None or self._at[queue] <= self._until

    @property
    def num_rounds(self) -> int:
        """Rounds that all have had."""
        return min(self._at) - 1

    def finish(self, rounds: int = 0) -> None:
        """Let all come to the end of one round, and so many more."""
        with self._changed:
            self._until = max(self._at) + rounds
        for thread in self._threads:
            thread.join(_WAIT_S)
        if self.failures or any(thread.is_alive() for thread in self._threads):
            raise Hang(f"not all consumers had their batches: {self.failures or 'they wait'}")


class Fleet:
    """The servers, by number; each has a row of queues."""

    def __init__(self, watch: Watch, folder: Path, num: int) -> None:
        self._watch, self._folder = watch, folder
        self._children: dict[int, Child] = {}
        self.addresses = [f"ipc://{folder}/{num}-{i}.sock" for i in range(num)]
        each = QUEUES // num
        self.queues = {i: (i * each, (i + 1) * each - 1) for i in range(num)}
        for number in self.queues:
            self.begin(number)
        for number in self.queues:
            self._wait(number)

    def start(self, number: int, queues: tuple[int, int] | None = None) -> None:
        """Start a server, with its own queues or others, and wait until it serves."""
        self.begin(number, queues)
        self._wait(number)

    def _wait(self, number: int) -> None:
        child = self._children[number]
        self._watch.wait(lambda: child.said("ready"), START_S, f"start of {child.name}")

    def begin(self, number: int, queues: tuple[int, int] | None = None) -> None:
        """Start it."""
        first, last = queues or self.queues[number]
        told = json.dumps([self.addresses[number], f"{first}-{last}/{QUEUES}"])
        self._children[number] = self._watch.start(
            f"server {number}", "chaos.servers", told, {"TMPDIR": str(self._folder)},
            self._folder / f"server-{number}.log",
        )  # fmt: skip

    def kill(self, number: int) -> None:
        """Kill a server, if it lives."""
        if number in self._children:
            self._watch.end(self._children.pop(number))

    def close(self) -> None:
        """Kill all that live."""
        for number in list(self._children):
            self.kill(number)


def strike(watch: Watch, folder: Path, kills: int, dice: random.Random) -> tuple[int, int, float]:
    """Kill each server so many times; returns how many batches were compared, how often queues were
    taken over, and how long a replaced server was away at most. Raises `Hang`."""
    fleet = Fleet(watch, folder, SERVERS)
    readers = Readers(fleet.addresses, None)
    left = [number for number in range(SERVERS) for _ in range(kills)]
    dice.shuffle(left)
    num_taken, away_s = 0, 0.0
    while left:
        watch.rest(0.1 * dice.random())
        number, began = left.pop(), time.monotonic()
        fleet.kill(number)
        if dice.random() < 0.2:
            # The next one is replaced by one that makes the queues of both, for a while.
            num_taken += 1
            other = number ^ 1
            fleet.kill(other)
            fleet.start(other, (fleet.queues[number & ~1][0], fleet.queues[number | 1][1]))
            had = readers.num_rounds
            watch.wait_for(lambda had=had: readers.num_rounds > had + 1, 0.5)
            fleet.kill(other)
            fleet.start(other)
        fleet.start(number)
        away_s = max(away_s, time.monotonic() - began)
    readers.finish()
    fleet.close()
    half = Fleet(watch, folder, SERVERS // 2)
    again = Readers(half.addresses, readers.state)
    again.finish(_ROUNDS_AFTER)
    half.close()
    found = readers.found | again.found
    if len(found) != len(readers.found) + len(again.found):
        raise Hang("batches came before the change of servers, and again behind it")
    compare(found)
    return len(found), num_taken, away_s


def compare(found: dict[int, bytes]) -> None:
    """Raise `Hang` unless these are all batches of the one order, from the first one on."""
    with make() as coordinator:
        for step, batch in zip(range(len(found)), coordinator["train"], strict=False):
            if found.get(step) != digest(feeds.note(batch)):
                raise Hang(f"batch {step} is another, or has not come")


def strike_servers(kills: int, seed: int) -> int:
    """Run it; returns the exit status."""
    began = time.monotonic()
    with Watch() as watch, tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        try:
            num, taken, away_s = strike(watch, Path(folder), kills, random.Random(seed))
        except Hang as error:
            print(f"FAILED: {error}", flush=True)
            for log in sorted(Path(folder).glob("*.log")):
                print(f"--- {log}\n" + "\n".join(log.read_text().splitlines()[-12:]), flush=True)
            return 1
    print(
        f"seed {seed}: {SERVERS} servers of {QUEUES} queues, each killed {kills} times, queues "
        f"taken over {taken} times, then {SERVERS // 2} servers: {num} batches equal, 0 failures "
        f"in {time.monotonic() - began:.0f} s; a server was replaced within {away_s:.1f} s",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    main()
