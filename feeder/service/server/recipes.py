"""How a served feed is made again when it has to go back: from its factory, or in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from feeder.checkpoint.resuming import find_position
from feeder.checkpoint.store import CheckpointStore
from feeder.config import FeedConfig
from feeder.feeds.coordinator import Coordinator
from feeder.errors import ConfigError, ResumeError
from feeder.state.positions import Positions
from feeder.service.protocol.fields import HEADER_BYTES, MAX_ITEMS, MAX_NAME
from feeder.state.snapshot import Snapshot, StreamState
from feeder.state.statedict import unpack_position
from feeder.workers.stream.batch import Cut
from feeder.workers.stream.position import Lanes
from feeder.workers.stream.resuming import Resume


class Recipe:
    """Makes the settings of one feed, with a fetch function that nobody has called yet.

    Given a factory it calls that each time; given a coordinator it has but one fetch function,
    which can be used again where it can be put back: `fetch(call)`, or one with cursor and seek.
    """

    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        factory: Callable[[], Any] | None,
        queues: int | None,
    ) -> None:
        self.name = name
        self._factory = factory
        self._queues = queues
        self._next: Coordinator | None = coordinator
        self.positions = Positions(self._config(coordinator), 0)
        """What the feed's positions mean."""
        self.origin: Resume | None = None
        """Where consumers begin that come without a position; None for the feed's beginning."""
        _check_names(name, self.config.stream.names)
        if len(self.config.devices) > MAX_ITEMS:
            raise ConfigError(
                f"feed {name!r} has {len(self.config.devices)} queues, expected at most {MAX_ITEMS}"
            )
        if self.config.stream.order == "arrival" and len(self.config.devices) > 1:
            raise ConfigError(
                f"feed {name!r} has order='arrival' and {len(self.config.devices)} queues: what "
                "each is dealt could not be repeated; serve it with one queue"
            )
        if coordinator[name].streams[0].started:
            self._take_over(coordinator)

    def _take_over(self, coordinator: Coordinator) -> None:
        """The feed runs already: end that, and serve it from where its user stands."""
        stream, spec = coordinator[self.name].streams[0], self.config.stream
        if not (spec.pure or spec.seekable):
            raise ConfigError(
                f"feed {self.name!r} is started already, and its fetch function cannot be put "
                "back; serve it before it is started, or serve a factory"
            )
        position = Snapshot((stream.state(with_rows=True),))
        if not coordinator.stop(self.name):
            raise ConfigError(f"feed {self.name!r} is started already, and does not stop")
        self._next = None
        self.begin_at(position)

    @property
    def config(self) -> FeedConfig:
        """The feed's settings."""
        return self.positions.config

    @property
    def goes_back(self) -> bool:
        """Whether the feed can be made again."""
        stream = self.config.stream
        return self._factory is not None or stream.pure or stream.seekable

    def _config(self, coordinator: Coordinator) -> FeedConfig:
        streams = coordinator[self.name].streams
        if len(streams) != 1:
            raise ConfigError(
                f"feed {self.name!r} was made by {len(streams)} calls, one per device; a served "
                "feed is one stream, dealt out: make it with devices=N, or serve it with queues=N"
            )
        config = streams[0].config
        num = len(config.devices) if self._queues is None else self._queues
        return replace(config, devices=tuple(f"queue:{i}" for i in range(num)))

    def begin_at(self, position: Snapshot | bytes) -> None:
        """Let consumers that come without a position begin there. Raises `ResumeError`."""
        origin = self.positions.find_in(position)
        self.positions.check_round(origin.cut)
        self.origin = origin

    def find(self, token: bytes | None, *, rejoins: bool) -> Resume | None:
        """Where a consumer begins that comes with a position, or without one. Raises
        `ResumeError`.

        The stored place is where all begin together. One that comes back alone without a position
        was lost before it had saved any: its model has seen nothing, and it begins at the start.
        """
        if token is None:
            return None if rejoins else self.origin
        return self.positions.find_in(unpack_position(token, most_header_bytes=HEADER_BYTES))

    def start_state(self) -> StreamState:
        """Where such consumers begin, with the leftover rows where they are known."""
        return self.state(self.origin)

    def state(self, resume: Resume | None, *, with_rows: bool = True) -> StreamState:
        """A position that a consumer came with, or the start of the feed's stream."""
        at = resume or Resume(cut=self.start_cut(), rows=(), columns=None)
        return self.positions.state(at.cut, at.rows, at.columns, with_rows=with_rows)

    def start_cut(self) -> Cut:
        """The start of the feed's stream."""
        stream = self.config.stream
        arrival = stream.order == "arrival"
        lanes = Lanes(num_lanes=stream.num_workers, pure=stream.pure, arrival=arrival)
        return Cut(
            epoch=0, index=0, step=0, finished=False, position=lanes.origin(), leftover=None,
            encode=self.positions.id.encode,
        )  # fmt: skip

    def token(self, resume: Resume | None) -> bytes:
        """The same as it is told: a snapshot where leftover rows go with it."""
        state = self.state(resume, with_rows=False)
        return state.token if state.rows is None else bytes(Snapshot((state,)))

    def make(self, resume: Resume | None) -> FeedConfig:
        """The settings, with a fetch function that stands where `resume` needs it. Raises
        `ResumeError` where there is none, and what the factory or `init_fun` raises."""
        coordinator, self._next = self._next, None
        if coordinator is None and self._factory is not None:
            coordinator = make_coordinator(self._factory)
        if coordinator is None:
            if not self.goes_back:
                raise ResumeError(
                    f"feed {self.name!r} has to go back, and its fetch function can only be put "
                    "back by a new one: serve a factory (MODULE:FUNCTION) instead of a "
                    "coordinator, give the function cursor(worker_id) and seek(worker_id, "
                    "cursor), or use fetch(call)"
                )
            return self.config
        try:
            config = self._config(coordinator)
            if config.init_fun is not None:
                config.init_fun(coordinator[self.name], coordinator)
        except BaseException:
            # Nobody has called the function: the next consumer may have more luck.
            self._next = coordinator
            raise
        return config


