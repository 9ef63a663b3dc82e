"""A feed: a named stream of batches, or of streams, one for each device.

Caffe2 feeds several devices by one call for each, so a name may stand for several streams. All that
concerns one of them is in `Stream`; here is what only all of them together can say: which device is
whose, one position, figures as sums.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from feeder.config import make_config
from feeder.errors import ConfigError, ResumeError
from feeder.feeds.device_feed import DeviceFeed
from feeder.feeds.epochs import Epoch
from feeder.feeds.reading import read_records
from feeder.feeds.records import Asked, Rows, ranges_in, records_of, when
from feeder.feeds.running import Running
from feeder.feeds.stream import Stream
from feeder.observe.figures import AS_GREATEST, FeedFigures
from feeder.settings import PositiveInt, check
from feeder.state.snapshot import HISTORY, Snapshot
from feeder.state.state_dict import STATE_KEY, unpack_state_dict
from feeder.state.token import name_of
from feeder.workers.fetch.threads import under_lock
from feeder.workers.public import public
from feeder.workers.stream.batch import Batch

if TYPE_CHECKING:
    from feeder.workers.sources.stores.reading import Seen

logger = logging.getLogger("feeder")


@public("feeder")
class Feed:
    """All streams of one input source name: one, or one per device where
    `init_data_input_workers` was called once per device.

    With one device the feed is itself the iterator over its batches; with several, `on` gives
    each device's. The coordinator's thread adds streams before the start; any thread reads.
    """

    def __init__(self, name: str, running: Running) -> None:
        self.name = name
        self._running = running
        self._streams: list[Stream] = []
        # In place of those of a feed of this name that was stopped.
        running.streams[name] = self._streams
        self._devices: dict[str, DeviceFeed] = {}
        # One edit is made at a time.
        self._lock = threading.RLock()

    def add(self, stream: Stream) -> None:
        """Add the stream of one more call."""
        for i, device in enumerate(stream.config.devices):
            self._devices[device] = DeviceFeed(stream, i, self._running)
        self._streams.append(stream)

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the feed's devices."""
        return tuple(self._devices)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams, in the order in which they were made."""
        return tuple(self._streams)

    @property
    def is_over(self) -> bool:
        """Whether it will give no more batches: all of them have been handed out, or it has
        failed."""
        return all(stream.condition() in ("ended", "failed") for stream in self._streams)

    @property
    def life(self) -> str:
        """What it does, for messages."""
        return "runs" if any(stream.started for stream in self._streams) else "is not started"

    def on(self, device: str | int, *, stream: Any = None) -> DeviceFeed:
        """The batches of one device, by its name or its number among the feed's devices.

        On a GPU the work on them goes to `stream`: one of CuPy or PyTorch, or any object with
        `__cuda_stream__`; without it to the current stream of CuPy, or of PyTorch for
        its tensors, at each batch.
        """
        if isinstance(device, int) and 0 <= device < len(self._devices):
            found = list(self._devices.values())[device]
        elif isinstance(device, str) and device in self._devices:
            found = self._devices[device]
        else:
            raise ConfigError(
                f"feed {self.name!r} has no device {device!r}, expected one of {self.devices!r} or "
                "its number"
            )
        if stream is not None:
            found.work_on(stream)
        return found

    def __iter__(self) -> DeviceFeed:
        return iter(self._only())

    def __next__(self) -> Batch:
        return next(self._only())

    def epochs(self) -> Iterator[Epoch]:
        """The epochs that are left, of a feed with one device; else as of `DeviceFeed`."""
        return self._only().epochs()

    def __len__(self) -> int:
        """Batches of the whole stream, of a feed with one device; else as of `DeviceFeed`."""
        return len(self._only())

    def __bool__(self) -> bool:
        return True  # Else `if feed` would ask for its length, which may not be known.

    def _only(self) -> DeviceFeed:
        if len(self._devices) != 1:
            raise ConfigError(
                f"feed {self.name!r} has {len(self._devices)} devices: take the batches of each "
                f"from feed.on(device), one of {self.devices!r}"
            )
        return next(iter(self._devices.values()))

    # ---- position

    def snapshot(self) -> Snapshot:
        """Where the feed stands: after the last batch handed out, or with several devices after
        the newest round handed out on all. Any thread may call it at any time; feeding goes on."""
        return Snapshot(tuple(stream.state(with_rows=True) for stream in self._streams))

    def state_dict(self) -> dict[str, bytes]:
        """The position for a trainer's checkpoint: one key, a few hundred bytes. The leftover
        rows are not in it (their chunk is fetched again) unless `repeatable=False`."""
        return {STATE_KEY: pack_states(self._streams)}

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        """Go on from a state dict; before the start alone. Raises `ResumeError`."""
        resume_streams(self._streams, unpack_state_dict(state_dict))

    def edit(
        self,
        fetch_fun: Callable[..., Any] | str | None = None,
        *,
        why: Annotated[str, Meta(min_length=1, description="a text")],
        batch_size: PositiveInt | None = None,
        global_batch_size: PositiveInt | None = None,
        seed: Annotated[int, Meta(ge=0, le=2**64 - 1)] | None = None,
    ) -> int:
        """Go on with other data while the feed runs: from the first round on of which no device
        has had a batch, exactly as if the run had been saved there and resumed with ``edit=why``.
        What was read ahead is made anew, and each position from there on holds the edit. See
        docs/editing.md.

        Any thread may call it. Devices that have come to that round wait until it has been made;
        others are first handed what is left of the rounds before, and meanwhile the position is
        that of the run without the edit.

        Args:
            fetch_fun: What the run reads from now on; left out, it reads what it did.
            why: Why, in words; `feeder log` shows them.
            batch_size: Rows of each batch from now on.
            global_batch_size: Rows of all devices together.
            seed: Seed of each source's next pass, and of those after it.

        Returns:
            The `step` of the first batch that the edit is for.

        Raises:
            ConfigError: A setting is wrong, or no run of such a feed can be edited.
            ResumeError: The run cannot be edited so, or has ended. Nothing has changed then.
        """
        given = check(Feed.edit, locals())
        del given["self"]
        given["edit"] = given.pop("why")
        return self._edit({k: v for k, v in given.items() if v is not None})

    @under_lock
    def _edit(self, changes: dict[str, Any]) -> int:
        if len(self._streams) != 1:
            raise ConfigError(
                f"feed {self.name!r} has {len(self._streams)} streams, one for each call of "
                "init_data_input_workers: a feed of one call, with devices=N, can be edited"
            )
        (old,) = self._streams
        if not (old.started or old.forked):
            raise ConfigError(
                f"feed {self.name!r} is not started in this process: change the feed call itself, "
                "with resume= and edit= if it goes on from a position, as for a server that is "
                "started again; one that runs is edited by feeder edit --address"
            )
        settings = {**old.settings, **changes}
        config = make_config(settings, old.config.stream.first_worker_id)
        new = old.edit(config, settings, self._streams)
        step: int = new.positions.fingerprint[HISTORY][2][-1][3]
        return step

    def records(self, step: int, *, read: bool = False) -> Rows:
        """The records that each row of a batch was made of, or will be, by the batch's `step`: for
        each row a tuple of `sources.Record`, of which `zip` has several. Nothing is read, and any
        step takes as long as any other. Any thread may call it at any time.

        Behind a filter, `on_error="skip"` and `pack` the rows depend on the data. With `read` these
        are read from the nearest place that the feed knows: where it began, or stands. A log line
        says first how much that is. A packed row has a `sources.Piece` for each document.

        Raises `ConfigError` if rows do not follow from numbers, as of a fetch function, and without
        `read` behind a filter and in packed rows; and if the feed ends before that step.
        """
        if read:
            return read_records(self._asked(), step, self._streams[0].places())
        return records_of(self._asked(), step)

    def records_in(self, steps: Iterable[int]) -> dict[str, list[range]]:
        """The numbers of the records that some batches were made of, or will be, by the name of
        their source, which is "" if there is one alone: what `exclude` of each source is given
        where the steps of a loss spike are not to come again. Raises as `records` does."""
        return ranges_in(self._asked(), steps)

    def when(self, source: str, record: int) -> Iterator[Seen]:
        """Where a record comes, in the order of steps: an iterator over `sources.Seen`, which has
        no end if the feed has none. The source is named as `records` names it, "" if there is only
        one; the record by its number. Nothing is read, and each answer takes as long as any other,
        but for DALI's shuffles, of which all records of an epoch are looked at. Any thread may call
        it at any time.

        Raises `ConfigError` as `records` does, for a source or record that there is none of, and
        for a record that never comes, as one that is excluded.
        """
        return when(self._asked(), source, record)

    def _asked(self) -> Asked:
        if len(self._streams) != 1:
            raise ConfigError(f"feed {self.name!r} has {len(self._streams)} streams, expected one")
        return self._streams[0].asked()

    def stats(self) -> dict[str, Any]:
        """Plain numbers of what the feed has done, in a flat dictionary that any logger takes:
        rows, batches and bytes at each hand-over, seconds waited on both of its sides, and the
        same for each worker and each queue. Summed over the feed's streams. Seconds include a
        wait under way. Any thread may call it at any time."""
        total: dict[str, Any] = {}
        for stream, first in zip(self._streams, self._first_queues(), strict=True):
            for key, value in stream.stats(first).items():
                old = total.get(key, 0)
                total[key] = max(old, value) if key in AS_GREATEST else old + value
        return total

    def figures(self, now: float) -> list[FeedFigures]:
        """The figures of each of its streams; `now` is on the monotonic clock."""
        return [
            stream.figures(now, first)
            for stream, first in zip(self._streams, self._first_queues(), strict=True)
        ]

    def _first_queues(self) -> list[int]:
        """The number of each stream's first queue among those of the feed."""
        counts = [len(stream.queues) for stream in self._streams]
        return [sum(counts[:i]) for i in range(len(counts))]

    # ---- life, for the coordinator

    def close(self) -> None:
        """Wake everything that waits, so that it ends."""
        for stream in self._streams:
            stream.close()
        self.drop()

    def drop(self) -> None:
        """Let go of batches that wait for their users: the feed is stopped."""
        for device in self._devices.values():
            device.drop()

    def __repr__(self) -> str:
        return f"<Feed {self.name!r} on {', '.join(self.devices)}>"


def pack_states(streams: list[Stream]) -> bytes:
    """The positions of streams, without their leftover rows where these can be fetched again."""
    return bytes(Snapshot(tuple(stream.state(with_rows=False) for stream in streams)))


def resume_streams(streams: Sequence[Stream], position: Snapshot | bytes) -> None:
    """Bring streams that are not started to a position, of a snapshot or of a token: all of them,
    or none where one does not fit."""
    # First all are looked up, then all are moved: one that does not fit moves none.
    if isinstance(position, Snapshot):
        found = [(stream, stream.find_resume(position)) for stream in streams]
        here = {(stream.config.name, stream.number) for stream in streams}
        for state in position.states:
            if (state.name, state.number) not in here and len(streams) > 1:
                logger.warning("the position of feed %r is not used: no such feed", state.name)
    else:
        # A token is of one stream. Where there is only one here, the stream itself checks the name,
        # and its error says more.
        whose = name_of(position)
        meant = [s for s in streams if len(streams) == 1 or (s.config.name, s.number) == whose]
        if not meant:
            raise ResumeError(f"the token is of feed {whose[0]!r}, stream {whose[1]}, not here")
        found = [(stream, stream.find_resume(position)) for stream in meant]
    for stream, resume in found:
        stream.resume(resume)
