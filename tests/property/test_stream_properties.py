"""For any chunks, workers, threads and cuts, with delays wherever they can be: the naive stream.

Where the environment variable CI is set Hypothesis tries the same examples each time.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from feeder import Batch
from feeds import CARRIERS, Record, assert_same, deal, expected, note, running
from fetches import FORMS, NUM_WORKERS, Script, Sizes, shaky

SIZES = st.lists(st.none() | st.integers(0, 6) | st.integers(0, 40), max_size=5)
PAUSE_S = 0.0005
NO_MORE = 10_000


@st.composite
def plans(draw: st.DrawFn) -> tuple[Script, int]:
    """Draw a script and its number of epochs; every epoch has a row."""
    epochs = draw(st.integers(1, 3))
    sizes: dict[tuple[int, int], Sizes] = {
        (worker, epoch): draw(SIZES) for epoch in range(epochs) for worker in range(NUM_WORKERS)
    }
    for epoch in range(epochs):
        sizes[0, epoch] = (*sizes[0, epoch], draw(st.integers(1, 9)))
    return Told(sizes), epochs


class Told:
    """A script that is read from a table, and that Hypothesis can show."""

    def __init__(self, sizes: dict[tuple[int, int], Sizes]) -> None:
        self.sizes = sizes

    def __call__(self, worker: int, epoch: int) -> Sizes:
        return self.sizes.get((worker, epoch), ())

    def __repr__(self) -> str:
        return f"Told({self.sizes!r})"


RUNS = st.fixed_dictionaries(
    {
        "num_threads": st.sampled_from((1, 2, 3, 8)),
        "max_buffered_batches": st.sampled_from((1, 2, 5, 100)),
        "max_buffered_bytes": st.sampled_from((None, 1, 1000)),
        "writable": st.booleans(),
    }
)
"""What a feed is run with, drawn anew for each part of it."""

PARTS = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(sorted(CARRIERS)), RUNS), max_size=4)
"""The parts that a stream is taken in: rounds, what the position travels in, how it is run."""


def take_in_parts(
    form: str, script: Script, parts: Any, seed: int, devices: int = 1, **stream: Any
) -> list[Batch]:
    """Take a stream in parts, each a feed of its own that goes on where the one before stood."""
    position, batches = None, []
    last = (NO_MORE, "bytes", {})
    for number, (rounds, carrier, run) in enumerate((*parts, last)):
        fetch = FORMS[form](script, shaky(seed + number, PAUSE_S))
        dawdle = shaky(seed - number, PAUSE_S)
        settings = {"resume": position, "devices": devices, **stream, **run}
        with running(fetch, **settings) as (coordinator, feed):
            taken = []
            for batch in islice(deal(feed), rounds * devices):
                dawdle()
                taken.append(batch)
            batches += taken
            if taken or carrier != "token":
                position = CARRIERS[carrier](coordinator, taken[-1] if taken else None)
    return batches


@given(
    form=st.sampled_from(sorted(FORMS)),
    plan=plans(),
    batch_size=st.integers(1, 20),
    workers=st.integers(1, NUM_WORKERS),
    devices=st.integers(1, 3),
    last_batch=st.sampled_from(("keep", "drop", "pad", "carry")),
    last_round=st.sampled_from(("uneven", "drop", "pad")),
    parts=PARTS,
    seed=st.integers(0, 1000),
)
@hypothesis.settings(max_examples=200)
def test_stream_taken_in_any_parts_is_the_naive_one(
    form: str, plan: tuple[Script, int], batch_size: int, workers: int, devices: int,
    last_batch: str, last_round: str, parts: Any, seed: int,
) -> None:  # fmt: skip
    script, epochs = plan
    stream = {"batch_size": batch_size, "last_batch": last_batch, "epochs": epochs}
    wanted: list[Record] = expected(
        FORMS[form](script), pure=form == "pure", num_workers=workers, num_devices=devices,
        last_round=last_round, **stream,
    )  # fmt: skip
    batches = take_in_parts(
        form, script, parts, seed, devices,
        num_worker_threads=workers, last_round=last_round, **stream,
    )  # fmt: skip
    assert_same([note(batch) for batch in batches], wanted)


@given(
    form=st.sampled_from(sorted(FORMS)),
    plan=plans(),
    batch_size=st.integers(1, 20),
    workers=st.integers(1, NUM_WORKERS),
    last_batch=st.sampled_from(("keep", "pad", "carry")),
    parts=PARTS,
    seed=st.integers(0, 1000),
)
@hypothesis.settings(max_examples=100)
def test_rows_in_order_of_arrival_are_conserved(
    form: str, plan: tuple[Script, int], batch_size: int, workers: int, last_batch: str,
    parts: Any, seed: int,
) -> None:  # fmt: skip
    script, epochs = plan
    wanted = expected(
        FORMS[form](script), pure=form == "pure", num_workers=workers, batch_size=1, epochs=epochs
    )
    batches = take_in_parts(
        form, script, parts, seed, order="arrival", num_worker_threads=workers,
        batch_size=batch_size, last_batch=last_batch, epochs=epochs,
    )  # fmt: skip
    got = Counter(int(row_id) for batch in batches for row_id in batch["id"][: batch.rows])
    assert got == Counter(int.from_bytes(columns[0][2], "little") for *_, columns in wanted)
