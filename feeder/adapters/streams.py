"""What loaders read: a feed that they make of a data set, or one that somebody else has made."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, Literal, NamedTuple

from feeder.adapters.asking import Numbers
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
from feeder.adapters.packing import COLUMNS
from feeder.api import init_data_input_workers
from feeder.devices.ondevice import OnDevice
from feeder.errors import ConfigError, ResumeError
from feeder.executors.options import Processes
from feeder.feeds.coordinator import Coordinator
from feeder.feeds.device_feed import DeviceFeed
from feeder.feeds.epochs import EpochReader
from feeder.feeds.feed import Feed
from feeder.feeds.records import Rows, check_record
from feeder.ranks import rank_of
from feeder.service.client.consumer import Consumer
from feeder.sources import Source
from feeder.state.snapshot import HISTORY, Snapshot
from feeder.state.state_dict import STATE_KEY, unpack_state_dict
from feeder.state.token import step_of
from feeder.workers.sources.arguments import whole as whole
from feeder.workers.sources.stores.reading import Faults, Record
from feeder.workers.stream.batch import Batch, Call
from feeder.workers.stream.chunks import arrow_chunks, is_table
from feeder.workers.stream.position import Cut, Position
from feeder.workers.stream.shares import Place, Share

NAME = "loader"
"""The input source name of the feeds that loaders make."""

Kind = Literal["map", "source", "iterable"]

_logger = logging.getLogger(__name__)


class Mark(NamedTuple):
    """Where a loader stands: after a batch."""

    place: Place
    at: Any = None
    """What else its stream needs to go on there."""


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


class Ranks(NamedTuple):
    """Which batches this process reads."""

    share: Share
    launched: int = 1
    """How many processes the launcher has started, if nobody said which of them this one is: each
    reads all rows then."""

    def note(self, state: dict[str, Any]) -> dict[str, Any]:
        """A state, which says over how many ranks its rows were dealt out."""
        return {**state, _DEALT: self.share.num}

    def check(self, state: Any) -> None:
        """Raise `ResumeError` if each of several processes would read the rows that were dealt out
        among them before."""
        if self.launched > 1 and state.get(_DEALT) != 1:
            dealt = state.get(_DEALT, "an unknown number of")
            raise ResumeError(
                f"the state is one of a FeedLoader whose rows were dealt out to {dealt} ranks, and "
                f"now each of {self.launched} processes would read all of the rest: give rank= and "
                "world_size=, or make the loader after torch.distributed is initialised"
            )


_DEALT = "world_size"


def find_ranks(rank: int | None, world_size: int | None, *, drops: bool) -> Ranks:
    """The share of this process, as it is given; otherwise all rows. A launcher's variables alone
    deal nothing out: `srun` also starts jobs that have nothing to do with each other."""
    if (rank is None) != (world_size is None):
        raise ConfigError(
            f"rank is {rank!r} and world_size is {world_size!r}, expected both or none"
        )
    if rank is None or world_size is None:
        launched = rank_of(os.environ)[1]
        if launched > 1:
            warnings.warn(
                f"the launcher has started {launched} processes, and each of them reads all rows: "
                "give rank= and world_size=, or make the loader after torch.distributed is "
                "initialised; rank=0, world_size=1 says that it is meant",
                stacklevel=5,
            )
        return Ranks(Share(0, 1, drops), launched)
    rank, world_size = whole("rank", rank, 0), whole("world_size", world_size, 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank is {rank}, expected 0 to {world_size - 1}: world_size is "
                          f"{world_size}")  # fmt: skip
    return Ranks(Share(rank, world_size, drops))


class Dealt(OnDevice):
    """A function of batches of a loader, whose feeds begin wherever the loader stands: its draws
    belong to the batch's place among those of all ranks."""

    _began, _share = Place(), Share()
    _length: Callable[[int], int | None] = staticmethod(lambda epoch: None)

    def dealt(self, began: Place, share: Share, length: Callable[[int], int | None]) -> Dealt:
        """The same for a feed of one rank that begins there; `length` is the batches of an
        epoch, of all ranks."""
        made = copy(self)
        made._began, made._share, made._length = began, share, length
        return made

    def __call__(self, batch: Batch) -> Batch:
        # What stands for the rest of an epoch of which nothing is left has no batch in it.
        is_packed = tuple(batch) == COLUMNS
        return batch if is_packed and is_empty(batch.columns) else super().__call__(batch)

    def place(self, batch: Batch) -> tuple[int, int, int]:
        began, share = self._began, self._share
        epoch, index = began.epoch + batch.epoch, 0 if batch.epoch else began.index
        number = index + batch.index * share.num + share.rank
        if share.num > 1 and (num := self._length(epoch)) is not None:
            # The last batch comes again for ranks without one.
            number = min(number, num - 1)
        return epoch, number, began.step + batch.step


