"""Edits of a feed while it is served: the same as to stop, save and resume with `edit=`."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from feeder.checkpoint.transcript import read_file
from feeder.service.server.editing import Change
from feeder.state.fingerprint import fingerprint_digest
from feeder.state.snapshot import Snapshot
from feeder.state.token import StreamId
from served import Aside, Server, outside, pass_time, process_of, reading, serving, wait_until

pytestmark = pytest.mark.usefixtures("world")

FIRSTS = {"web": 0, "code": 10_000, "books": 20_000}


def mixed(mode: Any = "drop", **weights: Any) -> Any:
    given = {
        name: (sources.arrays(np.arange(60) + FIRSTS[name]).shuffle(seed=1), weight)
        for name, weight in weights.items()
    }
    return sources.mix(given, on_exhausted=mode)


def feed(source: Any, resume: Any = None, **settings: Any) -> Any:
    if "global_batch_size" not in settings:
        settings.setdefault("batch_size", 4)
    return feeder.init_data_input_workers(
        ["x"], source, coordinator=feeder.Coordinator(), resume=resume, **settings
    )


def edit(server: Server, why: str = "because", seed: int | None = None, **given: Any) -> int:
    sizes = {k: given.pop(k) for k in [*given] if k.endswith("batch_size")}
    weights = {name: Fraction(weight) for name, weight in given.items()}
    step = server.group.edit(Change(weights, sizes, seed), why)
    server.notify()
    return step


def test_one_queue_goes_on_with_other_weights() -> None:
    with (
        serving(lambda: feed(mixed(web=7, code=3))) as server,
        reading(server, plane="frames", credit=4) as consumer,
    ):
        rows = [batch["x"].tolist() for batch in islice(consumer, 5)]
        step = edit(server, web=1, code=1)
        assert 5 <= step <= 9
        rows += [batch["x"].tolist() for batch in consumer]
    with outside(), feed(mixed(web=7, code=3)) as coordinator:
        plain = [batch["x"].tolist() for batch in islice(coordinator["train"], step)]
        state = coordinator.state_dict()
        with feed(mixed(web=1, code=1), state, edit="because") as other:
            plain += [batch["x"].tolist() for batch in other["train"]]
    assert rows == plain


class Program:
    """A random served feed, and random edits of it."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.queues = draw.choice([1, 1, 2, 3])
        self.replicas = draw.choice([1, 1, 1, 2])
        self.mode = draw.choice(["drop", "repeat", "stop"])
        self.weights = {name: draw.randint(1, 5) for name in [*FIRSTS][: draw.randint(1, 3)]}
        self.size = {"batch_size": draw.randint(1, 5)}
        if self.queues > 1 and draw.random() < 0.3:
            self.size = {"global_batch_size": self.queues * draw.randint(1, 4)}
        self.settings: dict[str, Any] = {
            "devices": self.queues, "epochs": draw.choice([1, 2, 3]),
            "last_batch": draw.choice(["keep", "drop", "pad"]),
            "last_round": draw.choice(["uneven", "drop", "pad"]),
        }  # fmt: skip

    def feed(self, weights: dict[str, int], resume: Any = None, **settings: Any) -> Any:
        return feed(mixed(self.mode, **weights), resume, **{**self.settings, **settings})

    def change(self) -> dict[str, Any]:
        """The words of an edit."""
        draw = self.draw
        words: dict[str, Any] = {}
        if draw.random() < 0.7:
            words["weights"] = {name: draw.randint(0, 5) for name in self.weights}
            words["weights"][draw.choice([*self.weights])] = draw.randint(1, 5)
        if draw.random() < 0.3:
            words["seed"] = draw.randint(0, 9)
        if draw.random() < 0.3 and (self.queues == 1 or draw.random() < 0.2):
            (size,) = self.size
            share = self.queues if size == "global_batch_size" else 1
            words["sizes"] = {size: share * draw.randint(1, 5)}
        return words


