"""How many batches a feed has, if its fetch function says how many rows each epoch has.

Nothing is counted while a feed runs: how many batches there are follows from the rows of each epoch
and the rules of rounds. So it is known before the start, and the same after any resume.
"""

from __future__ import annotations

from operator import index

from feeder.config import FeedConfig
from feeder.observe.figures import ProgressFigures, SourceFigures
from feeder.workers.stream.position import Cut, LazyPosition
from feeder.workers.stream.spec import LastRound

_MANY_EPOCHS = 100_000
"""Of more epochs no length is told: rows are asked for epoch by epoch, and `len()` is to be
quick."""


def num_batches(config: FeedConfig, device: int) -> int | None:
    """Batches of the whole stream on a device, or queue; None where the fetch function has no
    `rows(epoch, batch_size)` that gives numbers, as that of sources does, or the number of epochs
    is not known."""
    stream, num = config.stream, len(config.devices)
    rows = getattr(stream.fetch, "rows", None)
    if stream.epochs is None or stream.dont_rebatch or not callable(rows):
        return None
    size, asked = stream.batch_size, stream.rows_asked
    if stream.epochs > _MANY_EPOCHS:
        return None
    try:
        counts = [index(rows(epoch, asked)) for epoch in range(stream.epochs)]
    except Exception:
        return None  # A user's own object may mean something else by the name `rows`.
    # Rows that are carried fill batches across epochs, so their sum counts; else each epoch does.
    counts = [sum(counts)] if stream.last_batch == "carry" else counts
    batches = [count // size if stream.last_batch == "drop" else -(-count // size)
               for count in counts]  # fmt: skip
    # Rounds end with each epoch, or with the stream.
    totals = batches if stream.rounds == "epoch" else [sum(batches)]
    return sum(_dealt(total, device, num, stream.last_round) for total in totals)


def epoch_batches(config: FeedConfig, epoch: int) -> int | None:
    """Batches of one epoch on all devices; None where nobody knows."""
    stream, num = config.stream, len(config.devices)
    rows = getattr(stream.fetch, "rows", None)
    if stream.dont_rebatch or stream.last_batch == "carry" or not callable(rows):
        return None
    try:
        count = index(rows(epoch, stream.rows_asked))
    except Exception:
        return None  # as in `num_batches`
    size = stream.batch_size
    total = count // size if stream.last_batch == "drop" else -(-count // size)
    if stream.rounds != "epoch":
        return total
    return sum(_dealt(total, device, num, stream.last_round) for device in range(num))


def progress_of(config: FeedConfig, at: Cut | LazyPosition) -> ProgressFigures:
    """How far a stream is that stands at a place."""
    epochs, epoch, batches = config.stream.epochs, at.epoch, at.index
    sources = _sources(config, at)
    length = None if epochs is not None and epoch >= epochs else epoch_batches(config, epoch)
    if epochs is not None and epoch >= epochs > 0:
        # At the very end the next epoch is one that there is not.
        epoch = epochs - 1
        batches = length = epoch_batches(config, epoch) or 0
    return ProgressFigures(
        epoch=epoch, epochs=epochs, batches=batches, length=length, sources=sources
    )


def _sources(config: FeedConfig, at: Cut | LazyPosition) -> tuple[SourceFigures, ...]:
    """What has been read of the sources of a mixture up to a place."""
    stream = config.stream
    read_of = getattr(stream.fetch, "read_of_sources", None)
    if not callable(read_of) or not stream.pure:
        return ()
    position = at.position if isinstance(at, Cut) else at.span.position(at.num_chunks)
    # Calls of all partitions together: with order="arrival" nearly those of the epoch's first rows.
    call = stream.call(position.epoch, sum(position.calls) - 1)
    return tuple(SourceFigures(name=name, **read) for name, read in read_of(call).items())


def _dealt(total: int, device: int, num: int, last_round: LastRound) -> int:
    """How many of so many batches a device is dealt."""
    if last_round != "uneven":
        total = (total if last_round == "drop" else total + num - 1) // num * num
    return len(range(device, total, num))
