"""`feeder config`: look at a configuration before it is served."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from feeder.cli import flags
from feeder.errors import ConfigError
from feeder.feeds.coordinator import Coordinator
from feeder.observe.humanize import duration, size
from feeder.workers.errors import in_words
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import Schema
from feeder.workers.stream.spec import RunSpec, StreamSpec


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("config", description="Look at a configuration.")
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")
    check = words.add_parser(
        "check",
        description="Check a configuration as `feeder serve` does, modules and data included, but "
        "without listening anywhere; make one call of each feed; and say what could be better on "
        "this machine. The exit "
        "status is 2 where something is wrong.",
    )
    show = words.add_parser(
        "show",
        description="Write down every setting with who gave it: a line of the file, a variable "
        "FEEDER_..., a flag, or nobody.",
    )
    for one in (check, show):
        one.add_argument("file", metavar="FILE", help="the configuration, TOML")
        flags.add_settings(one)


def main(arguments: argparse.Namespace) -> int:
    """Check or show."""
    return check(arguments) if arguments.word == "check" else show(arguments)


def show(arguments: argparse.Namespace) -> int:
    """Print every setting."""
    from feeder.config_file.settings import show

    for line in show(flags.read(arguments, arguments.file)):
        print(line)
    return 0


def check(arguments: argparse.Namespace) -> int:
    """Make the feeds, and print what they are and what could be better."""
    from feeder.cli.config import advise
    from feeder.config import memory_bytes
    from feeder.config_file.build import build_checkpointing, build_coordinator, locating
    from feeder.service.server.factory import make_feed_factories
    from feeder.service.server.serve import check_arguments

    settings = flags.read(arguments, arguments.file)
    if not settings.feeds:
        raise ConfigError(f"{arguments.file}: there is no feed: give it a table [feeds.NAME]")
    # As the server does it, so that what passes here starts there: modules are imported, data is
    # opened, and only the sockets are missing.
    coordinator = build_coordinator(settings)
    told = {key: one.value for key, one in settings.server.items()}
    with locating(settings.server):
        told, *_ = check_arguments(told)
        make_feed_factories(
            coordinator, None, told["queues"], told["replicas"], told["executor"], told["part"]
        )
    build_checkpointing(settings.checkpoint)
    for name in coordinator:
        (stream,) = coordinator[name].streams
        spec = stream.config.stream
        print(f"feed {name!r}: {', '.join(spec.names)} in batches of {spec.batch_size} rows")
        print(f"  {call_once(name, spec)}")
    cpus = len(os.sched_getaffinity(0))
    for line in advise(coordinator, memory=memory_bytes(), cpus=cpus):
        print(f"advice: {line}")
    return 0


def call_once(name: str, spec: StreamSpec) -> str:
    """What the first call of a feed gives, in words. Raises `ConfigError` where it gives nothing
    that a server could serve."""
    worker_id, began = spec.worker_ids[0], time.monotonic()
    try:
        if spec.pure:
            call = Call(0, 0, worker_id, spec.batch_size, spec.seed)
            chunk = spec.fetch(call)
        else:
            chunk = spec.fetch(worker_id, spec.batch_size)
    except StopIteration:
        return "its first call ends the epoch: there are no rows"
    except Exception as error:  # whatever a user's own function does
        raise ConfigError(f"feed {name!r}: its first call raised {in_words(error)}") from error
    took = duration(time.monotonic() - began)
    schema = Schema(spec.names, spec.axes, ragged=spec.dont_rebatch)
    raw = tuple(chunk) if isinstance(chunk, list) else chunk
    if isinstance(raw, Mapping) and set(raw) == set(spec.names):
        raw = tuple(raw[column] for column in spec.names)
    arranged = schema.arrange([raw])
    if arranged.error is not None:
        raise ConfigError(f"feed {name!r}: its first call: {arranged.error}")
    columns = ", ".join(f"{one.name} {one.dtype} {one.shape}" for one in schema.columns or ())
    num_bytes = sum(array.nbytes for arrays in arranged.columns for array in arrays)
    rows = arranged.rows[0] if arranged.rows else 0
    return f"its first call took {took} and gave {rows} rows of {columns}, {size(num_bytes)}"


# ---- Advice: a configuration is never changed for the machine that it runs on.


GOOD_SHARE = 0.5
"""The share of the memory that buffers may take; the rest is the trainer's and the system's."""


def advise(coordinator: Coordinator, *, memory: int, cpus: int) -> Iterator[str]:
    """A line for each thing that could be better, with what to do; `memory` in bytes."""
    runs = {name: stream.config.run for name in coordinator for stream in coordinator[name].streams}
    yield from _advise_memory(runs, memory)
    # Threads that wait for storage cost nothing; four a CPU is where computing ones get in their
    # way.
    threads = sum(run.num_threads for run in runs.values())
    if threads > 4 * cpus:
        yield (
            f"{threads} fetcher threads share {cpus} CPUs: that pays where they wait for storage; "
            "where they compute, set num_threads nearer to the number of CPUs"
        )


def _advise_memory(runs: dict[str, RunSpec], memory: int) -> Iterator[str]:
    good = int(memory * GOOD_SHARE)
    bound = sum(run.max_bytes for run in runs.values())
    if bound > good:
        yield (
            f"max_buffered_bytes comes to {size(bound)}, and there are {size(memory)}: lower it to "
            f"{good // len(runs)} ({size(good // len(runs))}) a feed, half of the memory"
        )
