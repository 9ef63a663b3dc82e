"""What loaders read: a feed that they make of a data set, or one that somebody else has made."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Literal, NamedTuple

from feeder.adapters.datasets import (
    Batched,
    Indices,
    IteratedBatches,
    MapBatches,
    Ordered,
    Sampled,
    SourceBatches,
    States,
    is_empty,
    is_iterator,
    is_told_epochs,
    warn_of_replay,
)
from feeder.adapters.loop import Mark, Run
from feeder.adapters.packing import COLUMNS
from feeder.api import init_data_input_workers
from feeder.errors import ConfigError, ResumeError
from feeder.executors.options import Processes
from feeder.feeds.coordinator import Coordinator
from feeder.feeds.device_feed import DeviceFeed
from feeder.feeds.epochs import EpochReader
from feeder.feeds.feed import Feed
from feeder.ranks import rank_of
from feeder.service.client.consumer import Consumer
from feeder.state.snapshot import Snapshot
from feeder.state.state_dict import STATE_KEY, unpack_state_dict
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import Cut, Position
from feeder.workers.stream.shares import Place, Share

NAME = "loader"
"""The input source name of the feeds that loaders make."""

Kind = Literal["map", "source", "iterable"]


def executor_settings(num_workers: int, given: Any, preload: Sequence[str]) -> dict[str, Any]:
    """The settings of a feed that runs so many workers: processes, which import what is preloaded
    once for all, as DataLoader has them; or what is given, or one thread."""
    if given is not None:
        if num_workers:
            raise ConfigError(
                f"num_workers is {num_workers} and executor is {given!r}, expected one of the two"
            )
        return {"executor": given}
    if not num_workers:
        return {"num_threads": 1}
    return {"executor": Processes(num_workers, preload=preload)}


def whole(name: str, value: Any, least: int) -> int:
    """A whole number of the user's, also one of NumPy's; raises `ConfigError` for anything else."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name} is {value!r}, expected a whole number of at least {least}")
    return number


def find_share(rank: int | None, world_size: int | None, *, drops: bool) -> Share:
    """The share of this process, as it is given or as the launcher tells it."""
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"rank is {rank!r} and world_size is {world_size!r}, expected both or none"
        )
    if rank is None or world_size is None:
        rank, world_size = rank_of(os.environ)
    rank, world_size = whole("rank", rank, 0), whole("world_size", world_size, 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}, expected 0 to {world_size - 1}: world_size is "
                          f"{world_size}")  # fmt: skip
    return Share(rank, world_size, drops)


