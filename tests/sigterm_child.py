"""A trainer that stores its position when it is told to end: `... sigterm_child HOW FOLDER`.

It says after each batch how many it has had, and takes the next when it is told to.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from typing import Any

import feeder
from feeder.checkpoint.store import CheckpointStore
from small import Pure, make


class TellingStore(CheckpointStore):
    """A store that says what it has stored."""

    def save(self, *args: Any, **kwargs: Any) -> str:
        name = super().save(*args, **kwargs)
        print("stored", flush=True)
        return name


class HangingStore(CheckpointStore):
    """A store whose disk does not answer."""

    def save(self, *args: Any, **kwargs: Any) -> str:
        print("hanging", flush=True)
        threading.Event().wait(60)
        return ""


def say_and_end(number: int, frame: Any) -> None:
    """A handler that the trainer had before."""
    print("my own handler", flush=True)
    sys.exit(7)


def wait_to_be_told(signals: int) -> None:
    """Python acts on a signal that came just before a wait when that returns: each one ends it."""
    while sys.stdin not in select.select([sys.stdin, signals], [], [])[0]:
        os.read(signals, 64)
    sys.stdin.readline()


def main(how: str, folder: str) -> None:
    kinds = {"hanging": HangingStore, "ignored": TellingStore}
    store = kinds.get(how, CheckpointStore)(folder)
    signals, number = os.pipe()
    os.set_blocking(number, False)
    signal.set_wakeup_fd(number)
    if how == "own handler":
        signal.signal(signal.SIGTERM, say_and_end)
    if how == "ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    coordinator = feeder.Coordinator(feeder.Checkpointing(store, on_sigterm=True))
    with make(Pure(num_calls=1000), epochs=None, coordinator=coordinator):
        for batch in coordinator["train"]:
            print(batch.step + 1, flush=True)
            wait_to_be_told(signals)


if __name__ == "__main__":
    main(*sys.argv[1:])