def _check_names(feed: str, columns: Sequence[str]) -> None:
    """Whether consumers can be told of them. Raises `ConfigError`."""
    if len(columns) > MAX_ITEMS:
        raise ConfigError(
            f"feed {feed!r} has {len(columns)} columns, expected at most {MAX_ITEMS}; a served "
            "batch holds no more: stack them"
        )
    for kind, name in [("feed", feed), *(("column", column) for column in columns)]:
        # Surrogates stand for what is no text, as in names of files.
        if len(name) > MAX_NAME or name != name.encode(errors="ignore").decode():
            raise ConfigError(
                f"{kind} name {name[:50]!r} has {len(name)} characters, expected at most "
                f"{MAX_NAME}, all of which UTF-8 has; what is served is told of by name"
            )


def make_recipes(
    coordinator: Coordinator, factory: Callable[[], Any] | None, queues: int | None
) -> list[Recipe]:
    """A recipe for each feed of a coordinator. Raises `ConfigError`."""
    names = list(coordinator)
    if not names:
        raise ConfigError("the coordinator has no feed to serve; add one first")
    return [Recipe(name, coordinator, factory, queues) for name in names]


def begin_at(recipes: list[Recipe], resume: Any, store: CheckpointStore | None) -> None:
    """Let consumers that come without a position begin at the one that `resume` means. Raises
    `ResumeError` where it does not fit, and `CheckpointError`."""
    found = find_position(resume, store)
    if found.position is not None:
        with found.named():
            for recipe in recipes:
                recipe.begin_at(found.position)


def make_coordinator(factory: Callable[[], Any]) -> Coordinator:
    """What a factory makes; raises `ConfigError` where that is no coordinator."""
    made = factory()
    if not isinstance(made, Coordinator):
        raise ConfigError(
            f"{getattr(factory, '__name__', factory)!r} returned {type(made).__name__}, expected "
            "a Coordinator, as init_data_input_workers returns it"
        )
    return made