class MadeStream:
    """A feed that is made anew wherever a loader begins; never changes but for its sampler."""

    def __init__(
        self,
        kind: Kind,
        dataset: Any,
        batched: Batched,
        share: Share,
        *,
        indices: Indices | None,
        settings: dict[str, Any],
        epochs: int | None,
        states: States,
    ) -> None:
        self._states = states
        self._is_read_once = is_iterator(dataset) or (
            isinstance(indices, Sampled) and indices.is_read_once
        )
        self._kind, self._dataset, self._batched, self._share = kind, dataset, batched, share
        self._indices, self._settings, self._epochs = indices, settings, epochs
        # Made and not started: what is wrong is told at once, and it knows what positions mean.
        (stream,) = self._make(Mark(Place()))[NAME].streams
        self._positions = stream.positions
        if share.drops:
            for epoch in range(self._epochs_that_differ()):
                _check_rounds(self._num_batches(epoch), share, epoch)

    def _fetch(self, mark: Mark) -> Any:
        place, batched, share = mark.place, self._batched, self._share
        if self._kind == "iterable":
            seed = self._settings["seed"]
            at = self._bytes_at(mark)
            return IteratedBatches(self._dataset, batched, share, place, at, seed, self._states)
        if self._kind == "source":
            return SourceBatches(self._dataset, batched, share, place)
        assert self._indices is not None
        return MapBatches(self._dataset, self._indices, batched, share, place)

    def _make(self, mark: Mark) -> Coordinator:
        epochs = self._epochs_from(mark.place)
        # A row is a whole batch, of a shape of its own.
        return init_data_input_workers(
            list(COLUMNS), self._fetch(mark), 1, 1, NAME, epochs=epochs, dont_rebatch=True,
            writable=True, coordinator=Coordinator(), **self._settings,
        )  # fmt: skip

    def _epochs_from(self, place: Place) -> int | None:
        """How many epochs a run has that begins there; None for no end."""
        executor = self._settings.get("executor")
        if is_told_epochs(self._dataset) and not isinstance(executor, Processes):
            # The data set is told an epoch while nobody reads another one of it. A process has a
            # data set of its own.
            return 1
        if self._is_read_once:
            # To look for its next epoch would be an error, and its user may want only one.
            return 1
        return None if self._epochs is None else max(1, self._epochs - place.epoch)

    @property
    def fingerprint(self) -> bytes:
        """What is equal for all ranks of one stream, and for no other stream."""
        return self._positions.id.fingerprint

    def begin(self) -> Mark:
        return Mark(Place())

    def check(self) -> None:
        if not isinstance(self._indices, Ordered):
            return
        then, now = self._indices.num_samples, len(self._dataset)
        if then != now:
            raise ConfigError(
                f"dataset {type(self._dataset).__name__} has {now} samples, and had {then} when "
                "the loader was made: make another loader"
            )

    def open(self, mark: Mark) -> tuple[Run, Mark]:
        if isinstance(self._indices, Sampled):
            self._indices.resume(mark.place.epoch, mark.place.index, self._bytes_at(mark))
        if self._kind == "iterable":
            warn_of_replay(self._fetch(mark))
        coordinator = self._make(mark)
        coordinator.start()
        return _MadeRun(coordinator, self._share, mark.place, self._epochs_from(mark.place)), mark

    def next_epoch(self, mark: Mark) -> Mark:
        return Mark(mark.place.after_epoch())

    def leave_epoch(self, run: Run, mark: Mark) -> Run | None:
        # A feed that begins there does not make what is left of the epoch.
        return None

    def _bytes_at(self, mark: Mark) -> bytes | None:
        """What a mark holds beside numbers."""
        if mark.at is None or isinstance(mark.at, bytes):
            return mark.at
        position: Position = mark.at.span.position(mark.at.num_chunks)
        return position.marks[0]

    def write(self, mark: Mark) -> dict[str, Any]:
        place, at = mark.place, self._bytes_at(mark)
        if self._indices is not None and at is None:
            at = self._indices.mark(place.epoch, place.index)
        cut = Cut(
            epoch=place.epoch,
            index=place.index,
            step=place.step,
            finished=False,
            position=Position(place.epoch, 0, (True,), (place.index,), (0,), (at,)),
            leftover=None,
            encode=self._positions.id.encode,
        )
        state = self._positions.state(cut, None, None, with_rows=False)
        return {STATE_KEY: bytes(Snapshot((state,)))}

    def read(self, state: Any) -> Mark:
        check_state(state)
        cut = self._positions.find_in(unpack_state_dict(state)).cut
        return Mark(Place(cut.epoch, cut.index, cut.step), cut.position.marks[0])

    def length(self) -> int | None:
        return self._rounds_of(0)

    def _rounds_of(self, epoch: int) -> int | None:
        num = self._num_batches(epoch)
        return None if num is None else self._share.rounds(num)

    def _epochs_that_differ(self) -> int:
        """After so many epochs their lengths come again: shards of a source take turns."""
        said = self._dataset.describe() if self._kind == "source" else {"stick_to_shard": True}
        turns: int = 1 if said["stick_to_shard"] else said["num_shards"]
        return turns if self._epochs is None else min(turns, self._epochs)

    def begin_epoch(self, mark: Mark, epoch: int) -> Mark:
        # As if all epochs before had been given whole.
        period = self._epochs_that_differ()
        rounds, rest = divmod(epoch, period)
        in_a_period = [self._rounds_of(e) or 0 for e in range(period)]
        return Mark(Place(epoch, 0, rounds * sum(in_a_period) + sum(in_a_period[:rest])))

    def left(self, mark: Mark) -> int | None:
        num = self._num_batches(mark.place.epoch)
        return None if num is None else self._share.rounds(num, mark.place.index)

    def close(self) -> None:
        """Nothing: its runs are ended by themselves."""

    def _num_batches(self, epoch: int) -> int | None:
        """Batches of all ranks in an epoch, where they are known."""
        if self._kind == "source":
            return self._batched.count(self._dataset.rows(epoch, self._batched.size or 1))
        try:
            if self._indices is not None:
                return self._indices.num_batches(epoch)
            return self._batched.count(len(self._dataset))
        except TypeError:
            return None


