"""What all adapters share: one epoch per loop, and the position of the last batch that was used.

A trainer may take batches ahead of what it has used. So the places of the last batches are kept,
and a state may be that of any of them.
"""

from __future__ import annotations

import weakref
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from feeder.adapters.asking import records_at, when_comes
from feeder.adapters.streams import MadeStream, Mark, ReadStream
from feeder.errors import ConfigError, FeedError, ResumeError, looped_again
from feeder.workers.stream.batch import Batch

if TYPE_CHECKING:
    from feeder.feeds.records import Rows
    from feeder.workers.sources.stores.reading import Seen

RING = 256
"""How many of the last batches a state may be asked for: far more than anything takes ahead."""


Stream = MadeStream | ReadStream
"""What a loader reads: a feed that it makes of a data set, or one that somebody else has made."""


class EpochLoop:
    """A loop over one epoch, as `iter` gives it. Nothing happens before its first `next`. Owned by
    the loader's thread."""

    def __init__(self, loader: EpochLoader) -> None:
        self._loader = loader
        self.state: Literal["fresh", "running", "over", "left"] = "fresh"
        """"over" once its epoch has been given, "left" if the loader went on without it."""

    def __iter__(self) -> EpochLoop:
        return self

    def __next__(self) -> Any:
        return self._loader._next(self)


