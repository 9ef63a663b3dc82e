"""Checkpoints by name, in a folder or an object store, and a writer's own sequence of them."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from feeder.checkpoint import format
from feeder.checkpoint.feed_meta import SNAPSHOT_ENTRY, make_meta
from feeder.checkpoint.format import DamagedError, Header, Loaded, Reader, Receipt
from feeder.checkpoint.local import LocalFolder
from feeder.checkpoint.names import check_name, check_prefix, check_writer, in_order
from feeder.checkpoint.objects import ObjectFolder
from feeder.checkpoint.tolerate import is_unreadable, skip_damaged, tolerate_failed_removal
from feeder.closing import Closing
from feeder.durable import Fs
from feeder.errors import CheckpointError, ConfigError, SnapshotFormatError
from feeder.state.snapshot import Snapshot
from feeder.workers import forks
from feeder.workers.public import public

# ---- The backend under a store: a folder or an object store, as its URL says.


OBJECT_STORES = ("s3", "gs", "az", "memory")


Backend = LocalFolder | ObjectFolder
"""Bytes by name. Every method raises `CheckpointError`."""


def open_backend(url: str, writer: str, retry_s: float, fs: Fs | None) -> Backend:
    """The backend that a URL means; touches nothing. Raises `ConfigError`."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return LocalFolder(_checked(url), writer, fs or Fs())
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"{url!r} names host {parts.netloc!r}, expected file:///PATH")
        return LocalFolder(_checked(unquote(parts.path)), writer, fs or Fs())
    if scheme in OBJECT_STORES and url[len(scheme) + 3 :].strip("/"):
        return ObjectFolder(url, retry_s)
    raise ConfigError(
        f"{url!r} cannot be the place of checkpoints, expected a path, file:///PATH, "
        "s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH"
    )


def _checked(path: str) -> str:
    if not path or "\0" in path:
        raise ConfigError(f"{path!r} cannot be the folder of checkpoints, expected a path")
    return path


# How many neighbours an error names of a checkpoint that is not there.
_NUM_NAMED = 5


