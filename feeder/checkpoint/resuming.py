"""The position that `resume=` names: a store's newest, a file, or bytes."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from feeder.checkpoint.format import MAGIC
from feeder.checkpoint.parts import Lowest, find_lowest, is_of_part
from feeder.checkpoint.store import CheckpointStore
from feeder.errors import CheckpointError, ConfigError, ResumeError
from feeder.state.snapshot import Snapshot
from feeder.state.state_dict import read_position

logger = logging.getLogger("feeder")

LATEST = "latest"


class Found(NamedTuple):
    """A position, and where it was found."""

    position: Snapshot | bytes | None
    """A snapshot or a token; None for the beginning."""
    where: str
    """The file or object, for messages; empty for what was in memory."""

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Say of a position that does not fit where it is from."""
        try:
            yield
        except ResumeError as error:
            if not self.where:
                raise
            raise type(error)(f"{self.where!r}: {error}; resume from another") from error


def find_position(resume: Any, store: CheckpointStore | None) -> Found:
    """The position that `resume=` means: "latest" of a store, or the beginning where nothing is in
    it yet; the newest of a store, or of one named by its folder or URL; one checkpoint, by the
    path of its file; or what `read_position` takes."""
    if isinstance(resume, str) and resume == LATEST:
        return _latest(store)
    if isinstance(resume, CheckpointStore):
        return _newest(resume)
    if isinstance(resume, (str, os.PathLike)):
        path = os.fspath(resume)
        if "://" in path or os.path.isdir(path):
            return _newest(CheckpointStore(path))
        if _is_checkpoint(path):
            folder, name = os.path.split(path)
            if is_of_part(name):
                raise ResumeError(
                    f"{path!r} is what the queues of one of several servers have used, not what "
                    "all have: resume from its folder; `feeder checkpoint show` shows it"
                )
            return Found(CheckpointStore(folder or ".").load(name), path)
        return Found(read_position(resume), path)
    return Found(read_position(resume), "")


def _latest(store: CheckpointStore | None) -> Found:
    if store is None:
        raise ConfigError(
            "resume is 'latest', and nobody said of what; name it in Coordinator(checkpoints=...), "
            "serve(checkpoints=...) or --checkpoint-dir"
        )
    lowest = find_lowest(store)
    if lowest is not None and lowest.lacks:
        # Of a server that has not begun nothing is known.
        logger.warning(
            "of queues %s nothing is stored in %r yet: feeds begin at their beginning",
            lowest.lacks, store.url,
        )  # fmt: skip
        return Found(None, store.url)
    # Empty, and not "none is whole": where all are damaged a run must not begin anew in silence.
    if lowest is None and store.is_empty():
        logger.info("nothing to resume from in %r yet: feeds begin at their beginning", store.url)
        return Found(None, store.url)
    return _newest(store, lowest)


def _newest(store: CheckpointStore, lowest: Lowest | None = None) -> Found:
    lowest = lowest or find_lowest(store)
    if lowest is not None:
        if lowest.lacks:
            raise CheckpointError(
                f"of queues {lowest.lacks} nothing is stored in {store.url!r}: what all queues "
                "have used is not known; resume from a trainer's position"
            )
        logger.info("resuming from the lowest of %s", lowest.where)
        return Found(lowest.snapshot, lowest.where)
    name, snapshot = store.find()
    logger.info("resuming from %r", store.path_of(name))
    return Found(snapshot, store.path_of(name))


def _is_checkpoint(path: str) -> bool:
    """Whether a file is a store's. One that cannot be read, or has NUL in its name, is none here:
    the reader of snapshots then raises the error that says so."""
    with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC
    return False
