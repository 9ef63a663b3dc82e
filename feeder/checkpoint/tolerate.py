"""Going on where one checkpoint of many is damaged, gone, or cannot be removed."""

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
    """Go on behind the block where it raises because a checkpoint is damaged, which is logged, or
    has gone in the meantime."""
    try:
        yield
    except DamagedError as error:
        logger.warning("passed over: %s", error)
    except CheckpointError as error:
        # Another process may retire old ones between the listing and the reading.
        if not isinstance(error.__cause__, FileNotFoundError):
            raise


@contextlib.contextmanager
def tolerate_failed_removal() -> Iterator[None]:
    """Go on behind the block where an old checkpoint cannot be removed: the new one is stored, and
    that is what counts."""
    try:
        yield
    except CheckpointError as error:
        logger.warning("an old checkpoint stays: %s", error)