class Run:
    """A random program as it is served."""

    def __init__(self, seed: int, stack: ExitStack) -> None:
        self.program, self._stack = Program(seed), stack
        self.draw, self.counted = self.program.draw, Counter[str]()
        program = self.program
        self.seats = [(q, r) for q in range(program.queues) for r in range(program.replicas)]
        self.server = self._serve()
        self.consumers = {
            (queue, replica): stack.enter_context(reading(
                self.server, queue=queue, replica=replica, credit=self.draw.randint(1, 6), hold=30,
                plane=self.draw.choice(["frames", "shared"]),
            ))
            for queue, replica in self.seats
        }  # fmt: skip
        self.left = set(self.seats)
        self.came: dict[tuple[int, int], dict[int, list[int]]] = {seat: {} for seat in self.seats}
        self.made: list[tuple[int, str, dict[str, Any]]] = []
        self.states: list[Any] = []

    def _serve(self, address: str = "") -> Server:
        program = self.program
        return self._stack.enter_context(serving(
            lambda: program.feed(program.weights, **program.size), address,
            queues=program.queues, replicas=program.replicas,
        ))  # fmt: skip

    def read(self, most_ahead: int = 0) -> None:
        """One batch of a consumer that is not far ahead, as queues hold so many."""
        seat = min(
            self.left, key=lambda one: len(self.came[one]) + self.draw.randint(0, most_ahead)
        )
        batch = next(self.consumers[seat], None)
        if batch is None:
            self.left.discard(seat)
            return
        assert batch.step not in self.came[seat]
        self.came[seat][batch.step] = batch["x"].tolist()

    def note_state(self) -> None:
        self.states.append(self.consumers[self.draw.choice(self.seats)].state_dict())

    def edit(self, why: str) -> bool:
        """Make an edit, if it can be; whether it was."""
        words, members = self.program.change(), self.server.group.membership.members
        weights = {k: Fraction(v) for k, v in words.get("weights", {}).items()}
        change = Change(weights, words.get("sizes", {}), words.get("seed"))
        sent = [0 if one.sent_to is None else one.sent_to.step for one in members]
        try:
            step = self.server.group.edit(change, why)
        except feeder.FeedError as error:
            self.counted[str(error)[:40]] += 1
            return False
        self.server.notify()
        assert step % self.program.queues == 0
        assert all(step > max(rows, default=-1) for rows in self.came.values())
        self.made.append((step, why, words))
        self.counted["edits"] += 1
        self.counted["behind"] += min(sent) + self.program.queues <= step
        self.note_state()
        if self.draw.random() < 0.5:
            wait_until(lambda: all(member.has_attached for member in members))
            self.note_state()
        return True

    def kill(self) -> None:
        """Kill the server; another one begins with the feed call that the first one had."""
        pass_time(self.draw.random() * 0.05)
        self.server.kill()
        # Whoever has been given the queue since the edit brings it.
        identities = [one._loop.machine._identity for one in self.consumers.values()]
        known = max(len(history_of(one.fingerprint)) for one in identities)
        self.counted["lost"] += known < len(self.made)
        self.counted["kills"] += 1
        del self.made[known:]
        self.server = self._serve(self.server.address)


def run(seed: int, *, kills: bool = False) -> Counter[str]:
    """What a random program did; checks that it is stops and resumes with the same edits. With
    `kills` servers are killed, and begin anew with the feed call that they had at first."""
    with ExitStack() as stack:
        one = Run(seed, stack)
        draw, made = one.draw, one.made
        for number in range(draw.randint(1, 3)):
            for _ in range(draw.randint(0, 15) * len(one.seats)):
                if one.left:
                    one.read(most_ahead=3)
            if one.edit(f"{number}") and kills and draw.random() < 0.7:
                one.kill()
        while one.left:
            one.read()
            if draw.random() < 0.05:
                one.note_state()
    with outside():
        plain = naive(one.program, made)
        for (queue, _), rows in one.came.items():
            wanted = {step: row for step, (of, row) in plain.items() if of == queue}
            assert rows == wanted, (seed, made)
        for state in one.states[-8:]:
            one.counted["resumes"] += check_resume(one.program, made, plain, state)
    one.counted["batches"] += len(plain)
    return one.counted


def history_of(fingerprint: Any) -> Any:
    """The edits of a run."""
    return fingerprint.get("source.history", [0, [], []])[2]