class EpochLoader:
    """Gives one epoch per loop, and its position at any time.

    One thread iterates and owns all fields; any thread may ask for states.
    """

    counts_batches = False
    """Whether its user counts the batches of an epoch by `len`, and so never asks for one after the
    last: its state is then one of the next epoch. A loop of `for` asks."""

    def __init__(self, stream: Stream, epochs: int | None) -> None:
        self._stream = stream
        self._epochs = epochs
        self._loop: EpochLoop | None = None
        self._is_begun = False
        self._is_exhausted = False
        self._kept: deque[tuple[Batch, Mark]] | None = None
        self._mark = stream.begin()
        self._again: deque[tuple[Batch, Mark]] = deque()
        """What was taken of the stream, and is given by the next loops."""
        self._ring: deque[Mark] = deque([self._mark], RING)
        # The places from which on steps are counted through whole epochs.
        self._known = [self._mark.place]
        weakref.finalize(self, stream.stop)

    # ---- batches

    def __iter__(self) -> Iterator[Any]:
        return EpochLoop(self)

    def __len__(self) -> int:
        length = self._stream.length()
        if length is None:
            raise TypeError("the length of this loader is not known")
        return length

    def __bool__(self) -> bool:
        return True  # Otherwise `if loader` would ask for its length.

    @property
    def epoch(self) -> int:
        """The epoch that is being looped over, or that the next loop gives; from 0."""
        return self._mark.place.epoch

    @property
    def step(self) -> int:
        """The batches that this rank has been given since the start, before a resume too."""
        return self._mark.place.step

    @property
    def left(self) -> int:
        """The batches that are left of that epoch, for this rank."""
        left = self._stream.left(self._mark)
        if left is None:
            raise TypeError("the length of this loader is not known")
        return left

    @property
    def is_over(self) -> bool:
        """Whether no epoch is left: a further loop would raise, or give nothing. A loader that
        reads a feed knows it after its last loop."""
        next_epoch = self.epoch + self._is_begun
        return self._is_exhausted or (self._epochs is not None and next_epoch >= self._epochs)

    @property
    def _must_reopen(self) -> bool:
        """Whether the next loop opens a run of its own: nobody has looked for its batches yet."""
        return not self._stream.reaches(self.epoch)

    def _convert(self, batch: Batch) -> Any:
        """A batch as the framework has it."""
        raise NotImplementedError

    def _next(self, loop: EpochLoop) -> Any:
        if loop is not self._loop:
            self._begin(loop)
        stream, mark = self._stream, self._mark
        number = self._next_epoch()
        if number != mark.place.epoch:
            self._is_exhausted = number is None and stream.reaches(mark.place.epoch + 1)
            self._end()
            raise StopIteration
        found = batch, after = self._again.popleft() if self._again else stream.take(mark)
        converted = self._convert(batch)
        if self._kept is not None:
            self._kept.append(found)
        self._mark = after
        self._ring.append(after)
        if self.counts_batches and self._left_for_sure(after) == 0:
            self._end()
        return converted

    def _next_epoch(self) -> int | None:
        """The epoch of the next batch, which is waited for; None after the last."""
        return self._again[0][1].place.epoch if self._again else self._stream.epoch_of_next()

    def _begin(self, loop: EpochLoop) -> None:
        if loop.state == "over":
            raise StopIteration
        if loop.state == "left":
            raise FeedError(
                "this loop over the loader has ended: another one has begun, or the loader was "
                "closed, was told an epoch or has loaded a state; a loader gives one epoch at a "
                "time: make a second one to read the data twice at once"
            )
        mark = self._mark
        if self._is_begun:
            # The loop before was left: this one has the next epoch.
            self._leave()
            while self._again and self._next_epoch() == mark.place.epoch:
                self._again.popleft()
            if self._stream.reaches(mark.place.epoch) and self._next_epoch() == mark.place.epoch:
                self._stream.leave_epoch(mark)
            mark = self._stream.next_epoch(mark)
            self._known.append(mark.place)
        self._open_at(mark)
        self._loop, self._is_begun = loop, True
        loop.state = "running"

    def _open_at(self, mark: Mark) -> None:
        if self._epochs is not None and mark.place.epoch >= self._epochs:
            raise looped_again(self._epochs)
        self._stream.check()
        if not self._stream.reaches(mark.place.epoch):
            # What was taken comes again from there.
            self._again.clear()
            before, mark = mark, self._stream.open(mark)
            if self._ring[-1] is before:
                self._ring[-1] = mark
        self._mark = mark

    def peek(self) -> Any:
        """The first batch of the next loop, which that loop still gives; of a data set that is over
        that of its first epoch. Between loops only; raises `FeedError` if there is none."""
        if self._is_begun:
            raise FeedError("a loop over the loader has begun: look at its first batch before it")
        if self._epochs is not None and self.epoch >= self._epochs:
            mark = self._stream.open(self._stream.begin())
            try:
                return self._convert(self._stream.take(mark)[0])
            finally:
                self._stream.stop()
        if not self._again:
            self._open_at(self._mark)
            if self._stream.epoch_of_next() != self._mark.place.epoch:
                raise FeedError(f"epoch {self.epoch} of the loader has no batch to look at")
            self._again.append(self._stream.take(self._mark))
        return self._convert(self._again[0][0])

    def _end(self) -> None:
        """The loop has had its epoch, and its user is told."""
        assert self._loop is not None
        self._loop.state = "over"
        self._mark = self._stream.next_epoch(self._mark)
        self._ring.append(self._mark)
        self._loop, self._is_begun = None, False

    # ---- position

    def state_dict(self, used: int | None = None) -> dict[str, Any]:
        """The position after the last batch that was given, for a trainer's checkpoint.

        The same for all ranks, and valid for each. `used` is how many batches this rank has used
        since the start, as `step` counts them, if the trainer takes batches ahead.
        """
        return self.state_at(self._mark if used is None else self._find(used))

    @property
    def mark(self) -> Mark:
        """Where it stands: what takes batches ahead keeps it beside each."""
        return self._mark

    def state_at(self, mark: Mark) -> dict[str, Any]:
        """The position at a mark that it had, as `state_dict` gives it."""
        return self._stream.write(mark)

    def _find(self, used: int) -> Mark:
        marks = list(self._ring)
        for mark in marks:
            # The first: an epoch's last batch has the number of the next epoch's start.
            if mark.place.step == used:
                return self._told(mark)
        first, last = marks[0].place.step, marks[-1].place.step
        raise ConfigError(
            f"used is {used!r}, expected a number from {first} to {last}: the batches that this "
            f"rank has used since the start (loader.step), at most {RING} ago"
        )

    def _told(self, mark: Mark) -> Mark:
        """A mark as a state says it."""
        is_over = self.counts_batches and self._ends_epoch(mark)
        return self._stream.next_epoch(mark) if is_over else mark

    def _left_for_sure(self, mark: Mark) -> int | None:
        """Batches that an epoch has after a mark, if its length is to be relied on."""
        return self._stream.left(mark)

    def _ends_epoch(self, mark: Mark) -> bool:
        """Whether a state of this mark is one of the next epoch."""
        return self._left_for_sure(mark) == 0

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state: the next loop gives the rest of its epoch. Raises `ResumeError`."""
        self._go_to(self._stream.read(state_dict))

    def begin_epoch(self, epoch: int) -> None:
        """Have the next loop give this epoch, all of it, unless it is its turn anyway. For trainers
        that count epochs themselves."""
        if epoch == self._mark.place.epoch:
            return
        self._go_to(self._stream.begin_epoch(self._mark, epoch))

    def keep(self) -> None:
        """Keep batches from now on, the last `RING` of them, until `forget`: what `rewind` gives
        again then need not be read again, and a feed that cannot go back can be rewound."""
        if self._kept is None:
            self._kept = deque(maxlen=RING)

    def forget(self, used: int) -> None:
        """Keep no batch up to this step."""
        while self._kept and self._kept[0][1].place.step <= used:
            self._kept.popleft()

    def rewind(self, used: int) -> None:
        """Have the next loop begin after the batch of this step: what was given since comes again.
        Raises `ResumeError` if it is not kept, and cannot be read again."""
        mark, given = self._find(used), self.step - used
        again = [kept for kept in self._kept or () if kept[1].place.step > used]
        if len(again) < given:
            self._go_to(self._stream.read(self._stream.write(mark)))
            return
        self._leave()
        self._again.extendleft(reversed(again))
        if self._kept is not None:
            self._kept.clear()
        self._mark, self._is_begun, self._is_exhausted = mark, False, False
        self._ring = deque([mark], RING)
        self._known = [place for place in self._known if place <= mark.place] or [mark.place]

    def _go_to(self, mark: Mark) -> None:
        """Have the next loop begin there."""
        self._leave()
        self._close()
        self._mark, self._is_begun, self._is_exhausted = mark, False, False
        self._ring = deque([mark], RING)
        self._known = [mark.place]

    # ---- what the batches are made of

    def records(self, step: int) -> Rows:
        """The records that the rows of a batch of this rank were made of, or will be, by its step:
        0 is the first batch since the start, and `step` the next one. Of a data set a record is a
        sample. Nothing is read. Epochs to come count as given whole.

        Raises `ConfigError` if rows do not follow from numbers, as those of a sampler, an iterable
        or a fetch function, of packed or filtered rows, and of what may be left out; for a feed or
        a consumer, which is asked itself; and for steps before those that the loader knows, from
        its start or the state that it has gone on from.
        """
        return records_at(self._stream.numbers(), self._known, step)

    def when(self, record: int, source: str = "") -> Iterator[Seen]:
        """Where a record comes, in the order of steps: an iterator over `sources.Seen`, whose
        `queue` is the rank. It has no end if the loader has none. Raises as `records` does, and for
        a record that there is none of, or that never comes."""
        return when_comes(self._stream.numbers(), tuple(self._known), source, record)

    # ---- life

    def close(self) -> None:
        """End its threads; the next loop starts them again."""
        self._leave()
        self._close()
        self._stream.close()

    def _leave(self) -> None:
        """The loop at hand gets no more batches."""
        if self._loop is not None:
            self._loop.state = "left"
        self._loop = None

    def _close(self) -> None:
        self._again.clear()
        self._stream.stop()

    def __enter__(self) -> EpochLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class EveryEpoch:
    """The batches of one epoch after another, as `every_epoch` gives them. An error leaves it where
    it is: no generator, which an error would end. Owned by the loader's thread."""

    def __init__(self, loader: EpochLoader) -> None:
        self._loader = loader
        self._loop: Iterator[Any] | None = None
        self._num_empty = 0

    def __iter__(self) -> EveryEpoch:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        while True:
            if self._loop is None:
                # Its end is known: to ask for one more is an error.
                if loader.is_over:
                    raise StopIteration
                self._loop = iter(loader)
            try:
                batch = next(self._loop)
            except StopIteration:
                self._loop = None
                self._num_empty += 1
                # The first may be the rest of an epoch that had none left.
                if self._num_empty > 2 and loader._must_reopen:
                    raise FeedError(f"epoch {loader.epoch - 1} of the loader has no batch, and the "
                                    "epoch before had none") from None  # fmt: skip
            else:
                self._num_empty = 0
                return batch


def every_epoch(loader: EpochLoader) -> EveryEpoch:
    """The batches of one epoch after another, for trainers that do not know of epochs."""
    return EveryEpoch(loader)


def to_plain(state: dict[str, Any]) -> dict[str, Any]:
    """A state of numbers and texts, for checkpoints that hold no bytes."""
    return {n: b64encode(v).decode() if isinstance(v, bytes) else v for n, v in state.items()}


def from_plain(state: Any) -> dict[str, Any]:
    """The reverse; raises `ResumeError` for what it never gave."""
    try:
        return {
            n: b64decode(v, validate=True) if isinstance(v, str) else v for n, v in state.items()
        }
    except (AttributeError, ValueError) as error:
        raise ResumeError(
            f"the state is {type(state).__name__}, and not what get_state() gives: {error}"
        ) from error
