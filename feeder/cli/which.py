"""`feeder which`: say which records a step of a run was made of, by a position of the run alone."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from feeder.cli.position import add_feed, add_file, feed_in, given, position_in
from feeder.feeds.records import Asked, asked_of, records_of
from feeder.workers.stream.position import Cut

if TYPE_CHECKING:
    from feeder.workers.sources.stores.reading import Record


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "which",
        description="Say which records a step was made of, or will be. The position of any step of "
        "the run is enough: its data are not read.",
    )
    add_position(parser)
    parser.add_argument("step", type=int, help="the number of a batch, as batch.step says it")
    parser.add_argument(
        "--rank", type=int, metavar="R",
        help="the rank, or queue, whose batch is meant: the step counts its batches alone, as its "
        "training loop does",
    )  # fmt: skip


def add_position(parser: argparse.ArgumentParser) -> None:
    """Add what says which run is asked, and how the answer is printed."""
    add_file(parser)
    add_feed(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON")


def find_asked(arguments: argparse.Namespace) -> tuple[Asked, Cut]:
    """The stream that is asked, and the place of its position. Raises `ConfigError`."""
    with given():
        return asked_of(feed_in(position_in(arguments), arguments.feed))


def main(arguments: argparse.Namespace) -> int:
    """Print the records."""
    asked, cut = find_asked(arguments)
    step = arguments.step
    if arguments.rank is not None:
        step = asked.step_of(step, arguments.rank)
    rows = records_of(asked, step)
    queue, has_come = asked.queue(step), step < cut.step
    if arguments.json:
        told = {
            "feed": asked.name, "step": step, "queue": queue, "queues": asked.num_queues,
            "has_come": has_come,
            "rows": [
                [r._asdict() for r in row]
                for row in rows
            ],
        }  # fmt: skip
        print(json.dumps(told))
        return 0
    print(f"step {step} of {asked.name}{where(asked, queue)}{to_come(has_come)}:")
    for number, row in enumerate(rows):
        print(f"  row {number}: {'; '.join(map(_named, row))}")
    return 0


def _named(record: Record) -> str:
    of = f" of {record.source}" if record.source else ""
    # A position that does not know the file says the number once more.
    where = "" if record.name == f"record {record.number}" else f": {record.name}"
    return f"record {record.number}{of}, pass {record.epoch}{where}"


def where(asked: Asked, queue: int) -> str:
    """Which queue has a batch, if there are several."""
    return f", queue {queue} of {asked.num_queues}" if asked.num_queues > 1 else ""


def to_come(has_come: bool) -> str:
    """Whether a batch lies behind the position."""
    return "" if has_come else ", to come"