def check_resume(program: Program, made: Any, plain: dict[int, Any], state: Any) -> bool:
    """A position goes on as the run does up to the edits that it does not have; whether it can."""
    (found,) = Snapshot.from_bytes(state["feeder"]).states
    history = history_of(found.fingerprint)
    known = [(step, why) for step, why, _ in made[: len(history)]]
    assert [(one[3], one[4]) for one in history] == known
    weights, settings = program.weights, dict(program.size)
    for _, _, words in made[: len(history)]:
        weights = words.get("weights", weights)
        settings |= words.get("sizes", {})
        settings |= {"seed": words["seed"]} if "seed" in words else {}
    end = made[len(history)][0] if len(history) < len(made) else math.inf
    try:
        coordinator = program.feed(weights, state, **settings)
    except feeder.ResumeError as error:
        assert "from which on batches have another size" in str(error)
        return False
    came = {}
    with coordinator:
        devices = [coordinator["train"].on(i) for i in range(program.queues)]
        while batches := [batch for one in devices if (batch := next(one, None)) is not None]:
            came |= {batch.step: (i, batch["x"].tolist()) for i, batch in enumerate(batches)}
    if not came:
        assert found.summary[2] > max(plain) - program.queues
        return True
    assert found.summary[2] <= min(came) < found.summary[2] + program.queues
    wanted = {step: row for step, (_, row) in plain.items() if min(came) <= step < end}
    assert {step: row for step, (_, row) in came.items() if step < end} == wanted
    return True


def naive(program: Program, made: list[tuple[int, str, dict[str, Any]]]) -> dict[int, Any]:
    """The batches of the same run in process, which is stopped and resumed at each edit."""
    came: dict[int, Any] = {}
    weights, size, seed, state, why = program.weights, program.size, 0, None, None
    for number in range(len(made) + 1):
        with program.feed(weights, state, seed=seed, edit=why, **size) as coordinator:
            train = coordinator["train"]
            devices = [train.on(i) for i in range(program.queues)]
            until = made[number][0] if number < len(made) else 10**9
            left, at = set(range(program.queues)), max([-1, *came]) + 1
            while left and at < until:
                for i in sorted(left):
                    batch = next(devices[i], None)
                    if batch is None:
                        left.discard(i)
                        continue
                    came[batch.step] = i, batch["x"].tolist()
                at += program.queues
            state = coordinator.snapshot()
        if number < len(made):
            _, why, words = made[number]
            weights, size = words.get("weights", weights), words.get("sizes", size)
            seed = words.get("seed", seed)
            weights = {name: weight for name, weight in weights.items()}
    return came


@pytest.mark.served
@pytest.mark.parametrize("seed", range(6))
def test_an_edit_of_a_served_feed_is_a_stop_and_a_resume(seed: int) -> None:
    run(seed)


@pytest.mark.served
@pytest.mark.parametrize("seed", range(100, 104))
def test_it_is_so_where_servers_are_killed_and_begin_without_it(seed: int) -> None:
    run(seed, kills=True)


def factory() -> Any:
    return feed(mixed(web=7, code=3), devices=2)


