"""Any numbers of devices one after another, any rounds and skips: as the naive feeder deals."""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import feeder
from feeds import Record, assert_same, make, note, note_naive
from naive import naive_dealing, naive_stream
from parts import examples


class Calls:
    """`fetch(call)`: so many rows from each call of each epoch; or as the calls of a source are."""

    def __init__(self, epochs: list[list[int]], batch_size: int | None) -> None:
        self.epochs, self.batch_size = epochs, batch_size
        self.made: list[tuple[int, int]] = []
        self.gives_all_rows = batch_size is not None

    def rows(self, epoch: int, batch_size: int) -> int:
        return sum(self.epochs[epoch])

    def __call__(self, call: feeder.Call) -> Any:
        self.made.append((call.epoch, call.index))
        if self.batch_size is None:
            ends = np.cumsum([0, *self.epochs[call.epoch]]).tolist()
        else:
            total = sum(self.epochs[call.epoch])
            ends = [*range(0, total, self.batch_size), total]
        if call.index >= len(ends) - 1:
            raise StopIteration
        first, stop = ends[call.index : call.index + 2]
        return (np.arange(first, stop) + 1000 * call.epoch + 1,)


LEG = st.tuples(
    st.integers(1, 6),  # devices
    st.integers(1, 6),  # rounds that are used
    st.integers(0, 2),  # rounds that are skipped first
    st.integers(0, 99),  # whose token; else of all
)


class Dealt(NamedTuple):
    """A stream, and how it is dealt out."""

    epochs: list[list[int]]
    """Rows of each call of each epoch."""
    batch_size: int
    is_source: bool
    rounds: str
    last_round: str
    last_batch: str

    def with_rounds_for(self, most: int) -> Dealt:
        """The same with a whole round of so many devices in each epoch where one without is an
        error: an epoch without a batch always is one."""
        num_rows = (most if self.last_round == "drop" else 1) * self.batch_size
        carries = self.rounds == "epoch" and self.last_batch == "carry"
        return self._replace(
            epochs=[[num_rows, *sizes] for sizes in self.epochs],
            last_batch="keep" if carries else self.last_batch,
        )

    def fetch(self) -> Calls:
        """Its fetch function, which has made no call yet."""
        return Calls(self.epochs, self.batch_size if self.is_source else None)

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
        }  # fmt: skip


DEALT = st.builds(
    Dealt,
    epochs=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=12), min_size=1, max_size=4),
    batch_size=st.integers(1, 4),
    is_source=st.booleans(),
    rounds=st.sampled_from(("stream", "epoch")),
    last_round=st.sampled_from(("uneven", "drop", "pad")),
    last_batch=st.sampled_from(("keep", "drop", "pad", "carry")),
)


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(dealt=DEALT, legs=st.lists(LEG, min_size=1, max_size=5))
@example(  # Rounds are skipped from an epoch's end, whose last chunk is shorter than the others.
    dealt=Dealt([[3], [5]], 2, True, "stream", "drop", "keep"),
    legs=[(4, 1, 1, 0), (4, 1, 2, 0), (6, 1, 0, 0)],
)
def test_every_device_is_dealt_what_the_naive_feeder_deals(
    dealt: Dealt, legs: list[tuple[int, ...]]
) -> None:
    dealt = dealt.with_rounds_for(max(num for num, *_ in legs))
    stream, plain = dealt.stream(), dealt.settings()
    at, resume = 0, None
    for num, used, skip, whose in legs:
        wanted = naive_dealing(stream, at, num, dealt.rounds, dealt.last_round)
        for end, _ in islice(wanted, skip):
            at = end
        with make(dealt.fetch(), devices=num, skip=skip, resume=resume, **plain) as coordinator:
            devices = [coordinator["train"].on(i) for i in range(num)]
            batches = []
            for end, parts in islice(wanted, used):
                batches = [next(device) for device in devices[: len(parts)]]
                assert_same([note(batch) for batch in batches], parts, num, used, skip, at)
                at = end
            # Where the stream ends in the middle of a round, it has ended for all once they know.
            if at == len(stream):
                assert [next(device, None) for device in devices] == [None] * num
            if not batches:
                # The stream has ended, or nothing is left but what a round is too short for.
                assert [next(device, None) for device in devices] == [None] * num
                return
            if whose % 3:
                resume = batches[whose % len(batches)].cut.token()
            else:
                resume = coordinator.state_dict()
