"""From which round a served feed begins: rounds that are skipped, positions of different steps, and
consumers that are dealt to as their positions say."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.service.protocol.membership import (
    Asks,
    Attaches,
    Died,
    Membership,
    Refuse,
    SendAway,
    Start,
    StartRun,
    Ticked,
)
from feeder.service.server import delivery
from feeder.workers.stream.rounds import Counting
from feeds import make
from served import outside, reading, serving

pytestmark = pytest.mark.usefixtures("world")

NUM = 40
"""Batches of an epoch, of 4 rows."""


class Plain:
    """`fetch(call)`: one batch in each call, as a source would give it where `tells`."""

    def __init__(self, *, num: int = NUM, tells: bool = False) -> None:
        self._num = num
        self.gives_all_rows = tells

    def rows(self, epoch: int, batch_size: int) -> int:
        if not self.gives_all_rows:
            raise ValueError
        return self._num * batch_size

    def __call__(self, call: feeder.Call) -> Any:
        if call.index == self._num:
            raise StopIteration
        start = (call.epoch * self._num + call.index) * call.batch_size
        return (np.arange(start, start + call.batch_size),)


def factory(*, num: int = NUM, tells: bool = False, **settings: Any) -> Any:
    plain = {"input_blob_names": ["id"], "batch_size": 4, "epochs": 2, **settings}
    return lambda: make(Plain(num=num, tells=tells), **plain)


def token_at(step: int, *, num_devices: int = 1, num: int = NUM, **settings: Any) -> bytes:
    """The token of the batch before number `step`, of a run with so many devices."""
    with outside(), factory(num=num, devices=num_devices, **settings)() as coordinator:
        devices = [coordinator["train"].on(i) for i in range(num_devices)]
        for i in range(step):
            token = next(devices[i % num_devices]).cut.token()
    return token


def first_steps(server: feeder.Server, **settings: Any) -> list[int]:
    """The numbers of the first batch of each queue."""
    with ExitStack() as stack:
        queues = [
            stack.enter_context(reading(server, queue=i, **settings))
            for i in range(server.queues["train"])
        ]
        return [next(queue).step for queue in queues]


# ---- skipped rounds


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("at", [None, 3])
def test_rounds_are_skipped_where_consumers_begin(tells: bool, at: int | None) -> None:
    resume = None if at is None else token_at(at, num_devices=2)
    begins = (0 if at is None else 4) + 3 * 2
    with serving(factory(tells=tells), queues=3, resume=resume, skip=2) as server:
        assert first_steps(server) == [begins, begins + 1, begins + 2]
    with serving(factory(tells=tells), queues=3) as server:
        assert first_steps(server, resume=resume, skip=2) == [begins, begins + 1, begins + 2]
    with serving(factory(tells=tells, skip=2), queues=3, resume=resume) as server:
        assert first_steps(server) == [begins, begins + 1, begins + 2]


def test_positions_tell_what_was_skipped_and_it_is_not_skipped_again() -> None:
    with serving(factory(), queues=2) as server, ExitStack() as stack:
        pair = [stack.enter_context(reading(server, queue=i, skip=3)) for i in range(2)]
        before = pair[0].state_dict()
        batches = [next(queue) for queue in pair]
        assert [batch.step for batch in batches] == [6, 7]
        assert batches[0].cut.dealing.skipped == 3
        state = pair[0].state_dict()
    with serving(factory(), queues=3) as server:
        assert first_steps(server, resume=state) == [8, 9, 10]
    # Nor where nothing was used, with whatever number of queues.
    with serving(factory(), queues=3) as server:
        assert first_steps(server, resume=before) == [6, 7, 8]
    wish = {"input_blob_names": ["id"], "batch_size": 4, "resume": before}
    with outside(), make(Plain(), devices=3, **wish) as again:
        assert [next(again["train"].on(i)).step for i in range(3)] == [6, 7, 8]


def test_the_next_server_does_not_skip_again() -> None:
    """Also where it is asked for the place of a consumer that has had no batch."""
    with serving(factory(), queues=1) as server:
        consumer = feeder.connect(server.address, skip=3)
    with serving(factory(), server.address, queues=1), consumer:
        assert next(consumer).step == 3


def test_rounds_of_an_epoch_are_skipped_where_the_source_tells_its_rows() -> None:
    settings = {"rounds": "epoch", "num": 7}
    with serving(factory(tells=True, **settings), queues=2, skip=5) as server:
        assert first_steps(server) == [9, 10]  # 4 rounds of the first epoch, 1 of the second
    with (
        serving(factory(**settings), queues=2) as server,
        pytest.raises(feeder.ConfigError, match="skip is 5, and rounds is 'epoch'"),
    ):
        feeder.connect(server.addresses[0], skip=5)


def test_who_comes_back_skips_nothing() -> None:
    with pytest.raises(feeder.ConfigError, match="skip is 2 with rejoin=True"):
        feeder.connect(rejoin=True, skip=2)
    with pytest.raises(feeder.ConfigError, match="skip is -1, expected a whole number"):
        feeder.connect(skip=-1)
    with pytest.raises(feeder.ConfigError, match="skip is True, expected a whole number"):
        feeder.serve(factory(), skip=True)


# ---- positions of different steps


@pytest.mark.parametrize("rounds", ["stream", "epoch"])
def test_ranks_whose_states_are_of_different_steps_are_told(rounds: str) -> None:
    """As after a kill between two saves."""
    tokens = [token_at(at, num_devices=4, rounds=rounds) for at in (12, 16)]
    first, second = (
        ("step 12 (round 3)", "step 16 (round 4)")
        if rounds == "stream"
        else ("batch 12 of epoch 0", "batch 16 of epoch 0")
    )
    with (
        serving(factory(rounds=rounds), queues=4) as server,
        reading(server, queue=0, resume=tokens[1]),
        pytest.raises(feeder.ResumeError) as told,
    ):
        feeder.connect(server.addresses[0], queue=1, resume=tokens[0])
    message = f"queue 1's checkpoint is of {first}, and queue 0's checkpoint is of {second}; "
    assert message in str(told.value)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_one_older_position_for_all_is_refused_for_its_own_reason(order: tuple[int, int]) -> None:
    """Within a round it is of one queue, and does not say so."""

    def refusals(*positions: Start) -> list[str]:
        feed = Membership(2, 30.0)
        pairs = zip(order, positions, strict=True)
        done = [feed.handle(Asks(at, "a trainer", start=start), 0.0) for at, start in pairs]
        return [str(one.error) for each in done for one in each if isinstance(one, Refuse)]

    told = "comes with the position before batch 5, as others do, and it does not say how batches"
    (refused,) = refusals(Start(5), Start(5))
    assert told in refused
    assert refusals(Start(6), Start(6)) == []
    # Where one of them says it, or they are two, that is not why.
    for other in (Start(5, into_round=0), Start(9)):
        (refused,) = refusals(Start(5), other)
        assert "does not say" not in refused


# ---- who says how batches are dealt


def asks(feed: Membership, queue: int, step: int, into_round: int, **fields: Any) -> list[Any]:
    done = feed.handle(
        Asks(queue, f"trainer {queue}", start=Start(step, into_round=into_round), **fields), 0.0
    )
    return [one for one in done if isinstance(one, (Refuse, SendAway))]


def test_who_comes_back_is_dealt_to_as_those_who_are_here() -> None:
    feed = Membership(3, 30.0)
    assert asks(feed, 0, 7, 0) == []
    assert feed.counting == Counting(3, begins=7)
    assert asks(feed, 1, 8, 1, rejoins=True) == []
    (refused,) = asks(feed, 2, 8, 0, rejoins=True)
    assert "queue 2's checkpoint is of step 8 (round 2), and queue 0's" in str(refused.error)
    assert asks(feed, 2, 9, 2, rejoins=True) == []
    for queue in range(3):
        done = feed.handle(Attaches(queue), 0.0)
    (run,) = [one for one in done if isinstance(one, StartRun)]
    assert (run.stands, run.first_steps) == ((0, 1, 2), [7, 8, 9])


# ---- unequal numbers of batches


def test_a_consumer_says_once_that_queues_may_get_unequal_numbers_of_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = "'train': its queues get unequal numbers of batches"
    with caplog.at_level(logging.WARNING, "feeder"):
        for settings, queues, num in (
            ({}, 2, 1), ({}, 1, 0), ({"epochs": None}, 2, 0), ({"last_round": "pad"}, 2, 0),
            ({"epochs": None, "rounds": "epoch"}, 2, 1), ({"last_round": "drop"}, 2, 0),
        ):  # fmt: skip
            caplog.clear()
            with serving(factory(**settings), queues=queues) as server:
                assert first_steps(server) == [*range(queues)]
            assert caplog.text.count(told) == num * queues, (settings, queues)
            assert ("last_round='drop' or 'pad'" in caplog.text) == bool(num)


# ---- one global batch


def test_a_global_batch_stays_with_any_number_of_queues() -> None:
    settings = {"batch_size": None, "global_batch_size": 24, "rounds": "epoch"}
    state, at = None, 0
    for num, used in ((8, 5), (4, 9), (2, 3), (12, 7)):
        with serving(factory(**settings), queues=num) as server, ExitStack() as stack:
            queues = [
                stack.enter_context(reading(server, queue=i, resume=state)) for i in range(num)
            ]
            for _ in range(used):
                rows = [row for queue in queues for row in next(queue)["id"].tolist()]
                assert rows == [*range(24 * at, 24 * at + 24)]
                at += 1
            state = queues[num // 2].state_dict()
    # Where nothing is used yet, the rest of the round still has the size of then.
    with (
        serving(factory(**settings), queues=3) as server,
        reading(server, queue=1, resume=state) as unused,
    ):
        state = unused.state_dict()
    with serving(factory(**settings), queues=4) as server, ExitStack() as stack:
        queues = [stack.enter_context(reading(server, queue=i, resume=state)) for i in range(4)]
        rows = [row for queue in queues for row in next(queue)["id"].tolist()]
        assert rows == [*range(24 * at, 24 * at + 24)]
    settings["rounds"] = "stream"
    state = token_at(13, num_devices=8, **settings)
    with (
        serving(factory(**settings), queues=4) as server,
        pytest.raises(feeder.ConfigError, match=r"had 3 rows .* 6 now; start first, and skip"),
    ):
        feeder.connect(server.addresses[0], resume=state, skip=1)
    with pytest.raises(feeder.ConfigError, match="expected a multiple of the 5 devices"):
        feeder.serve(factory(**settings), queues=5)


@pytest.mark.parametrize("other", ["starts", "comes back", "has ended", "was sent a batch"])
def test_only_those_that_start_have_to_be_of_one_round(other: str) -> None:
    """Where rounds end with epochs: one starts in a later epoch, and the other one stands before
    it. If both start, no batch may come in between."""
    feed = Membership(2, 30.0, counting=Counting(2, per_epoch=True))
    ended = Start(2, finished=True) if other == "has ended" else None
    feed.handle(Asks(0, "the other", start=ended, rejoins=other == "comes back"), 0.0)
    feed.handle(Attaches(0), 0.0)
    if other == "was sent a batch":
        feed.handle(Asks(1, "one that dies"), 0.0)
        feed.handle(Attaches(1), 0.0)
        feed.members[0].note_sent(1, Start(1, index=1))
        feed.handle(Died(1), 0.0)
    assert feed.handle(Asks(1, "one that starts", start=Start(8, epoch=1)), 0.0) == []
    (run,) = [one for one in feed.handle(Attaches(1), 0.0) if isinstance(one, StartRun)]
    assert (run.void is None) is (other != "starts")


def test_an_epoch_is_dealt_as_its_own_positions_say() -> None:
    """One of a later epoch, which is gone, said nothing of where rounds begin before."""
    feed = Membership(2, 30.0, counting=Counting(2, per_epoch=True))
    ahead = Start(13, epoch=1, index=5, nobodys=0, into_round=0)
    feed.handle(Asks(0, "one of a later epoch", start=ahead, rejoins=True), 0.0)
    feed.handle(Died(0), 0.0)
    for queue in range(2):
        start = Start(1, epoch=0, index=1, nobodys=0, into_round=0)
        assert not feed.handle(Asks(queue, "one that starts", start=start), 0.0)
    assert [member.step for member in feed.members] == [1, 2]


@pytest.mark.parametrize(("index", "is_alike"), [(4, True), (5, False)])
def test_who_hangs_is_sent_away_if_it_was_dealt_otherwise(index: int, is_alike: bool) -> None:
    feed = Membership(2, 30.0, counting=Counting(2, per_epoch=True))
    ahead = Start(12, epoch=1, index=index, nobodys=0, into_round=0)
    feed.handle(Asks(0, "one of a later epoch", start=ahead, rejoins=True), 0.0)
    feed.handle(Attaches(0), 0.0)
    feed.handle(Ticked(), 31.0)
    start = Start(1, epoch=0, index=1, nobodys=0, into_round=0)
    done = feed.handle(Asks(1, "one that comes back", start=start, rejoins=True), 31.0)
    assert any(isinstance(one, SendAway) for one in done) is not is_alike
    assert feed.members[1].step == 2


def test_who_comes_back_from_a_position_within_a_round_begins_where_the_others_did() -> None:
    """One rank's state is for all. It lies within a round that all of them have used."""
    token = token_at(3, num_devices=4)
    with serving(factory(), queues=4) as server, ExitStack() as stack:
        first = [stack.enter_context(reading(server, queue=i, resume=token)) for i in range(3)]
        with reading(server, queue=3, resume=token) as lost:
            assert [next(queue).step for queue in (*first, lost)] == [4, 5, 6, 7]
        # It had saved nothing of its own.
        last = stack.enter_context(reading(server, queue=3, resume=token, rejoin=True))
        assert [next(last).step for _ in range(2)] == [7, 11]
        assert next(first[0]).step == 8