def in_process(step: int) -> dict[int, list[int]]:
    """The batches of a run that is edited at a step."""
    with outside(), ExitStack() as stack:
        coordinator = stack.enter_context(factory())
        train, came = coordinator["train"], {}
        for _ in range(step // 2):
            for i in range(2):
                batch = next(train.on(i))
                came[batch.step] = batch["x"].tolist()
        state = coordinator.state_dict()
        coordinator = stack.enter_context(
            feed(mixed(web=1, code=1), state, devices=2, edit="because")
        )
        devices = [coordinator["train"].on(i) for i in range(2)]
        while batches := [batch for one in devices if (batch := next(one, None)) is not None]:
            came |= {batch.step: batch["x"].tolist() for batch in batches}
    return came


@pytest.mark.parametrize("restarts", ["resume", "alone", "old first", "new first"])
def test_a_server_that_begins_anew_takes_the_edit_from_a_position(restarts: str) -> None:
    """Also if one consumer has not heard of the edit when the server is killed."""
    came: dict[int, list[int]] = {}
    with ExitStack() as stack:
        server = stack.enter_context(serving(factory))
        settings: Any = {"credit": 2, "hold": 30}
        both = [stack.enter_context(reading(server, queue=i, **settings)) for i in range(2)]

        def read(i: int, num: int = 1) -> None:
            for batch in islice(both[i], num):
                assert batch.step not in came
                came[batch.step] = batch["x"].tolist()

        for _ in range(4):
            read(0), read(1)
        processes = [process_of(one) for one in both]
        if "first" in restarts:
            processes[0].pause()
        step = edit(server, web=1, code=1)
        if restarts == "resume":
            read(0, 3), read(1, 3)
            state = server.group.state()
            server.kill()
            stack.enter_context(serving(
                factory, server.address, resume=bytes(Snapshot((state,)))
            ))  # fmt: skip
        elif restarts == "alone":
            read(0, 3), read(1, 3)
            server.kill()
            stack.enter_context(serving(factory, server.address))
        else:
            wait_until(lambda: both[1]._loop.inbox.num_opened == 2)
            server.kill()
            first, second = (0, 1) if restarts == "old first" else (1, 0)
            for process in processes:
                process.pause()
            server = stack.enter_context(serving(factory, server.address))
            processes[first].go_on()
            wait_until(lambda: server.group.membership.members[first].has_attached)
            processes[second].go_on()
        while both:
            for one in list(both):
                if (batch := next(one, None)) is None:
                    both.remove(one)
                    continue
                assert batch.step not in came
                came[batch.step] = batch["x"].tolist()
    assert came == in_process(step)


def new_factory(**settings: Any) -> Any:
    return feed(mixed(web=1, code=1), devices=2, **settings)


def saved_around_an_edit(
    older: int, make: Any = factory, rounds: int = 1
) -> tuple[list[Any], int, dict[int, Any]]:
    """The positions of two trainers after some rounds, of which one had not heard of an edit, the
    step of the edit, and the batches from there on."""
    states: list[Any] = [None, None]
    with serving(make) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=i, credit=4)) for i in range(2)]
        wait_until(lambda: [one.sent for one in server.group.membership.members] == [4, 4])
        for _ in range(rounds):
            next(both[0]), next(both[1])
        states[older] = both[older].state_dict()
        step = edit(server, web=1, code=1)
        wait_until(lambda: all(one.has_attached for one in server.group.membership.members))
        states[1 - older] = both[1 - older].state_dict()
        rest = {batch.step: batch["x"].tolist() for _ in range(5) for batch in map(next, both)}
    found = [Snapshot.from_bytes(state["feeder"]).states[0] for state in states]
    assert [len(history_of(one.fingerprint)) for one in found] == [older, 1 - older]
    return states, step, rest


def check_mixed_start(make: Any, states: list[Any], order: list[int], rest: dict[int, Any]) -> Any:
    """Trainers that come in some order go on from there; returns the server's history."""
    with serving(make) as server, ExitStack() as stack:
        consumers = {
            i: stack.enter_context(reading(server, queue=i, resume=states[i])) for i in order
        }
        came = {
            batch.step: batch["x"].tolist() for i in range(2) for batch in islice(consumers[i], 5)
        }
        assert came == rest
        return history_of(server.group.feed.factory.positions.fingerprint)


@pytest.mark.parametrize("older", [0, 1])
@pytest.mark.parametrize(
    ("make", "is_first"),
    [
        (factory, [False, True]),
        (new_factory, [False]),
        (lambda: new_factory(edit="because"), [False, True]),
    ],
    ids=["old", "new", "new with edit="],
)
def test_trainers_start_together_of_which_one_has_saved_before_the_edit(
    make: Any, is_first: list[bool], older: int
) -> None:
    """Whichever comes first, unless the server cannot know of the edit then."""
    states, step, rest = saved_around_an_edit(older)
    for comes_first in is_first:
        order = [older, 1 - older] if comes_first else [1 - older, older]
        (one,) = check_mixed_start(make, states, order, rest)
        assert one[3] == step


