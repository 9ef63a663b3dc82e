"""Any numbers of queues one after another, servers that are lost, consumers that come back in the
middle of a round: each queue gets what the naive feeder deals. On virtual time (`served`)."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import feeder
from feeds import assert_same, make, note
from naive import naive_dealing
from parts import examples
from property.test_elastic_properties import DEALT, Dealt
from served import one_thread, reading, serving

pytestmark = pytest.mark.served

LEG = st.tuples(
    st.integers(1, 5),  # queues
    st.integers(1, 4),  # rounds that are used
    st.integers(0, 99),  # whose state is for all
    st.sampled_from(("", "server lost", "one comes back", "all come back")),
    st.integers(0, 2),  # rounds that are skipped first
)


class Leg:
    """A server and a consumer of each queue."""

    def __init__(self, stack: ExitStack, factory: Any, num: int, state: Any, skip: int) -> None:
        self._stack, self._factory, self._num = stack, factory, num
        self.serve()
        self.queues = [self._connect(i, resume=state, skip=skip) for i in range(num)]

    def serve(self) -> None:
        """Serve, or serve again."""
        self._server = self._stack.enter_context(
            serving(self._factory, "ipc:///virtual/feed", queues=self._num)
        )

    def _connect(self, queue: int, **settings: Any) -> feeder.Consumer:
        return self._stack.enter_context(reading(self._server, queue=queue, **settings))

    def lose_server(self) -> None:
        """Another server takes the place of this one; consumers find it."""
        self._server.close()
        self.serve()

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
    dealt = dealt.with_rounds_for(max(num for num, *_ in legs))
    stream, plain = dealt.stream(), dealt.settings()
    at, state = 0, None
    for num, used, whose, event, skip in legs:
        # What rounds of an epoch lead to cannot be told without making them.
        skip = skip if dealt.rounds == "stream" else 0
        wanted = naive_dealing(stream, at, num, dealt.rounds, dealt.last_round)
        for end, _ in islice(wanted, skip):
            at = end
        with one_thread(), ExitStack() as stack:
            leg = Leg(stack, lambda: make(dealt.fetch(), **plain), num, state, skip)
            batches: list[feeder.Batch] = []
            num_begun = 0
            for i, (end, parts) in enumerate(islice(wanted, used)):
                batches = []
                for queue in range(len(parts)):
                    # In the middle of the round, once all have had a batch: before, the feed waits
                    # for those who may still load a state, and one thread reads all queues here.
                    is_first = i == queue == 0 and event != "server lost"
                    is_safe = num_begun == num or is_first
                    if i == whose % used and queue == whose % len(parts) and is_safe:
                        happen(event, leg, queue)
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


def happen(event: str, leg: Leg, queue: int) -> None:
    if event == "server lost":
        leg.lose_server()
    elif event == "one comes back":
        leg.come_back(queue)
    elif event == "all come back":
        for each in range(len(leg.queues)):
            leg.come_back(each)
