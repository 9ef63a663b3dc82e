"""Any numbers of devices one after another, any rounds and skips: as the naive feeder deals."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import feeder
from feeds import Record, assert_same, make, note, note_naive
from naive import naive_dealing, naive_stream


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


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    epochs=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=12), min_size=1, max_size=4),
    batch_size=st.integers(1, 4),
    is_source=st.booleans(),
    legs=st.lists(LEG, min_size=1, max_size=5),
    rounds=st.sampled_from(("stream", "epoch")),
    last_round=st.sampled_from(("uneven", "drop", "pad")),
    last_batch=st.sampled_from(("keep", "drop", "pad", "carry")),
)
def test_every_device_is_dealt_what_the_naive_feeder_deals(
    epochs: list[list[int]], batch_size: int, is_source: bool, legs: list[tuple[int, ...]],
    rounds: str, last_round: str, last_batch: str,
) -> None:  # fmt: skip
    if rounds == "epoch" and last_batch == "carry":
        last_batch = "keep"
    # An epoch without a batch, or without a round, is an error of its own.
    num_batches = max(num for num, *_ in legs) if last_round == "drop" else 1
    epochs = [[num_batches * batch_size, *sizes] for sizes in epochs]
    size = batch_size if is_source else None
    naive = naive_stream(
        Calls(epochs, size), ("id",), pure=True, batch_size=batch_size, num_workers=2,
        epochs=len(epochs), last_batch=last_batch,
    )  # fmt: skip
    stream: list[Record] = [note_naive(batch) for batch in naive]
    plain = {
        "input_blob_names": ["id"], "batch_size": batch_size, "epochs": len(epochs),
        "num_worker_threads": 2, "rounds": rounds, "last_round": last_round,
        "last_batch": last_batch,
    }  # fmt: skip
    at, resume = 0, None
    for num, used, skip, whose in legs:
        fetch = Calls(epochs, size)
        wanted = naive_dealing(stream, at, num, rounds, last_round)
        for end, _ in islice(wanted, skip):
            at = end
        with make(fetch, devices=num, skip=skip, resume=resume, **plain) as coordinator:
            devices = [coordinator["train"].on(i) for i in range(num)]
            batches = []
            for end, dealt in islice(wanted, used):
                batches = [next(device) for device in devices[: len(dealt)]]
                assert_same([note(batch) for batch in batches], dealt, num, used, skip, at)
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
