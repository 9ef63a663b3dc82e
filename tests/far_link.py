"""Measures far data over a link: `PYTHONPATH=.:tests python -m far_link`.

A store on this host answers after `--latency` seconds and sends so many bytes a second. Of two
epochs of tokens, in order and in windows, with a cache for all and for half of the data, it tells
how long they took over what the link takes for the bytes that came, and the requests over the
fewest that bring them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import feeder
from far_server import Numbers, far_server

SEQ_LEN = 512
MIB = 1 << 20


class Measured(NamedTuple):
    """What an order and a cache come to."""

    first_trips: float
    """Round trips until the first batch is there, beside the time of its bytes."""
    time: float
    """The time after the first batch, over what the link takes."""
    requests: float
    """The requests, over the fewest of 8 MiB."""
    bytes: float
    """The bytes, over those of the data."""


def measure(
    window: int | None, part: float, epochs: int, latency_s: float, bytes_per_s: float, mib: int
) -> Measured:
    """Read so many MiB through a cache that holds a part of them."""
    with far_server() as far, tempfile.TemporaryDirectory() as folder:
        for i in range(4):
            far.objects[f"b/{i}"] = Numbers(i << 40, mib * MIB // 32)
        far.latency_s, far.bytes_per_s = latency_s, bytes_per_s
        urls = [f"{far.address}/b/{i}" for i in range(4)]
        with feeder.Cache(folder, int(part * mib * MIB)) as cache:
            source = feeder.sources.tokens(urls, SEQ_LEN, "uint64", offset=0, cache=cache)
            if window is not None:
                source = source.shuffle(window=window)
            began = time.monotonic()
            feeds = feeder.init_data_input_workers(
                ["x"], source, batch_size=64, epochs=epochs, num_threads=2,
                coordinator=feeder.Coordinator(),
            )  # fmt: skip
            with feeds:
                feed = iter(feeds["train"])
                next(feed)
                first = time.monotonic()
                before = cache.stats()["bytes"]
                for _ in feed:
                    pass
            last, told = time.monotonic(), cache.stats()
    return Measured(
        first_trips=(first - began - before / bytes_per_s) / latency_s,
        time=(last - first) * bytes_per_s / max(1, told["bytes"] - before),
        requests=told["requests"] / -(-told["bytes"] // (8 * MIB)),
        bytes=told["bytes"] / (mib * MIB),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each order and cache."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--latency", type=float, default=0.25, metavar="S", help="of an answer (0.25)")
    add("--mb", type=float, default=20.0, metavar="MB", help="that come in a second (20)")
    add("--mib", type=int, default=256, metavar="MIB", help="of data (256)")
    options = parser.parse_args(arguments)
    # What is loaded at the first time is no part of it.
    measure(None, 4.0, 1, 0.001, 1e9, 4)
    print("order, cache, epochs: first batch in round trips, time, requests, bytes")
    for name, window in (("in order", None), ("window of 2,048", 2048)):
        for part, epochs in ((1.5, 1), (0.5, 2)):
            one = measure(
                window, part, epochs, options.latency, options.mb * 1e6, options.mib
            )  # fmt: skip
            print(
                f"{name}, {part:.0%}, {epochs}: " + ", ".join(f"{x:.2f}" for x in one), flush=True
            )


if __name__ == "__main__":
    main()
