"""What several servers of one stream have stored is the lowest of them, and never more than all
their queues have used."""

from __future__ import annotations

import tempfile
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import feeder
from feeder.checkpoint.parts import find_lowest, store_of
from feeder.checkpoint.resuming import find_position
from feeder.checkpoint.store import CheckpointStore
from feeder.state.snapshot import Snapshot
from feeder.state.token import start_of
from feeder.workers.stream.spec import Part
from parts import examples
from small import Calls, make

ROUNDS = 12


@cache
def snapshots(num: int) -> list[Snapshot]:
    """Positions of a feed with so many queues, by round: after the first queue's batch, as that of
    a server that makes no other queue of the round."""
    fetch = Calls(ROUNDS * num, lambda call: (np.full(4, call.index),))
    with make(fetch, devices=num) as coordinator:
        devices = [coordinator["train"].on(i) for i in range(num)]
        found = [coordinator.snapshot()]
        for _ in range(ROUNDS):
            batches = [next(device) for device in devices]
            state = found[0].states[0]._replace(token=batches[0].cut.token())
            found.append(Snapshot((state,)))
    return found


def step_in(snapshot: Snapshot) -> int:
    """The first batch that no queue has used."""
    (state,) = snapshot.states
    return start_of(state.token)[0]


def save(folder: Path | str, part: Part | None, at_round: int, num: int | None = None) -> None:
    with store_of(CheckpointStore(folder), part) as store:
        store.save(snapshots(part.num if num is None else num)[at_round])


def lowest(folder: Path | str) -> int:
    found = find_lowest(CheckpointStore(folder))
    assert found is not None
    assert not found.lacks
    return step_in(found.snapshot)


def test_it_is_the_lowest_of_the_newest_of_each(tmp_path: Path) -> None:
    left, right = Part(0, 2, 3), Part(2, 3, 3)
    assert find_lowest(CheckpointStore(tmp_path)) is None
    save(tmp_path, left, 0)
    save(tmp_path, right, 0)
    save(tmp_path, left, 5)
    assert lowest(tmp_path) == 0
    save(tmp_path, right, 4)
    assert lowest(tmp_path) == 12
    for resume, store in (("latest", CheckpointStore(tmp_path)), (tmp_path, None)):
        found = find_position(resume, store)
        assert isinstance(found.position, Snapshot)
        assert step_in(found.position) == 12
        assert "queues-0-1-of-3.0000" in found.where


def test_of_queues_of_which_nothing_is_stored_nothing_is_claimed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, Part(0, 2, 4), 5)
    store = CheckpointStore(tmp_path)
    assert find_position("latest", store).position is None
    assert "of queues 2 to 3 of 4 nothing is stored" in caplog.text
    with pytest.raises(feeder.CheckpointError, match=r"queues 2 to 3 of 4.*a trainer's position"):
        find_position(tmp_path, None)


def test_who_has_not_stored_since_queues_changed_has_used_what_all_had(tmp_path: Path) -> None:
    for queue, at_round in enumerate((2, 6, 6)):
        save(tmp_path, Part(queue, queue + 1, 3), at_round)
    save(tmp_path, Part(0, 1, 2), 5)
    assert lowest(tmp_path) == 2 * 3
    save(tmp_path, Part(1, 2, 2), 4)
    assert lowest(tmp_path) == 4 * 2


def test_what_one_server_has_stored_is_no_position_of_all(tmp_path: Path) -> None:
    save(tmp_path, Part(0, 2, 4), 5)
    (name,) = CheckpointStore(tmp_path).names()
    with pytest.raises(feeder.ResumeError, match=r"one of several servers.*resume from its folder"):
        find_position(tmp_path / name, None)


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    for at_round in (3, 4):
        save(tmp_path, Part(0, 1, 2), at_round)
        save(tmp_path, Part(1, 2, 2), at_round)
    newest = CheckpointStore(tmp_path).names("queues-0-0")[-1]
    (tmp_path / newest).write_bytes((tmp_path / newest).read_bytes()[:-9])
    assert lowest(tmp_path) == 6


def test_nothing_begins_anew_where_all_of_one_server_are_damaged(tmp_path: Path) -> None:
    save(tmp_path, Part(0, 1, 2), 3)
    save(tmp_path, Part(1, 2, 2), 3)
    damaged = tmp_path / "queues-1-1-of-2.00000001"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    with pytest.raises(feeder.CheckpointError, match=r"queues-1-1-of-2.*can be loaded"):
        find_position("latest", CheckpointStore(tmp_path))


def test_all_feeds_are_in_it_each_at_its_lowest(tmp_path: Path) -> None:
    for first, at in ((0, (3, 7)), (1, (5, 2))):
        states = [
            snapshots(2)[i].states[0]._replace(name=name) for name, i in zip("ab", at, strict=True)
        ]
        with store_of(CheckpointStore(tmp_path), Part(first, first + 1, 2)) as store:
            store.save(Snapshot(tuple(states)))
    found = find_lowest(CheckpointStore(tmp_path))
    assert found is not None
    assert [(one.name, start_of(one.token)[0]) for one in found.snapshot.states] == [
        ("a", 6), ("b", 4),
    ]  # fmt: skip


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data())
def test_the_number_of_servers_and_queues_may_change(data: st.DataObject) -> None:
    """Servers begin where all were found to be, or before it, as trainers say; each stores that,
    and what its queues use from then on; some die before they have stored anything."""
    with tempfile.TemporaryDirectory() as folder:
        known = num_before = 0
        for _ in range(data.draw(st.integers(1, 4))):
            # Who is not there yet of as many queues as before counts with what it stored then.
            num = data.draw(st.sampled_from([num for num in (1, 2, 3) if num != num_before]))
            num_before = num
            cuts = sorted(data.draw(st.sets(st.integers(1, num - 1)))) if num > 1 else []
            ends = [0, *cuts, num]
            parts = [Part(*pair, num) for pair in pairwise(ends)]
            # A whole round of these queues: what was found lies in none that is begun.
            start = min(data.draw(st.integers(0, known)), known) // num
            used, stored = dict.fromkeys(parts, start), dict[Part, int]()
            stores = data.draw(st.lists(st.sampled_from(parts), max_size=6))
            begun = parts if data.draw(st.booleans()) or not known else stores[:1]
            for part in [*begun, *(one for one in stores if one in begun)]:
                save(folder, None if num == 1 else part, used[part], num)
                stored[part] = used[part] * num
                used[part] = min(ROUNDS, used[part] + data.draw(st.integers(0, 2)))
                lacks = [known] if len(stored) < len(parts) else []
                assert step_is_known(folder) == min([*stored.values(), *lacks])
            known = step_is_known(folder)


def step_is_known(folder: str) -> int:
    position = find_position("latest", CheckpointStore(folder)).position
    assert position is None or isinstance(position, Snapshot)
    return 0 if position is None else step_in(position)