def _check_rounds(num_batches: int | None, share: Share, epoch: int) -> None:
    if num_batches is not None and not share.rounds(num_batches):
        which = f"epoch {epoch}" if epoch else "an epoch"
        round_ = f"what does not go round all {share.num} ranks" if share.num > 1 else "the rest"
        raise ConfigError(
            f"{which} has {num_batches} whole batches, and drop_last=True leaves out {round_}: "
            "nothing is left; use drop_last=False, fewer ranks or a smaller batch_size"
        )


class _MadeRun:
    """A running feed, whose numbers count from where it began. Owned by the loader's thread."""

    def __init__(
        self, coordinator: Coordinator, share: Share, began: Place, epochs: int | None
    ) -> None:
        self._coordinator, self._share, self._began = coordinator, share, began
        self._end = None if epochs is None else began.epoch + epochs
        self._feed: DeviceFeed = coordinator[NAME].on(0)
        self._first: Batch | None = None
        self._is_looked_at = False

    def next_epoch(self) -> int | None:
        if not self._is_looked_at:
            first = next(self._feed, None)
            self._is_looked_at = True
            self._first = None if first is None or is_empty(first.columns) else first
        number = self._first.epoch if self._first is not None else self._feed.next_epoch()
        return None if number is None else self._began.epoch + number

    def reaches(self, epoch: int) -> bool:
        return self._end is None or epoch < self._end

    def take(self, mark: Mark) -> tuple[Batch, Mark]:
        batch, self._first = self._first, None
        if batch is None:
            batch = next(self._feed)
        began = self._began
        index = 0 if batch.epoch else began.index
        place = Place(began.epoch + batch.epoch, index, mark.place.step - batch.index)
        return batch, Mark(self._share.after(place, batch.index + 1), batch.place)

    def close(self) -> None:
        self._coordinator.stop()


# ---- feeds of others


class Reader(NamedTuple):
    """A feed or a consumer that is open."""

    batches: EpochReader
    """Gives its batches."""
    position: Any
    """What has its `state_dict` and `load_state_dict`."""
    start: Callable[[], object] | None = None
    """Starts it, where it is the loader's own."""
    close: Callable[[], object] | None = None
    """Ends it, where it is the loader's own."""


