"""Servers that share one stream: which feeds can be, who finds which server, and what each knows of
the others."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.config import FeedConfig
from feeder.service.server.editing import Change
from feeder.service.server.part import read_queues
from feeder.workers.stream.spec import Part
from feeds import make
from served import Aside, outside, pass_time, reading, serving
from watching import around

pytestmark = pytest.mark.usefixtures("world")

NUM = 12
"""Batches of an epoch, of 4 rows; the last one has 2."""


class Plain:
    """`fetch(call)` that says how many rows an epoch has; calls of one batch each."""

    gives_all_rows = True
    fails_at = -1

    def rows(self, epoch: int, batch_size: int) -> int:
        return NUM * batch_size - 2

    def __call__(self, call: feeder.Call) -> Any:
        if call.index == self.fails_at:
            raise OSError("no disk")
        start, stop = call.index * 4, min(NUM * 4 - 2, call.index * 4 + 4)
        if start >= stop:
            raise StopIteration
        return (np.arange(start, stop) + 100 * call.epoch,)


def factory(fetch: Any = Plain, **settings: Any) -> Any:
    wish = {"input_blob_names": ["id"], "batch_size": 4, "epochs": 2, **settings}
    return lambda: make(fetch(), **wish)


def whole(**settings: Any) -> dict[int, list[int]]:
    """The rows of each step, of one feed in this process."""
    with outside(), factory(**settings)() as coordinator:
        return {batch.step: batch["id"].tolist() for batch in coordinator["train"]}


def read(*consumers: feeder.Consumer) -> dict[int, list[int]]:
    """The rows of each step that these have to the end, each in a thread of its own."""

    def rest(consumer: feeder.Consumer) -> list[tuple[int, list[int]]]:
        return [(batch.step, batch["id"].tolist()) for batch in consumer]

    found = [Aside(lambda one=one: rest(one)) for one in consumers]
    return {step: rows for one in found for step, rows in one.result()}


# ---- which feeds can be shared


@pytest.mark.parametrize(
    ("fetch", "settings", "cure"),
    [
        (lambda: lambda worker_id, batch_size: None, {}, r"use fetch\(call\)"),
        (Plain, {"order": "arrival"}, "use 'ticket'"),
        (Plain, {"dont_rebatch": True}, "leave it out"),
        (Plain, {"batch_size": None, "global_batch_size": 8}, "give batch_size"),
        (Plain, {"last_batch": "carry"}, "use 'keep', 'drop' or 'pad'"),
        (Plain, {"last_round": "pad"}, "use 'uneven' or 'drop'"),
        (lambda: lambda call: None, {}, "give rows_per_call, a divisor of batch_size"),
        (lambda: lambda call: None, {"rows_per_call": 4}, r"have rows\(epoch, batch_size\)"),
    ],
)
def test_a_feed_that_numbers_do_not_say_is_refused_with_its_cure(
    fetch: Any, settings: Any, cure: str
) -> None:
    feeds = factory(fetch, **settings)
    what = (
        f"'train' cannot be made by several servers, and this one is to make queue 1 of 2: .*{cure}"
    )
    with pytest.raises(feeder.ConfigError, match=what), serving(feeds, queues="1/2"):
        pass
    # All queues are no part of them.
    if settings.get("order") != "arrival":
        with serving(feeds, queues="0-1/2"):
            pass


@pytest.mark.parametrize(
    "queues", ["0-8/8", "3-2/8", "8/8", "x", "0-1", "", "0-1/5000", 0, 4097, True, 1.5, "-1", "1/0"]
)
def test_queues_that_are_none_are_refused(queues: Any) -> None:
    with pytest.raises(feeder.ConfigError, match=r"queues is .* expected a whole number from 1"):
        read_queues(queues)


def test_queues_are_a_number_or_some_of_a_number() -> None:
    assert read_queues(None) == (None, None)
    assert read_queues(8) == read_queues("8") == read_queues("0-7/8") == (8, None)
    assert read_queues(np.int64(8)) == (8, None)
    assert read_queues("2/8") == (8, Part(2, 3, 8))
    assert read_queues("0-6/8") == (8, Part(0, 7, 8))


def test_a_position_within_a_call_is_refused() -> None:
    """It is of the same settings, of a function that gave other numbers of rows then."""

    class Ragged(Plain):
        gives_all_rows = False

        def __call__(self, call: feeder.Call) -> Any:
            return (np.arange(3 * call.index, 3 * call.index + 3),)

    with outside(), factory(Ragged)() as coordinator:
        batches = [next(coordinator["train"]) for _ in range(3)]
    # After the third one a call has ended, the fourth.
    for number in (1, 3):
        with (
            serving(factory(), queues="1/2") as server,
            pytest.raises(feeder.ResumeError, match=f"does not begin with call {number}"),
        ):
            feeder.connect(
                server.address, queue=1, resume=batches[number - 1].cut.token(), timeout=5
            )


# ---- who makes what


def test_each_makes_the_batches_of_its_queues_alone() -> None:
    calls: list[list[tuple[int, int]]] = [[], []]

    class Noting(Plain):
        def __init__(self, calls: list[tuple[int, int]]) -> None:
            self.calls = calls

        def __call__(self, call: feeder.Call) -> Any:
            self.calls.append((call.epoch, call.index))
            return super().__call__(call)

    with (
        serving(factory(lambda: Noting(calls[0])), queues="0-1/5") as left,
        serving(factory(lambda: Noting(calls[1])), queues="2-4/5") as right,
        ExitStack() as stack,
    ):
        queues = [stack.enter_context(reading(left, right, queue=i)) for i in range(5)]
        assert read(*queues) == whole()
    ends = {(0, NUM), (1, NUM)}
    made = [set(one) - ends for one in calls]
    assert not made[0] & made[1]
    assert [len(one) - len(set(one)) for one in calls] == [0, 0]
    assert made[0] | made[1] == {(epoch, call) for epoch in range(2) for call in range(NUM)}


def test_replicas_have_the_batches_of_their_queue() -> None:
    with serving(factory(), queues="1/2", replicas=2) as server, ExitStack() as stack:
        pair = [stack.enter_context(reading(server, queue=1, replica=i)) for i in range(2)]
        found = [Aside(lambda one=one: [batch.step for batch in one]) for one in pair]
        assert [one.result() for one in found] == [list(range(1, 2 * NUM, 2))] * 2


def test_an_error_of_a_call_is_that_of_the_server_that_makes_it() -> None:
    class Failing(Plain):
        fails_at = 5

    with (
        serving(factory(Failing), queues="0/2") as left,
        serving(factory(Failing), queues="1/2") as right,
        reading(left, right, queue=0) as even,
        reading(left, right, queue=1) as odd,
    ):
        assert [*read(even)] == [*range(0, 2 * NUM, 2)]
        assert [next(odd).step, next(odd).step] == [1, 3]
        with pytest.raises(feeder.FetchError, match=r"call 5.*no disk"):
            next(odd)


def test_a_server_is_over_when_its_queues_are() -> None:
    with (
        serving(factory(), queues="0/2", exit_when="acknowledged") as left,
        serving(factory(), queues="1/2", exit_when="acknowledged") as right,
        reading(right, queue=1) as odd,
    ):
        next(odd)
        with reading(left, queue=0) as even:
            read(even)
        assert left.wait(60.0)
        assert not right.is_dead


def test_figures_are_of_its_queues() -> None:
    with serving(factory(), queues="2-3/8") as server:
        (feed,) = server.loop.monitors.figures(0.0).feeds
        assert [queue.queue for queue in feed.queues] == [2, 3]


# ---- who finds whom


def test_who_asks_the_wrong_server_is_told() -> None:
    with serving(factory(), queues="0-1/4") as server:
        what = "queue is 3, and the server there makes queues 0 to 1 of 4 of feed 'train'"
        with pytest.raises(feeder.ConfigError, match=what):
            feeder.connect(server.address, queue=3, timeout=5)
        with pytest.raises(feeder.ConfigError, match="queue is 4, but feed 'train' has 4"):
            feeder.connect(server.address, queue=4, timeout=5)


def test_the_queue_is_looked_for_at_all_addresses() -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(factory(), queues=f"{i}/4")) for i in range(4)]
        for i in range(4):
            with reading(*servers, queue=i) as consumer:
                assert next(consumer).step == i
        with pytest.raises(feeder.ConfigError, match="give the address of one that makes it"):
            feeder.connect([one.address for one in servers[:3]], queue=3, timeout=5)


def test_who_waits_for_its_server_to_start_is_told_that_it_has_not() -> None:
    with (
        serving(factory(), queues="0/2") as server,
        pytest.raises(feeder.ConnectTimeout, match=r"no answer .* makes queue 0 of 2"),
    ):
        feeder.connect([server.address, "ipc:///virtual/late"], queue=1, timeout=5)


def test_queues_are_taken_over_by_a_server_that_is_restarted_with_them() -> None:
    with ExitStack() as stack:
        left = stack.enter_context(serving(factory(), queues="0/2"))
        right = stack.enter_context(serving(factory(), queues="1/2"))
        even = stack.enter_context(reading(left, right, queue=0))
        odd = stack.enter_context(reading(left, right, queue=1))
        found = {batch.step: batch["id"].tolist() for batch in (next(even), next(odd), next(even))}
        right.kill()
        left.kill()
        stack.enter_context(serving(factory(), left.address, queues=2))
        assert found | read(even, odd) == whole()


def test_who_was_served_looks_for_its_queue_as_long_as_for_any_server() -> None:
    """A server with other queues may be restarted with these at any moment."""
    with serving(factory(), queues="0/2") as left, ExitStack() as stack:
        right = stack.enter_context(serving(factory(), queues="1/2"))
        odd = stack.enter_context(reading(left, right, queue=1, reconnect=20.0))
        assert next(odd).step == 1
        right.kill()
        pass_time(15.0)
        right = stack.enter_context(serving(factory(), right.address, queues="1/2"))
        assert next(odd).step == 3
        right.kill()
        rest = Aside(lambda: [*odd])
        with pytest.raises(feeder.ConnectTimeout, match="makes queue 0 of 2"):
            rest.result()


def test_a_search_where_all_refuse_goes_on_and_is_no_busy_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(factory(), queues="0/3") as left, ExitStack() as stack:
        other = stack.enter_context(serving(factory(), queues="1/3"))
        last = stack.enter_context(serving(factory(), queues="2/3"))
        consumer = stack.enter_context(reading(left, other, last, queue=2))
        next(consumer)
        last.kill()
        wrong = stack.enter_context(serving(factory(), last.address, queues="0/3"))
        asked = []
        around(monkeypatch, left.group, "open", before=lambda *_: asked.append(0))
        # What it has received is used before it misses its server.
        rest = Aside(lambda: [batch.step for batch in consumer])
        pass_time(11.0)
        assert 20 < len(asked) < 120
        wrong.kill()
        stack.enter_context(serving(factory(), last.address, queues="2/3"))
        assert rest.result() == list(range(5, 2 * NUM, 3))


def test_who_has_had_all_of_one_server_is_not_missed_at_another() -> None:
    """What consumers tell of ended queues is of the queues of their server."""
    with serving(factory(), queues="0-1/4") as left, ExitStack() as stack:
        pair = [stack.enter_context(reading(left, queue=i)) for i in range(2)]
        read(*pair)
        right = stack.enter_context(serving(factory(), queues="2-3/4"))
        others = [stack.enter_context(reading(right, queue=i)) for i in (2, 3)]
        assert len(read(*others)) == NUM


# ---- positions


def test_a_position_of_any_server_is_one_of_all() -> None:
    rows = whole(last_round="drop")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(serving(factory(last_round="drop"), queues=queues))
            for queues in ("0/3", "1-2/3")
        ]
        queues = [stack.enter_context(reading(*servers, queue=i)) for i in range(3)]
        for _ in range(2):
            found = [next(queue) for queue in queues]
        states = [queue.state_dict() for queue in queues] + [one.cut.token() for one in found]
    # Each for all trainers, and each trainer with another one.
    for given in [*([state] * 4 for state in states), states[:4], states[2:6]]:
        with ExitStack() as stack:
            servers = [
                stack.enter_context(serving(factory(last_round="drop"), queues=queues))
                for queues in ("0-1/4", "2/4", "3/4")
            ]
            queues = [
                stack.enter_context(reading(*servers, queue=i, resume=given[i])) for i in range(4)
            ]
            found = read(*queues)
        assert found == {step: rows[step] for step in range(6, 22)}


@pytest.mark.parametrize("rounds", ["stream", "epoch"])
@pytest.mark.parametrize("last_round", ["uneven", "drop"])
def test_the_end_is_one_place(rounds: str, last_round: str) -> None:
    """That of one server, whoever made the last batch, and whether or not its round is complete."""
    feeds = factory(rounds=rounds, last_round=last_round)
    ends = []
    for parts in (["5"], ["0-2/5", "3-4/5"], ["0/5", "1/5", "2/5", "3/5", "4/5"]):
        with ExitStack() as stack:
            servers = [stack.enter_context(serving(feeds, queues=queues)) for queues in parts]
            queues = [stack.enter_context(reading(*servers, queue=i)) for i in range(5)]
            read(*queues)
            ends.append([queue.state_dict() for queue in queues])
    assert ends[0] == ends[1] == ends[2]
    assert len({state["feeder"] for state in ends[0]}) == 1


def test_an_edit_is_refused_by_name() -> None:
    with serving(factory(), queues="0/2") as server, reading(server, queue=0) as consumer:
        next(consumer)
        with pytest.raises(feeder.ConfigError, match=r"made by several servers.*edit it there"):
            server.group.edit(Change({}, {"batch_size": 8}, None), "why")


def test_a_position_of_an_edited_run_is_refused_by_name() -> None:
    """Its source says by itself what each call gives."""
    rows = {"input_blob_names": ["id"], "last_batch": "drop"}

    def source() -> Any:
        return feeder.sources.arrays(np.arange(200), random_shuffle=True, seed=5)

    with outside(), make(source(), batch_size=4, **rows) as coordinator:
        next(coordinator["train"])
        state = coordinator.state_dict()
    with outside():
        edited = make(source(), batch_size=8, edit="larger", resume=state, **rows)
        with edited as coordinator:
            next(coordinator["train"])
            state = coordinator.state_dict()
    with (
        serving(lambda: make(source(), batch_size=8, **rows), queues="0/2") as server,
        pytest.raises(feeder.ResumeError, match="was edited: serve it with one server"),
    ):
        feeder.connect(server.address, queue=0, resume=state, timeout=5)
    what = "edit is given: go on with one server"
    feeds = factory(edit="why", resume=None)
    with pytest.raises(feeder.ConfigError, match=what), serving(feeds, queues="0/2"):
        pass


def test_a_part_is_no_word_of_positions() -> None:
    """Servers of any parts, and of all queues, have one fingerprint."""
    prints = []
    for queues in ("0/2", "1/2", 2):
        with serving(factory(), queues=queues) as server:
            config: FeedConfig = server.feed.factory.config
            prints.append(config.fingerprint())
    assert prints[0] == prints[1] == prints[2]