def test_they_do_so_within_a_call() -> None:
    """The last round of an epoch has a batch of the next one, which is half of a call."""
    settings: Any = {"devices": 2, "global_batch_size": 22, "epochs": 3}
    states, step, rest = saved_around_an_edit(1, lambda: feed(mixed(web=7, code=3), **settings), 6)
    new = lambda: feed(mixed(web=1, code=1), edit="because", **settings)  # noqa: E731
    (one,) = check_mixed_start(new, states, [1, 0], rest)
    assert one[3] == step


def test_a_place_that_a_mixed_start_has_given_up_counts_up_to_the_next_edit() -> None:
    states, step, rest = saved_around_an_edit(1)
    with serving(lambda: new_factory(edit="because")) as server, ExitStack() as stack:
        one = stack.enter_context(reading(server, queue=1, resume=states[1]))
        given_up = one.state_dict()
        assert given_up != states[1]
        other = stack.enter_context(reading(server, queue=0, resume=states[0]))
        one.close()
        with reading(server, queue=1, resume=given_up) as one:
            came = {
                batch.step: batch["x"].tolist()
                for _ in range(5)
                for batch in (next(other), next(one))
            }
            assert came == rest
            assert edit(server, seed=3) > step
            next(other), next(one)
        refused = pytest.raises(feeder.ResumeError, match="two histories")
        with refused, reading(server, queue=1, resume=given_up, rejoin=True):
            pass


@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (new_factory, r"to go on .* give edit='why'"),
        (lambda: new_factory(edit="other"),
         r"two histories.*given edit='other'.*'because' at step \d+: give edit='because'"),
    ],
    ids=["no edit=", "another edit="],
)  # fmt: skip
def test_a_mixed_start_that_cannot_be_names_its_cure(make: Any, cure: str) -> None:
    states, _, _ = saved_around_an_edit(1)
    with (
        serving(make) as server,
        pytest.raises(feeder.ResumeError, match=cure),
        reading(server, queue=1, resume=states[1]),
        reading(server, queue=0, resume=states[0]),
    ):
        pass


def test_a_note_alone_is_heard_of_from_a_later_trainer() -> None:
    """Though the server is given what the run is made of since then."""
    with serving(factory) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=i, credit=2)) for i in range(2)]
        next(both[0]), next(both[1])
        old = both[0].state_dict()
        edit(server, "a note")
        wait_until(lambda: all(one.has_attached for one in server.group.membership.members))
        new = both[1].state_dict()
    with serving(factory) as server, ExitStack() as stack:
        both = [
            stack.enter_context(reading(server, queue=i, resume=state, rejoin=True))
            for i, state in enumerate([old, new])
        ]
        assert len([*zip(*both, strict=True)]) == 14
        ends = [Snapshot.from_bytes(one.state_dict()["feeder"]).states[0] for one in both]
    assert [len(history_of(one.fingerprint)) for one in ends] == [1, 1]


def test_consumers_ask_the_server_that_was_edited_though_there_is_another() -> None:
    with serving(factory) as server, serving(factory) as second, ExitStack() as stack:
        both = [stack.enter_context(reading(server, second, queue=i, credit=2)) for i in range(2)]
        came = {one.step: one["x"].tolist() for one in (next(both[0]), next(both[1]))}
        step = edit(server, web=1, code=1)
        for batches in zip(*both, strict=True):
            came |= {batch.step: batch["x"].tolist() for batch in batches}
    assert came == in_process(step)


def test_a_consumer_that_starts_behind_an_edit_without_it_is_refused_by_name() -> None:
    def state_at(num: int) -> Any:
        with (
            serving(factory) as server,
            reading(server, queue=0) as one,
            reading(server, queue=1) as other,
        ):
            list(islice(one, num)), list(islice(other, num))
            return one.state_dict()

    old = state_at(8)
    with serving(factory) as server:
        with (
            reading(server, queue=0, credit=1) as one,
            reading(server, queue=1, credit=1) as other,
        ):
            next(one), next(other)
            assert edit(server, web=1, code=1) < 14
            next(one), next(other)
        told = r"0 edits.*edited at step \d+: they have two histories"
        with pytest.raises(feeder.ResumeError, match=told), reading(server, queue=0, resume=old):
            pass


