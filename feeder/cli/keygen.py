"""`feeder keygen`: make the keys of a server and its clients."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from feeder.service.net.keys import CLIENTS, DEFAULT_CLIENT, PUBLIC, SECRET, SERVER, make_keys
from feeder.service.net.security import check_zmq


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "keygen",
        description="Make a client's keys, and the server's where DIR has none yet. "
        "Nothing is overwritten.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="where the keys are kept")
    parser.add_argument(
        "--name",
        default=DEFAULT_CLIENT,
        help=f"of the client, one per trainer's host (default: {DEFAULT_CLIENT})",
    )


def main(arguments: argparse.Namespace) -> int:
    """Write the keys and say what to do with them."""
    # A libzmq without curve makes no keys, and says so before anything is written.
    check_zmq(curve=True)
    directory: Path = arguments.directory
    for path in make_keys(directory, arguments.name):
        print(f"wrote {path}")
    server, allowed = directory / (SERVER + PUBLIC), directory / CLIENTS
    secret = directory / (arguments.name + SECRET)
    print(f"the server lets in every client whose key is in {allowed}")
    print(f"copy to the trainer's host: scp -p {shlex.join(map(str, (server, secret)))} HOST:DIR/")
    return 0
