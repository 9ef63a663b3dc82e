"""The server process of the campaign: serves a feed until it is told to stop, or killed."""

from __future__ import annotations

import json
import logging
import signal
import sys
from functools import partial

import feeder
from chaos.processes import plant_what_was_asked
from chaos.streams import NUM_QUEUES, make


def main() -> None:
    """Run the process; its only argument is JSON: form, addresses, lease_s, security."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)6d %(message)s")
    settings = json.loads(sys.argv[1])
    plant_what_was_asked()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    factory = partial(make, settings["form"])
    with feeder.serve(
        factory, settings["addresses"], queues=NUM_QUEUES, lease=settings["lease_s"],
        **settings["security"],
    ) as server:  # fmt: skip
        print("ready", flush=True)
        server.wait()
    sys.exit("the server was over by itself")


if __name__ == "__main__":
    main()