@public("feeder")
class CheckpointStore(Closing):
    """Checkpoints by name: each a set of named arrays and bytes, written once and then read-only.

    Args:
        url: A folder, as a path or ``file://`` URL, or a place in an object store: ``s3://``,
            ``gs://``, ``az://`` (extra `objectstore`). A folder is made where it is missing; the
            one that it lies in must be there.
        keep: How many checkpoints of its own sequence (`save`) stay; None keeps all.
        writer: Whose sequence that is. Two stores with the same writer cannot write into one
            folder at a time; stores with different writers can, each its own names: so do the
            nodes of a job. The lock (on ``.writer-NAME.lock``) is taken at the first write, names
            the process that holds it, and ends with `close` or with the process. An object store
            has no locks: there a name is written once, whoever comes first.
        retry_s: For how many seconds a call to an object store that fails is made again. One
            that gets no answer at all fails after 300 s.
        fs: The file system, for tests.

    Its mutex guards the next number of the sequence, and keeps `save` to one thread at a time.

    Guarantees: what `put` and `save` have returned from is there after any crash, of the power
    too; a checkpoint is read whole or not at all; nothing is ever removed that is no checkpoint.
    Any thread may use it. Every method raises `CheckpointError`, which says which file and what
    to do.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: int | None = None,
        writer: str = "feed",
        retry_s: float = 30.0,
        fs: Fs | None = None,
    ) -> None:
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep is {keep!r}, expected a whole number from 1 on, or None")
        if type(retry_s) not in (int, float) or not 0 < retry_s <= 1e6:
            raise ConfigError(f"retry_s is {retry_s!r} s, expected more than 0, at most 1e6")
        self.url = os.fspath(url)
        self.keep = keep
        self.writer = check_writer(writer)
        self._backend = open_backend(self.url, self.writer, retry_s, fs)
        self._given: dict[str, Any] = {"keep": keep, "retry_s": retry_s, "fs": fs}
        # Whether numbers follow on those of other writers, too.
        self._counts_all = False
        self._next: int | None = None
        self._mutex = threading.Lock()
        forks.call_in_child(self.after_fork)

    # ---- written

    def put(
        self, name: str, entries: Mapping[str, Any], *, meta: Mapping[str, Any] | None = None
    ) -> Receipt:
        """Store arrays (of any dtype but Python objects) and bytes under a name that nothing has
        yet. Durable when it returns; the arrays may not be changed until then."""
        check_name(name)
        parts, num_bytes, digest = format.encode(entries, meta)
        self._backend.create(name, parts)
        return Receipt(name=name, num_bytes=num_bytes, digest=digest)

    def remove(self, name: str, *, missing_ok: bool = False) -> None:
        """Remove a checkpoint, damaged or not; refuses what is none. With `missing_ok`, nothing is
        done where there is nothing."""
        try:
            with self._backend.open(check_name(name)) if missing_ok else self._reader(name) as file:
                if not format.is_checkpoint(file):
                    raise CheckpointError(
                        f"{file.path!r} is no checkpoint, and is left where it is"
                    )
            self._backend.remove(name)
        except CheckpointError as error:
            if not (missing_ok and isinstance(error.__cause__, FileNotFoundError)):
                raise

    # ---- read

    def get(self, name: str, entries: Iterable[str] | None = None) -> Loaded:
        """Read a checkpoint, or only some of its entries, all of which must be there."""
        with self._reader(name) as reader:
            header = format.read_header(reader)
            wanted = format.chosen(entries, header.entries, reader.path)
            return Loaded(
                name=name,
                entries={e: format.read_entry(reader, e, header.entries[e]) for e in wanted},
                meta=header.meta,
                num_bytes=reader.size,
                digest=header.digest,
            )

    def header(self, name: str) -> Header:
        """The header of a checkpoint; its entries are not read."""
        with self._reader(name) as reader:
            return format.read_header(reader)

    def entry_names(self, name: str) -> list[str]:
        """The names of a checkpoint's entries, in the order in which they were given."""
        return list(self.header(name).entries)

    def verify(self, name: str) -> Receipt:
        """Read all of a checkpoint, and raise where a bit of it is wrong."""
        with self._reader(name) as reader:
            header = format.read_header(reader)
            for entry, placed in header.entries.items():
                format.verify_entry(reader, entry, placed)
            return Receipt(name=name, num_bytes=reader.size, digest=header.digest)

    def exists(self, name: str) -> bool:
        """Whether there is a checkpoint of this name, damaged or not. A file that cannot be read
        raises."""
        return self._is_checkpoint(check_name(name))

    def names(self, prefix: str = "") -> list[str]:
        """The checkpoints whose names begin so, damaged ones too, from old to new: in the order
        of their names, where digits count as numbers. Other files are left out; one that cannot be
        read, which may be either, raises."""
        found = self._backend.names(check_prefix(prefix))
        return sorted(filter(self._is_checkpoint, found), key=in_order)

    def file_names(self, prefix: str = "", after: str = "") -> list[str]:
        """The names that begin so of all files, checkpoints or not, in no order; only those that
        come after a name, as texts. None is opened: one listing, however many there are."""
        return self._backend.names(check_prefix(prefix), after)

    def latest(self, prefix: str = "") -> str | None:
        """The newest checkpoint that is complete and valid, None where there is none. Damaged
        ones are named in the log and passed over; one of a newer version raises, and so does one
        that cannot be read, where no older one is valid."""
        # One that cannot be read just now may be the newest that is whole. An older whole one is as
        # good; without one, "there is none" would be wrong.
        unread: CheckpointError | None = None
        for name in reversed(self.names(prefix)):
            with skip_damaged():
                try:
                    return self.verify(name).name
                except DamagedError as error:
                    unread = unread or (error if is_unreadable(error) else None)
                    raise
        if unread is not None:
            raise unread
        return None

    def path_of(self, name: str) -> str:
        """Where a checkpoint lies, as messages name it."""
        return self._backend.path_of(name)

    @contextlib.contextmanager
    def _reader(self, name: str) -> Iterator[Reader]:
        try:
            with self._backend.open(check_name(name)) as reader:
                yield reader
        except CheckpointError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            raise CheckpointError(
                f"there is no checkpoint {self.path_of(name)!r}; the newest there are "
                f"{self._names_beside(name)!r}"
            ) from error.__cause__

    def _names_beside(self, name: str) -> list[str]:
        """The newest names in the folder of a name, for messages: no file is opened for it."""
        folder = name.rpartition("/")[0]
        with contextlib.suppress(CheckpointError):
            found = self._backend.names(f"{folder}/" if folder else "")
            return sorted(found, key=in_order)[-_NUM_NAMED:]
        return []

    def _is_checkpoint(self, name: str) -> bool:
        try:
            with self._backend.open(name) as reader:
                return format.is_checkpoint(reader)
        except CheckpointError as error:
            # A file that cannot be read may be a checkpoint: nobody may begin anew beside it.
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise

    # ---- the sequence of a writer

    def save(
        self,
        snapshot: Snapshot,
        step: int | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> str:
        """Store the position of feeds as the next of this writer's sequence, with the trainer's
        own step number, and return its name. Once it is durable, the oldest beyond `keep` are
        removed."""
        with self._mutex:
            said = make_meta(snapshot, step, meta)
            number = self._next_number() if self._next is None else self._next
            # Until this one is there the next number is not known: a `put` that fails may have
            # written it all the same, and another process may have come in.
            self._next = None
            name = sequence_name(self.writer, number)
            self.put(name, {SNAPSHOT_ENTRY: bytes(snapshot)}, meta=said)
            self._next = number + 1
            if self.keep is not None:
                with tolerate_failed_removal():
                    self._retire(self.keep, name)
        return name

    def load(self, name: str | None = None) -> Snapshot:
        """The position of feeds in a checkpoint, by default in the newest of this writer's that
        is whole. Raises `CheckpointError` where none is."""
        return self.find()[1] if name is None else self._snapshot(name)

    def find(self) -> tuple[str, Snapshot]:
        """The name of the newest of this writer's that is whole, and the position in it."""
        names = self.sequence_names()
        for name in reversed(names):
            with skip_damaged():
                return name, self._snapshot(name)
        there = f"{len(names)} files of that name are damaged" if names else "there is none"
        raise CheckpointError(
            f"no checkpoint {self.path_of(self.writer)}.* can be loaded, {there}; resume from "
            "another place, or start anew"
        )

    def is_empty(self) -> bool:
        """Whether nothing of this writer's sequence is there, not even damaged."""
        return not self.sequence_names()

    def retire(self, keep: int) -> list[str]:
        """Remove the oldest of this writer's sequence until `keep` are left, and return their
        names. The newest that is whole stays in any case, and what cannot be removed, which is
        named in the log. Raises `CheckpointError` where none is whole."""
        return [] if self.is_empty() else self._retire(keep, self.find()[0])

    def _retire(self, keep: int, whole: str) -> list[str]:
        found, removed = [], []
        for name in self.sequence_names():
            with tolerate_failed_removal():
                if self._is_checkpoint(name):
                    found.append(name)
        # The newest may be damaged: what is known to be whole stays in any case.
        for name in found[:-keep]:
            if name != whole:
                with tolerate_failed_removal():
                    self.remove(name)
                    removed.append(name)
        return removed

    def sequence_names(self) -> list[str]:
        """All that has a name of this writer's sequence, a checkpoint or what may have been one,
        from old to new."""
        names = self._backend.names(f"{self.writer}.")
        return sort_sequence(self.writer, names)

    def _next_number(self) -> int:
        names = self._backend.names("") if self._counts_all else self.sequence_names()
        numbers = [sequence_number(name.rpartition(".")[0], name) for name in names]
        return max(numbers, default=-1) + 1

    def _snapshot(self, name: str) -> Snapshot:
        data = self.get(name, [SNAPSHOT_ENTRY]).entries[SNAPSHOT_ENTRY]
        try:
            return Snapshot.from_bytes(bytes(data))
        except SnapshotFormatError as error:
            raise SnapshotFormatError(f"checkpoint {self.path_of(name)!r}: {error}") from error

    # ---- life

    def claim(self) -> None:
        """See to it now that it can be written to, and that nobody else of this writer's name
        does."""
        self._backend.claim()

    def close(self) -> None:
        """Let other stores of this writer write. This one may be used again."""
        with self._mutex:
            self._next = None
            self._backend.close()

    def after_fork(self) -> None:
        """This is a forked child: what the parent holds is not its own."""
        forks.call_in_child(self.after_fork)
        self._mutex = threading.Lock()
        self._next = None
        self._backend.after_fork()

    def __repr__(self) -> str:
        return f"<CheckpointStore {self.url!r}, writer {self.writer!r}>"


def beside(store: CheckpointStore, writer: str) -> CheckpointStore:
    """A store of the same place, for another writer, whose numbers follow on those of all others:
    of two sequences the larger number is that of who began later."""
    other = CheckpointStore(store.url, writer=writer, **store._given)
    other._counts_all = True
    return other


# ---- The names of a writer's sequence of checkpoints: its name, a dot, a growing number


_NUMBER = re.compile(r"[0-9]+")


def sequence_name(writer: str, number: int) -> str:
    """The name of one of a writer's sequence."""
    return f"{writer}.{number:08d}"


def sequence_number(writer: str, name: str) -> int:
    """Which of a writer's sequence has a name; -1 where none has."""
    number = name.removeprefix(f"{writer}.")
    return int(number) if number != name and _NUMBER.fullmatch(number) else -1


def sort_sequence(writer: str, names: Iterable[str]) -> list[str]:
    """The names that belong to a writer's sequence, from old to new."""
    numbers = {name: sequence_number(writer, name) for name in names}
    return sorted((name for name in numbers if numbers[name] >= 0), key=numbers.__getitem__)
