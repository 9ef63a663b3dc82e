"""Any numbers of queues one after another, servers that are lost, consumers that come back in the
middle of a round: each queue gets what the naive feeder deals. On virtual time (`served`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import feeder
from feeds import Record, assert_same, make, note, note_naive
from naive import naive_dealing, naive_stream
from parts import examples
from served import one_thread, reading, serving

pytestmark = pytest.mark.served


class Calls:
    """`fetch(call)`: so many rows from each call of each epoch; or as the calls of a source are."""

    def __init__(self, epochs: list[list[int]], batch_size: int | None, *, is_source: bool) -> None:
        self.epochs, self.batch_size = epochs, batch_size
        if is_source:
            self.gives_all_rows = True

    def rows(self, epoch: int, batch_size: int) -> int:
        return sum(self.epochs[epoch])

    def __call__(self, call: feeder.Call) -> Any:
        if self.batch_size is None:
            ends = np.cumsum([0, *self.epochs[call.epoch]]).tolist()
        else:
            total = sum(self.epochs[call.epoch])
            ends = [*range(0, total, self.batch_size), total]
        if call.index >= len(ends) - 1:
            raise StopIteration
        first, stop = ends[call.index : call.index + 2]
        return (np.arange(first, stop) + 1000 * call.epoch + 1,)


class Dealt(NamedTuple):
    """A stream, and how it is dealt out."""

    epochs: list[list[int]]
    """Rows of each call of each epoch."""
    batch_size: int
    is_source: bool
    rounds: str
    last_round: str
    last_batch: str
    per_call: int = 0
    """Rows of each call, where the feed says so; 0 where it does not."""

    def with_rounds_for(self, most: int) -> Dealt:
        """The same with a whole round of so many devices in each epoch where one without is an
        error: an epoch without a batch always is one."""
        num_rows = (most if self.last_round == "drop" else 1) * self.batch_size
        carries = self.rounds == "epoch" and self.last_batch == "carry"
        return self._replace(
            epochs=[[num_rows, *sizes] for sizes in self.epochs],
            last_batch="keep" if carries else self.last_batch,
        )

    def of_numbers(self, calls: int) -> Dealt:
        """One of which numbers say which calls each batch is made of: so many."""
        return self._replace(
            is_source=calls == 1,
            batch_size=calls * self.batch_size,
            per_call=0 if calls == 1 else self.batch_size,
            last_round="uneven" if self.last_round == "pad" else self.last_round,
            last_batch="keep" if self.last_batch == "carry" else self.last_batch,
        )

    def fetch(self) -> Calls:
        """Its fetch function, which has made no call yet."""
        per_call = self.batch_size if self.is_source else self.per_call or None
        return Calls(self.epochs, per_call, is_source=self.is_source)

    def stream(self) -> list[Record]:
        """Its batches."""
        naive = naive_stream(
            self.fetch(), ("id",), pure=True, batch_size=self.batch_size, num_workers=2,
            epochs=len(self.epochs), last_batch=self.last_batch,
        )  # fmt: skip
        return [note_naive(batch) for batch in naive]

    def settings(self) -> dict[str, Any]:
        """The settings of its feed."""
        return {
            "input_blob_names": ["id"], "batch_size": self.batch_size,
            "epochs": len(self.epochs), "num_worker_threads": 2, "rounds": self.rounds,
            "last_round": self.last_round, "last_batch": self.last_batch,
            "rows_per_call": self.per_call or None,
        }  # fmt: skip


DEALT = st.builds(
    Dealt,
    epochs=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=12), min_size=1, max_size=4),
    batch_size=st.integers(1, 4),
    is_source=st.booleans(),
    rounds=st.sampled_from(("stream", "epoch")),
    last_round=st.sampled_from(("uneven", "drop", "pad")),
    last_batch=st.sampled_from(("keep", "drop", "pad", "carry")),
    per_call=st.just(0),
)

LEG = st.tuples(
    st.integers(1, 5),  # queues
    st.integers(1, 4),  # rounds that are used
    st.integers(0, 99),  # whose state is for all
    st.sampled_from(("", "server lost", "one comes back", "all come back")),
    st.integers(0, 2),  # rounds that are skipped first
)


class Leg:
    """A server and a consumer of each queue."""

    def __init__(
        self, stack: ExitStack, factory: Any, num: int, state: Any, skip: int,
        bounds: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """`bounds`: the queues at which the parts of further servers begin."""
        self._stack, self._factory, self._num = stack, factory, num
        ends = [0, *bounds, num]
        self.servers = {
            f"ipc:///virtual/feed{i}": range(*part) for i, part in enumerate(pairwise(ends))
        }
        """By address the queues of each."""
        self._serving: dict[str, Any] = {}
        for address in self.servers:
            self.serve(address)
        self.queues = [self._connect(i, resume=state, skip=skip) for i in range(num)]

    def serve(self, address: str) -> None:
        """Serve, or serve again."""
        own = self.servers[address]
        queues = self._num if len(own) == self._num else f"{own[0]}-{own[-1]}/{self._num}"
        self._serving[address] = self._stack.enter_context(
            serving(self._factory, address, queues=queues)
        )

    def _connect(self, queue: int, **settings: Any) -> feeder.Consumer:
        return self._stack.enter_context(reading(*self.servers, queue=queue, **settings))

    def lose_server(self, number: int = 0) -> None:
        """Another server takes the place of this one; consumers find it."""
        address = [*self._serving][number % len(self._serving)]
        self._serving[address].kill()
        self.serve(address)

    def take_over(self, number: int) -> None:
        """A server is lost, and the one before or behind it makes the queues of both."""
        if len(self._serving) == 1:
            return self.lose_server()
        addresses = [*self._serving]
        lost = number % len(addresses)
        other = addresses[lost - 1 if lost else 1]
        queues = {*self.servers[addresses[lost]], *self.servers[other]}
        self._serving.pop(addresses[lost]).kill()
        self._serving[other].kill()
        self.servers[other] = range(min(queues), max(queues) + 1)
        self.serve(other)

    def come_back(self, queue: int) -> None:
        """The trainer of a queue ends, and comes back with its own state."""
        state = self.queues[queue].state_dict()
        self.queues[queue].close()
        self.queues[queue] = self._connect(queue, resume=state, rejoin=True)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(dealt=DEALT, legs=st.lists(LEG, min_size=1, max_size=4))
def test_every_queue_is_dealt_what_the_naive_feeder_deals(
    dealt: Dealt, legs: list[tuple[Any, ...]]
) -> None:
    deal_and_compare(dealt, legs)


@settings(max_examples=examples(80), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    dealt=st.builds(Dealt.of_numbers, DEALT, st.integers(1, 3)),
    legs=st.lists(LEG, min_size=1, max_size=4),
    bounds=st.lists(st.sets(st.integers(1, 4)), min_size=4, max_size=4),
)  # fmt: skip
def test_so_do_several_servers_of_one_stream(
    dealt: Dealt, legs: list[tuple[Any, ...]], bounds: list[set[int]]
) -> None:
    """Another number of servers in each leg; they are lost, come back, and take queues over."""
    deal_and_compare(dealt, legs, bounds)


def deal_and_compare(
    dealt: Dealt, legs: list[tuple[Any, ...]], bounds: Sequence[set[int]] = ()
) -> None:
    dealt = dealt.with_rounds_for(max(num for num, *_ in legs))
    stream, plain = dealt.stream(), dealt.settings()
    at, state = 0, None
    for number, (num, used, whose, event, skip) in enumerate(legs):
        parts_at = sorted(one for one in bounds[number] if one < num) if bounds else []
        if bounds and event == "server lost" and whose % 2:
            event = "queues taken over"
        # What rounds of an epoch lead to cannot be told without making them.
        skip = skip if dealt.rounds == "stream" else 0
        wanted = naive_dealing(stream, at, num, dealt.rounds, dealt.last_round)
        for end, _ in islice(wanted, skip):
            at = end
        with one_thread(), ExitStack() as stack:
            leg = Leg(stack, lambda: make(dealt.fetch(), **plain), num, state, skip, parts_at)
            batches: list[feeder.Batch] = []
            num_begun = 0
            for i, (end, parts) in enumerate(islice(wanted, used)):
                batches = []
                for queue in range(len(parts)):
                    # In the middle of the round, once all have had a batch: before, the feed waits
                    # for those who may still load a state, and one thread reads all queues here.
                    is_first = i == queue == 0 and event in ("one comes back", "all come back")
                    is_safe = num_begun == num or is_first
                    if i == whose % used and queue == whose % len(parts) and is_safe:
                        happen(event, leg, queue, whose)
                    batches.append(next(leg.queues[queue]))
                    num_begun = max(num_begun, queue + 1)
                assert_same([note(batch) for batch in batches], parts, num, used, at, event)
                at = end
            if at == len(stream) or not batches:
                assert [next(queue, None) for queue in leg.queues] == [None] * num
                if not batches:
                    return
            if whose % 3:
                state = batches[whose % len(batches)].cut.token()
            else:
                state = leg.queues[whose % len(batches)].state_dict()


def happen(event: str, leg: Leg, queue: int, whose: int) -> None:
    if event == "server lost":
        leg.lose_server(whose)
    elif event == "queues taken over":
        leg.take_over(whose)
    elif event == "one comes back":
        leg.come_back(queue)
    elif event == "all come back":
        for each in range(len(leg.queues)):
            leg.come_back(each)
