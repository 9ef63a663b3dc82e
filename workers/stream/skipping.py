"""Where a stream stands so many batches later, without making them, if its source can tell.

To make a million batches and drop them would take hours. The rows of each epoch are known of a
source, so the place is arithmetic; and if the arithmetic would be in the middle of a call, it says
the place of a call before, so that a run makes and drops a few batches and no second way is needed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from feeder.workers.stream.position import Cut
from feeder.workers.stream.rounds import Turns, next_round
from feeder.workers.stream.spec import StreamSpec


def skip_ahead(spec: StreamSpec, cut: Cut, turns: Turns, num: int) -> tuple[Cut, Turns] | None:
    """The place after the batches of negative turns, and how a run deals that begins there; None if
    these have to be made to know it. The place is a few batches before, which the run makes and
    drops, if it would be in the middle of a call, or at the end of the stream.

    A source tells it by ``rows(epoch, batch_size)`` and by ``gives_all_rows``: call n of an epoch
    then gives the n-th `batch_size` rows. If rows flow into the next epoch, the first call of a
    source with ``carrying`` gives what its first batch lacks.
    """
    fetch: Any = spec.fetch
    is_told = spec.pure and callable(getattr(fetch, "rows", None))
    is_plain = spec.order == "ticket" and turns.dealing is not None and not turns.older
    if not (is_told and is_plain and getattr(fetch, "gives_all_rows", False)):
        return None
    size, asked, carries = spec.batch_size, spec.rows_asked, spec.last_batch == "carry"
    start, index, step, turn = cut.position.epoch, cut.index, cut.step, turns.first
    drops = num > 1 and spec.rounds == "epoch" and spec.last_round == "drop"
    # Rows that the first call of an epoch gives less than it is asked for, and rows of the epoch
    # before that its first batch has.
    in_step = carries and callable(getattr(fetch, "carrying", None))
    less = sum([fetch.rows(i, asked) for i in range(start)]) % asked if in_step else 0
    carried, epoch, taken = 0, start, _rows_before(cut, asked, less)
    while True:
        rows = fetch.rows(epoch, asked)
        left = carried + max(0, rows - taken)
        # What another run's stream ended with was a batch, also of rows that are carried otherwise.
        ends_other = turn < turns.first_round and epoch + 1 == turns.ends_after
        is_cut = spec.last_batch == "drop" or (carries and not ends_other)
        num_left = left // size if is_cut else -(-left // size)
        is_last = epoch + 1 == spec.epochs
        moved = min(max(0, num_left - is_last), -turn)
        index, step, turn = index + moved, step + moved, turn + moved
        if moved:
            taken, carried = taken + moved * size - carried, 0
        if moved < num_left or is_last or (carries and turn == 0):
            break
        if rows == 0 or (drops and index < num):
            return None  # Such an epoch may be an error.
        carried = max(0, left - moved * size) if carries else 0
        less = (less + rows) % asked if in_step else 0
        epoch, index, taken = epoch + 1, 0, 0
        turn = turn_at_epoch(spec, turns, epoch, turn, num)
    call, within = divmod(taken + less, asked) if taken else (0, 0)
    back, odd = divmod(within, size)
    # An epoch that begins within a batch has no place before its first.
    is_within = carried or (back and index < back + carries)
    if odd or is_within or (epoch, call) < (start, cut.position.calls[0]):
        return None
    return _moved(cut, turns, epoch, call, index - back, step - back, turn - back)


def _rows_before(cut: Cut, asked: int, less: int) -> int:
    """How many rows of the position's epoch the batches before a cut have taken."""
    call, leftover = cut.position.calls[0], cut.leftover
    if leftover is not None:
        return max(0, leftover.call * asked - less) + leftover.taken
    return max(0, call * asked - less)


def turn_at_epoch(spec: StreamSpec, turns: Turns, epoch: int, turn: int, num: int) -> int:
    """The turn of an epoch's first batch, where the next batch would have this turn."""
    if turn < turns.first_round and epoch == turns.ends_after:
        return turns.first_round
    if spec.rounds != "epoch":
        return turn
    return next_round(turn, num, drops=spec.last_round == "drop", first=turns.first_round)


def _moved(
    cut: Cut, turns: Turns, epoch: int, call: int, index: int, step: int, turn: int
) -> tuple[Cut, Turns]:
    """A cut at another place, and how a run deals whose first batch there has this turn."""
    position = cut.position._replace(epoch=epoch, calls=(call,), marks=(None,))
    # The last chunk before the cut is compared by its call, in the epoch of the position. One that
    # ended the epoch before would be taken for a chunk of this one.
    checked = cut.checked
    if checked is not None:
        is_of_epoch = epoch == cut.position.epoch and checked.call < cut.position.calls[0]
        checked = checked if is_of_epoch else None
    there = replace(
        cut, epoch=epoch, index=index, step=step, position=position, leftover=None, checked=checked
    )
    assert turns.dealing is not None
    return there, turns._replace(first=turn, dealing=turns.dealing.begun_at(step - turn))
