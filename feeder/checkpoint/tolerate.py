"""What is said, and gone on after, when something is wrong with one checkpoint of many."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from feeder.checkpoint.format import DamagedError
from feeder.errors import CheckpointError

logger = logging.getLogger("feeder")


def is_unreadable(error: CheckpointError) -> bool:
    """Whether something is there that could not be read: no right to it, a bad sector. Only what
    the system calls missing counts as nothing."""
    cause = error.__cause__
    return isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)


@contextlib.contextmanager
def skip_damaged() -> Iterator[None]:
    """Go on behind the block where it raises because a checkpoint is damaged, which is said, or
    has gone in the meantime."""
    try:
        yield
    except DamagedError as error:
        logger.warning("passed over: %s", error)
    except CheckpointError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise


@contextlib.contextmanager
def tolerate_failed_removal() -> Iterator[None]:
    """Go on behind the block where an old checkpoint cannot be removed, having said so."""
    try:
        yield
    except CheckpointError as error:
        logger.warning("an old checkpoint stays: %s", error)