def test_who_starts_brings_no_edit_to_consumers_that_run() -> None:
    with serving(factory) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=i, credit=2)) for i in range(2)]
        next(both[0]), next(both[1])
        edit(server, web=1, code=1)
        wait_until(lambda: all(one.has_attached for one in server.group.membership.members))
        edited = both[0].state_dict()
    with serving(factory) as server, reading(server, queue=1) as other:
        with reading(server, queue=0) as one:
            next(one), next(other)
        refused = pytest.raises(feeder.ResumeError, match="of another feed")
        with refused, reading(server, queue=0, resume=edited):
            pass
        assert not history_of(server.group.feed.factory.positions.fingerprint)


def test_a_consumer_of_another_history_is_refused_by_name() -> None:
    def state_of(step: int) -> Any:
        with serving(factory) as server, ExitStack() as stack:
            both = [stack.enter_context(reading(server, queue=i, credit=1)) for i in range(2)]
            for _ in range(step):
                next(both[0]), next(both[1])
            edit(server, web=1, code=1)
            next(both[0]), next(both[1])
            return both[0].state_dict()

    one, other = state_of(2), state_of(6)
    with (
        serving(factory) as server,
        reading(server, queue=1, resume=one),
        pytest.raises(feeder.ResumeError, match="they have two histories"),
        reading(server, queue=0, resume=other, rejoin=True),
    ):
        pass


@pytest.mark.parametrize("restarts", [False, True])
def test_a_consumers_transcript_is_that_of_a_run_that_is_stopped(
    tmp_path: Path, restarts: bool
) -> None:
    served, plain = tmp_path / "served", tmp_path / "plain"
    with serving(lambda: feed(mixed(web=7, code=3))) as server:
        with reading(server, credit=4, transcript=served) as consumer:
            for _ in range(5):
                next(consumer)
            step = edit(server, web=1, code=1)
            num = step - 5 if restarts else 10**6
            for _ in islice(consumer, num):
                pass
            if restarts:
                wait_until(lambda: consumer._loop.inbox.num_opened == 2)
            state = consumer.state_dict()
        if restarts:
            with reading(server, resume=state, transcript=served) as consumer:
                assert next(consumer).step == step
                assert len(list(consumer)) == 29 - step
    with outside():
        with feed(mixed(web=7, code=3), transcript=plain) as coordinator:
            for _ in range(step):
                next(coordinator["train"])
            state = coordinator.state_dict()
        with feed(mixed(web=1, code=1), state, edit="because", transcript=plain) as coordinator:
            list(coordinator["train"])
    (one,), (other,) = served.iterdir(), plain.iterdir()
    assert one.read_bytes() == other.read_bytes()


def test_a_consumers_transcript_goes_on_from_a_position_that_was_edited(tmp_path: Path) -> None:
    with (
        serving(lambda: feed(mixed(web=7, code=3))) as server,
        reading(server, transcript=tmp_path) as consumer,
    ):
        before = len([*islice(consumer, 5)])
        state = consumer.snapshot()
    with outside(), feed(mixed(web=1, code=1), state, edit="because") as coordinator:
        state = coordinator.snapshot()
    with (
        serving(lambda: feed(mixed(web=1, code=1))) as server,
        reading(server, resume=state, transcript=tmp_path) as consumer,
    ):
        steps = [batch.step for batch in consumer]
    (path,) = tmp_path.iterdir()
    found = read_file(path)
    assert steps[0] == before and found.steps.tolist() == [*range(before), *steps]
    assert [at for at, _ in found.settings] == [0, before]


def test_an_edit_of_the_size_waits_for_no_queue_that_is_behind() -> None:
    """It is refused by name, and changes nothing."""
    with serving(factory) as server, ExitStack() as stack:
        left = stack.enter_context(reading(server, queue=0, credit=8))
        right = stack.enter_context(reading(server, queue=1, credit=2))
        came = [next(left).step, next(right).step]
        with pytest.raises(feeder.ResumeError, match="have been sent fewer rounds than others"):
            edit(server, batch_size=2)
        rest = Aside(lambda: [batch.step for batch in left])
        came += [batch.step for batch in right]
        assert sorted(came + rest.result()) == [*range(30)]
        assert right.stats()["reconnects"] == 0


