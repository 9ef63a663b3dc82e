"""Which queues of a feed a server makes, where others are made by other servers of one stream.

Nothing is agreed between the servers. Each works out from numbers alone which calls its batches are
made of (`workers.stream.parts`), so a feed has to be one of which numbers say that. Any other one
is refused here, with what would make it one.
"""

from __future__ import annotations

import re
from typing import Any

from feeder.config import FeedConfig
from feeder.errors import ConfigError, ResumeError
from feeder.workers.errors import in_words
from feeder.workers.stream.parts import rows_of_epoch, rows_per_call
from feeder.workers.stream.position import Cut
from feeder.workers.stream.spec import Part

MAX_QUEUES = 4096
_SOME = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?/(\d{1,9})")


def read_queues(given: int | str | None) -> tuple[int | None, Part | None]:
    """How many queues each feed has, None for as many as it has devices, and which of them the
    server makes, None for all. Raises `ConfigError`."""
    part = None
    if isinstance(given, str):
        found = _SOME.fullmatch(given)
        if found is not None:
            first, last, num = int(found[1]), int(found[2] or found[1]), int(found[3])
            part = Part(first, last + 1, num)
        elif given.isascii() and given.isdigit() and len(given) < 10:
            num = int(given)
        else:
            raise _wrong(given)
    elif given is None:
        return None, None
    elif isinstance(given, bool) or not hasattr(given, "__index__"):
        raise _wrong(given)
    else:
        num = given.__index__()
    if not 1 <= num <= MAX_QUEUES or (part and not part.first < part.stop <= num):
        raise _wrong(given)
    return num, None if part == Part(0, num, num) else part


def _wrong(given: Any) -> ConfigError:
    return ConfigError(
        f"queues is {given!r}, expected a whole number from 1 to {MAX_QUEUES}, or some of so many "
        "queues, as '0-7/64'"
    )


def check_part(config: FeedConfig, part: Part) -> None:
    """Raise `ConfigError` if a feed's batches cannot be made by several servers, with what would
    let them be."""
    stream, run = config.stream, config.run
    against = {
        "its calls follow from each other: use fetch(call)": not stream.pure,
        "order is 'arrival': use 'ticket'": stream.order == "arrival",
        "dont_rebatch is True, so nobody knows the rows of a batch: leave it out":
        stream.dont_rebatch,
        "global_batch_size is given, so a call gives the rows of all queues: give batch_size":
        stream.global_batch_size is not None,
        "last_batch is 'carry', so batches begin within calls: use 'keep', 'drop' or 'pad'":
        stream.last_batch == "carry",
        "last_round is 'pad', which repeats batches of other servers: use 'uneven' or 'drop'":
        stream.last_round == "pad",
        "edit is given: go on with one server from there": config.edit is not None,
        "nobody knows how many rows each call gives: give rows_per_call, a divisor of batch_size, "
        "if all but an epoch's last give so many (sources that filter, pack or leave out defective "
        "records do not)": rows_per_call(stream, run) is None,
    }  # fmt: skip
    for why, is_so in against.items():
        if is_so:
            raise _refused(config, part, why)
    try:
        rows_of_epoch(stream, 0)
    except Exception as error:
        why = (
            "nobody knows how many rows an epoch has: let the fetch function have rows(epoch, "
            f"batch_size), as sources have ({in_words(error)})"
        )
        raise _refused(config, part, why) from error


def _refused(config: FeedConfig, part: Part, why: str) -> ConfigError:
    return ConfigError(
        f"feed {config.name!r} cannot be made by several servers, and this one is to make {part}: "
        f"{why}; or serve all queues with one server"
    )


def check_place(config: FeedConfig, cut: Cut) -> None:
    """Raise `ResumeError` unless the batches from a position on begin with calls of their own."""
    part, rows = config.run.part, rows_per_call(config.stream, config.run)
    if part is None or cut.finished or rows is None:
        return
    per_batch = config.stream.batch_size // rows
    if cut.leftover is not None or cut.position.calls[0] != cut.index * per_batch:
        raise ResumeError(
            f"the position of feed {config.name!r} is before batch {cut.index} of epoch "
            f"{cut.epoch}, which does not begin with call {cut.index * per_batch}, as it would "
            f"with {rows} rows in each call: it cannot be gone on from by several servers"
        )
