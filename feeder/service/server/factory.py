"""The settings of a served feed, made anew each time that the feed has to go back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from feeder.checkpoint.resuming import Found, find_position
from feeder.checkpoint.store import CheckpointStore
from feeder.config import FeedConfig, deal_to, run_on
from feeder.errors import ConfigError, FeedError, ResumeError
from feeder.feeds.coordinator import Coordinator
from feeder.service.protocol.fields import HEADER_BYTES, MAX_ITEMS, MAX_NAME
from feeder.service.server.editing import Change, change_in, edited, is_part_of, place_in
from feeder.service.server.part import check_part, check_place
from feeder.state.history import number_of, of_windows
from feeder.state.positions import Positions
from feeder.state.snapshot import HISTORY, Snapshot, StreamState
from feeder.state.state_dict import unpack_position
from feeder.workers.fetch.resuming import Resume
from feeder.workers.stream.position import Cut, Partitions, first_step
from feeder.workers.stream.rounds import Counting
from feeder.workers.stream.spec import Part

logger = logging.getLogger("feeder")


_SENSELESS = (FeedError, ArithmeticError, LookupError, StopIteration, TypeError, ValueError)
"""Whoever wrote a position may have written anything."""


class _GivenUp(NamedTuple):
    """A run that had the edit of the feed call at a step where the run that goes on has it later.
    Immutable."""

    positions: Positions
    step: int
    """Where its edit lay."""
    before: Positions
    """Those of both without that edit."""
    at: Resume
    """The place of that step in the run that goes on."""


def _last_edit(state: StreamState | None) -> tuple[int, str] | None:
    """The step and the note of the last edit of a state; None if it has none."""
    try:
        _, _, _, step, note, *_ = state.fingerprint[HISTORY][2][-1]  # type: ignore[union-attr]
    except (AttributeError, LookupError, TypeError, ValueError):
        return None
    return step, note


class FeedFactory:
    """Makes the settings of one feed, each time with a fetch function that nobody has called yet.

    Given the user's factory it calls that each time. Given a coordinator it has one fetch function
    only, which can be used again if it can be put back: `fetch(call)`, or a function with cursor
    and seek. `make` is called by the feed's own thread. Everything else is the I/O thread's, which
    changes it while no run is being made: to what a consumer's position says, or at an edit.
    """

    def __init__(
        self,
        name: str,
        coordinator: Coordinator,
        factory: Callable[[], Any] | None,
        queues: int | None,
        replicas: int = 1,
        executor: Any = None,
        part: Part | None = None,
    ) -> None:
        self.name = name
        self._executor = executor
        self.part = part
        """The queues whose batches it makes; None for all."""
        self.replicas = replicas
        """How many consumers are given the batches of each queue."""
        self._user_factory = factory
        self._queues = queues
        # Made already and not used yet: a factory is slow to call twice for one start.
        self._next: Coordinator | None = coordinator
        self._is_other = False
        self._given = self.positions = Positions(self._config(coordinator), 0)
        """Finds and encodes the feed's positions; those of an earlier format of its source once it
        went on from one, and those of an edited run."""
        # What edits have changed since the server began, and what positions were before each.
        self._change = Change()
        self._former: list[Positions] = []
        # Where the feed call's edit was made here, at a position that lacks it.
        self._made_at: Snapshot | None = None
        self._given_up: _GivenUp | None = None
        # Why nobody can begin at the start, once an edit has changed the size of batches.
        self._no_start = ""
        self.origin: Resume | None = None
        """Where consumers without a position begin; None for the start of the feed."""
        _check_names(name, self.config.stream.names)
        if len(self.own_queues) * replicas > MAX_ITEMS:
            num, shared = len(self.own_queues), f" with {replicas} replicas" * (replicas > 1)
            raise ConfigError(
                f"feed {name!r} has {num} queues{shared}, expected at most {MAX_ITEMS} on a server"
            )
        if self.config.stream.order == "arrival" and len(self.config.devices) > 1:
            raise ConfigError(
                f"feed {name!r} has order='arrival' and {len(self.config.devices)} queues: what "
                "each is dealt could not be repeated; serve it with one queue"
            )
        if coordinator[name].streams[0].started:
            self._take_over(coordinator)

    def _take_over(self, coordinator: Coordinator) -> None:
        """Stop a feed that runs in this process already, to serve it from where its user stands."""
        stream, spec = coordinator[self.name].streams[0], self.config.stream
        if not (spec.pure or spec.seekable):
            raise ConfigError(
                f"feed {self.name!r} is started already, and its fetch function cannot be put "
                "back; serve it before it is started, or serve a factory"
            )
        position = Snapshot((stream.state(with_rows=True),))
        if not coordinator.stop(self.name):
            raise ConfigError(f"feed {self.name!r} is started already, and does not stop")
        # Its fetch function has been called, so `make` has to put it back like any other time.
        self._next = None
        self.begin_at(position)

    @property
    def config(self) -> FeedConfig:
        """The feed's settings."""
        return self.positions.config

    @property
    def num_seats(self) -> int:
        """How many consumers it has: one for each replica of each queue."""
        return len(self.config.devices) * self.replicas

    @property
    def own_queues(self) -> range:
        """The queues whose batches it makes."""
        num = len(self.config.devices)
        return range(num) if self.part is None else range(self.part.first, self.part.stop)

    @property
    def goes_back(self) -> bool:
        """Whether the feed can be made again at an earlier position."""
        stream = self.config.stream
        # New processes begin with the function as it was given.
        is_renewed = self._user_factory is not None or self.config.run.executor is not None
        return is_renewed or stream.pure or stream.seekable

    def _config(self, coordinator: Coordinator) -> FeedConfig:
        streams = coordinator[self.name].streams
        if len(streams) != 1:
            raise ConfigError(
                f"feed {self.name!r} was made by {len(streams)} calls, one per device; a served "
                "feed is one stream, dealt out: make it with devices=N, or serve it with queues=N"
            )
        config = streams[0].config
        if config.transcript is not None:
            raise ConfigError(
                f"transcript is {config.transcript!r}, and feed {self.name!r} is served: what was "
                "handed out is known to its trainers; give transcript= to feeder.connect"
            )
        if config.on_device is not None:
            raise ConfigError(
                f"on_device is {config.on_device!r}, and feed {self.name!r} is served: a server "
                "has no device, its trainers have; give on_device= to feeder.connect"
            )
        num = len(config.devices) if self._queues is None else self._queues
        config = deal_to(config, tuple(f"queue:{i}" for i in range(num)))
        config = run_on(config, self._executor)
        if self.part is not None:
            check_part(config, self.part)
        # Here no user waits who could make batches (`num_threads=0`).
        run = config.run._replace(num_threads=max(1, config.run.num_threads), part=self.part)
        return config._replace(run=run)

    def edit(self, state: StreamState, change: Change, why: str, others: Sequence[Resume]) -> bool:
        """Go on from a state with a change, as another run; whether anything is to change. Raises
        `ConfigError` and `ResumeError`, also if one of the other places is in no such run; then all
        is as it was."""
        change = self._change.then(change)
        given = Positions(change.applied(self._given.config), 0)
        owner: Positions | None = edited(given, state, why).owner
        if owner is None or owner.fingerprint == self.positions.fingerprint:
            return False
        for one in others:
            try:
                place_in(owner, self.positions, one)
            except ResumeError as error:
                raise ResumeError(
                    f"feed {self.name!r} cannot be edited so while some queues have been sent fewer"
                    f" rounds than others: {error}"
                ) from error
        self._go_on_as(owner, change)
        return True

    def _go_on_as(self, owner: Positions, change: Change) -> None:
        """From now on the feed is the run that edits have made, by all changes since it began."""
        former, self.positions, self._is_other = self.positions, owner, True
        if self._given_up is not None:
            # Its place is known in the run that ends here alone.
            self._former.remove(self._given_up.positions)
            self._given_up = None
        self._former.append(former)
        self._change = change
        try:
            place_in(owner, former, self._start())
            self.origin = self.origin and place_in(owner, former, self.origin)
        except ResumeError as error:
            self.origin, self._no_start = None, str(error)

    def was(self, former: Positions) -> bool:
        """Whether positions were those of the feed before an edit."""
        return former in self._former

    def begin_at(self, position: Snapshot | bytes | None, skip: int = 0) -> None:
        """Let consumers without a position begin so many rounds after it, or after the start of the
        feed. Raises `ResumeError`."""
        at = self._start() if position is None else self._find_in(position)
        if at.cut.dealing is None and position is not None:
            self.positions.check_round(at.cut)
        self.origin = self.positions.deal(at, skip=skip)

    def find(
        self, token: bytes | None, *, rejoins: bool, skip: int = 0,
        others: Callable[[], Sequence[Resume] | None] = tuple,
    ) -> Resume | None:  # fmt: skip
        """Where a consumer begins, given its position or None, and how many rounds later. Raises
        `ResumeError`. `others` says where the others stand who have decided to; None if it brings
        them no edits.

        The stored position is for all who start together. A consumer that comes back alone without
        a position was lost before it had saved one: its model has seen nothing, so it begins at the
        start.
        """
        if token is not None:
            position = unpack_position(token, most_header_bytes=HEADER_BYTES)
            found = self._find_in(position, others)
            self.positions.tell_of_dealing(found.cut)
            return self.positions.deal(found, skip=skip)
        found_at = None if rejoins else self.origin
        if self._no_start and found_at is None:
            raise ResumeError(self._no_start)
        if not skip:
            return found_at
        return self.positions.deal(found_at or self._start(), skip=skip)

    def _find_in(
        self, position: Snapshot | bytes, others: Callable[[], Sequence[Resume] | None] = tuple
    ) -> Resume:
        try:
            found = self.positions.find_in(position)
        except ResumeError as error:
            other = (
                self._find_before(position)
                or self._find_edited_anew(position)
                or self._find_edit_made(position, others)
                or self._find_edited(position, others)
            )
            if other is not None:
                self._check_place(other)
                return other
            if cure := self._cure(position):
                raise ResumeError(f"{error}{cure}") from error
            raise
        self._check_place(found)
        if found.owner is not None:
            self._become(found.owner, others)
            if self._given.config.edit and found.fingerprint != found.owner.id.fingerprint:
                assert isinstance(position, Snapshot)
                self._made_at = position
        return found

    def _become(
        self, owner: Positions, others: Callable[[], Sequence[Resume] | None]
    ) -> None:  # fmt: skip
        """Go on as the run of a position that fits what is given. Raises `ResumeError` if others
        stand in another one."""
        former = self.positions
        if not (HISTORY in owner.fingerprint and is_part_of(former, owner)):
            self._is_other, self.positions = True, owner
            return
        # An edit that leaves the settings as they are: others may be here, who know none.
        if (standing := others()) is None:
            former.compare_histories(owner.fingerprint[HISTORY], former.fingerprint.get(HISTORY))
            return
        for one in standing:
            place_in(owner, former, one)
        self._go_on_as(owner, self._change)

    def _cure(self, position: Snapshot | bytes) -> str:
        """What else can be done if a position is refused for an edit that was made here."""
        last = _last_edit(self._state_in(position))
        if self._made_at is None or last is None:
            return ""
        step, note = last
        return (
            f". This server was given edit={self._given.config.edit!r}, which it has made at a "
            f"position without it; the run of this one has the edit {note!r} at step {step}: give "
            f"edit={note!r}, or no edit= and the feed call of before it, and start all trainers "
            "together"
        )

    def _state_in(self, position: Snapshot | bytes) -> StreamState | None:
        states = [] if isinstance(position, bytes) else position.states
        return next((one for one in states if (one.name, one.number) == (self.name, 0)), None)

    def _check_place(self, found: Resume) -> None:
        """Raise `ResumeError` if several servers cannot go on from a place."""
        is_edited = found.owner is not None and HISTORY in found.owner.fingerprint
        if self.part is not None and is_edited:
            raise ResumeError(
                f"the position of feed {self.name!r} is of a run that was edited: serve it with "
                "one server"
            )
        check_place(self.positions.config, found.cut)

    def _find_before(self, position: Snapshot | bytes) -> Resume | None:
        """The place in this run of a position of before an edit; None if it is of no such run.
        Raises `ResumeError`."""
        for former in self._former:
            try:
                found = former.find_in(position)
            except ResumeError:
                continue
            if found.owner is None:
                return self.place_in(former, found)
        return None

    def place_in(self, former: Positions, at: Resume) -> Resume:
        """Where a place of the run is in the one that edits have made of it. Raises
        `ResumeError`."""
        given_up = self._given_up
        if given_up is None or former is not given_up.positions:
            return place_in(self.positions, former, at)
        if first_step(at.cut) >= given_up.step:
            return given_up.at
        return place_in(self.positions, given_up.before, at)

    def _find_edit_made(
        self, position: Snapshot | bytes, others: Callable[[], Sequence[Resume] | None]
    ) -> Resume | None:
        """The place of a position that has the edit of the feed call already, at a later step than
        it was made at here: the trainers that came before were saved when they had not heard of it.
        The feed is the run of this position from now on. None if that is none which theirs begin.
        Raises `ResumeError`."""
        state, made_at = self._state_in(position), self._made_at
        last = _last_edit(state)
        if made_at is None or self.origin is not None or last is None:
            return None
        if last[1] != self._given.config.edit:
            return None
        try:
            found = self._given.find_in(position)
            before, at, _ = self._run_of(made_at)
        except _SENSELESS:
            return None
        owner, former = found.owner, self.positions
        is_its_own = owner is not None and found.fingerprint == owner.id.fingerprint
        if owner is None or not is_its_own or not is_part_of(before, owner) or others() is None:
            return None
        at, step = place_in(owner, before, at), former.fingerprint[HISTORY][2][-1][3]
        self._given_up, self._made_at = _GivenUp(former, step, before, at), None
        self._former.append(former)
        self.positions = owner
        return found

    def _run_of(self, position: Snapshot) -> tuple[Positions, Resume, Change]:
        """The run of a position with other edits than the feed call has, the place there, and what
        these edits have changed. Raises what `_SENSELESS` has."""
        state = self._state_in(position)
        assert state is not None
        change = change_in(self._given.config, state.fingerprint)
        owner = Positions(change.applied(self._given.config)._replace(edit=None), 0)
        found = owner.find_in(position)
        return found.owner or owner, found, change

    def _find_edited_anew(self, position: Snapshot | bytes) -> Resume | None:
        """The place of a position before the edit that all consumers of this round begin with; None
        if it is of another round."""
        if self._given.config.edit is None or self.positions is self._given:
            return None
        try:
            found = self._given.find_in(position)
        except ResumeError:
            return None
        is_same = found.owner and found.owner.fingerprint == self.positions.fingerprint
        return found if is_same else None

    def _find_edited(
        self, position: Snapshot | bytes, others: Callable[[], Sequence[Resume] | None]
    ) -> Resume | None:
        """The place of a position with other edits than this run, none of which was made here. If
        the feed lacks the last of them, they are its own from now on. None if it is of no such
        run. Raises `ResumeError`."""
        state, former = self._state_in(position), self.positions
        history = former.fingerprint.get(HISTORY)
        if state is None or of_windows(history) or not (history or HISTORY in state.fingerprint):
            return None
        assert isinstance(position, Snapshot)
        try:
            owner, found, change = self._run_of(position)
        except _SENSELESS:
            return None
        if is_part_of(owner, former):
            return place_in(former, owner, found)
        if not is_part_of(former, owner) or (standing := others()) is None:
            return None
        for one in standing:
            place_in(owner, former, one)
        logger.warning(
            "feed %r goes on with the %s of a position that a consumer or the server was given",
            self.name, number_of(owner.fingerprint[HISTORY]),
        )  # fmt: skip
        self._go_on_as(owner, change)
        return found

    def _start(self) -> Resume:
        return Resume(cut=self.start_cut(), rows=(), columns=None)

    @property
    def counting(self) -> Counting:
        """How rounds are counted from the origin on."""
        return self.positions.counting(None if self.origin is None else self.origin.cut)

    def start_state(self) -> StreamState:
        """Where consumers without a position begin, with leftover rows if these are known."""
        return self.state(self.origin)

    def state(self, resume: Resume | None, *, with_rows: bool = True) -> StreamState:
        """The state at a position that a consumer came with, or at the start of the stream."""
        at = resume or self._start()
        return self.positions.state(at.cut, at.rows, at.columns, with_rows=with_rows)

    def start_cut(self) -> Cut:
        """The start of the feed's stream."""
        stream = self.config.stream
        arrival = stream.order == "arrival"
        partitions = Partitions.of(stream.num_workers, pure=stream.pure, arrival=arrival)
        return Cut(
            epoch=0, index=0, step=0, finished=False, position=partitions.origin(), leftover=None,
            encode=self.positions.id.encode,
        )  # fmt: skip

    def token(self, resume: Resume | None) -> bytes:
        """The same as bytes for messages: a token, or a snapshot if leftover rows go with it."""
        state = self.state(resume, with_rows=False)
        return state.token if state.rows is None else bytes(Snapshot((state,)))

    def make(self, resume: Resume | None) -> FeedConfig:
        """The settings, with a fetch function that stands where `resume` needs it. Raises
        `ResumeError` if there is none, and what the factory or `init_fun` raises."""
        coordinator, self._next = self._next, None
        # The stages from cheap to dear: what is at hand, the user's factory, the same function.
        if coordinator is None and self._user_factory is not None:
            coordinator = make_coordinator(self._user_factory)
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
            if self._is_other:
                config = self.positions.applied(self._change.applied(config))
            if config.init_fun is not None:
                config.init_fun(coordinator[self.name], coordinator)
        except BaseException:
            # Nobody has called the fetch function, so it is still good for the next attempt.
            self._next = coordinator
            raise
        return config