def test_a_position_after_an_edit_of_the_size_says_how_many_rows_batches_have() -> None:
    """By that the next edit finds where its round ends."""
    with serving(factory) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=i, credit=2)) for i in range(2)]
        wait_until(lambda: [one.sent for one in server.group.membership.members] == [2, 2])
        assert edit(server, batch_size=3) == 4
        sizes = [len(next(one)["x"]) for _ in range(3) for one in both]
        assert sizes == [4, 4, 4, 4, 3, 3]
        (state,) = Snapshot.from_bytes(both[0].state_dict()["feeder"]).states
    of = StreamId(state.name, state.number, fingerprint_digest(state.fingerprint))
    dealing = of.decode(state.token, None).dealing
    assert dealing is not None
    assert (dealing.num, dealing.batch_size) == (2, 3)


def test_a_stored_position_has_the_edit() -> None:
    """Also before all have used a batch that was sent after it."""
    with serving(factory) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=i, credit=2)) for i in range(2)]
        for _ in range(3):
            next(both[0]), next(both[1])
        before = server.group.state()
        step = edit(server, web=1, code=1)
        after = server.group.state()
        assert before.summary == after.summary
        assert [one[3] for one in after.fingerprint["source.history"][2]] == [step]
    with outside(), feed(mixed(web=1, code=1), Snapshot((after,)), devices=2) as coordinator:
        came = [next(coordinator["train"].on(i % 2))["x"].tolist() for i in range(20)]
    wanted, first = in_process(step), after.summary[2]
    assert came == [wanted[first + i] for i in range(20)]


def test_after_an_edit_of_the_size_who_has_no_position_begins_where_the_server_does() -> None:
    """Though the start of the feed cannot be had again."""

    def make() -> Any:
        return feed(mixed(web=7, code=3))

    with serving(make) as server, reading(server, credit=1) as consumer:
        next(consumer)
        step = edit(server, batch_size=6)
        list(islice(consumer, 4))
        position = bytes(consumer.snapshot())
    with serving(make, resume=position) as server, reading(server) as consumer:
        batch = next(consumer)
        assert (batch.step, len(batch["x"])) == (5, 6)
    assert step < 5


@pytest.mark.parametrize("more", range(4))
def test_a_position_before_the_step_of_an_edit_has_it(more: int) -> None:
    """Also if its consumer has batches at hand that were sent before: so the edit is not lost where
    a job starts from there with the feed call of before."""
    with serving(factory) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=i, credit=4)) for i in range(2)]
        wait_until(lambda: [one.sent for one in server.group.membership.members] == [4, 4])
        next(both[0]), next(both[1])
        step = edit(server, web=1, code=1)
        wait_until(lambda: all(one.has_attached for one in server.group.membership.members))
        for _ in range(more):
            next(both[0]), next(both[1])
        states = [one.state_dict() for one in both]
    for state in states:
        (found,) = Snapshot.from_bytes(state["feeder"]).states
        assert [one[3] for one in history_of(found.fingerprint)] == [step]
    with serving(factory) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=i, resume=states[i])) for i in range(2)]
        came = {batch.step: batch["x"].tolist() for one in both for batch in islice(one, 8)}
    assert step >= 2 * more + 2
    wanted = in_process(step)
    assert came == {i: wanted[i] for i in range(2 * more + 2, 2 * more + 18)}


def edits_told(both: Sequence[feeder.Consumer], num: int) -> list[int]:
    """How many edits positions have after each of so many rounds."""
    edits = []
    for _ in range(num):
        next(both[0]), next(both[1])
        (state,) = Snapshot.from_bytes(both[0].state_dict()["feeder"]).states
        edits.append(len(history_of(state.fingerprint)))
    return edits


