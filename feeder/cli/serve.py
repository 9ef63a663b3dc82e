"""`feeder serve`: feeds for consumers in other processes, until it is told to stop."""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from feeder.cli import flags
from feeder.cli.arguments import check_resume
from feeder.config_file import objects
from feeder.errors import ConfigError, FeedError
from feeder.workers.stream.spec import Part

if TYPE_CHECKING:
    from feeder.config_file.settings import Settings
    from feeder.service.server.serve import Server

# What orchestrators and terminals send.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "serve",
        description="Serve the feeds of a coordinator, or of a configuration, to consumers in "
        "other processes, on this host or others, until SIGTERM or SIGINT. The exit status is 0 "
        "after a clean stop, 1 where it ended by itself because a feed, or the server, had failed.",
    )
    parser.add_argument(
        "target",
        metavar="MODULE:ATTR",
        nargs="?",
        type=target,
        help="a function without arguments that returns a coordinator, or a coordinator; modules "
        "are looked for in the current folder first",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"a configuration with what is not given here (default: {flags.CONFIG}, else none)",
    )
    flags.add_settings(parser)


def target(text: str) -> tuple[str, str]:
    """MODULE:ATTR, an argparse type; neither is looked for yet."""
    try:
        return objects.split_name(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(arguments: argparse.Namespace) -> int:
    """Serve until a signal comes or, with --exit-when acknowledged, until all has been used or a
    feed has failed."""
    with ending_at_once():
        server = make_server(arguments)
        try:
            run(server)
        except SystemExit:
            # The signal came just before `run` waits for it.
            server.close()
            raise
    return 0 if server.failure is None else 1


def make_server(arguments: argparse.Namespace) -> Server:
    """The server that the arguments mean; it runs."""
    settings = flags.read(arguments, arguments.config)
    feeds = choose_feeds(arguments.target, settings)
    import feeder
    from feeder.config_file.build import build_checkpointing, locating
    from feeder.executors.options import RayActors, executor_of

    checkpoints = build_checkpointing(settings.checkpoint)
    resume = settings.checkpoint["resume"].value
    with locating(settings.checkpoint):
        check_resume(resume)
    told = {key: one.value for key, one in settings.server.items()}
    with locating(settings.server):
        if isinstance(executor_of(told["executor"]), RayActors):
            # Of the cluster that this host belongs to, where no other one is named.
            os.environ.setdefault("RAY_ADDRESS", "auto")
        return feeder.serve(feeds, **told, checkpoints=checkpoints, resume=resume)


def run(server: Server) -> None:
    """Say that the server is ready, wait for a signal or for it to be over, and close it.

    Raises `StuckWorkerError` where a fetch function does not return.
    """
    with stop_signals() as (stopped, stop):

        def tell() -> None:
            server.wait()
            os.write(stop, b"\0")

        teller = threading.Thread(target=tell, name="feeder serve", daemon=True)
        teller.start()
        try:
            for line in ready_lines(server):
                print(line, flush=True)
            notify("READY=1")
            # Python writes the number of each signal. With keys SIGHUP means to read them again, as
            # it does to other services.
            while os.read(stopped, 1)[0] == signal.SIGHUP and server.read_keys():
                pass
        finally:
            notify("STOPPING=1")
            try:
                server.close()
            finally:
                # `close` has woken it; where it hangs all the same, it is a daemon.
                teller.join(1.0)


def notify(state: str) -> None:
    """Tell systemd how the service stands, where systemd has started it (sd_notify(3))."""
    place = os.environ.get("NOTIFY_SOCKET", "")
    if place:
        # A name that begins with @ is of the abstract kind.
        address = "\0" + place[1:] if place.startswith("@") else place
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), address)


def choose_feeds(named: tuple[str, str] | None, settings: Settings) -> Any:
    """The feeds to serve: those of MODULE:ATTR, or of the configuration. Raises `ConfigError`
    unless exactly one of the two is given, and can be served."""
    if named is not None and settings.feeds:
        raise ConfigError(
            f"{':'.join(named)!r} is given, and the configuration has feeds of its own: give one "
            "of them"
        )
    if named is not None:
        return telling(load(*named), ":".join(named))
    if not settings.feeds:
        raise ConfigError(
            "there is nothing to serve: give MODULE:ATTR, or --config FILE with [feeds.NAME]"
        )
    from feeder.config_file.build import build_coordinator

    return functools.partial(build_coordinator, settings)


def load(module_name: str, attribute: str) -> Any:
    """The object that MODULE:ATTR names. Raises `ConfigError` where it cannot be served."""
    expected = "a function that returns a coordinator, or a coordinator"
    found = objects.load(module_name, attribute, expected)
    check(found, f"{module_name}:{attribute}")
    return found


def telling(feeds: Any, name: str) -> Any:
    """The feeds to serve; a function among them raises `ConfigError` in place of its own errors."""
    if not callable(feeds):
        return feeds

    @functools.wraps(feeds)
    def make() -> Any:
        try:
            return feeds()
        except FeedError:
            raise
        except Exception as error:  # whatever a user's own function does
            raise ConfigError(f"{name!r} raised {objects.told(error)}") from error

    return make


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
    shared = f" with {server.replicas} replicas" if server.replicas > 1 else ""
    own = server.own_queues

    def queues(num: int) -> str:
        is_part = len(own) < num
        return str(Part(own.start, own.stop, num)) if is_part else f"{num} queue{'s' * (num != 1)}"

    feeds = [f"{name!r}, {queues(num)}{shared}" for name, num in sorted(server.queues.items())]
    what = f"feed{'s' * (len(feeds) != 1)} {'; '.join(feeds)}"
    lines = [f"serving {what}, at {address}" for address in server.addresses]
    return lines if server.status_url is None else [*lines, f"status page: {server.status_url}"]


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Let SIGTERM end the command in the middle of its start-up, which may take minutes of
    importing and opening, with the status of a clean stop: nothing is served yet."""

    def end(*_: object) -> None:
        raise SystemExit(0)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def stop_signals() -> Iterator[tuple[int, int]]:
    """A pipe, (read, write), with a byte in it from the first signal on that asks to stop.

    Python's own code writes it, in whatever thread the system gives the signal to: a handler would
    wait for the main thread, which waits here and is not interrupted where another one got it.
    """
    stopped, stop = os.pipe()
    # Python writes a byte for each signal; a full pipe must not block the handler.
    os.set_blocking(stop, False)
    numbers = [*STOP_SIGNALS]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` has it
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    woken = signal.set_wakeup_fd(stop, warn_on_full_buffer=False)
    try:
        yield stopped, stop
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(stopped)
        os.close(stop)