class ReadStream:
    """A feed or a consumer, in whose epochs a loader loops; `again` opens another one at a state.
    Owned by the loader's thread."""

    def __init__(self, reader: Reader, again: Callable[[Any], Reader] | None = None) -> None:
        self._reader, self._again = reader, again
        self._is_read = False
        self._began: dict[str, Any] = {}

    def begin(self) -> Mark:
        return Mark(Place(epoch=-1))

    def check(self) -> None:
        """Nothing: a feed looks after what it reads."""

    def open(self, mark: Mark) -> tuple[Run, Mark]:
        if not self._is_read:
            # Once it is read it says where it stands then.
            self._began = self._reader.position.state_dict()
            if self._reader.start is not None:
                self._reader.start()
        self._is_read = True
        reader, place = self._reader.batches, mark.place
        number = reader.next_epoch()
        if place.epoch < 0:
            # Nobody has said an epoch: it is the one where the feed stands.
            mark = mark._replace(place=place._replace(epoch=number or 0))
        while number is not None and number < mark.place.epoch:
            next(reader)
            number = reader.next_epoch()
        return _ReadRun(reader), mark

    def next_epoch(self, mark: Mark) -> Mark:
        # The position stays that of the last batch: of a feed no other is known.
        return Mark(mark.place.after_epoch(), mark.at)

    def leave_epoch(self, run: Run, mark: Mark) -> Run | None:
        # A feed that others read, too, leaves nothing out: the rest is taken and dropped.
        while run.next_epoch() == mark.place.epoch:
            run.take(mark)
        return run

    def write(self, mark: Mark) -> dict[str, Any]:
        numbers = {"epoch": mark.place.epoch, "step": mark.place.step}
        if mark.at is not None:
            return {STATE_KEY: mark.at.cut().token(), **numbers}
        begins = self._began if self._is_read else self._reader.position.state_dict()
        return {**begins, **numbers}

    def read(self, state: Any) -> Mark:
        check_state(state)
        unpack_state_dict(state)
        position = {STATE_KEY: state[STATE_KEY]}
        if self._is_read and self._again is not None:
            self.close()
            self._reader = self._again(position)
        else:
            self._reader.position.load_state_dict(position)
        self._is_read = False
        return Mark(Place(state.get("epoch", -1), 0, state.get("step", 0)))

    def length(self) -> int | None:
        return None

    def begin_epoch(self, mark: Mark, epoch: int) -> Mark:
        raise ConfigError(
            f"the trainer begins epoch {epoch}, and the feed stands in epoch {mark.place.epoch}: "
            "load the loader's state, or resume from a checkpoint in the middle of an epoch"
        )

    def left(self, mark: Mark) -> int | None:
        return None

    def close(self) -> None:
        """End the reader, where it is the loader's own."""
        if self._reader.close is not None:
            self._reader.close()


class _ReadRun:
    """A feed or a consumer that is being read; it is not ended with the run. Owned by the loader's
    thread."""

    def __init__(self, reader: EpochReader) -> None:
        self._reader = reader

    def next_epoch(self) -> int | None:
        return self._reader.next_epoch()

    def reaches(self, epoch: int) -> bool:
        return True

    def take(self, mark: Mark) -> tuple[Batch, Mark]:
        batch = next(self._reader)
        place = Place(batch.epoch, batch.index + 1, mark.place.step + 1)
        return batch, Mark(place, batch.place)

    def close(self) -> None:
        """Nothing."""


class Connection:
    """A served feed. Owned by the loader's thread."""

    def __init__(self, addresses: Any, options: dict[str, Any]) -> None:
        self._addresses, self._options = addresses, {"writable": True, **options}

    def open(self, resume: Any) -> Reader:
        """A consumer of it, at a position."""
        # Only loaders that connect need the service.
        from feeder.service.client.connect import connect

        options = self._options if resume is None else {**self._options, "resume": resume}
        consumer = connect(self._addresses, **options)
        return Reader(consumer, consumer, close=consumer.close)


FEEDS = (Feed, DeviceFeed, Consumer, Coordinator, Connection)
"""What `read_feed` reads."""


def read_feed(dataset: Any) -> ReadStream:
    """The stream of a feed, of a consumer, or of a server to connect to."""
    if isinstance(dataset, Connection):
        return ReadStream(dataset.open(None), dataset.open)
    if isinstance(dataset, Coordinator):
        (name,) = list(dataset) if len(dataset) == 1 else (None,)
        if name is None:
            raise ConfigError(f"dataset is {dataset!r}, expected one of its feeds")
        dataset = dataset[name]
    if isinstance(dataset, Feed):
        return ReadStream(Reader(dataset.on(0) if len(dataset.devices) == 1 else _several(dataset),
                                 dataset))  # fmt: skip
    return ReadStream(Reader(dataset, dataset))


def _several(feed: Feed) -> Any:
    raise ConfigError(f"feed {feed.name!r} has devices {feed.devices!r}: give one queue of it, "
                      "served and connected to by each rank")  # fmt: skip


def check_state(state: Any) -> None:
    """Raise `ResumeError` where a state is another loader's."""
    if isinstance(state, dict) and STATE_KEY not in state:
        theirs = {"_snapshot", "_sampler_iter_state", "_num_yielded", "_iterator_finished"}
        if theirs & state.keys():
            raise ResumeError(
                "the state is one of torchdata's StatefulDataLoader, whose order is another: begin "
                "an epoch anew, without a state"
            )
