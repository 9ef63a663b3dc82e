"""A trainer process of the campaign: reads one queue and keeps records and checkpoints."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import feeder
import feeds
from chaos.ledger import Checkpoint, Ledger
from chaos.processes import plant_what_was_asked
from chaos.streams import chained, digest
from feeder.errors import LeaseLost, RemoteError

EVERY = 5
"""Batches from checkpoint to checkpoint."""

FENCED = 3
"""Exit status of a trainer whose queue was taken over."""

HURRY = "hurry"
"""A file of this name in the folder ends the pauses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a trainer is told."""

    folder: str
    queue: int
    addresses: list[str]
    plane: str
    pause_s: float
    """How long a step of training takes."""
    num_kept: int
    """Batches that it keeps beside the one at hand."""
    start: int | None = None
    """Start, with all others, from the checkpoint after so many batches; else rejoin alone."""
    takeover: bool = False
    security: dict[str, Any] = field(default_factory=dict)
    """What `feeder.connect` needs, to be let in."""


class Trainer:
    """The loop."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.hurry = Path(settings.folder, HURRY)
        self.ledger = Ledger(Path(settings.folder), settings.queue)
        self.records = self.ledger.open_records()
        self.checkpoint = self.ledger.load(settings.start)
        self.kept: deque[tuple[Any, bytes]] = deque()

    def run(self) -> None:
        """Read the queue from the last checkpoint to the end."""
        settings, (num, chain, state) = self.settings, self.checkpoint
        with feeder.connect(
            settings.addresses, queue=settings.queue, plane=settings.plane, resume=state or None,
            rejoin=settings.start is None, takeover=settings.takeover, timeout=30.0, hold=2,
            **settings.security,
        ) as consumer:  # fmt: skip
            first = num
            for batch in consumer:
                chain = chained(chain, self.look_at(batch))
                num += 1
                if num % EVERY == 0:
                    self.ledger.save(Checkpoint(num, chain, self.position(consumer, num)))
                if num % EVERY == 0 or num == first + 1:
                    print("at", num, flush=True)
                if not self.hurry.exists():
                    threading.Event().wait(settings.pause_s)
            self.ledger.save(Checkpoint(num, chain, consumer.state_dict()["feeder"]))
        print("done", num, chain.hex(), flush=True)

    def look_at(self, batch: Any) -> bytes:
        """Write a batch down, keep it for a while, and see that those kept stay what they were."""
        found = digest(feeds.note(batch))
        self.ledger.write(self.records, batch.step, found)
        self.kept.append((batch, found))
        if len(self.kept) > self.settings.num_kept:
            old, was = self.kept.popleft()
            assert digest(feeds.note(old)) == was, f"batch {old.step} was changed while it was kept"
        return found

    def position(self, consumer: Any, num: int) -> bytes:
        """The consumer's position; now and then with the leftover rows, where they are known."""
        if num // EVERY % 3 == 0:
            try:
                return bytes(consumer.snapshot())
            except RemoteError:
                logging.info("no snapshot after %d batches", num)
        return consumer.state_dict()["feeder"]


def main() -> int:
    """Run the process; its only argument is JSON, as `Settings`."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d %(message)s")
    plant_what_was_asked()
    trainer = Trainer(Settings(**json.loads(sys.argv[1])))
    try:
        trainer.run()
    except LeaseLost as error:
        logging.info("%s", error)
        return FENCED
    return 0


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status) if status else sys.exit(0)
