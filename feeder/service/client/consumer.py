"""The consumer: an iterable of the batches of one queue of a served feed, for a trainer."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

from feeder.checkpoint.transcribing import Start, Transcript
from feeder.closing import Closing
from feeder.devices.ondevice import OnDevice
from feeder.errors import (
    ClosedError,
    ConfigError,
    FeedError,
    ForkedError,
    RemoteError,
    ResumeError,
    SnapshotFormatError,
    read_again,
)
from feeder.feeds.epochs import EpochReader
from feeder.feeds.records import Rows, asked_of, records_of
from feeder.service.client.inbox import Loading
from feeder.service.client.io_loop import ClientLoop
from feeder.service.client.lease import ClientLease
from feeder.service.client.remote import Identity
from feeder.service.faults import point
from feeder.service.protocol.seats import seat_name, seat_of
from feeder.state.history import digests_before
from feeder.state.snapshot import Snapshot
from feeder.state.state_dict import STATE_KEY, unpack_state_dict
from feeder.state.token import is_token, start_of
from feeder.workers import forks
from feeder.workers.fetch.threads import ThreadGroup
from feeder.workers.public import public
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.position import first_step

logger = logging.getLogger("feeder")

_STOP_S = 30.0
"""How long `close` waits for the I/O thread, which may look a second for a server, and waits a
second for its goodbye. It runs no function of the user's; but if 300 consumers of one process close
at once, each of its calls waits a second or more for the interpreter's lock."""
_ANSWER_S = 10.0
"""How long a server may take to answer a request for a snapshot, whose rows may be 256 MiB."""


