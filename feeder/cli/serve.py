"""`feeder serve`: feeds for consumers in other processes, until it is told to stop."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feeder.cli.arguments import address, count, seconds
from feeder.errors import ConfigError

if TYPE_CHECKING:
    from feeder.checkpoint.policy import Checkpointing
    from feeder.transport.server import Server

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "serve",
        description="Serve the feeds of a coordinator to consumers in other processes, on this "
        "host or others, until SIGTERM or SIGINT. The exit status is 0 after a clean stop.",
    )
    add = parser.add_argument
    add(
        "target",
        metavar="MODULE:ATTR",
        type=target,
        help="a function without arguments that returns a coordinator, or a coordinator; modules "
        "are looked for in the current folder first",
    )
    add(
        "--bind",
        metavar="ADDR",
        action="append",
        type=address,
        help="where to listen: tcp://HOST:PORT, ipc:///PATH or ipc://NAME; may be given several "
        "times (default: a unix socket in a directory of this user's own)",
    )
    add(
        "--queues",
        metavar="N",
        type=count(1, 4096),
        help="queues of each feed (default: as many as it has devices)",
    )
    add("--keys", metavar="DIR", type=Path, help="of feeder keygen: only its clients come in")
    add("--insecure", action="store_true", help="let other hosts in without keys")
    add(
        "--lease",
        metavar="SECONDS",
        type=seconds,
        default=30.0,
        help="for how long a consumer need not be heard of (default: 30)",
    )
    add(
        "--exit-when",
        choices=("never", "acknowledged"),
        default="never",
        help="acknowledged: end by itself once every batch has been used (default: never)",
    )
    add_checkpoints(parser)


def add_checkpoints(parser: argparse.ArgumentParser) -> None:
    """Add what is told of checkpoints."""
    add = parser.add_argument
    add(
        "--checkpoint-dir",
        metavar="DIR",
        help="store there what all consumers have used: a folder, or s3://, gs://, az://",
    )
    add(
        "--checkpoint-every",
        metavar="SECONDS",
        type=seconds,
        default=30.0,
        help="how often (default: 30), and once more at the end",
    )
    add(
        "--keep",
        metavar="N",
        type=count(1),
        default=3,
        help="how many of these checkpoints stay (default: 3)",
    )
    add(
        "--resume",
        metavar="WHERE",
        help="where consumers begin that bring no position: 'latest' of --checkpoint-dir, the path "
        "of a snapshot or checkpoint, or another folder of checkpoints",
    )


def target(text: str) -> tuple[str, str]:
    """MODULE:ATTR, an argparse type; neither is looked for yet."""
    module, _, attribute = text.partition(":")
    names = (*module.split("."), *attribute.split("."))
    if not all(name.isidentifier() for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODULE:ATTR, as in 'package.feeds:make'")
    return module, attribute


def main(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes or, with --exit-when acknowledged, until all has been used."""
    found = load(*arguments.target)
    import feeder

    server = feeder.serve(
        found,
        arguments.bind,
        queues=arguments.queues,
        keys=arguments.keys,
        insecure=arguments.insecure,
        lease=arguments.lease,
        exit_when=arguments.exit_when,
        checkpoints=checkpoints(arguments),
        resume=arguments.resume,
    )
    run(server)
    return 0


def checkpoints(arguments: argparse.Namespace) -> Checkpointing | None:
    """Where the server stores what was used, and how often."""
    if arguments.checkpoint_dir is None:
        return None
    from feeder import Checkpointing, CheckpointStore

    store = CheckpointStore(arguments.checkpoint_dir, keep=arguments.keep)
    return Checkpointing(store, every_s=arguments.checkpoint_every)


def run(server: Server) -> None:
    """Say that the server is ready, wait for a signal or for it to be over, and close it.

    Raises `StuckWorkerError` where a fetch function does not return.
    """
    with stop_signals() as stopped:

        def tell() -> None:
            server.wait()
            os.eventfd_write(stopped, 1)

        teller = threading.Thread(target=tell, name="feeder serve", daemon=True)
        teller.start()
        try:
            for line in ready_lines(server):
                print(line, flush=True)
            os.read(stopped, 8)  # not eventfd_read, which a signal's handler interrupts
        finally:
            try:
                server.close()
            finally:
                teller.join(1.0)


def load(module_name: str, attribute: str) -> Any:
    """What MODULE:ATTR names. Raises `ConfigError`, and whatever the module raises."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and lacks another
        raise ConfigError(
            f"no module {error.name!r}, looked for in {os.getcwd()!r} and where Python's packages "
            "are; expected MODULE:ATTR, as in 'package.feeds:make'"
        ) from error
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise ConfigError(
                f"{module_name!r} has no attribute {attribute!r}, expected a function that "
                "returns a coordinator, or a coordinator"
            ) from error
    check(found, f"{module_name}:{attribute}")
    return found


def check(found: Any, name: str) -> None:
    """Raise `ConfigError` unless it can be served, so far as can be seen without calling it."""
    import feeder

    if isinstance(found, feeder.Coordinator):
        return
    if not callable(found):
        raise ConfigError(
            f"{name!r} is {type(found).__name__}, expected a function that returns a coordinator, "
            "or a coordinator"
        )
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ConfigError(f"{name!r} cannot be called without arguments: {error}") from error
    except ValueError:
        return  # written in C, it does not tell


def ready_lines(server: Server) -> list[str]:
    """A line for each address: what is served there."""
    feeds = [
        f"{name!r}, {num} queue{'s' * (num != 1)}" for name, num in sorted(server.queues.items())
    ]
    what = f"feed{'s' * (len(feeds) != 1)} {'; '.join(feeds)}"
    return [f"serving {what}, at {address}" for address in server.addresses]


@contextlib.contextmanager
def stop_signals() -> Iterator[int]:
    """An eventfd that becomes readable at the first signal that asks to stop.

    A handler may interrupt whatever the main thread is doing, so that it must take no lock: to
    write to a descriptor takes none.
    """
    descriptor = os.eventfd(0)
    before = {
        number: signal.signal(number, lambda *_: os.eventfd_write(descriptor, 1))
        for number in STOP_SIGNALS
    }
    try:
        yield descriptor
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(descriptor)
