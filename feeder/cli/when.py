"""`feeder when`: say at which steps a run has a record, by a position of the run alone."""

from __future__ import annotations

import argparse
import json
from typing import Any

from feeder.cli.which import add_position, find_asked, to_come, where
from feeder.feeds.records import when
from feeder.workers.sources.stores.reading import Seen


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "when",
        description="Say at which steps a run has had a record up to a position, and when it comes "
        "next. The position is enough: the run's data are not read.",
    )
    add_position(parser)
    parser.add_argument(
        "source", nargs="?", default="", help="its source, as `feeder which` names it"
    )
    parser.add_argument("record", type=int, help="its number in the source")


def main(arguments: argparse.Namespace) -> int:
    """Print the steps."""
    asked, cut = find_asked(arguments)
    found: list[Seen] = []
    for seen in when(asked, arguments.source, arguments.record):
        found.append(seen)
        if seen.step >= cut.step:
            break
    if arguments.json:
        steps = [{**seen._asdict(), "has_come": seen.step < cut.step} for seen in found]
        of = {"source": arguments.source, "record": arguments.record}
        print(json.dumps({"feed": asked.name, **of, "queues": asked.num_queues, "steps": steps}))
        return 0
    for seen in found:
        queue = where(asked, seen.queue)
        coming = to_come(seen.step < cut.step)
        print(f"step {seen.step}, row {seen.row}{queue}, epoch {seen.epoch}{coming}")
    return 0