@public("feeder")
class Consumer(EpochReader, Closing):
    """The batches of one queue of a served feed, in order, once: iterable and iterator.

    Made by `feeder.connect`. It is read by one thread at a time: `next` raises `FeedError` while
    another thread is in it. Positions may be asked for by any thread. When its server goes away it
    looks for one again, at each of its addresses, and goes on where it was. Arrays may be kept for
    as long as they are wanted: a consumer that keeps more batches than there are slots for is given
    private copies. `iter` raises `ConfigError` if all batches have been handed out already.

    The thread that reads owns the batches at hand and the position. It shares the inbox with the
    I/O thread, which owns the rest. An interrupt (Ctrl-C) in any method loses no batch.
    """

    def __init__(
        self,
        loop: ClientLoop,
        given: bytes | None = None,
        transcript: str | None = None,
        on_device: OnDevice | None = None,
    ) -> None:
        """`given` is the position to go on from, and `transcript` the folder of one, if any.
        `on_device` makes of each batch what is handed out on the host."""
        super().__init__("the consumer")
        self._loop = loop
        self._given, self._folder, self._on_device = given, transcript, on_device
        self._transcript: Transcript | None = None
        self._inbox = loop.inbox
        # How many batches the user may keep, beside the one that is being handed out.
        self._most_held = loop.options.hold
        # In `_ready` a `Loading` stands in the place of batches while a state dict is being loaded.
        self._position: Any = None
        # The batch that a function made the last one of, until the next is asked for: its position
        # says what its last call gave.
        self._fed: Batch | None = None
        # Rows and bytes that were handed out.
        self._counts = (0, 0)
        self._told_at = 0
        # After how many batches the I/O thread is woken to report them. Batches that are dropped
        # report themselves through their slots, so this is for users who keep theirs.
        self._tell_every = 1
        self._unusable: FeedError | None = None
        self._copies = False
        self._loaded: bytes | None = None
        self._num_loads = 0
        self._thread_group = ThreadGroup()
        self._thread_group.start("feeder consumer", loop.run)
        forks.call_in_child(self.abandon_in_child)
        # A consumer that is dropped without `close` must not hold its queue for ever. There is no
        # need for it at the interpreter's exit: the server sees that the process ends.
        self._forgotten = weakref.finalize(self, loop.call_soon, loop.stop)
        self._forgotten.atexit = False
        if self._inbox.landing is not None:
            weakref.finalize(self, self._inbox.landing.end_thread).atexit = False
        try:
            self._inbox.wait_for_opened(0)
        except BaseException:
            self.close()
            raise

    # ---- batches

    def __iter__(self) -> Iterator[Batch]:
        if self._end_is_told and self._unusable is None:
            opened = self._lease.opened
            raise read_again(f"feed {opened.name!r}", opened.epochs)
        return self

    def __next__(self) -> Batch:
        if self._is_read:
            self._refuse_second()
        try:
            self._is_read = True
            # Before the wait: its slot may be that of the next one.
            self._fed = None
            if (ready := self._wait_for_some()) is None:
                self._end_is_told = True
                raise StopIteration
            inbox: Any = self._inbox
            lease = inbox.lease
            handed, (rows, num_bytes) = inbox.handed + 1, self._counts
            on_host = inbox.landing is None
            # A GPU's batch is ordered behind its copy on the user's stream.
            batch = ready[0] if on_host else inbox.batches.receive(ready.popleft())
            point("consumer.handed")
            # What the user still looks at, in slots: above `hold` the server would run out of them,
            # so the batch is copied and its slot goes back.
            kept = handed - lease.base - lease.num_released if lease.lends else 0
            if kept > self._most_held:
                batch = self._copy(batch)
            if handed - self._told_at > self._tell_every:
                # Only batches before this one are reported: an interrupt from here on makes this
                # one come again, and what the server was told cannot be taken back.
                self._loop.waker.wake()
                self._told_at = handed - 1
            fed = batch
            if self._on_device is not None:
                batch = self._on_device(fed)
            if self._folder is not None:
                self._note(fed)
            epoch = self._enter(batch.epoch)
            epoch.newest = batch.index
            batch.of = epoch
            counts = rows + batch.rows, num_bytes + batch.held_bytes
            # No call stands between these assignments and the `return`, and Python raises
            # interrupts at calls: a batch that the user never saw does not count, and comes next.
            self._position, inbox.handed, self._counts = batch.place, handed, counts
            if on_host:
                del ready[0]
                self._fed = fed if self._on_device is not None else None
            return batch
        finally:
            self._is_read = False

    def _end(self, place: Any) -> None:
        self._position = place

    def _note(self, batch: Batch) -> None:
        """Write a batch into the transcript: at once, since the user may take its position from the
        batch, without a word to the consumer."""
        place: Any = batch.place
        if self._transcript is None:
            self._transcript = self._begin_transcript(place.identity)
        if (now := place.identity.id.fingerprint) != self._transcript.settings:
            self._transcript.go_on_as(now)
        self._transcript.note(batch)
        self._transcript.flush()

    def _begin_transcript(self, identity: Identity) -> Transcript:
        options = self._loop.options
        assert self._folder is not None and identity.began is not None
        dealing, now = identity.began.dealing, identity.id.fingerprint
        step, of_given = first_step(identity.began), now
        # Where the user said that the run goes on: rounds may have been left out there, and its
        # settings may have been others.
        if (given := self._loaded or self._given) is not None:
            step, of_given = start_of(_token_in(given, identity))
        made = Transcript(
            self._folder, identity.name, identity.number, options.queue, options.replica
        )
        is_even = "rounds" not in identity.fingerprint
        then = {now, of_given, *digests_before(identity.fingerprint, step)}
        made.begin(Start(step, 1 if dealing is None else dealing.num, then, now, is_even))
        return made

    def _refill(self) -> Any:
        if self._unusable is not None:
            raise self._unusable
        if isinstance(self._ready, Loading):
            self._finish_loading(self._ready)
        self._inbox.begun = True
        if not len(self._inbox.batches):
            # About to wait: the server may need just the slots that were let go of to go on.
            self._loop.waker.wake()
        got = self._inbox.batches.get()
        # Twice the lease's own: slots that go back report the batches sooner.
        self._tell_every = 2 * self._lease.tell_every
        if not isinstance(got, deque):
            return got
        queue = self._inbox.batches
        # No call stands in between, so an interrupt finds all of it done or nothing: the queue
        # keeps what it has given until `given` is cleared.
        self._ready = got
        queue.given = None
        return None

    def _copy(self, batch: Batch) -> Batch:
        """Return the batch in memory of its own, so that its slot goes back."""
        if not self._copies:
            self._copies = True
            logger.warning(
                "more than %d batches are kept: from now on batches are copied for as long as "
                "that is so; drop them, or connect with hold=",
                self._most_held,
            )
        arrays = tuple([array.copy() for array in batch.columns])
        for array in arrays:
            # As the slot's arrays are: that a batch was copied must not change what it allows.
            array.flags.writeable = False
        copied = batch.with_arrays(arrays)
        copied.place.batch = weakref.ref(copied)
        return copied

    def __len__(self) -> int:
        """Return how many batches the whole stream has on this queue, as if no record were left
        out.

        Raises `TypeError` if the server cannot know it: it does for sources with a number of
        epochs.
        """
        length = self._lease.opened.length
        if length is None:
            raise TypeError("the length of this feed is not known")
        return length

    @property
    def _lease(self) -> ClientLease:
        lease = self._inbox.lease
        assert lease is not None
        return lease

    # ---- position

    def state_dict(self) -> dict[str, bytes]:
        """Return the position after the last batch handed out, for a trainer's checkpoint.

        One key, with the same bytes that the feed gives in process. Changes nothing; may be called
        at any time, from any thread.
        """
        self._check_forked()
        self._inbox.stats.note_position_asked(time.monotonic())
        if (position := self._position) is not None:
            lease = self._lease
            if position.identity.is_before(lease.identity):
                # At the place of an edit a server alone knows what the edited run calls it.
                said = lease.starts.get(self._inbox.handed, position)
                position = said.after_edits(lease.identity)
                if self._transcript is not None and position.identity is lease.identity:
                    # Who goes on from there has to find that the run has these settings.
                    self._transcript.go_on_as(lease.identity.id.fingerprint)
            return {STATE_KEY: position.state(lease.columns)}
        loaded = self._ready.position if isinstance(self._ready, Loading) else self._loaded
        return {STATE_KEY: loaded or self._inbox.start}

    def records_of(self, batch: Batch) -> Rows:
        """The records that the rows of a batch were made of: by the position alone, as the data are
        elsewhere."""
        (state,) = Snapshot.from_bytes(self.state_dict()[STATE_KEY]).states
        return records_of(asked_of(state)[0], batch.step)

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        """Go on from a state dict, before the first batch; `ResumeError` after it, or if
        refused."""
        self._check_usable()
        if self._position is not None:
            raise ResumeError("batches have been handed out already; load the state into a fresh "
                              "consumer")  # fmt: skip
        position = bytes(unpack_state_dict(state_dict))
        self._num_loads += 1
        # One assignment drops what an interrupted `next` had taken, and says where to go on. If the
        # wait below is interrupted, the next call finishes the load.
        self._ready = Loading(self._num_loads, position)
        self._finish_loading(self._ready)

    def _finish_loading(self, state: Loading) -> None:
        """Wait until a server has given the queue at a state; finishes an interrupted load too."""
        self._loop.call_soon(lambda: self._loop.reopen(state.number, state.position))
        try:
            self._inbox.wait_for_opened(state.number)
            self._loaded = state.position
        except (ConfigError, ResumeError):
            # The state is refused: the consumer stands where it stood, and may load another.
            self._ready = deque()
            raise
        except FeedError:
            self._drop_ready()
            raise
        self._ready = deque()

    def _drop_ready(self) -> None:
        """Drop what was not handed out. A state that was being loaded stays the position."""
        if isinstance(self._ready, Loading):
            self._loaded = self._ready.position
        self._ready = deque()

    def snapshot(self) -> Snapshot:
        """Return the position with its leftover rows, as the server has them.

        Raises `RemoteError` if there is no server, or if it does not know the rows, as just
        after it was found again (`state_dict` always works). Raises `ClosedError` after `close`.
        """
        self._check_usable()
        self._inbox.stats.note_position_asked(time.monotonic())
        state = self._ready
        if isinstance(state, Loading):
            # The load may have been interrupted before it was asked for; asking twice is harmless.
            self._loop.call_soon(lambda: self._loop.reopen(state.number, state.position))
        request = self._loop.request_snapshot()
        try:
            return Snapshot.from_bytes(request.result(_ANSWER_S))
        except SnapshotFormatError as error:
            raise RemoteError(f"the server sent a bad snapshot: {error}") from error

    # ---- figures

    @property
    def plane(self) -> str:
        """How the batches come: "shared" or "frames"."""
        return self._lease.kind

    @property
    def path(self) -> str:
        """What the GPU copies from; "" without a GPU.

        "registered memory": it reads shared memory itself. "pinned slots": batches are written into
        these first.
        """
        landing = self._inbox.landing
        return "" if landing is None else landing.path

    def stats(self) -> dict[str, Any]:
        """Return what the consumer has done: a flat dictionary of numbers, and the plane by name.

        Seconds include a wait that is under way. Any thread may call it at any time.
        """
        rows, num_bytes = self._counts
        figures = self._inbox.summarise(rows, num_bytes)
        return {**figures, "plane": self.plane, "path": self.path}

    # ---- life

    def close(self) -> None:
        """Leave; batches that were handed out stay valid. Harmless when done before.

        The server is told what was used, which takes up to a second. A consumer that has had
        everything and whose server was killed looks for the next one for up to a second before.
        """
        if isinstance(self._unusable, ForkedError):
            return
        self._unusable = ClosedError("the consumer is closed")
        self._drop_ready()
        self._loop.call_soon(self._loop.stop)
        # Not before the call above: if this is interrupted, the finaliser still ends the consumer.
        self._forgotten.detach()
        self._thread_group.close(_STOP_S)
        if self._transcript is not None:
            self._transcript.close()
        if self._inbox.landing is not None:
            self._inbox.landing.close()
        forks.call_no_more(self)

    def abandon_in_child(self) -> None:
        """Make this object unusable in a forked child: sockets and thread are the parent's."""
        self._unusable = ForkedError(
            "the consumer was connected in the parent process; connect after the fork, or start "
            "children with the spawn method"
        )
        # First the batches that were not handed out: what the child does not hold it need not copy.
        self._ready, self._fed = deque(), None
        self._forgotten.detach()
        if self._transcript is not None:
            self._transcript.after_fork()
        # The child shares the eventfd: to write to it would wake the parent's thread.
        self._loop.waker.silence()
        if self._inbox.landing is None:
            self._inbox.drop_in_child()

    def _check_usable(self) -> None:
        error = self._unusable or self._loop.failure
        if error is not None:
            # One object is raised each time: its traceback would grow with every call.
            raise error.with_traceback(None)

    def _check_forked(self) -> None:
        if isinstance(self._unusable, ForkedError):
            raise self._unusable

    def __repr__(self) -> str:
        options = self._loop.options
        way = f"{self.plane}, {self.path}" if self.path else self.plane
        replicas = self._lease.opened.replicas
        seat = seat_name(seat_of(options.queue, options.replica, replicas), replicas)
        return f"<Consumer of {seat} of {options.feed or 'the feed'!r}, {way}>"


def _token_in(position: bytes, identity: Identity) -> bytes:
    """The token of a stream in a position."""
    if is_token(position):
        return position
    states = Snapshot.from_bytes(position).states
    of = identity.name, identity.number
    return next(state.token for state in states if (state.name, state.number) == of)
