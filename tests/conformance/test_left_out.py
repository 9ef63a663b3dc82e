"""Records that are left out: named in the log and in a bounded list, which a position knows as a
naive reader of its stream does, for any number of threads and processes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import feeder
from feeder import sources
from feeder.sources import LeftOut
from feeder.workers.sources.stores import reading

SIZE, BATCH, MOST = 30, 4, 5


def read(bad: frozenset[int], record: int) -> int:
    if record in bad:
        raise ValueError("bad")
    return record


def opened(bad: frozenset[int], **options: Any) -> tuple[Any, Any]:
    source = sources.records(range(SIZE)).map(partial(read, bad), on_error="skip")
    coordinator = feeder.init_data_input_workers(
        ["x"], source, BATCH, coordinator=feeder.Coordinator(), epochs=2, **options
    )
    return source, coordinator


def naive(bad: frozenset[int], epoch: int, calls: int) -> tuple[LeftOut, ...]:
    """What calls before this one have left out: each record once, the first ones."""
    last = SIZE if epoch else calls * BATCH
    return tuple(
        LeftOut(0, record // BATCH, f"sample {record}", "bad")
        for record in sorted(bad, key=lambda record: (record // BATCH, str(record)))
        if record < last
    )[:MOST]


@given(
    st.sets(st.integers(0, SIZE - 1), max_size=SIZE - 1).map(frozenset),
    st.integers(1, 3),
    st.integers(0, 5),
    st.booleans(),
)
def test_a_position_knows_what_was_left_out_before(
    bad: frozenset[int], threads: int, used: int, with_rows: bool
) -> None:
    def check(coordinator: Any) -> bytes:
        snapshot = coordinator.snapshot()
        (state,) = snapshot.states
        position = batch.cut.position if (batch := last[0]) else None
        expected = () if position is None else naive(bad, position.epoch, position.calls[0])
        assert state.left_out == expected
        data = bytes(snapshot)
        assert data[8] == (2 if expected else 1)
        (written,) = feeder.Snapshot.from_bytes(data).states
        assert (written.token, written.left_out) == (state.token, state.left_out)
        assert all(f"{one.name}: bad" in snapshot.describe() for one in expected)
        return data if with_rows else coordinator.state_dict()["feeder"]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "_SKIPS_LISTED", MOST)
        last: list[Any] = [None]
        source, coordinator = opened(bad, num_threads=threads)
        with coordinator:
            for _ in range(used):
                last[0] = next(coordinator["train"], last[0])
            data = check(coordinator)
        # The rest, from there on.
        source, coordinator = opened(bad, num_threads=threads, resume=data)
        with coordinator:
            for batch in coordinator["train"]:
                last[0] = batch
            check(coordinator)
            stats = coordinator["train"].stats()
        assert tuple(source.left_out) == naive(bad, 1, 0)
        assert stats["skipped"] == source.skipped
        if not used and len(bad) <= MOST:
            assert source.skipped == 2 * len(bad)


@pytest.mark.process
@pytest.mark.parametrize("max_calls", [None, 1], ids=["some", "each of another process"])
def test_processes_list_the_same(max_calls: int | None) -> None:
    """The first call of all is made again, perhaps by another process."""
    bad = frozenset({1, 2, 9, 17, 29})
    source, coordinator = opened(bad, executor=feeder.Processes(2, max_calls=max_calls))
    with coordinator:
        assert sum(batch.rows for batch in coordinator["train"]) == 2 * (SIZE - len(bad))
        (state,) = coordinator.snapshot().states
    assert state.left_out == tuple(source.left_out) == naive(bad, 1, 0)
    assert source.skipped == 2 * len(bad)
