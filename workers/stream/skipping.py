"""Where a stream stands so many batches later, without making them, where its source can tell."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from feeder.workers.spec import StreamSpec
from feeder.workers.stream.position import Cut
from feeder.workers.stream.rounds import Turns, next_round


def skip_ahead(spec: StreamSpec, cut: Cut, turns: Turns, num: int) -> tuple[Cut, Turns] | None:
    """The place after the batches of negative turns, and how a run deals that begins there; None
    where these have to be made to know it, as where they reach the end of the stream.

    A source tells it by ``rows(epoch, batch_size)`` and by ``gives_all_rows``: call n of an epoch
    then gives the n-th `batch_size` rows.
    """
    fetch: Any = spec.fetch
    is_told = spec.pure and callable(getattr(fetch, "rows", None))
    is_plain = spec.order == "ticket" and spec.last_batch != "carry" and not spec.dont_rebatch
    if not (is_told and is_plain and getattr(fetch, "gives_all_rows", False)):
        return None
    if cut.leftover is not None or turns.dealing is None or turns.older:
        return None
    size, asked, turn = spec.batch_size, spec.rows_asked, turns.first
    epoch, index, step = cut.position.epoch, cut.index, cut.step
    taken = cut.position.calls[0] * asked
    while turn < 0:
        rows = fetch.rows(epoch, asked)
        left = rows - taken
        num_left = left // size if spec.last_batch == "drop" else -(-left // size)
        moved = min(num_left, -turn)
        turn, step = turn + moved, step + moved
        if moved < num_left:
            index, taken = index + moved, taken + moved * size
            continue
        epoch, index, taken = epoch + 1, 0, 0
        if rows == 0 or epoch == spec.epochs:
            return None
        if turn < turns.first_round and epoch == turns.ends_after:
            turn = turns.first_round
        elif spec.rounds == "epoch":
            drops = spec.last_round == "drop"
            turn = next_round(turn, num, drops=drops, first=turns.first_round)
    call, within = divmod(taken, asked)
    if within:
        return None
    position = cut.position._replace(epoch=epoch, calls=(call,), marks=(None,))
    # The last chunk before the cut is compared by its call, in the epoch of the position. One that
    # ended the epoch before would be taken for a chunk of this one.
    checked = cut.checked
    if checked is not None:
        is_of_epoch = epoch == cut.position.epoch and checked.call < cut.position.calls[0]
        checked = checked if is_of_epoch else None
    there = replace(cut, epoch=epoch, index=index, step=step, position=position, checked=checked)
    return there, Turns(0, 0, turns.dealing.begun_at(step), older_size=turns.older_size)
