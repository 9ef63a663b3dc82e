"""A position and a feed that do not fit: refused with every field that differs, then and now."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from feeder.workers.sources.source import Source
from small import Calls, Counted, Pure, ids, make
from watching import says


def snapshot_of(fetch: Any, num_batches: int = 1, **settings: Any) -> feeder.Snapshot:
    with make(fetch, **settings) as coordinator:
        for _ in range(num_batches):
            next(coordinator["train"])
        return coordinator.snapshot()


def refuse(resume: Any, fetch: Any, **settings: Any) -> str:
    """Return what the ResumeError says, and see that no feed was added."""
    coordinator = settings.setdefault("coordinator", feeder.Coordinator())
    with pytest.raises(feeder.ResumeError) as caught:
        make(fetch, resume=resume, **settings)
    assert type(caught.value) is feeder.ResumeError
    assert len(coordinator) == 0
    return str(caught.value)


ANOTHER = "the snapshot is of another feed than 'train': "
DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "form": ({"fetch": Counted()}, "form: 'pure' then, 'replay' now"),
    "names": ({"names": ["number"]}, "names: ['id'] then, ['number'] now"),
    "batch_columns": ({"batch_columns": [1]}, "batch_columns: [0] then, [1] now"),
    "batch_size": ({"batch_size": 5}, "batch_size: 4 then, 5 now"),
    "num_worker_threads": (
        {"num_worker_threads": 3}, "num_worker_threads: 2 then, 3 now"
    ),
    "seed": ({"seed": 2**64 - 1}, "seed: 0 then, 18446744073709551615 now"),
    "last_batch": ({"last_batch": "drop"}, "last_batch: 'keep' then, 'drop' now"),
    "last_round": ({"last_round": "pad"}, "last_round: 'uneven' then, 'pad' now"),
    "order": ({"order": "arrival"}, "order: 'ticket' then, 'arrival' now"),
    "rounds": ({"rounds": "epoch"}, "rounds: None then, 'epoch' now"),
    "global_batch_size": (
        {"batch_size": None, "global_batch_size": 4},
        "batch_size: 4 then, None now; global_batch_size: None then, 4 now",
    ),
    "dont_rebatch": ({"dont_rebatch": True}, "dont_rebatch: False then, True now"),
    "version": ({"version": "b"}, "version: '' then, 'b' now"),
}  # fmt: skip


def test_a_field_that_differs_is_told_with_both_values() -> None:
    before = snapshot_of(Pure())
    for settings, told in DIFFERENCES.values():
        assert refuse(before, **{"fetch": Pure(), **settings}) == ANOTHER + told
    (stream,) = make(Pure())["train"].streams
    only_where_set = {"rounds", "global_batch_size"}
    wanted = {*stream.config.fingerprint(), *only_where_set}
    assert {*DIFFERENCES, "first_worker_id"} == wanted, "every field is tried"


def two_devices(num_workers: int) -> feeder.Coordinator:
    """Return one feed made by two calls, the second of which counts its worker ids on."""
    coordinator = make(Pure(), devices=("cpu:0",), num_worker_threads=num_workers)
    return make(Pure(), devices=("cpu:1",), coordinator=coordinator)


def test_another_first_worker_id_is_told() -> None:
    with two_devices(2) as coordinator:
        next(coordinator["train"].on(1))
        state = coordinator.state_dict()
    with says(feeder.ResumeError, ANOTHER + "num_worker_threads: 2 then, 3 now"):
        two_devices(3).load_state_dict(state)
    snapshot = feeder.Snapshot.from_bytes(state["feeder"])
    (second,) = (state for state in snapshot.states if state.number == 1)
    with says(feeder.ResumeError, ANOTHER + "first_worker_id: 2 then, 3 now"):
        two_devices(3)["train"].streams[1].positions.find(second)


class Before(Source):
    """A source as its positions were written before worker ids were left out of them."""

    ignores_worker_ids = False


def numbers(kind: type[Source] = Source) -> Source:
    source = sources.arrays(np.arange(1, 101), order="feeder", random_shuffle=True)
    source.__class__ = kind
    return source


@pytest.mark.parametrize(
    ("before", "now", "as_token", "order"),
    [
        (1, 2, False, "ticket"), (2, 1, True, "ticket"), (2, 5, False, "arrival"),
        (1, 2, True, "arrival"),
    ],
)  # fmt: skip
def test_a_source_is_resumed_with_any_number_of_worker_ids(
    before: int, now: int, as_token: bool, order: str
) -> None:
    settings: dict[str, Any] = {"batch_size": 7, "order": order, "num_threads": 1}
    with make(numbers(), num_worker_threads=before, **settings) as coordinator:
        batches = list(islice(coordinator["train"], 5))
        position = batches[-1].cut.token() if as_token else coordinator.snapshot()
        rest = ids(coordinator["train"])
    with make(numbers(), num_worker_threads=now, resume=position, **settings) as again:
        assert ids(again["train"]) == rest
        assert again.state_dict() == coordinator.state_dict()


@pytest.mark.parametrize("as_token", [False, True], ids=["snapshot", "token"])
def test_older_positions_of_a_source_are_resumed(as_token: bool) -> None:
    with make(numbers(Before), num_worker_threads=3) as coordinator:
        batch = next(coordinator["train"])
        position = batch.cut.token() if as_token else coordinator.snapshot()
        rest = ids(coordinator["train"])
    for now in (3, 2):
        settings: dict[str, Any] = {"num_worker_threads": now, "resume": position}
        if as_token and now == 2:  # Its digest has the number of then.
            assert refuse(position, numbers(), num_worker_threads=2)
            continue
        with make(numbers(), **settings) as again:
            assert ids(again["train"]) == rest


def test_what_does_not_change_a_batch_may_differ() -> None:
    snapshot = snapshot_of(Pure())
    make(Pure(), resume=snapshot, num_threads=7, max_buffered_batches=3, max_buffered_bytes=10**6,
         epochs=None, timeout=1.0, writable=True, retries=1, devices=("cpu:3",))  # fmt: skip


def test_a_token_within_a_chunk_has_the_rest_of_it() -> None:
    with make(Pure(5, 4), batch_size=3) as coordinator:
        batches = list(coordinator["train"])
    for number, batch in enumerate(batches, 1):
        with make(Pure(5, 4), batch_size=3, resume=batch.cut.token()) as again:
            assert ids(again["train"]) == ids(batches[number:])


def test_a_token_of_other_settings_is_refused() -> None:
    with make(Pure()) as coordinator:
        token = next(coordinator["train"]).cut.token()
    told = refuse(token, Pure(), batch_size=5)
    assert told.startswith("the token of feed 'train' was made with other settings ")


def test_an_unknown_feed_is_told_with_those_that_there_are() -> None:
    snapshot = snapshot_of(Pure())
    told = refuse(snapshot, Pure(), input_source_name="val")
    assert told == "the snapshot holds feeds ['train[0]'], expected val[0]"
    told = refuse(snapshot.states[0].token, Pure(), input_source_name="val")
    assert told == "the token is of feed 'train', stream 0; expected 'val', stream 0"
    both = make(Pure(), input_source_name="val", coordinator=make(Pure()))
    with pytest.raises(feeder.ResumeError, match=r"holds feeds \['train\[0\]'\], expected val"):
        both.load_state_dict({"feeder": bytes(snapshot)})


def test_a_state_dict_that_is_refused_moves_no_feed() -> None:
    def two(batch_size: int) -> feeder.Coordinator:
        coordinator = make(Pure())
        return make(Pure(), batch_size=batch_size, input_source_name="val", coordinator=coordinator)

    with two(4) as coordinator:
        next(coordinator["train"])
        state = coordinator.state_dict()
    other = two(5)
    before = other.state_dict()
    with pytest.raises(feeder.ResumeError):
        other.load_state_dict(state)
    assert other.state_dict() == before


def test_a_state_dict_is_loaded_before_the_start_alone() -> None:
    coordinator = make(Pure())
    state = coordinator.state_dict()
    coordinator.load_state_dict(state)
    coordinator.load_state_dict(state)
    told = "feed 'train' is started already; load its state before coordinator.start()"
    with coordinator:
        for loader in (coordinator, coordinator["train"]):
            with says(feeder.ResumeError, told):
                loader.load_state_dict(state)
    for loader in (coordinator, coordinator["train"]):
        with pytest.raises((feeder.ResumeError, feeder.ClosedError)):
            loader.load_state_dict(state)


def test_an_older_position_needs_a_whole_round_of_the_devices_that_there_are() -> None:
    """It does not say how many there were."""
    snapshot = snapshot_of(Pure(), 3)
    (stream,) = make(Pure())["train"].streams
    cut = replace(stream.find_resume(snapshot).cut, dealing=None)
    token = stream.positions.id._replace(dealing=None).encode(cut)
    told = refuse(token, Pure(), devices=2)
    assert told == (
        "the position is before batch 3, which is no multiple of 2 devices; resume with a number "
        "of devices that divides it"
    )
    make(Pure(), devices=3, resume=token)
    make(Pure(), devices=2, resume=snapshot)


def columns(*shape: int, dtype: Any = np.int64) -> Any:
    return Calls(4, lambda call: (np.ones((3, *shape), dtype), np.ones(3)))


@pytest.mark.parametrize("held", [True, False], ids=["snapshot", "state dict"])
def test_other_columns_than_then_are_told_at_the_first_chunk(held: bool) -> None:
    with make(columns(2), ["x", "y"]) as coordinator:
        next(coordinator["train"])
        position = coordinator.snapshot() if held else coordinator.state_dict()
    coordinator = make(columns(5, dtype=np.float32), ["x", "y"], resume=position)
    told = (
        "the fetch function gives other columns: dtype of 'x': int64 then, float32 now; row shape "
        "of 'x': (2,) then, (5,) now"
    )
    with coordinator, says(feeder.ResumeError, told):
        list(coordinator["train"])


def test_a_replay_that_gives_other_rows_names_the_worker() -> None:
    class Drifting(Counted):
        def __call__(self, worker_id: int, batch_size: int) -> Any:
            (rows,) = super().__call__(worker_id, batch_size)
            return (rows + (worker_id == 1),)

    snapshot = snapshot_of(Counted(), 3)
    with pytest.warns(feeder.ReplayWarning, match="^feed 'train' is resumed by replay: "):
        coordinator = make(Drifting(), resume=snapshot)
    with coordinator, pytest.raises(feeder.ResumeError) as caught:
        list(coordinator["train"])
    assert str(caught.value) == (
        "fetch function is not deterministic: worker 1, call 2: other rows; resume from a snapshot"
        ", which holds the rows left over, give the function cursor(worker_id) and seek(worker_id, "
        "cursor), or make it repeat itself"
    )


def test_the_warning_of_a_replay_is_at_the_line_of_the_user() -> None:
    state = snapshot_of(Counted(), 3)
    fresh, in_place = feeder.Coordinator(), make(Counted())
    with pytest.warns(feeder.ReplayWarning) as caught:
        feeder.init_data_input_workers(["id"], Counted(), 4, resume=state, coordinator=fresh)
        in_place.load_state_dict({"feeder": bytes(state)})
        make(Counted())["train"].load_state_dict({"feeder": bytes(state)})
    assert [warning.filename for warning in caught] == [__file__] * 3
