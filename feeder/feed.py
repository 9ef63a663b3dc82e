"""A feed: a named stream of batches, and what each of its devices sees of it."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

from feeder.devices.cuda.queue import CudaQueue
from feeder.errors import ClosedError, ConfigError, ResumeError
from feeder.length import num_batches
from feeder.metrics.figures import AS_GREATEST, FeedFigures
from feeder.snapshot import Snapshot
from feeder.statedict import STATE_KEY, unpack_state_dict
from feeder.stream import Stream
from feeder.token import name_of
from workers.batch import Batch
from workers.ledger import Held
from workers.position import Place

logger = logging.getLogger("feeder")


class DeviceFeed:
    """The batches of one device, in order: an iterator, used by one thread at a time."""

    def __init__(self, stream: Stream, device: int) -> None:
        self._stream = stream
        self._device = device
        self._queue = queue = stream.queues[device]
        # What a GPU's queue still has to do for a batch when it is handed out.
        self._receive = queue.receive if isinstance(queue, CudaQueue) else None
        self._progress = stream.progress
        self._alone = len(stream.queues) == 1
        self._ready: deque[Batch] = deque()
        self._handed = stream.counted.handed[device]
        self._held = Held(0, 0, 0, 0)
        self._num_handed = 0  # counted where there are several devices
        # Where something is to be done at a batch: those after it, and where its round ends.
        self._later: deque[Batch] = deque()
        self._mark = 0

    @property
    def device(self) -> str:
        """The name of the device."""
        return self._stream.config.devices[self._device]

    def __iter__(self) -> DeviceFeed:
        return self

    def __next__(self) -> Batch:
        while not (ready := self._ready):
            self._refill()
        if self._receive is None:
            batch, is_last = ready[0], len(ready) == 1
        else:
            batch, is_last = self._receive(ready.popleft()), not ready
        if is_last:
            self._stream.pipeline.channel.hand_out(self._device, self._held)
        # What an interrupt takes from the user does not count as handed out, and comes next: one
        # that comes later than this finds the user's own code.
        if self._alone:
            self._progress.place = batch.place
        else:
            self._progress.note(self._device, self._num_handed + 1, batch.place)
            self._num_handed += 1
        if self._receive is None:
            del ready[0]
        if is_last and self._mark:
            self._reach_mark()
        return batch

    def __len__(self) -> int:
        """Batches of the whole stream on this device, also after a resume, as if no record were
        left out; `TypeError` where that is not known: it is for sources and a number of epochs."""
        length = num_batches(self._stream.config, self._device)
        if length is None:
            raise TypeError("the length of this feed is not known")
        return length

    def __bool__(self) -> bool:
        return True  # Else `if feed` would ask for its length.

    def work_on(self, stream: Any) -> None:
        """Say which stream of the GPU the work on its batches goes to. Raises `ConfigError`."""
        if not isinstance(self._queue, CudaQueue):
            raise ConfigError(f"stream is {stream!r}, but {self.device!r} is no GPU; leave it out")
        self._queue.work_on(stream)

    def _refill(self) -> None:
        """Wait for batches; raises what has taken the place of the next."""
        stream = self._stream
        stream.check_usable()
        got, later, mark = self._later or self._queue.get(), deque[Batch](), 0
        if isinstance(got, Place):
            self._end(got)
            raise StopIteration
        if stream.marks is not None:
            num, mark = stream.marks.first(got)
            if num:
                got, later = deque(islice(got, num)), deque(islice(got, num, None))
        rows = sum([batch.rows for batch in got])
        num_bytes = sum([batch.held_bytes for batch in got])
        kept_rows = sum([batch.kept_rows for batch in got])
        held = Held(len(got), rows, num_bytes, kept_rows)
        # No call in between: an interrupt finds all of it or nothing.
        self._held, self._later, self._mark = held, later, mark
        self._ready = self._handed.left = got
        self._queue.given = None
        if stream.stopped:
            # In the meantime, from another thread, which may have missed these batches.
            self.drop()
            raise ClosedError(f"feed {stream.config.name!r} is stopped")
        self._handed.take(len(got), rows, num_bytes)

    def _end(self, place: Place) -> None:
        """There are no more batches: the stream has ended at `place`."""
        stream, progress = self._stream, self._progress
        # A stream that had ended before it began stays where it was, leftover and all.
        if stream.pipeline.start_cut.finished or progress.place is place:
            return
        progress.end(self._device, place)
        if stream.marks is not None and progress.place is place:
            stream.marks.reached()

    def _reach_mark(self) -> None:
        """With several devices the last that comes to the end of the round does what is to be."""
        marks, place, mark = self._stream.marks, self._progress.place, self._mark
        self._mark = 0
        if marks is not None and place is not None and place.step == mark:
            marks.reached()

    def drop(self) -> None:
        """Forget the batches at hand: the stream has been stopped, or this is a forked child."""
        self._handed.drop()
        # Not cleared: the user's thread may be about to hand one out.
        self._ready, self._later = deque(), deque()

    def __repr__(self) -> str:
        return f"<DeviceFeed {self._stream.config.name!r} on {self.device!r}>"


class Feed:
    """All streams of one input source name: one, or one per device where
    `init_data_input_workers` was called once per device.

    With one device the feed is itself the iterator over its batches; with several, `on` gives
    each device's.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._streams: list[Stream] = []
        self._devices: dict[str, DeviceFeed] = {}

    def add(self, stream: Stream) -> None:
        """Add the stream of one more call."""
        for i, device in enumerate(stream.config.devices):
            self._devices[device] = DeviceFeed(stream, i)
        self._streams.append(stream)

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the feed's devices."""
        return tuple(self._devices)

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The streams, in the order in which they were made."""
        return tuple(self._streams)

    def on(self, device: str | int, *, stream: Any = None) -> DeviceFeed:
        """The batches of one device, by its name or its number among the feed's devices.

        On a GPU the work on them goes to `stream`: one of CuPy or PyTorch, or any object with
        `__cuda_stream__`; without it to CuPy's current stream at each batch.
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
        return self._only()

    def __next__(self) -> Batch:
        return next(self._only())

    def __len__(self) -> int:
        """Batches of the whole stream, of a feed with one device; else as of `DeviceFeed`."""
        return len(self._only())

    def __bool__(self) -> bool:
        return True

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
        """What each of its streams has done; `now` on the monotonic clock."""
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
        self._drop()

    def fork(self) -> None:
        """This is a forked child."""
        for stream in self._streams:
            stream.fork()
        self._drop()

    def _drop(self) -> None:
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
    if isinstance(position, Snapshot):
        found = [(stream, stream.find_resume(position)) for stream in streams]
        here = {(stream.config.name, stream.number) for stream in streams}
        for state in position.states:
            if (state.name, state.number) not in here and len(streams) > 1:
                logger.warning("the position of feed %r is not used: no such feed", state.name)
    else:
        whose = name_of(position)
        meant = [s for s in streams if len(streams) == 1 or (s.config.name, s.number) == whose]
        if not meant:
            raise ResumeError(f"the token is of feed {whose[0]!r}, stream {whose[1]}, not here")
        found = [(stream, stream.find_resume(position)) for stream in meant]
    for stream, resume in found:
        stream.resume(resume)
