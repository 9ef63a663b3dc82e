"""Errors of the fetch function: at their place in the stream, for every consumer, with a note."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest

from conformance.served import reading, served, serving
from feeder import (
    Batch,
    ChunkError,
    Coordinator,
    FeedError,
    FetchError,
    RemoteError,
)
from feeds import assert_same, make, note
from fetches import make_fetch

pytestmark = pytest.mark.served

FIRST_BAD = 3
"""The call whose chunk is bad, of the workers' calls or of the pure function's."""


class Broken(Exception):
    """What the fetch function raises."""


def broken(form: str, bad: Any) -> Any:
    """Return a fetch function one call of which returns, or raises, what `bad` makes of it."""
    fetch = make_fetch(form, "small")
    whole, calls = fetch.make, count()

    def make_bad(*args: Any) -> Any:
        call = args[0].index if form == "pure" else next(calls)
        return bad(whole(*args)) if call == FIRST_BAD else whole(*args)

    fetch.make = make_bad
    return fetch


def fail(chunk: Any) -> Any:
    try:
        raise OSError("the disk is gone")
    except OSError as error:
        raise Broken("no rows today") from error


def other_dtype(chunk: Any) -> Any:
    if isinstance(chunk, dict):
        return chunk | {"label": chunk["label"].astype(np.int8)}
    return [*chunk[:2], chunk[2].astype(np.int8)]


def read_to_the_error(feed: Any) -> tuple[list[Batch], FeedError]:
    """Return the batches before an error, which is raised again at every later call."""
    batches: list[Batch] = []
    with pytest.raises(FeedError) as caught:
        for batch in feed:
            batches.append(batch)
    assert not isinstance(caught.value.__context__, IndexError)
    with pytest.raises(type(caught.value), match="^" + str(caught.value)[:20]):
        next(feed)
    return batches, caught.value


def fields_of(error: FeedError) -> dict[str, Any]:
    return {name: value for name, value in vars(error).items() if not name.startswith("_")}


@pytest.mark.parametrize(
    ("transport", "form", "bad", "kind"),
    [
        ("shared", "replay", fail, FetchError),
        ("shared", "seek", other_dtype, ChunkError),
        ("ipc", "pure", fail, FetchError),
        ("tcp", "pure", other_dtype, ChunkError),
    ],
)
def test_error_takes_the_place_of_its_chunk(
    transport: str, form: str, bad: Any, kind: type[FeedError]
) -> None:
    settings = {"num_worker_threads": 1, "batch_size": 2}
    with make(broken(form, bad), **settings) as coordinator:
        wanted, error = read_to_the_error(coordinator["train"])
        after = coordinator.state_dict()
    assert len(wanted) == FIRST_BAD * 3 // 2
    with served(transport, make(broken(form, bad), **settings)) as seen:
        got, remote = read_to_the_error(seen)
        assert seen.state_dict() == after
    assert_same([note(batch) for batch in got], [note(batch) for batch in wanted])
    assert type(remote) is type(error) is kind and str(remote) == str(error)
    assert fields_of(remote) == fields_of(error) and remote.worker_id == 0
    assert remote.call == FIRST_BAD


def test_remote_traceback_comes_as_a_note() -> None:
    with served("shared", make(broken("pure", fail))) as seen:
        _, error = read_to_the_error(seen)
    told = "\n".join(error.__notes__)
    for part in ("Broken: no rows today", "OSError: the disk is gone", "in fail", __file__):
        assert part in told


def test_error_reaches_the_consumers_of_all_queues() -> None:
    def factory() -> Coordinator:
        return make(broken("pure", fail), batch_size=1, num_worker_threads=1)

    with served("shared", factory, num_queues=3) as seen:
        ended = [read_to_the_error(consumer) for consumer in seen.consumers]
    steps = [[batch.step for batch in batches] for batches, _ in ended]
    assert steps == [list(range(queue, 9, 3)) for queue in range(3)]
    assert {type(error) for _, error in ended} == {FetchError}


def test_what_a_factory_raises_reaches_the_consumer(caplog: pytest.LogCaptureFixture) -> None:
    made: list[Coordinator] = []

    def factory() -> Coordinator:
        if made:
            raise Broken("the catalogue is gone")
        made.append(make(make_fetch("replay", "small")))
        return made[0]

    with serving(factory) as server:
        with reading(server) as consumer:
            state = consumer.state_dict()
            next(consumer)
        with (
            reading(server, resume=state) as consumer,
            pytest.raises(RemoteError, match="Broken: the catalogue is gone"),
        ):
            next(consumer)
    assert "could not be made" in caplog.text
    # The records hold the traceback, and with it what the server had open.
    caplog.clear()
