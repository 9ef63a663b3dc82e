"""The machine of a consumer: its table, and random events against a model of plain facts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from feeder.errors import (
    AuthError,
    ConnectTimeout,
    FeedError,
    ProtocolError,
    RemoteError,
    TransportError,
)
from feeder.service.client import machine as machine_module
from feeder.service.client.machine import (
    ANSWERED,
    HAS_ALL,
    HOLDS,
    LIFE,
    SEEKS,
    SERVED,
    ClientMachine,
    ConsumerOptions,
    Instructions,
    Moment,
)
from feeder.service.client.remote import Identity
from feeder.service.memory.fdpass import OwnLimitError
from feeder.service.protocol import messages as say

OPTIONS = ConsumerOptions(
    addresses=("a", "b"), feed="", queue=0, replica=0, credit=0, hold=2, skip=3,
    rejoins=False, takes_over=True, plane="auto", checksum="auto", writable=False, timeout_s=10.0,
    reconnect_s=20.0, who="a test",
)  # fmt: skip
LEASE_S = 6.0


@pytest.fixture(autouse=True)
def _any_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        machine_module, "identity_of", lambda opened: Identity("x", 0, {}, None, digest=b"x")
    )


def test_every_state_is_reached_and_reaches_the_last() -> None:
    reached = {state: {state, *moves.values()} for state, moves in LIFE.items()}
    for _ in LIFE:
        reached = {at: set().union(*(reached[one] for one in at_)) for at, at_ in reached.items()}
    assert reached["starting"] == set(LIFE)
    assert all("over" in found for found in reached.values())


def test_a_state_looks_for_a_server_or_holds_a_queue_or_neither() -> None:
    assert not SEEKS & HOLDS
    assert set(LIFE) - SEEKS - HOLDS == {"idle", "leaving", "over"}
    for state, moves in LIFE.items():
        assert ("given" in moves) == (state in SEEKS)
        assert ("expelled" in moves) == (state in HOLDS)
        assert moves["stops"] == "over"
    assert HAS_ALL < SEEKS | HOLDS
    assert ANSWERED < HOLDS


class Shell:
    """What carries instructions out: a server that says what it is told to, and a user."""

    def __init__(self, options: ConsumerOptions = OPTIONS, token: bytes | None = None) -> None:
        self.now = 100.0
        self.received = self.handed = 0
        self.begun = False
        self.machine = ClientMachine(options, token, b"c" * 16, "a kernel", self.now)
        self.is_connected = False
        self.addresses: list[str] = []
        self.sent: list[Any] = []
        self.endings: list[Any] = []
        self.answers: list[tuple[Any, Any]] = []
        self.lost: list[str] = []
        self.is_silent = False
        """Whether the server answers no renewal."""
        self.slots: tuple[int, ...] = ()
        self.num_given = self.num_dropped = 0
        self.generation = b""

    @property
    def at(self) -> Moment:
        return Moment(self.now, self.received, self.handed, self.begun)

    @property
    def opens(self) -> list[say.Open]:
        return [one for one in self.sent if isinstance(one, say.Open)]

    def do(self, instructions: Instructions) -> None:
        for what, *told in instructions:
            getattr(self, what.value)(*told)

    def begin_connection(self, address: str) -> None:
        assert not self.is_connected, "one connection at a time"
        self.is_connected = True
        self.addresses.append(address)

    def end_connection(self) -> None:
        self.is_connected = False

    def end_lease(self) -> None:
        assert self.is_connected

    def send(self, message: Any) -> None:
        assert self.is_connected, "a message that nobody gets"
        self.sent.append(message)

    def tell_used(
        self, generation: bytes, used: int, begun: bool, slots: tuple[int, ...], is_news: bool
    ) -> None:
        slots, self.slots = slots or self.slots, ()
        if slots or is_news:
            self.send(SimpleNamespace(generation=generation, used=used, begun=begun, slots=slots))

    def join(self, opened: say.Opened, identity: Identity, token: bytes | None) -> None:
        self.do(self.machine.joined(opened, identity, "frames", "", self.at))

    def take(self, message: Any, frames: Any) -> None:
        if isinstance(message, say.Batches):
            self.received += 1
            unedited = SimpleNamespace(is_before=lambda identity: False)
            last: Any = SimpleNamespace(asked=b"after %d" % self.received, identity=unedited)
            self.machine.took(last)

    def finish(self, ending: Any) -> None:
        self.endings.append(ending)

    def answer(self, question: Any, answer: Any) -> None:
        self.answers.append((question, answer))

    def drop(self) -> None:
        self.num_dropped += 1

    def look(self) -> None:
        if not self.is_silent:
            self.machine.note_sign()

    def note_lost(self, why: str) -> None:
        self.lost.append(why)

    def step(self) -> None:
        """One turn of the loop, without anything that has come."""
        self.do(self.machine.seek(self.at))
        if self.machine.state in SERVED:
            slots, self.slots = self.slots, ()
            self.do(self.machine.tell_used(self.at, slots))
        self.do(self.machine.tick(self.at))

    def pass_time(self, seconds: float) -> None:
        """Let so many seconds go by, and have done what is due on the way."""
        ends, turns = self.now + seconds, 0
        while (due := self.machine.next_deadline) <= ends and self.machine.state != "over":
            self.now = max(self.now, due)
            self.step()
            turns += 1
            assert turns < 10_000, "it turns round and round"
        self.now = max(self.now, ends)
        self.step()

    def hear(self, message: say.Message) -> None:
        self.do(self.machine.hear(message, self.at))

    # ---- what a server says

    def give(self, replicas: int = 1) -> None:
        self.num_given += 1
        self.generation = b"%024d" % self.num_given
        self.hear(say.Opened(
            generation=self.generation, credit=0, shared=None, lease_s=LEASE_S, length=None,
            name="x", number=0, fingerprint=b"", epochs=None, token=b"start", writable=False,
            replicas=replicas,
        ))  # fmt: skip

    def say_spec(self) -> None:
        self.hear(say.Spec(generation=self.generation, batch_size=1, columns=()))

    def say_batch(self) -> None:
        self.hear(say.Batches(generation=self.generation, groups=()))

    def say_end(self) -> None:
        self.hear(say.End(generation=self.generation, sequence=0, token=b"end"))

    def say_fault(self, kind: str = "FeedError", sequence: int | None = None) -> None:
        self.hear(say.Fault(
            generation=self.generation, sequence=sequence, kind=kind, text="it broke", fields={},
            note="",
        ))  # fmt: skip

    def say_waiting(self, queues: tuple[int, ...] = (), ended: tuple[int, ...] = ()) -> None:
        self.hear(say.Waiting(generation=self.generation, queues=queues, ended=ended))

    def say_state(self, data: bytes | None, receipt: bytes) -> None:
        self.hear(say.State(generation=self.generation, data=data, receipt=receipt))

    def say_farewell(self) -> None:
        self.hear(say.Farewell(generation=b"", reason="it stops"))

    def break_off(self, error: FeedError | None = None, *, is_server: bool = True) -> None:
        error = error or TransportError("the connection broke")
        self.do(self.machine.trouble(error, self.at, reached_at=self.now, is_server=is_server))


def running(options: ConsumerOptions = OPTIONS) -> Shell:
    shell = Shell(options)
    shell.step()
    shell.give()
    shell.say_spec()
    shell.say_batch()
    return shell


class Facts:
    """The same consumer in plain facts: what is so, without a word of what that leads to."""

    def __init__(self, options: ConsumerOptions) -> None:
        self.rejoins = options.rejoins
        self.holds = self.has_run = self.has_all = self.is_refused = self.is_answered = False
        self.wants = True
        self.leaves = self.is_over = False
        self.ended: tuple[int, ...] = ()

    def loses(self) -> None:
        if self.leaves and self.holds:
            self.is_over = True
        elif self.holds and self.is_refused:
            self.wants = False
        elif self.has_run or self.has_all or self.ended:
            self.rejoins = True
        self.holds = self.is_answered = False

    def check(self, machine: ClientMachine) -> None:
        assert (machine.state == "over") == self.is_over
        if self.is_over:
            return
        assert (machine.state == "leaving") == (self.leaves and self.holds)
        assert (machine.state in HOLDS) == (self.holds and not self.leaves)
        assert (machine.state in SEEKS) == (self.wants and not self.holds)
        assert (machine.state in ANSWERED) == (self.is_answered and not self.leaves)
        if self.wants and not self.is_refused:
            assert (machine.state in HAS_ALL) == (self.has_all and not (self.leaves and self.holds))


def always(world: World) -> bool:
    return True


def asking(world: World) -> bool:
    return world.shell.is_connected and not world.facts.holds and not world.facts.is_over


def held(world: World) -> bool:
    """Whether a server that serves it may say something."""
    return world.shell.is_connected and world.facts.holds and not world.facts.leaves


def streams(world: World) -> bool:
    return held(world) and world.shell.machine._protocol.state == "streaming"


def event(may_be: Callable[[World], bool]) -> Callable[..., Any]:
    """Something that may happen if `may_be`; afterwards the loop has a turn."""

    def wrap(function: Callable[..., None]) -> Any:
        @wraps(function)
        def happens(world: World) -> None:
            opens = len(world.shell.opens)
            function(world)
            world.facts.wants &= not world.facts.is_over
            world.shell.step()
            if len(world.shell.opens) > opens:
                world.check_asked(world.shell.opens[-1])

        return rule()(precondition(may_be)(happens))

    return wrap


class World(RuleBasedStateMachine):
    """Random events, for the machine and for its facts."""

    @initialize(rejoins=st.booleans(), runs=st.booleans(), seed=st.integers(0, 2**32))
    def begins(self, rejoins: bool, runs: bool, seed: int) -> None:
        random.seed(seed)
        options = OPTIONS._replace(rejoins=rejoins)
        self.options, self.shell, self.facts = options, Shell(options), Facts(options)
        self.num_asked, self.receipt = 0, b""
        self.shell.step()
        if runs:
            self.shell.give()
            self.shell.say_spec()
            self.shell.say_batch()
            self.facts.holds = self.facts.has_run = self.facts.is_answered = True

    # ---- what servers say

    @event(asking)
    def give(self) -> None:
        self.shell.give()
        self.receipt = b""
        self.facts.holds, self.facts.is_answered = True, not self.facts.leaves

    @event(asking)
    def refuse(self) -> None:
        self.shell.generation = b""
        # Who comes back has a position of its own: that it is wrong ends the search, too.
        self.shell.say_fault("ResumeError" if self.facts.rejoins else "LeaseLost")
        self.facts.wants, self.facts.is_over = False, self.facts.leaves

    @event(lambda world: asking(world) and bool(world.shell.num_given))
    def refuse_a_start(self) -> None:
        machine, opens = self.shell.machine, len(self.shell.opens)
        if self.facts.rejoins or not machine._dealt or machine._num_opens >= say.MAX_OPENS:
            return
        self.shell.generation = b""
        self.shell.say_fault("ResumeError")
        self.facts.rejoins = True
        assert len(self.shell.opens) == opens + 1, "it asks once more, over the same connection"

    @event(lambda world: streams(world) and not world.facts.has_all)
    def spec(self) -> None:
        self.shell.say_spec()
        self.facts.has_run = True

    @event(lambda world: streams(world) and world.facts.has_run and not world.facts.has_all)
    def batch(self) -> None:
        self.shell.say_batch()

    @event(streams)
    def end(self) -> None:
        self.shell.say_end()
        self.facts.has_all = True

    @event(held)
    def fails(self) -> None:
        self.shell.say_fault(sequence=0)
        self.facts.is_refused = True

    @event(held)
    def expels(self) -> None:
        self.shell.say_fault()
        self.facts.is_refused, self.facts.is_answered = True, False

    @event(streams)
    def waits(self) -> None:
        self.shell.say_waiting(queues=(1,))
        self.facts.ended = ()

    @event(streams)
    def others_end(self) -> None:
        self.shell.say_waiting(ended=(1, 2))
        self.facts.ended = (1, 2)

    @event(lambda world: world.shell.is_connected and not world.facts.is_over)
    def farewell(self) -> None:
        facts = self.facts
        if facts.has_all and not (facts.leaves and facts.holds):
            facts.wants, facts.is_over = False, facts.leaves
        self.shell.say_farewell()
        facts.loses()

    @event(lambda world: world.shell.is_connected and not world.facts.is_over)
    def breaks(self) -> None:
        self.shell.break_off()
        self.facts.loses()

    @event(lambda world: world.shell.is_connected and not world.facts.is_over)
    def stale(self) -> None:
        message = say.End(generation=b"-" * 24, sequence=0, token=b"wrong")
        assert self.shell.machine.hear(message, self.shell.at) == []

    @event(held)
    def spoil(self) -> None:
        error = ProtocolError("what came was changed on its way")
        self.shell.do(self.shell.machine.cannot_take(error, self.shell.at))
        if self.shell.endings and self.shell.endings[-1] is error:
            self.facts.wants = False
        self.facts.loses()

    @event(lambda world: streams(world) and world.shell.machine.options.plane != "frames")
    def limit(self) -> None:
        opens = self.shell.machine._num_opens
        self.shell.do(self.shell.machine.cannot_take(OwnLimitError("no memory"), self.shell.at))
        self.facts.holds, self.facts.is_answered, self.facts.rejoins = False, False, True
        assert self.shell.is_connected == (opens < say.MAX_OPENS)

    @event(lambda world: held(world) and world.shell.machine._asked is not None)
    def answer(self) -> None:
        asked = [one for one in self.shell.sent if isinstance(one, say.Snapshot)][-1]
        assert asked.receipt == self.receipt
        self.receipt = b"%08d" % len(self.shell.sent)
        self.shell.say_state(b"snapshot", self.receipt)

    # ---- what the user does

    @event(lambda world: world.shell.handed < world.shell.received)
    def hand(self) -> None:
        self.shell.begun, self.shell.handed = True, self.shell.handed + 1

    @event(always)
    def begin(self) -> None:
        self.shell.begun = True

    @event(lambda world: not world.shell.handed)
    def load(self) -> None:
        held = self.facts.holds
        self.shell.received, self.shell.begun = 0, False
        self.shell.do(self.shell.machine.load(b"loaded", self.shell.at))
        if not self.facts.leaves and not self.facts.is_over:
            self.facts = Facts(self.options)
            assert not (held and self.shell.is_connected) or (
                self.shell.opens[-1].token == b"loaded"
            )

    @event(always)
    def close(self) -> None:
        facts, shell = self.facts, self.shell
        tells = facts.has_all and facts.wants and shell.handed == shell.received
        goes_on = (facts.holds or tells) and not facts.leaves
        shell.do(shell.machine.close(shell.at))
        facts.is_over, facts.leaves = facts.is_over or not goes_on, True

    @event(always)
    def ask(self) -> None:
        self.num_asked += 1
        question = SimpleNamespace(given_up=False, number=self.num_asked)
        self.shell.do(self.shell.machine.ask_snapshot(question, self.shell.at))

    @rule(seconds=st.sampled_from((0.3, 1.5, 9.0, 25.0)), is_silent=st.booleans())
    def time_passes(self, seconds: float, is_silent: bool) -> None:
        facts, machine = self.facts, self.shell.machine
        ends, opens = machine._give_up_at, len(self.shell.opens)
        self.shell.is_silent = is_silent
        self.shell.pass_time(seconds)
        assert not (is_silent and seconds > LEASE_S + 1.0 and machine.state in SERVED)
        if not facts.holds or facts.leaves:
            # Nobody has answered for too long, or the goodbye has had no answer.
            facts.wants = facts.wants and self.shell.now < ends
            facts.is_over = facts.is_over or (facts.leaves and self.shell.now >= ends)
        elif machine.state not in HOLDS:
            # It has left a server that was silent, or long lacked others, who may be elsewhere.
            assert is_silent or say.Bye in map(type, self.shell.sent)
            assert not facts.is_refused
            facts.loses()
            facts.wants = self.shell.now < machine._give_up_at
        facts.wants &= not facts.is_over
        if len(self.shell.opens) > opens:
            self.check_asked(self.shell.opens[-1])

    # ---- what holds

    def check_asked(self, asked: say.Open) -> None:
        assert (asked.intent == "rejoin") == self.facts.rejoins
        assert asked.ended == self.facts.ended
        assert asked.takeover == (not self.shell.num_given)

    @invariant()
    def is_as_its_facts_are(self) -> None:
        if hasattr(self, "facts"):
            self.facts.check(self.shell.machine)

    @invariant()
    def answers_each_question_once(self) -> None:
        if hasattr(self, "facts"):
            answered = [question.number for question, _ in self.shell.answers]
            machine = self.shell.machine
            waits = [*machine._questions, *([machine._asked] if machine._asked else [])]
            assert sorted([*answered, *(one.number for one in waits)]) == [
                *range(1, self.num_asked + 1)
            ]
            assert not waits or self.facts.is_answered

    @invariant()
    def speaks_of_one_lease_after_the_other(self) -> None:
        """Each question is counted, and nothing comes after a goodbye."""
        sent = self.shell.sent if hasattr(self, "facts") else []
        generation, has_left, num = b"", False, 0
        for one in sent:
            if isinstance(one, say.Open):
                generation, has_left, num = b"", False, num + 1
                assert one.attempt == num
                continue
            assert not has_left, f"{one} comes after the goodbye"
            generation = generation or one.generation
            assert one.generation == generation
            has_left = isinstance(one, say.Bye)


test_it_is_as_its_facts_are = World.TestCase
test_it_is_as_its_facts_are.settings = settings(max_examples=150, stateful_step_count=30)


# ---- one by one


def test_it_asks_where_it_stands() -> None:
    shell = Shell(token=b"token")
    shell.step()
    assert (shell.opens[0].token, shell.opens[0].skip, shell.opens[0].takeover) == (
        b"token",
        3,
        True,
    )
    shell.give()
    shell.break_off()
    shell.step()
    assert (shell.opens[1].token, shell.opens[1].skip, shell.opens[1].takeover) == (
        b"start",
        0,
        False,
    )
    shell.give()
    shell.say_spec()
    shell.say_batch()
    shell.break_off()
    shell.step()
    assert (shell.opens[2].token, shell.opens[2].intent) == (b"after 1", "rejoin")
    shell.give()
    shell.say_end()
    shell.break_off()
    shell.step()
    assert (shell.opens[3].token, shell.opens[3].intent) == (b"end", "rejoin")


@pytest.mark.parametrize(
    ("token", "begun", "received", "undecided"),
    [
        (None, False, 0, True),
        (b"", False, 0, False),
        (None, True, 0, False),
        (None, False, 1, False),
    ],
)
def test_who_may_still_load_a_state_is_undecided(
    token: bytes | None, begun: bool, received: int, undecided: bool
) -> None:
    shell = Shell(token=token)
    shell.begun, shell.received = begun, received
    shell.step()
    assert shell.opens[0].undecided == undecided


def test_what_was_used_is_told_with_what_earlier_leases_left() -> None:
    shell = running()
    shell.break_off()
    shell.step()
    shell.give()
    shell.sent.clear()
    shell.step()
    assert shell.sent == [], "one batch of the lease before is pending, as the server takes it"
    shell.begun = True
    shell.step()
    shell.handed = 1
    for _ in range(2):
        shell.step()
    assert [(one.used, one.begun) for one in shell.sent] == [(-1, True), (0, True)]
    shell.slots = (7,)
    shell.step()
    assert shell.sent[2].slots == (7,)
    shell.pass_time(0.49)
    assert len(shell.sent) == 3
    shell.pass_time(0.02)
    assert len(shell.sent) == 4, "the lease is renewed"


@pytest.mark.parametrize(("error", "most"), [
    (ProtocolError("wrong bytes"), 1), (TransportError("no memory"), 10), (FeedError("else"), 0),
])  # fmt: skip
def test_what_cannot_be_taken_is_asked_for_again_so_often(error: FeedError, most: int) -> None:
    for batches in (0, 1):
        shell = running()
        for num in range(most + batches):
            shell.do(shell.machine.cannot_take(error, shell.at))
            assert not shell.endings or num == most
            shell.step()
            if shell.machine.state in SEEKS:
                shell.give()
                shell.say_spec()
            if batches and num == 0 and most:
                shell.say_batch()
        shell.do(shell.machine.cannot_take(error, shell.at)) if shell.is_connected else None
        assert (shell.machine.state, shell.endings) == ("idle", [error])


def test_after_a_load_it_counts_anew_what_cannot_be_taken() -> None:
    shell, error = running(), ProtocolError("wrong bytes")
    shell.do(shell.machine.cannot_take(error, shell.at))
    shell.received = 0
    shell.do(shell.machine.load(b"loaded", shell.at))
    shell.step()
    shell.give()
    shell.say_spec()
    shell.do(shell.machine.cannot_take(error, shell.at))
    assert (shell.machine.state, shell.endings) == ("returning", [])


def test_a_client_is_refused_by_all_or_by_none() -> None:
    shell = Shell()
    shell.step()
    shell.break_off(AuthError("a refuses"))
    shell.step()
    assert (shell.machine.state, shell.addresses) == ("starting", ["a", "b"])
    shell.break_off(AuthError("b refuses"))
    assert (shell.machine.state, str(shell.endings[0])) == ("idle", "b refuses")
    shell = running()
    for _ in range(4):
        shell.break_off(AuthError("it is being stopped"))
        shell.step()
    assert (shell.machine.state, shell.endings) == ("returning", [])


def test_a_client_that_was_let_in_before_and_is_refused_now_is_told_so() -> None:
    shell = running()
    shell.break_off()
    assert shell.lost == ["the connection broke"]
    for _ in range(3):
        shell.step()
        shell.break_off(AuthError("server.key here is another"))
    assert shell.lost[1:] == ["server.key here is another"], "once for a search"
    shell.step()
    shell.give()
    shell.break_off()
    shell.step()
    shell.break_off(AuthError("another again"))
    assert shell.lost[2:] == ["the connection broke", "another again"]
    shell.now += OPTIONS.reconnect_s + 1
    shell.step()
    (error,) = shell.endings
    assert isinstance(error, ConnectTimeout)
    assert str(error).endswith("does `feeder serve` run there?; another again")


@pytest.mark.parametrize("answers", [True, False])
def test_who_used_everything_and_lost_its_server_says_goodbye_at_the_next(answers: bool) -> None:
    shell = running()
    shell.say_end()
    shell.break_off()
    shell.step()
    shell.handed = 1
    shell.do(shell.machine.close(shell.at))
    assert shell.machine.state == "closing"
    shell.give()
    assert (shell.machine.state, type(shell.sent[-1]), shell.num_dropped) == ("leaving", say.Bye, 1)
    if answers:
        shell.say_farewell()
    else:
        shell.pass_time(1.0)
    assert shell.machine.state == "over"


@pytest.mark.parametrize("handed", [0, 1])
def test_a_goodbye_has_its_time(handed: int) -> None:
    shell = running()
    shell.say_end()
    shell.break_off()
    shell.step()
    shell.handed = handed
    shell.do(shell.machine.close(shell.at))
    assert shell.machine.state == ("closing" if handed else "over")
    shell.pass_time(1.0)
    assert (shell.machine.state, shell.endings[1:]) == ("over", [])


def test_what_listens_and_is_no_server_is_not_asked_again_at_once() -> None:
    for is_server, waits in ((True, False), (False, True)):
        shell = Shell(OPTIONS._replace(addresses=("a",)))
        shell.step()
        shell.break_off(is_server=is_server)
        assert (shell.machine.next_deadline > shell.now) == waits
        shell.step()
        assert shell.is_connected != waits
        shell.pass_time(2.0)
        assert shell.is_connected


def test_a_server_that_lacks_others_is_left_for_the_first_address() -> None:
    shell = Shell()
    shell.step()
    shell.break_off()
    shell.step()
    shell.give()
    shell.say_waiting(queues=(1,))
    shell.pass_time(LEASE_S - 0.1)
    assert (shell.machine.state, shell.addresses) == ("joined", ["a", "b"])
    shell.pass_time(LEASE_S + 1.0)
    assert (shell.machine.state, shell.addresses[2]) == ("starting", "a")
    assert say.Bye in map(type, shell.sent)


def test_a_server_that_is_silent_for_a_lease_is_left_for_the_next_address() -> None:
    shell = running()
    shell.is_silent = True
    shell.pass_time(2.0)
    assert shell.machine.describe_wait().startswith("the server answers and has none yet")
    shell.pass_time(LEASE_S - 2.5)
    told = "the server has been silent for {} s: it is stopped or overloaded, or the network to it "
    assert shell.machine.describe_wait() == f"{told.format(5)}is cut"
    assert (shell.machine.state, shell.lost) == ("running", [])
    shell.pass_time(1.5)
    assert (shell.machine.state, shell.addresses) == ("returning", ["a", "b"])
    assert shell.lost == [f"{told.format(6)}is cut"]


def test_only_time_in_which_it_looked_counts_as_silence() -> None:
    """It was stopped itself: the answers lie there, and are read after its clock."""
    shell = running()
    shell.is_silent = True
    for _ in range(3):
        shell.now += 10 * LEASE_S
        shell.step()
    assert shell.machine.state == "running"


def test_an_answer_ends_the_silence_and_says_nothing_new() -> None:
    shell = running()
    shell.say_waiting(queues=(1,), ended=(2,))
    shell.say_batch()
    assert not shell.machine.waits_for_others
    shell.is_silent = True
    for _ in range(5):
        shell.pass_time(LEASE_S - 1.0)
        shell.say_waiting(queues=(1,), ended=(2,))
        assert (shell.machine.state, shell.machine.waits_for_others) == ("running", False)
    shell.say_waiting(queues=(1,), ended=())
    assert shell.machine.waits_for_others


def test_another_number_of_trainers_is_another_feed() -> None:
    shell = running()
    shell.break_off()
    shell.step()
    with pytest.raises(FeedError, match="replicas: 1 then, 2 now"):
        shell.give(replicas=2)
    shell.do(shell.machine.load(b"loaded", shell.at))
    shell.step()
    shell.give(replicas=2)
    assert shell.machine.state == "joined"


def test_questions_are_asked_one_after_the_other() -> None:
    shell = running()
    shell.handed = 1
    first, left, last = (SimpleNamespace(given_up=number == 1) for number in range(3))
    for one in (first, left, last):
        shell.do(shell.machine.ask_snapshot(one, shell.at))
    assert [one.receipt for one in shell.sent if isinstance(one, say.Snapshot)] == [b""]
    shell.say_state(b"rows", b"12345678")
    assert shell.answers == [(first, b"rows")]
    asked = [one for one in shell.sent if isinstance(one, say.Snapshot)]
    assert [one.receipt for one in asked] == [b"", b"12345678"]
    shell.say_state(None, b"87654321")
    assert "more than 256 MiB" in str(shell.answers[1][1])
    with pytest.raises(ProtocolError, match="was not asked for"):
        shell.say_state(b"rows", b"12345678")


def test_a_question_nobody_answers_is_refused() -> None:
    shell = Shell()
    question = SimpleNamespace(given_up=False)
    shell.do(shell.machine.ask_snapshot(question, shell.at))
    assert "no server at a, b (idle)" in str(shell.answers[0][1])
    shell = running()
    shell.do(shell.machine.ask_snapshot(question, shell.at))
    shell.say_fault("LeaseLost")
    shell.do(shell.machine.ask_snapshot(question, shell.at))
    assert [str(answer) for _, answer in shell.answers] == [
        "no snapshot: it broke; use state_dict()"
    ] * 2
    assert all(isinstance(answer, RemoteError) for _, answer in shell.answers)


def test_a_server_is_not_asked_for_what_came_before_it() -> None:
    shell = running()
    shell.break_off()
    shell.step()
    shell.give()
    early, late = (SimpleNamespace(given_up=False) for _ in range(2))
    shell.do(shell.machine.ask_snapshot(early, shell.at))
    ((asked, answer),) = shell.answers
    assert asked is early and "the server does not know the leftover rows" in str(answer)
    shell.handed = 1
    shell.do(shell.machine.ask_snapshot(late, shell.at))
    assert [one.sequence for one in shell.sent if isinstance(one, say.Snapshot)] == [0]


def test_who_has_failed_looks_for_no_server() -> None:
    for sequence in (1, None):
        shell = running()
        shell.say_fault(sequence=sequence)
        shell.break_off()
        shell.step()
        assert (shell.machine.state, len(shell.opens)) == ("idle", 1)
        assert shell.machine.next_deadline == math.inf


def test_who_knows_of_a_run_comes_back_alone_though_it_had_no_batch() -> None:
    shell = Shell()
    shell.step()
    shell.give()
    shell.say_waiting(ended=(1,))
    shell.break_off()
    shell.step()
    assert (shell.opens[1].intent, shell.opens[1].ended) == ("rejoin", (1,))
    shell.do(shell.machine.load(b"loaded", shell.at))
    shell.step()
    assert (shell.opens[2].intent, shell.opens[2].ended) == ("start", ())


def test_what_is_said_of_the_lease_before_a_load_is_not_heard() -> None:
    shell = running()
    shell.received = 0
    shell.do(shell.machine.load(b"loaded", shell.at))
    assert [type(one) for one in shell.sent[-2:]] == [say.Bye, say.Open]
    assert shell.is_connected
    shell.say_batch()
    shell.say_end()
    assert (shell.received, shell.machine.state) == (0, "starting")


def test_who_cannot_map_memory_asks_for_frames_once() -> None:
    shell = running()
    shell.do(shell.machine.cannot_take(OwnLimitError("no descriptors"), shell.at))
    assert shell.is_connected
    assert (shell.opens[1].intent, shell.opens[1].boot_id) == ("rejoin", "")
    shell = running(OPTIONS._replace(plane="shared"))
    shell.do(shell.machine.cannot_take(OwnLimitError("no descriptors"), shell.at))
    assert (shell.machine.state, type(shell.endings[0])) == ("idle", TransportError)


def test_with_the_connection_questions_and_their_receipts_are_over() -> None:
    shell = running()
    first, second = SimpleNamespace(given_up=False), SimpleNamespace(given_up=False)
    shell.do(shell.machine.ask_snapshot(first, shell.at))
    shell.handed = 1
    shell.say_state(b"rows", b"12345678")
    shell.do(shell.machine.ask_snapshot(first, shell.at))
    shell.break_off()
    assert "the connection has ended" in str(shell.answers[1][1])
    shell.step()
    shell.give()
    shell.do(shell.machine.ask_snapshot(second, shell.at))
    asked = [one for one in shell.sent if isinstance(one, say.Snapshot)]
    assert [(one.sequence, one.receipt) for one in asked] == [(0, b""), (1, b"12345678"), (0, b"")]
