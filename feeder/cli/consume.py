"""`feeder consume`: read a served feed as a trainer would, and say how fast it is and what came."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from feeder.cli.arguments import address, check_resume, count
from feeder.cli.meter import Meter, show_progress
from feeder.errors import ClosedError, ConfigError

if TYPE_CHECKING:
    from feeder.service.client.consumer import Consumer


def add_parser(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "consume",
        description="Read batches until the stream ends, --limit is reached or SIGINT, SIGTERM or "
        "SIGHUP comes; then say how fast they came and the digest of all their bytes, which is the "
        "same however they were transported.",
    )
    add = parser.add_argument
    add(
        "addresses",
        metavar="ADDR",
        nargs="*",
        type=address,
        help="where servers are, tried in turn (default: this user's own unix socket)",
    )
    add("--feed", default="", metavar="NAME", help="may be left out where there is but one")
    add("--queue", type=count(0), metavar="N", help="of the feed (default: the launcher's rank)")
    add(
        "--replica",
        type=count(0),
        default=0,
        metavar="R",
        help="which of the trainers that share the queue (default: 0)",
    )
    add("--limit", type=count(1), metavar="N", help="stop after N batches")
    add("--every", type=count(1), metavar="N", help="print step and digest after each N batches")
    add(
        "--credit",
        type=count(0, 1024),
        default=0,
        metavar="N",
        help="batches that may be on their way (default: the server chooses)",
    )
    add("--plane", choices=("auto", "shared", "frames"), default="auto", help="how batches come")
    add(
        "--checksum",
        choices=("auto", "off", "sampled", "full"),
        default="auto",
        help="how they are checked",
    )
    add("--keys", metavar="DIR", type=Path, help="of feeder keygen, for a server with keys")
    add(
        "--transcript", metavar="DIR", help="write a digest of each batch there, for feeder compare"
    )
    add("--resume", metavar="FILE", type=Path, help="go on from a position that was saved")
    add("--save", metavar="FILE", type=Path, help="save the position at the end, however it comes")


def main(arguments: argparse.Namespace) -> int:
    """Read, and say what came."""
    import feeder

    if arguments.save is not None and not arguments.save.absolute().parent.is_dir():
        raise ConfigError(f"--save is {str(arguments.save)!r}, whose folder is missing")
    if arguments.save is not None and arguments.save.exists() and not arguments.save.is_file():
        raise ConfigError(f"--save is {str(arguments.save)!r}, which is there and no file")
    check_resume(arguments.resume)
    consumer = feeder.connect(
        arguments.addresses or None,
        feed=arguments.feed,
        queue=arguments.queue,
        replica=arguments.replica,
        credit=arguments.credit,
        plane=arguments.plane,
        checksum=arguments.checksum,
        transcript=arguments.transcript,
        keys=arguments.keys,
        resume=arguments.resume,
    )
    with consumer, interrupts() as over:
        reader = Reader(consumer, over, limit=arguments.limit, every=arguments.every)
        try:
            reader.read_all(None if arguments.resume else expected(consumer, arguments.limit))
        finally:
            if arguments.save is not None:
                save(consumer, arguments.save)
            for line in reader.meter.summary(consumer):
                print(line, flush=True)
    return 0


def expected(consumer: Consumer, limit: int | None) -> int | None:
    """How many batches a consumer at the start of its stream will be read for, where known."""
    try:
        length = len(consumer)
    except TypeError:
        return limit
    return length if limit is None else min(limit, length)


class Reader:
    """Reads a consumer in a thread of its own: whatever happens to the main thread, a batch that
    was handed out has been counted and digested.

    That thread writes `meter` and `_failure`; the main thread sets `_stopping` and then waits."""

    def __init__(
        self, consumer: Consumer, over: int, *, limit: int | None, every: int | None
    ) -> None:
        """`over` is an eventfd: readable where an interrupt came."""
        self.meter = Meter()
        """Counts and digest of the batches read so far."""
        self._consumer = consumer
        self._limit = limit
        self._every = every
        self._over = over
        self._stopping = False
        self._failure: BaseException | None = None

    def read_all(self, total: int | None) -> None:
        """Read until the end, the limit or an interrupt, and show how far of `total` it is. Raises
        what the consumer raises."""
        # A daemon: where the consumer hangs in a way that closing it does not end, Ctrl-C does.
        thread = threading.Thread(target=self._run, name="feeder consume", daemon=True)
        thread.start()
        try:
            show_progress(self.meter, self._consumer, total, self._over)
        finally:
            self._stopping = True
            self._consumer.close()  # it wakes the thread, where that waits for a batch
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._read()
        except ClosedError as error:
            # Our own `close` woke it, or somebody else has ended the consumer.
            self._failure = None if self._stopping else error
        except Exception as error:
            self._failure = error
        finally:
            self.meter.stop()
            os.eventfd_write(self._over, 1)

    def _read(self) -> None:
        meter, limit, every = self.meter, self._limit, self._every
        for batch in self._consumer:
            meter.add(batch)
            if every is not None and meter.batches % every == 0:
                print(f"step {batch.step}  xxh3 {meter.hexdigest()}", flush=True)
            if meter.batches == limit or self._stopping:
                return


@contextlib.contextmanager
def interrupts() -> Iterator[int]:
    """An eventfd that becomes readable at SIGINT, SIGTERM and SIGHUP, which do nothing else; the
    last is left alone where it is ignored, as `nohup` has it."""
    # A descriptor can be waited for together with others, and a handler that raises would leave a
    # batch that was handed out and not counted.
    descriptor = os.eventfd(0)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = [signal.signal(one, lambda *_: os.eventfd_write(descriptor, 1)) for one in numbers]
    try:
        yield descriptor
    finally:
        for one, handler in zip(numbers, before, strict=True):
            signal.signal(one, handler)
        os.close(descriptor)


def save(consumer: Consumer, path: Path) -> None:
    """Write the position after the last batch that was read. Raises `CheckpointError`."""
    from feeder.state.snapshot import Snapshot

    (position,) = consumer.state_dict().values()
    Snapshot.from_bytes(position).write(path)
    print(f"position saved: {path}", file=sys.stderr)
