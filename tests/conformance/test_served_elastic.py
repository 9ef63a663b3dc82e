"""One served stream, and any number of queues one after another: the order of its batches stays.

As in `test_elastic`, a leg is a run with some queues, of whose rounds so many are used, and what
each queue gets is compared with the naive stream. The next leg has a server of its own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import pytest

import feeder
from conformance.served import reading, serving
from conformance.test_elastic import LEGS, NUM_EPOCHS, fetch_of, script
from feeds import Record, assert_same, expected, make, note
from fetches import FORMS
from naive import naive_dealing

pytestmark = pytest.mark.served


@pytest.fixture(scope="module")
def streams() -> dict[str, list[Record]]:
    """The naive stream of each form."""
    return {
        form: expected(FORMS[form](script), pure=form == "pure", epochs=NUM_EPOCHS)
        for form in FORMS
    }


@contextmanager
def consumers(server: feeder.Server, states: list[Any], **settings: Any) -> Iterator[list[Any]]:
    """A consumer of each queue, each with its state."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(reading(server, queue=i, resume=state, **settings))
            for i, state in enumerate(states)
        ]


def states_for(
    num: int, queues: list[Any], batches: list[feeder.Batch], carrier: str, dice: random.Random
) -> list[Any]:
    """The states with which so many queues start: of the last leg one for all, or any."""
    if carrier == "token of any":
        return [dice.choice(batches).cut.token() for _ in range(num)]
    if carrier == "state dict of one":
        return [dice.choice(queues[: len(batches)]).state_dict()] * num
    return [queues[i % len(batches)].state_dict() for i in range(num)]


@pytest.mark.parametrize("carrier", ["state dict of one", "state dicts of all", "token of any"])
@pytest.mark.parametrize("last_round", ["uneven", "drop", "pad"])
@pytest.mark.parametrize("rounds", ["stream", "epoch"])
@pytest.mark.parametrize("form", FORMS)
def test_the_order_stays_with_any_numbers_of_queues_one_after_another(
    form: str, rounds: str, last_round: str, carrier: str, streams: dict[str, list[Record]]
) -> None:
    stream, dice = streams[form], random.Random(f"{form} {rounds} {last_round} {carrier}")
    settings = {"epochs": NUM_EPOCHS, "rounds": rounds, "last_round": last_round}
    at, states, got = 0, [None] * LEGS[0], list[Record]()
    for leg, num in enumerate(LEGS):
        wanted = naive_dealing(stream, at, num, rounds, last_round)
        with (
            serving(lambda: make(fetch_of(form), **settings), queues=num) as server,
            consumers(server, states) as queues,
        ):
            # The last leg goes to the end; the others stop anywhere, also in another epoch.
            some = None if leg == len(LEGS) - 1 else dice.randint(1, len(stream) // 5 // num + 1)
            for end, dealt in islice(wanted, some):
                batches = [next(queue) for queue in queues[: len(dealt)]]
                assert_same([note(batch) for batch in batches], dealt, leg, num, at)
                got += [batch for batch in dealt if batch[3]]
                at = end
            if some is None:
                assert [next(queue, None) for queue in queues] == [None] * num
            else:
                states = states_for(LEGS[leg + 1], queues, batches, carrier, dice)
    # Nothing doubled, and nothing lost but what a round was too short for.
    assert [batch for batch in stream if batch in got] == got
    lost = len(stream) - len(got)
    most = 0 if last_round != "drop" else LEGS[-1] - 1 if rounds == "stream" else 15 * NUM_EPOCHS
    assert lost <= most
