"""A trainer whose feed runs on processes, and which ends as it is told: `... executor_child HOW`.

It says which processes there are once it has had two batches; where it goes on to the end of the
stream, it says the digest.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from feeder import Coordinator, Processes
from feeds import digest, make, note
from fetches import make_fetch
from lineage import descendants
from remote import Held


def say(*words: Any) -> None:
    """Print a line at once."""
    print(*words, flush=True)


def finish(coordinator: Coordinator, records: list[Any]) -> None:
    """Say the digest of the whole stream."""
    records += [note(batch) for batch in coordinator["train"]]
    say(digest(records))


def fork_and_wait() -> None:
    """Fork a trainer that has all of this one's descriptors."""
    pid = os.fork()
    if not pid:
        threading.Event().wait(60)
        os._exit(0)
    say(pid)
    threading.Event().wait(60)


def fork_and_end() -> None:
    """Fork a trainer that ends as a script does: everything of it is let go of."""
    pid = os.fork()
    if not pid:
        sys.exit(0)
    os.waitpid(pid, 0)


def interrupt() -> None:
    """Press Ctrl-C: all processes of the terminal hear it."""
    try:
        os.killpg(0, signal.SIGINT)
        threading.Event().wait(60)
    except KeyboardInterrupt:
        pass


def main(how: str) -> None:
    """Run the feed, and end."""
    fetch = Held() if how == "in a call" else make_fetch("pure", "single")
    coordinator = make(fetch, epochs=3, executor=Processes(2), max_buffered_batches=1)
    coordinator.start()
    records = [note(next(coordinator["train"])) for _ in range(2)]
    say(*descendants(os.getpid()))
    match how:
        case "wait" | "in a call":
            threading.Event().wait(60)
        case "exit":
            sys.exit(0)
        case "error":
            raise ValueError("of the trainer")
        case "at once":
            os._exit(0)
        case "fork and wait":
            fork_and_wait()
        case "fork and end":
            fork_and_end()
            finish(coordinator, records)
        case "interrupt":
            interrupt()
            finish(coordinator, records)


if __name__ == "__main__":
    main(sys.argv[1])
