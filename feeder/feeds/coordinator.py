"""All feeds of a process: started together, stopped together, and stored as one position.

A trainer that reads several feeds goes on from one step of its own, so their positions belong
together: one snapshot, taken at one moment, holds all of them. The coordinator is what the user
holds; what runs is in `Running`, which no thread refers to, so that a coordinator that is forgotten
ends its threads.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from feeder.checkpoint.policy import Checkpointing
from feeder.checkpoint.resuming import LATEST, Found, find_position
from feeder.checkpoint.store import CheckpointStore
from feeder.config import make_config
from feeder.errors import ClosedError, ConfigError, ForkedError, StuckWorkerError
from feeder.feeds.feed import Feed, pack_states, resume_streams
from feeder.feeds.running import STOP_DEADLINE_S, Running, sync, take_snapshot
from feeder.feeds.stream import Stream
from feeder.observe.figures import Figures, build_figures, with_checkpoints
from feeder.state.snapshot import Snapshot
from feeder.state.state_dict import STATE_KEY, unpack_state_dict
from feeder.workers.public import public

if TYPE_CHECKING:
    from feeder.observe.status.port import StatusPort


logger = logging.getLogger("feeder")


@public("feeder")
class Coordinator:
    """Holds feeds by their input source name.

    A `with` block starts and stops it, or `start` and `stop` do. Of nested blocks the outermost one
    stops it, as where a loop of training holds one of validation. One thread at a time adds, starts
    and stops feeds, and owns all fields; any thread may ask for positions and figures at any time.

    Args:
        checkpoints: Where positions are stored, and when: a `Checkpointing`, or a
            `CheckpointStore`, a path or a URL to store them there when `checkpoint` is called.
            ``resume="latest"`` goes on from the newest.
    """

    def __init__(
        self, checkpoints: Checkpointing | CheckpointStore | str | os.PathLike[str] | None = None
    ) -> None:
        self._feeds: dict[str, Feed] = {}
        self._stopped: set[str] = set()
        self._num_entered = 0
        self._running = Running(None if checkpoints is None else Checkpointing.of(checkpoints))
        self._saver = self._running.saver
        # What "latest" meant when it was first asked for: the feeds of one coordinator go on from
        # one checkpoint.
        self._latest: Found | None = None
        self.closed = False
        """Whether it has been stopped as a whole."""
        self.is_default = False
        """Whether it is that of the process, which feeds without a `coordinator=` are added to."""

    @property
    def forked(self) -> bool:
        """Whether this is a forked child's copy of a running one."""
        return self._running.forked

    # ---- feeds

    def add(self, settings: dict[str, Any], resume: Any) -> Feed:
        """Add a stream with the settings of `init_data_input_workers`. Raises `ConfigError`, and
        `ResumeError` where it cannot go on from `resume`; then nothing is added."""
        self._check_usable()
        name = settings["input_source_name"]
        feed = self._feeds[name] if isinstance(name, str) and name in self else None
        streams = feed.streams if feed is not None else ()
        first = sum(stream.config.stream.num_workers for stream in streams)
        config = make_config(settings, first)
        # One call per device is Caffe2's way to feed several: each adds a stream of its own.
        if feed is not None and set(config.devices) & set(feed.devices):
            if feed.is_over:
                # As where a notebook's cell is run again: the old one has nothing left to give.
                self.stop(name)
                return self.add(settings, resume)
            raise ConfigError(
                f"there is a feed {name!r} already, which {feed.life}: to replace it, as where a "
                f"notebook's cell is run again, call coordinator.stop({name!r}) before; else give "
                "the new one another input_source_name, or coordinator=feeder.Coordinator()"
            )
        # All that can fail comes before the feed is noted: a call that raises adds nothing.
        stream = Stream(config, len(streams), settings)
        if resume is not None:
            found = self._find(resume)
            if found.position is not None:
                with found.named():
                    resume_streams([stream], found.position)
        if self._saver is not None:
            stream.triggers = self._saver.triggers(len(config.devices))
        feed = feed or Feed(config.name, self._running)
        feed.add(stream)
        self._feeds[config.name] = feed
        self._stopped.discard(config.name)
        return feed

    def _find(self, resume: Any) -> Found:
        """The position that `resume=` names, for one feed."""
        store = None if self._saver is None else self._saver.store
        if not (isinstance(resume, str) and resume == LATEST):
            return find_position(resume, store)
        if self._latest is None:
            self._latest = find_position(resume, store)
        return self._latest

    def __getitem__(self, name: str) -> Feed:
        if name not in self._feeds:
            raise KeyError(f"no feed {name!r}, expected one of {sorted(self._feeds)!r}")
        return self._feeds[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in list(self._feeds) if name not in self._stopped)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __bool__(self) -> bool:
        return True  # Else `coordinator or Coordinator()` would put a first feed into another one.

    def __contains__(self, name: object) -> bool:
        return name in self._feeds and name not in self._stopped

    def get_worker_ids(self) -> list[int]:
        """The worker ids of all feeds, feed by feed; within a source name they count on."""
        return [i for stream in self._streams() for i in stream.config.stream.worker_ids]

    def _streams(self) -> list[Stream]:
        return [stream for name in self for stream in self._feeds[name].streams]

    def _check_usable(self) -> None:
        if self.forked:
            raise ForkedError(
                "the coordinator was made in the parent process; make one after the fork"
            )
        if self.closed:
            raise ClosedError("the coordinator is stopped; make a new one, with resume=")

    # ---- life

    def start(self) -> None:
        """Start the feeds that are not started: first every `init_fun`, then all threads."""
        self._check_usable()
        # Every init_fun runs before any thread does: one that raises leaves nothing to stop.
        new = [name for name in self if not all(s.started for s in self._feeds[name].streams)]
        for name in new:
            for stream in self._feeds[name].streams:
                if stream.config.init_fun is not None and not stream.initialised:
                    stream.config.init_fun(self._feeds[name], self)
                    stream.initialised = True
        self._running.start([s for s in self._streams() if not s.started])

    def stop(
        self, input_source_name: str | None = None, *, deadline_s: float = STOP_DEADLINE_S
    ) -> bool:
        """Stop all feeds, or the one named: at once, wherever their threads wait.

        Returns True when every thread has ended. A fetch function that does not return within
        `deadline_s` seconds is named in the log, with its stack, and the result is False.
        """
        try:
            self._stop(input_source_name, deadline_s)
        except StuckWorkerError as error:
            logger.error("%s", error)
            return False
        return True

    def _stop(self, name: str | None, deadline_s: float) -> None:
        feeds = list(self._feeds.values()) if name is None else [self[name]]
        self._stopped.update(feed.name for feed in feeds)
        self.closed = self.closed or name is None
        streams = [stream for feed in feeds for stream in feed.streams]
        try:
            self._running.stop(streams, deadline_s, is_all=self.closed)
        finally:
            for feed in feeds:
                feed.drop()

    def __enter__(self) -> Coordinator:
        entered = self._num_entered
        try:
            self.start()
            self._num_entered = entered + 1
        except BaseException:
            # Nobody leaves a block that was not entered: not after Ctrl-C either, at any line.
            self._num_entered = entered
            if not entered:
                self.stop()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._num_entered = max(0, self._num_entered - 1)
        if self._num_entered:
            return
        try:
            self._stop(None, STOP_DEADLINE_S)
        except StuckWorkerError as stuck:
            # The error that the block raised is the one its user needs to see.
            if error is None:
                raise
            logger.error("%s", stuck)

    # ---- position

    def snapshot(self) -> Snapshot:
        """Where all feeds stand, with their leftover rows. A look-up: nothing waits for it."""
        return take_snapshot(self._running.streams)

    def checkpoint(
        self,
        where: CheckpointStore | str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        wait: bool = True,
    ) -> Snapshot:
        """Store where all feeds stand, and return it. Any thread may call it; feeding goes on.

        Args:
            where: A store; the path of a file, which is replaced; by default its own place.
            step: The trainer's own step number, which a store keeps beside the position.
            wait: True to return once it is durable; False to have it written by the coordinator's
                own thread, in its own place.

        Raises:
            CheckpointError: It could not be stored, and `wait` is True.
            TranscriptError: So too the transcript up to it.
            ConfigError: There is no place to store it in.
        """
        snapshot, saver = self.snapshot(), self._saver
        if where is not None:
            # In its own place the saver does so.
            sync(self._running.streams)
        if isinstance(where, CheckpointStore):
            where.save(snapshot, step)
        elif where is not None:
            snapshot.write(where)
        elif saver is None:
            what = "expected a store or a file, or Coordinator(checkpoints=...)"
            raise ConfigError(f"there is no place to store in: {what}; or take snapshot()")
        elif wait or not saver.is_running:
            saver.save_now(snapshot, step)
        else:
            saver.ask(snapshot, step)
        return snapshot

    def checkpoint_stats(self) -> dict[str, Any]:
        """Plain numbers of the checkpoints in the coordinator's own place, saved, failed, and left
        out because writing was slower than asking; the last one's name and seconds. Else empty."""
        return {} if self._saver is None else self._saver.stats()

    def state_dict(self) -> dict[str, bytes]:
        """The position of all feeds for a trainer's checkpoint: one key. Pure; valid at any
        time, also before the first batch and after the end."""
        return {STATE_KEY: pack_states(self._running.all_streams())}

    def load_state_dict(self, state_dict: dict[str, bytes]) -> None:
        """Go on from a state dict; before the start alone. Raises `ResumeError`."""
        self._check_usable()
        resume_streams(self._streams(), unpack_state_dict(state_dict))

    # ---- what is told

    def figures(self) -> Figures:
        """The figures of all feeds, of stopped ones too; any thread may ask."""
        now = time.monotonic()
        feeds = list(self._feeds.values())
        figures = build_figures([f for feed in feeds for f in feed.figures(now)], now)
        if self._saver is None or not self._saver.is_running:
            return figures
        return with_checkpoints(figures, self._saver.age_s, self._saver.stats())

    def serve_status(self, place: str | int = 0) -> StatusPort:
        """Show what the feeds do at ``[HOST:]PORT``: a page for people at `/`, `/metrics` for
        Prometheus, `/stats.json`, `/healthz`, `/readyz`. Without a host only this machine is
        answered; port 0 is any that is free. No rows are shown.

        Returns what serves it, a context manager with the page's `url`; it outlives the feeds.
        Raises `ConfigError` where it cannot listen there.
        """
        from feeder.observe.status.port import StatusPort

        return StatusPort(place, self.figures)

    def __repr__(self) -> str:
        return f"<Coordinator of {list(self)!r}>"