def test_a_group_counts_no_more_chunks_than_a_message_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "MAX_CHUNKS", 2)
    with serving(factory()) as server, reading(server, credit=8) as consumer:
        chunks = [batch.place._group.chunks for batch in consumer]  # type: ignore[attr-defined]
    assert max(max(numbers, default=0) for numbers in chunks) == 2


def test_a_slot_stays_with_its_queue_where_a_round_is_filled_up_after_rows_were_dropped() -> None:
    def fetch(call: feeder.Call) -> Any:
        if call.index == 11:
            raise StopIteration
        return (np.full(4 if call.index < 10 else 1, call.index),)

    def made() -> Any:
        return make(
            fetch, input_blob_names=["id"], batch_size=4, epochs=3, rounds="epoch",
            last_batch="drop", last_round="pad",
        )  # fmt: skip

    with serving(made, queues=3) as server, ExitStack() as stack:
        three = [
            stack.enter_context(reading(server, queue=i, plane="frames", credit=2))
            for i in range(3)
        ]
        rows = [
            [one["id"][: one.rows].tolist() for one in each] for each in zip(*three, strict=True)
        ]
        assert all(one.stats()["reconnects"] == 0 for one in three)
    of_epoch = [[[i] * 4 for i in range(at, at + 3)] for at in (0, 3, 6)]
    assert rows == 3 * [*of_epoch, [[9] * 4, [], []]]