def test_a_position_has_two_edits_that_were_made_before_its_batches_were_handed_out() -> None:
    """Also at the step of the first one."""
    with serving(factory) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=i, credit=4)) for i in range(2)]
        for number in range(2):
            wait_until(lambda: [one.sent for one in server.group.membership.members] == [4, 4])
            assert edit(server, web=1, code=1 + number) == 8 + 8 * number
        wait_until(lambda: all(one.has_attached for one in server.group.membership.members))
        assert edits_told(both, 9) == [2] * 9


def test_who_was_away_at_an_edit_is_told_who_holds_its_queue() -> None:
    with serving(factory) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=i, credit=2)) for i in range(2)]
        next(both[0]), next(both[1])
        edit(server, web=1, code=1)
        process_of(both[0]).pause()
        taker = reading(server, queue=0, resume=both[0].state_dict(), rejoin=True, takeover=True)
        stack.enter_context(taker)
        process_of(both[0]).go_on()
        with pytest.raises(feeder.LeaseLost, match="is held by"):
            list(both[0])


def test_a_position_before_an_edit_of_the_size_is_one_of_the_run_before() -> None:
    with serving(factory) as server, ExitStack() as stack:
        both = [stack.enter_context(reading(server, queue=i, credit=2)) for i in range(2)]
        wait_until(lambda: [one.sent for one in server.group.membership.members] == [2, 2])
        edit(server, batch_size=3)
        wait_until(lambda: all(one.has_attached for one in server.group.membership.members))
        assert edits_told(both, 3) == [0, 1, 1]


def test_a_transcript_goes_on_from_a_position_before_the_step_of_an_edit(tmp_path: Path) -> None:
    with serving(lambda: feed(mixed(web=7, code=3))) as server:
        with reading(server, credit=4, transcript=tmp_path) as consumer:
            wait_until(lambda: server.group.membership.members[0].sent == 4)
            next(consumer)
            step = edit(server, web=1, code=1)
            wait_until(lambda: consumer._loop.inbox.num_opened == 2)
            next(consumer)
            state = consumer.state_dict()
            next(consumer)
        with reading(server, resume=state, transcript=tmp_path) as consumer:
            assert next(consumer).step == 2 < step
            assert len(list(consumer)) == 27


def test_a_factory_that_makes_another_feed_after_an_edit_is_told_so() -> None:
    sizes = [60, 61]

    def make() -> Any:
        source = sources.arrays(np.arange(sizes.pop(0))).shuffle(seed=1)
        return feed(sources.mix({"web": (source, 1)}))

    with serving(make) as server, reading(server, credit=2) as consumer:
        next(consumer)
        edit(server, seed=4)
        with pytest.raises(feeder.ResumeError, match=r"otherwise than.*60 then, 61 now"):
            list(consumer)


@pytest.mark.parametrize(
    ("size", "weights"),
    [
        (60, ("0.12345", "0.87655")), (6000, ("0.12345", "0.87655")), (60, ("1e-30", "1")),
        (60, ("1", "1e-30")),
    ],
)  # fmt: skip
def test_uneven_weights_hold_after_a_restart(size: int, weights: tuple[str, str]) -> None:
    given = dict(zip(("web", "code"), weights, strict=True))

    def make(web: float = 7, code: float = 3, resume: Any = None, **settings: Any) -> Any:
        parts = {
            name: sources.arrays(np.arange(size) + FIRSTS[name]).shuffle(seed=1)
            for name in ("web", "code")
        }
        source = sources.mix({"web": (parts["web"], web), "code": (parts["code"], code)})
        return feed(source, resume, batch_size=size // 15, **settings)

    with serving(make) as server, reading(server, credit=2) as consumer:
        came = [batch["x"].tolist() for batch in islice(consumer, 3)]
        step = edit(server, **given)
        came += [batch["x"].tolist() for batch in islice(consumer, 6)]
        server.kill()
        with serving(make, server.address):
            came += [batch["x"].tolist() for batch in consumer]
    with outside(), make() as coordinator:
        wanted = [batch["x"].tolist() for batch in islice(coordinator["train"], step)]
        state = coordinator.state_dict()
        with make(*map(float, weights), state, edit="because") as other:
            wanted += [batch["x"].tolist() for batch in other["train"]]
    assert step < 9
    assert came == wanted
