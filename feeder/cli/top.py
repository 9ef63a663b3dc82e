"""`feeder top`: watch what a server's feeds do."""

from __future__ import annotations

import argparse
import importlib.util
import select
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feeder.cli.arguments import address, seconds
from feeder.cli.consume import interrupts
from feeder.errors import ConfigError, TransportError
from feeder.observe.status.history import History

if TYPE_CHECKING:
    from rich.console import RenderableType

    from feeder.service.client.monitor import Monitor


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "top",
        description="Show the feeds of a server, their queues, consumers and workers, and what "
        "holds them up, until SIGINT. Nothing is taken from the server.",
    )
    add = parser.add_argument
    add(
        "address",
        metavar="ADDR",
        nargs="?",
        type=address,
        help="where the server is (default: this user's own unix socket)",
    )
    add("--keys", metavar="DIR", type=Path, help="of feeder keygen, for a server with keys")
    add("--every", metavar="SECONDS", type=seconds, default=1.0, help="between frames (default: 1)")
    add(
        "--once",
        action="store_true",
        help="look twice, print what happened in between, and end; so too where the output is no "
        "terminal",
    )


def main(arguments: argparse.Namespace) -> int:
    """Draw frames."""
    if importlib.util.find_spec("rich") is None:
        raise ConfigError("feeder top needs rich: pip install 'feedworks[cli]'")
    from feeder.service.client.monitor import Monitor

    with Monitor(arguments.address, arguments.keys) as monitor, interrupts() as over:
        history = History()
        history.add(monitor.fetch())
        if arguments.once or not sys.stdout.isatty():
            select.select([over], [], [], arguments.every)
            history.add(monitor.fetch())
            print_frame(history, monitor.address)
        else:
            draw(history, monitor, arguments.every, over)
    return 0


def print_frame(history: History, place: str) -> None:
    """Print one frame, as wide as the terminal or 100 characters."""
    from rich.console import Console

    from feeder.cli.frames import make_frame

    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False)
    console.print(make_frame(history, place, ""))


def draw(history: History, monitor: Monitor, every_s: float, over: int) -> None:
    """Draw a frame after the other until the eventfd `over` is readable. A server that goes away
    is asked again and again."""
    from rich.live import Live

    from feeder.cli.frames import make_frame

    frame: RenderableType = make_frame(history, monitor.address, "")
    with Live(frame, auto_refresh=False, screen=True) as live:
        while not select.select([over], [], [], every_s)[0]:
            trouble = ""
            try:
                history.add(monitor.fetch())
            except TransportError as error:
                # A server that is restarted comes back; the last frame stays, with the reason.
                trouble = str(error)
            live.update(make_frame(history, monitor.address, trouble), refresh=True)