class MadeStream:
    """A feed that is made anew wherever a loader begins, and whose numbers count from there. Owned
    by the loader's thread."""

    def __init__(
        self,
        kind: Kind,
        dataset: Any,
        batched: Batched,
        ranks: Ranks,
        *,
        indices: Indices | None,
        settings: dict[str, Any],
        epochs: int | None,
        states: States,
        skips: bool = False,
    ) -> None:
        self._states = states
        self.faults = Faults("skip" if skips else "raise")
        """What is left out of a data set."""
        self._is_read_once = is_iterator(dataset) or (
            isinstance(indices, Sampled) and indices.is_read_once
        )
        self._kind, self._dataset, self._batched = kind, dataset, batched
        self._ranks, self._share = ranks, (share := ranks.share)
        self._is_told = False
        self._indices, self._settings, self._epochs = indices, settings, epochs
        # The feed that is open, where it began, and the epoch behind its last one.
        self._coordinator: Coordinator | None = None
        self._began = Place()
        self._end: int | None = None
        # Made and not started: what is wrong is told at once, and it knows what positions mean.
        (stream,) = self._make(Mark(Place()))[NAME].streams
        # What the data set is now; the positions are of an earlier format if it goes on so.
        self._given = self._positions = stream.positions
        self._given_dataset = dataset
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
        return MapBatches(self._dataset, self._indices, batched, share, place, self.faults)

    def _make(self, mark: Mark) -> Coordinator:
        epochs, settings = self._epochs_from(mark.place), self._settings
        if (on_device := settings.get("on_device")) is not None:
            function = on_device.dealt(mark.place, self._share, self._num_batches)
            settings = {**settings, "on_device": function}
        # A row is a whole batch, of a shape of its own.
        return init_data_input_workers(
            list(COLUMNS), self._fetch(mark), 1, 1, NAME, epochs=epochs, dont_rebatch=True,
            writable=True, coordinator=Coordinator(), **settings,
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
        """Where a loader begins."""
        return Mark(Place())

    def check(self) -> None:
        """Raise `ConfigError` if a loop would read something else than the loops before."""
        if not isinstance(self._indices, Ordered):
            return
        then, now = self._indices.num_samples, len(self._dataset)
        if then != now:
            raise ConfigError(
                f"dataset {type(self._dataset).__name__} has {now} samples, and had {then} when "
                "the loader was made: make another loader"
            )

    # ---- the feed that is open

    def open(self, mark: Mark) -> Mark:
        """Open a feed from there on; returns where that is."""
        self.stop()
        if isinstance(self._indices, Sampled):
            self._indices.resume(mark.place.epoch, mark.place.index, self._bytes_at(mark))
        if self._kind == "iterable" and self._fetch(mark).is_replayed:
            warn_of_replay(stacklevel=5)
        self._tell()
        coordinator = self._make(mark)
        coordinator.start()
        epochs = self._epochs_from(mark.place)
        self._began = mark.place
        self._end = None if epochs is None else mark.place.epoch + epochs
        self._first: Batch | None = None
        self._is_looked_at = False
        self._feed: DeviceFeed = coordinator[NAME].on(0)
        self._coordinator = coordinator
        return mark

    def reaches(self, epoch: int) -> bool:
        """Whether the feed that is open gives the batches of an epoch."""
        return self._coordinator is not None and (self._end is None or epoch < self._end)

    def epoch_of_next(self) -> int | None:
        """The epoch of the next batch, which is waited for; None after the last."""
        if not self._is_looked_at:
            first = next(self._feed, None)
            self._is_looked_at = True
            self._first = None if first is None or is_empty(first.columns) else first
        number = self._first.epoch if self._first is not None else self._feed.next_epoch()
        return None if number is None else self._began.epoch + number

    def take(self, mark: Mark) -> tuple[Batch, Mark]:
        """The next batch, and where the loader stands after it."""
        batch, self._first = self._first, None
        if batch is None:
            batch = next(self._feed)
        began = self._began
        index = 0 if batch.epoch else began.index
        place = Place(began.epoch + batch.epoch, index, mark.place.step - batch.index)
        return batch, Mark(self._share.after(place, batch.index + 1), batch.place)

    def leave_epoch(self, mark: Mark) -> None:
        """Go on with the epoch after the mark's."""
        # A feed that begins there does not make what is left of the epoch.
        self.stop()

    def stop(self) -> None:
        """End the feed that is open, if there is one."""
        coordinator, self._coordinator = self._coordinator, None
        if coordinator is not None:
            coordinator.stop()

    close = stop

    def _tell(self) -> None:
        """Say once what this rank reads of an epoch, if it is not all."""
        share, num = self._share, self._num_batches(0)
        if self._is_told or share.num == 1 or num is None:
            return
        self._is_told = True
        size, rows = self._batched.size or 1, self._num_rows(0)
        last = share.batch(share.rounds(num) - 1, num)
        missing = max(0, num * size - rows) if last == num - 1 else 0
        _logger.info(
            "rank %d of %d: reads %d of %d rows; rank=0, world_size=1 reads all",
            share.rank, share.num, share.rounds(num) * size - missing, rows,
        )  # fmt: skip

    def next_epoch(self, mark: Mark) -> Mark:
        """The start of the next epoch."""
        return Mark(mark.place.after_epoch())

    def _bytes_at(self, mark: Mark) -> bytes | None:
        """What a mark holds beside numbers."""
        if mark.at is None or isinstance(mark.at, bytes):
            return mark.at
        position: Position = mark.at.span.position(mark.at.num_chunks)
        return position.marks[0]

    def write(self, mark: Mark) -> dict[str, Any]:
        """A mark for a trainer's checkpoint."""
        place, at = mark.place, self._bytes_at(mark)
        if self._indices is not None and at is None:
            at = self._indices.mark(place.epoch, place.index)
        index = place.index // self._unit
        cut = Cut(
            epoch=place.epoch,
            index=index,
            step=place.step,
            finished=False,
            position=Position(place.epoch, 0, (True,), (index,), (0,), (at,)),
            leftover=None,
            encode=self._positions.id.encode,
        )
        state = self._positions.state(cut, None, None, with_rows=False)
        if self._share.num > 1:
            # Each rank has left out other samples, and the state is one for all of them.
            state = state._replace(left_out=())
        return self._ranks.note({STATE_KEY: bytes(Snapshot((state,)))})

    @property
    def _unit(self) -> int:
        """Batches that a position counts as one: the rows of a global batch are the same for any
        number of ranks, and their batches are not."""
        return self._share.num if self._batched.global_size is not None else 1

    def read(self, state: Any) -> Mark:
        """The reverse; raises `ResumeError`."""
        check_state(state)
        found = self._given.find_in(unpack_state_dict(state))
        cut = found.cut
        self._ranks.check(state)
        self.faults.count(0, found.left_out)
        older = found.owner
        if older is not None and HISTORY in older.fingerprint:
            raise ResumeError(
                "the state is of a run that has been edited, which feeds alone go on with: "
                "init_data_input_workers, and servers"
            )
        self._positions = older or self._given
        self._dataset = self._given_dataset.as_it_was() if older else self._given_dataset
        return Mark(Place(cut.epoch, cut.index * self._unit, cut.step), cut.position.marks[0])

    def length(self) -> int | None:
        """Batches of a loop; None if nobody knows."""
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
        """The start of any epoch."""
        # As if all epochs before had been given whole.
        period = self._epochs_that_differ()
        rounds, rest = divmod(epoch, period)
        in_a_period = [self._rounds_of(e) or 0 for e in range(period)]
        return Mark(Place(epoch, 0, rounds * sum(in_a_period) + sum(in_a_period[:rest])))

    def left(self, mark: Mark) -> int | None:
        """Batches that the epoch has after a mark; None if nobody knows."""
        num = self._num_batches(mark.place.epoch)
        return None if num is None else self._share.rounds(num, mark.place.index)

    def numbers(self) -> Numbers:
        """What it reads, by numbers; raises `ConfigError` if rows do not follow from these."""
        if why := self._why_unknown():
            raise ConfigError(
                f"the records of a step of the loader do not follow from numbers: {why}; have each "
                "sample's number in its batches"
            )
        return Numbers(
            self._share, self._batched.size or 1, self._epochs, self._epochs_that_differ(),
            lambda epoch: self._num_batches(epoch) or 0, self._records_of, self._rows_of,
        )  # fmt: skip

    def _why_unknown(self) -> str:
        if self._kind == "iterable":
            return "an iterable says nothing of them"
        if isinstance(self._indices, Sampled):
            return "a sampler has an order of its own"
        if self._kind == "map" and self.faults.may_skip:
            return "on_error='skip' may leave samples out"
        return ""

    def _records_of(self, epoch: int, batch: int) -> Rows:
        size = self._batched.size or 1
        if isinstance(ordered := self._indices, Ordered):
            return tuple(
                (Record("", n, epoch, f"sample {n}"),) for n in ordered.samples(epoch, batch)
            )
        call = Call(batch, epoch, 0, size, self._settings["seed"])
        return tuple(self._dataset.records_of(call))

    def _rows_of(self, source: str, record: int, epoch: int) -> Iterator[int]:
        size = self._batched.size or 1
        if isinstance(ordered := self._indices, Ordered):
            check_record({"": ordered.num_samples}, source, record)
            return iter(ordered.positions(epoch, record))
        check_record(self._dataset.sizes_of(), source, record)
        call = Call(0, epoch, 0, size, self._settings["seed"])
        rows: Iterator[int] = self._dataset.rows_of(source, record, call)
        return rows

    def _num_batches(self, epoch: int) -> int | None:
        """Batches of all ranks in an epoch; None if nobody knows."""
        try:
            if self._indices is not None:
                return self._indices.num_batches(epoch)
            return self._batched.count(self._num_rows(epoch))
        except TypeError:
            return None

    def _num_rows(self, epoch: int) -> int:
        """Rows of all ranks in an epoch; raises `TypeError` if nobody knows."""
        if self._kind == "source":
            rows: int = self._dataset.rows(epoch, self._batched.size or 1)
            return rows
        return len(self._dataset)


def _check_rounds(num_batches: int | None, share: Share, epoch: int) -> None:
    if num_batches is not None and not share.rounds(num_batches):
        which = f"epoch {epoch}" if epoch else "an epoch"
        round_ = f"what does not go round all {share.num} ranks" if share.num > 1 else "the rest"
        raise ConfigError(
            f"{which} has {num_batches} whole batches, and drop_last=True leaves out {round_}: "
            "nothing is left; use drop_last=False, fewer ranks or a smaller batch_size"
        )


# ---- feeds of others


class ReadStream:
    """What a loader reads of a feed or a consumer, in whose epochs it loops. Of each round of its
    batches one rank has one. Owned by the loader's thread.

    A feed of the user's goes on when the loader ends. `again` makes the loader's own, at a state.
    """

    def __init__(
        self, given: Any, again: Callable[[Any], Any] | None = None, ranks: Ranks | None = None
    ) -> None:
        self._again = again
        # None if the rows are those of this process anyway.
        self._ranks, self._share = ranks, Share() if ranks is None else ranks.share
        self._is_read = False
        self._began: dict[str, Any] = {}
        self._take_over(given)

    def _take_over(self, given: Any) -> None:
        self._given, self._position = given, _feed_of(given)
        self._batches = _reader_of(self._position)
        self._round: list[Batch] = []

    def begin(self) -> Mark:
        return Mark(Place(epoch=-1))

    def check(self) -> None:
        """Nothing: a feed looks after what it reads."""

    def open(self, mark: Mark) -> Mark:
        if not self._is_read:
            # Once it is read it says where it stands then.
            self._began = self._position.state_dict()
            if self._again is not None and isinstance(self._given, Coordinator):
                self._given.start()
        self._is_read = True
        reader, place = self._batches, mark.place
        number = reader.next_epoch()
        if place.epoch < 0:
            # Nobody has said an epoch: it is the one where the feed stands.
            mark = mark._replace(place=place._replace(epoch=number or 0))
        while number is not None and number < mark.place.epoch:
            next(reader)
            number = reader.next_epoch()
        return mark

    def reaches(self, epoch: int) -> bool:
        return self._is_read

    def epoch_of_next(self) -> int | None:
        reader, num = self._batches, self._share.num
        if num == 1:
            return reader.next_epoch()
        while not self._round and (epoch := reader.next_epoch()) is not None:
            while len(self._round) < num and reader.next_epoch() == epoch:
                self._round.append(next(reader))
            if self._share.drops and len(self._round) < num:
                self._round = []
        return self._round[0].epoch if self._round else None

    def take(self, mark: Mark) -> tuple[Batch, Mark]:
        batches, self._round = self._round or [next(self._batches)], []
        batch = batches[min(self._share.rank, len(batches) - 1)]
        place = Place(batch.epoch, batches[-1].index + 1, mark.place.step + 1)
        return batch, Mark(place, batches[-1].place)

    def leave_epoch(self, mark: Mark) -> None:
        # A feed that others read, too, leaves nothing out: the rest is taken and dropped.
        while self.epoch_of_next() == mark.place.epoch:
            self.take(mark)

    def next_epoch(self, mark: Mark) -> Mark:
        # The position stays that of the last batch: of a feed no other is known.
        return Mark(mark.place.after_epoch(), mark.at)

    def write(self, mark: Mark) -> dict[str, Any]:
        if mark.at is not None:
            position = {STATE_KEY: mark.at.cut().token()}
        else:
            position = self._began if self._is_read else self._position.state_dict()
        state = {**position, "epoch": mark.place.epoch, "step": mark.place.step}
        return state if self._ranks is None else self._ranks.note(state)

    def read(self, state: Any) -> Mark:
        check_state(state)
        found = unpack_state_dict(state)
        # A feed's own state has no number of batches beside it.
        token = found if isinstance(found, bytes) else found.states[0].token
        position = {STATE_KEY: state[STATE_KEY]}
        if self._ranks is not None:
            self._ranks.check(state)
        if self._is_read and self._again is not None:
            self.close()
            self._take_over(self._again(position))
        else:
            self._position.load_state_dict(position)
        self._is_read, self._round = False, []
        return Mark(Place(state.get("epoch", -1), 0, state.get("step", step_of(token))))

    def length(self) -> int | None:
        return None

    def begin_epoch(self, mark: Mark, epoch: int) -> Mark:
        raise ConfigError(
            f"the trainer begins epoch {epoch}, and the feed stands in epoch {mark.place.epoch}: "
            "load the loader's state, or resume from a checkpoint in the middle of an epoch"
        )

    def left(self, mark: Mark) -> int | None:
        return None

    def numbers(self) -> Numbers:
        raise ConfigError(
            "the loader reads a feed, a consumer, or rows that follow from all rows before them: "
            "ask the feed by the step of its batches, feed.records(batch.step)"
        )

    def stop(self) -> None:
        """Nothing: a loop that is left may be gone on from."""

    def close(self) -> None:
        """End the feed, if it is the loader's own."""
        if self._again is not None:
            (self._given.stop if isinstance(self._given, Coordinator) else self._given.close)()


def read_function(
    fetch: Callable[[Call], Any], batched: Batched, ranks: Ranks, settings: dict[str, Any],
    epochs: int | None,
) -> ReadStream:  # fmt: skip
    """The rows of a pure fetch function, whose columns are known by its first call, in batches of
    which each rank takes its own.

    A source is one, too. It is read in this way if its rows are not one for each record: then only
    a reader of all rows before a batch knows which rows the batch has.
    """
    if ranks.share.num > 1:
        warnings.warn(
            f"each of the {ranks.share.num} ranks makes all batches, and keeps its own: the "
            "rows of a batch follow from all rows before it; to make each batch once, serve "
            "the data (feeder.serve, feeder serve) and use FeedLoader.connect",
            stacklevel=5,
        )
    size = batched.size or 1
    first = fetch(Call(0, 0, 0, size, settings["seed"]))
    if is_table(first):
        first = arrow_chunks().to_chunk(first)
    if not isinstance(first, (Mapping, tuple, list)):
        raise ConfigError(
            f"dataset is a function and gave a {type(first).__name__}, expected a list, tuple "
            "or dict of arrays"
        )
    names = list(first if isinstance(first, Mapping) else map(str, range(len(first))))

    def again(resume: Any) -> Coordinator:
        return init_data_input_workers(
            names, fetch, resume=resume, coordinator=Coordinator(), writable=True,
            input_source_name=NAME, batch_size=size, epochs=epochs,
            last_batch="drop" if batched.drop_last else "keep", **settings,
        )  # fmt: skip

    return ReadStream(again(None), again, ranks)


def has_row_per_record(source: Source) -> bool:
    """Whether a row of a source follows from its number alone."""
    traits = source.traits
    return not (traits.may_skip or traits.filters or traits.is_last or traits.one_per_call)


class Connection(NamedTuple):
    """A served feed, which `FeedLoader.connect` reads."""

    addresses: Any
    options: dict[str, Any]
    """Of `feeder.connect`."""

    def open(self, resume: Any) -> Consumer:
        """A consumer of it, at a position."""
        # Only loaders that connect need the service.
        from feeder.service.client.connect import connect

        options = {"writable": True, **self.options}
        return connect(
            self.addresses, **(options if resume is None else options | {"resume": resume})
        )


FEEDS = (Feed, DeviceFeed, Consumer, Coordinator, Connection)
"""What `read_feed` reads."""


def read_feed(dataset: Any) -> ReadStream:
    """What a loader reads of a feed, of a consumer, or of a server to connect to."""
    if isinstance(dataset, Connection):
        return ReadStream(dataset.open(None), dataset.open)
    return ReadStream(dataset)


def _feed_of(given: Any) -> Any:
    """The feed of a coordinator; anything else as it is."""
    if not isinstance(given, Coordinator):
        return given
    if len(given) != 1:
        raise ConfigError(f"dataset is {given!r}, expected one of its feeds")
    (name,) = given
    return given[name]


def _reader_of(given: Any) -> EpochReader:
    """What gives the batches of a feed or of a consumer."""
    if not isinstance(given, Feed):
        reader: EpochReader = given
        return reader
    if len(given.devices) != 1:
        raise ConfigError(f"feed {given.name!r} has devices {given.devices!r}: give one queue of "
                          "it, served and connected to by each rank")  # fmt: skip
    return given.on(0)


def check_state(state: Any) -> None:
    """Raise `ResumeError` if a state is another loader's."""
    if isinstance(state, dict) and STATE_KEY not in state:
        theirs = {"_snapshot", "_sampler_iter_state", "_num_yielded", "_iterator_finished"}
        if theirs & state.keys():
            raise ResumeError(
                "the state is one of torchdata's StatefulDataLoader, whose order is another: begin "
                "an epoch anew, without a state"
            )
        if "is_begun" in state:
            raise ResumeError(
                "the state is one of DataLoader, whose place is one in an order of PyTorch's: load "
                "it into a DataLoader, or begin an epoch anew, without a state"
            )