def _check_names(feed: str, columns: Sequence[str]) -> None:
    """Check that messages can hold these names. Raises `ConfigError`."""
    if len(columns) > MAX_ITEMS:
        raise ConfigError(
            f"feed {feed!r} has {len(columns)} columns, expected at most {MAX_ITEMS}; a served "
            "batch holds no more: stack them"
        )
    for kind, name in [("feed", feed), *(("column", column) for column in columns)]:
        # Surrogates stand for bytes that are no text, as in names of files; UTF-8 has none.
        if len(name) > MAX_NAME or name != name.encode(errors="ignore").decode():
            raise ConfigError(
                f"{kind} name {name[:50]!r} has {len(name)} characters, expected at most "
                f"{MAX_NAME}, all of which UTF-8 has; what is served is told of by name"
            )


def make_feed_factories(
    coordinator: Coordinator, factory: Callable[[], Any] | None, queues: int | None,
    replicas: int = 1, executor: Any = None, part: Part | None = None,
) -> list[FeedFactory]:  # fmt: skip
    """A `FeedFactory` for each feed of a coordinator. Raises `ConfigError`."""
    names = list(coordinator)
    if not names:
        raise ConfigError("the coordinator has no feed to serve; add one first")
    return [
        FeedFactory(name, coordinator, factory, queues, replicas, executor, part) for name in names
    ]


def begin_at(
    factories: list[FeedFactory], resume: Any, store: CheckpointStore | None, skip: int
) -> None:
    """Let consumers without a position begin so many rounds after the position that `resume` names.
    Raises `ResumeError` if it does not fit, and `CheckpointError`."""
    found = Found(None, "") if resume is None else find_position(resume, store)
    with found.named():
        for factory in factories:
            rounds = skip + factory.config.skip
            if found.position is not None or rounds:
                factory.begin_at(found.position, rounds)


def make_coordinator(factory: Callable[[], Any]) -> Coordinator:
    """The coordinator that a user's factory makes; raises `ConfigError` if it makes none."""
    made = factory()
    if not isinstance(made, Coordinator):
        raise ConfigError(
            f"{getattr(factory, '__name__', factory)!r} returned {type(made).__name__}, expected "
            "a Coordinator, as init_data_input_workers returns it"
        )
    if made.is_default:
        # It would find the feed of its last call there, at the second connection.
        made.stop()
        raise ConfigError(
            f"{getattr(factory, '__name__', factory)!r} adds its feeds to the coordinator of the "
            "process, and is called again when a feed goes back: give init_data_input_workers "
            "coordinator=feeder.Coordinator()"
        )
    return made
