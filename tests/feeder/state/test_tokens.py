"""Tokens: what goes in comes out, whatever the position, and what they tell without a feed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feeder.errors import ConfigError, SnapshotFormatError
from feeder.state import token as tokens
from feeder.state.token import StreamId
from feeder.workers.stream.position import Cut, Leftover, Position
from feeder.workers.stream.rounds import Dealing

ID = StreamId("train", 2, b"settings")
COUNTS = st.integers(0, 2**63 - 1)
MARKS = st.none() | st.binary(max_size=9)
DEALINGS = st.builds(
    Dealing, COUNTS, st.integers(1, 9), st.integers(1, 9), COUNTS, st.none() | COUNTS
)


@st.composite
def positions(draw: st.DrawFn) -> Position:
    num = draw(st.just(1) | st.integers(2, 20))
    live = draw(st.lists(st.booleans(), min_size=num, max_size=num).filter(any))
    calls, rows = ([draw(COUNTS) for _ in range(num)] for _ in range(2))
    return Position(
        draw(COUNTS), draw(st.integers(0, num - 1)), tuple(live), tuple(calls), tuple(rows),
        tuple(draw(MARKS) for _ in range(num)), tuple(draw(st.lists(COUNTS, max_size=3))),
    )  # fmt: skip


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    position, leftover = draw(positions()), None
    if draw(st.booleans()):
        partition = draw(st.integers(0, len(position.calls) - 1))
        rows = draw(st.integers(1, 2**63 - 1))
        leftover = Leftover(
            partition=partition, call=draw(st.integers(position.calls[partition], 2**63 - 1)),
            taken=draw(st.integers(0, rows)), rows=rows, digest=draw(st.integers(0, 2**64 - 1)),
            mark=draw(MARKS),
        )  # fmt: skip
    is_whole = leftover is not None and leftover.taken == leftover.rows
    return Cut(
        epoch=draw(COUNTS), index=draw(COUNTS), step=draw(COUNTS), finished=False,
        position=position, leftover=None if is_whole else leftover,
        checked=leftover if is_whole else None, dealing=draw(st.none() | DEALINGS),
        encode=ID.encode,
    )  # fmt: skip


@given(cut=cuts(), of_feed=st.none() | DEALINGS)
def test_what_goes_in_comes_out(cut: Cut, of_feed: Dealing | None) -> None:
    token = ID._replace(dealing=of_feed).encode(cut)
    found = ID.decode(token, None)
    dealing = of_feed if cut.dealing is None else cut.dealing
    assert found == cut
    assert (found.checked, found.dealing) == (cut.checked, dealing)
    assert ID.encode(found) == token
    assert (tokens.fingerprint_of(token), tokens.name_of(token)) == (b"settings", ("train", 2))
    assert tokens.step_of(token) == cut.step // (1 if dealing is None else dealing.num)
    is_over = dealing is None or (dealing.epochs is not None and cut.epoch >= dealing.epochs)
    first = cut.step if dealing is None or is_over else max(cut.step, dealing.start)
    while not (dealing is None or is_over or (first - dealing.start) % dealing.num == 0):
        first += 1
    assert tokens.start_of(token) == (first, b"settings")
    at = cut.position
    is_told = len(at.calls) == 1 and not at.done
    assert tokens.calls_of(token) == ((at.epoch, at.calls[0]) if is_told else None)


def test_a_token_is_as_large_as_messages_and_checkpoints_allow() -> None:
    def cut(num_bytes: int) -> Any:
        position = Position(0, 0, (True,), (1,), (1,), (bytes(num_bytes),))
        return Cut(
            epoch=0, index=0, step=0, finished=False, position=position, leftover=None,
            encode=ID.encode,
        )  # fmt: skip

    most = 60_000 + 64 * 1024 + 11 - len(cut(60_000).token())
    token = cut(most).token()
    assert (len(token), ID.decode(token, None)) == (64 * 1024 + 11, cut(most))
    with pytest.raises(ConfigError, match="a token of 65537 bytes"):
        cut(most + 1).token()
    with pytest.raises(SnapshotFormatError, match="a body of 65537 bytes"):
        ID.decode(token + b"-", None)


WHOLE = Position(0, 1, (True, True), (3, 4), (3, 4), (None, None))


@pytest.mark.parametrize(
    "changes",
    (
        {"turn": 2},
        {"rows": (3,)},
        {"marks": (None,) * 3},
        {"live": (False, False)},
        {"live": (True, True, True)},
    ),
    ids=str,
)
def test_a_position_that_does_not_fit_together_is_refused(changes: dict[str, Any]) -> None:
    """Its sum is right, as of a token that other code has written."""
    cut = Cut(
        epoch=0, index=0, step=0, finished=False, position=WHOLE, leftover=None, encode=ID.encode
    )
    assert ID.decode(cut.token(), None).position == WHOLE
    wrong = replace(cut, position=WHOLE._replace(**changes))
    with pytest.raises(SnapshotFormatError, match="expected as much of each partition"):
        ID.decode(wrong.token(), None)
