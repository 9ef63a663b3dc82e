"""`feeder log`: say what a run was made of, from edit to edit."""

from __future__ import annotations

import argparse
import json
from typing import Any

from feeder.cli.arguments import in_words
from feeder.cli.position import add_file, given, position_in
from feeder.state.history import chapters_of


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "log", description="Say what a run was made of, from edit to edit, and what it has read."
    )
    add_file(parser)
    parser.add_argument("--json", action="store_true", help="print it as JSON, feed by feed")


def main(arguments: argparse.Namespace) -> int:
    """Print the history."""
    states = position_in(arguments).states
    with given():
        told = {f"{state.name}[{state.number}]": chapters_of(state) for state in states}
    if arguments.json:
        print(json.dumps(told, indent=2))
        return 0
    for name, chapters in told.items():
        print(f"{name}:")
        for chapter in chapters:
            for line in _lines(chapter):
                print(f"  {line}")
    return 0


def _lines(chapter: dict[str, Any]) -> list[str]:
    note = chapter["note"]
    lines = [] if note is None else [f"edit at step {chapter['from_step']}: {note}"]
    first, last = chapter["from_step"], chapter["to_step"] - 1
    steps = f"steps {first} to {last}" if first <= last else "no steps yet"
    lines.append(f"{steps}, {chapter['rows_of_a_call']} rows a call, seed {chapter['seed']}")
    if packing := chapter.get("packing"):
        sizes = ", ".join(f"{name} {value}" for name, value in packing.items() if name != "source")
        lines.append(f"  {packing['source']}: {sizes}")
    for name, source in chapter["sources"].items():
        excluded = ""
        if source["excluded"]:
            excluded = f", {source['excluded']} excluded: {in_words(source['excluded_ranges'])}"
        lines.append(
            f"  {name or 'the source'}: weight {source['weight']}, {source['records']} records"
            f"{excluded}; {source['read']} read"
        )
    return lines
