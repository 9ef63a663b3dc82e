"""Checkpoints in a folder of a file system."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator
from typing import Any

from feeder import durable
from feeder.checkpoint.format import DamagedError
from feeder.checkpoint.names import is_name
from feeder.durable import Fs, opened
from feeder.errors import CheckpointError

# ---- One writer at a time: a lock on a file that names who has it.


logger = logging.getLogger("feeder")

# What flock raises on file systems without locks, as some network ones.
_NO_LOCKS = {errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK}
# The line in a lock's file is always as long, so that a new one overwrites the old one whole.
_NAME_BYTES = 128


class WriterLock:
    """The right of one writer to write into a folder, taken when it is first needed. It ends
    with its process; used by one thread at a time."""

    def __init__(self, fs: Fs, path: str, writer: str) -> None:
        self._fs = fs
        self._path = path
        self._writer = writer
        self._file: int | None = None

    def acquire(self, folder: int) -> bool:
        """Take it, once; returns whether another process may have had it since this one did.
        Raises `CheckpointError` naming who has it, and `OSError`."""
        if self._file is not None:
            return False
        file = self._fs.open(f".writer-{self._writer}.lock", folder, os.O_RDWR | os.O_CREAT)
        try:
            is_changed = self._lock(file)
        except BaseException:
            self._fs.close(file)
            raise
        self._file = file
        return is_changed

    def _lock(self, file: int) -> bool:
        # flock belongs to the open file and ends with the process, however that ends: a lock that
        # was left behind by a kill does not exist.
        try:
            self._fs.lock(file)
        except BlockingIOError as error:
            raise CheckpointError(
                f"{self._path!r} has a writer {self._writer!r} already, {self._holder(file)}; end "
                "it, or close its store, or give this one another writer="
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "%r lies on a file system without locks (%s): see to it that one process alone "
                "writes there", self._path, error.strerror,
            )  # fmt: skip
            is_exclusive = False
        else:
            is_exclusive = True
        name = f"process {os.getpid()} on {os.uname().nodename}".encode()[: _NAME_BYTES - 1]
        line, found = name.ljust(_NAME_BYTES - 1) + b"\n", bytearray(_NAME_BYTES)
        self._fs.read_into(file, memoryview(found), 0)
        durable.write_all(self._fs, file, line)
        return not is_exclusive or found != line

    def _holder(self, file: int) -> str:
        buffer = bytearray(_NAME_BYTES)
        num = self._fs.read_into(file, memoryview(buffer), 0)
        return bytes(buffer[:num]).decode(errors="replace").strip() or "a process not known"

    def release(self) -> None:
        """Let others write."""
        file, self._file = self._file, None
        if file is not None:
            # By hand: a forked child has the same open file, whose close alone would not unlock it.
            try:
                self._fs.unlock(file)
            finally:
                self._fs.close(file)

    def forget(self) -> None:
        """This is a forked child: the lock is the parent's."""
        file, self._file = self._file, None
        if file is not None:
            self._fs.close(file)


_RIGHTS = "give this user the right to it, or name another folder"
_CURES = {
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: "name a folder that can be written to",
    errno.ELOOP: "symbolic links are not followed, put a folder or a file there",
    errno.ENOTDIR: "put a folder there, not a file or a symbolic link",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space",
}


class LocalReader:
    """One open file, read by the thread that opened it."""

    def __init__(self, fs: Fs, file: int, path: str) -> None:
        self._fs, self._file = fs, file
        self.path = path
        self.size = fs.size(file)

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer with the bytes from offset `at` on."""
        left = buffer
        try:
            while left:
                num = self._fs.read_into(self._file, left, at)
                if not num:
                    raise OSError(errno.EIO, "the file ended while it was read")
                left, at = left[num:], at + num
        except OSError as error:
            # A bad sector that cannot be read is damage; anything else may go away.
            kind = DamagedError if error.errno == errno.EIO else CheckpointError
            raise kind(f"cannot read checkpoint {self.path!r}: {error.strerror}") from error


class LocalFolder:
    """A folder whose files are checkpoints. Only files and folders that this user alone may read
    are made; symbolic links are not followed, so that nothing outside is read or written. Any
    thread may use it; its mutex guards the lock and what is known of the folders."""

    def __init__(self, path: str, writer: str, fs: Fs) -> None:
        self.path = os.path.abspath(path)
        self._writer = writer
        self._fs = fs
        self._mutex = threading.Lock()
        self._lock = WriterLock(fs, self.path, writer)
        # Folders that are durable.
        self._prepared: set[str] = set()
        # Folders that hold no temporary files of this writer's past. To look for these takes as
        # long as there are files; so it is not done again while no other process has had the lock.
        self._swept: set[str] = set()

    def path_of(self, name: str) -> str:
        """Where a checkpoint lies, for messages."""
        return os.path.join(self.path, name)

    # ---- written

    def claim(self) -> None:
        """Make the folder where it is missing, and become its one writer of this name."""
        with self._failing("write", ""):
            self._become_writer()

    def create(self, name: str, parts: list[Any]) -> None:
        """Write a file once; durable when it returns."""
        last = name.split("/")[-1]
        with self._failing("write", name):
            self._become_writer()
            with self._folder_of(name, make=True) as folder:
                try:
                    durable.write(self._fs, folder, last, parts, replace=False, writer=self._writer)
                except BaseException:
                    self._swept.clear()  # what could not be taken away is looked for anew
                    raise

    def remove(self, name: str) -> None:
        """Take a file away."""
        with self._failing("remove", name), self._folder_of(name) as folder:
            self._fs.unlink(name.split("/")[-1], folder)

    # ---- read

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[LocalReader]:
        """Open a file for a block."""
        fs = self._fs
        with contextlib.ExitStack() as stack:
            with self._failing("read", name):
                folder = stack.enter_context(self._folder_of(name))
                file = stack.enter_context(opened(fs, fs.open(name.split("/")[-1], folder)))
                reader = LocalReader(fs, file, self.path_of(name))
            yield reader

    def names(self, prefix: str, after: str = "") -> list[str]:
        """Files under the folder that may be checkpoints, by their names."""
        start = prefix.rpartition("/")[0]
        start = f"{start}/" if start else ""
        with self._failing("list", start):
            try:
                with self._folder_of(start) as folder:
                    found = list(self._walk(folder, start, prefix))
            except FileNotFoundError:
                # A folder that is not there yet holds nothing; one that nobody can make is a
                # mistake in its name.
                with opened(self._fs, self._fs.open_folder(os.path.dirname(self.path))):
                    return []
        return [name for name in found if name.startswith(prefix) and name > after]

    def _walk(self, folder: int, path: str, prefix: str) -> Iterator[str]:
        fs = self._fs
        for name, is_folder in fs.list(folder):
            here = path + name
            if not is_name(here):
                continue
            if not is_folder:
                yield here
            elif f"{here}/".startswith(prefix[: len(here) + 1]):
                try:
                    handle = fs.open_folder(name, folder)
                except FileNotFoundError:
                    continue  # it has gone since; all else is still there
                with opened(fs, handle) as inner:
                    yield from self._walk(inner, f"{here}/", prefix)

    # ---- folders

    @contextlib.contextmanager
    def _folder_of(self, name: str, *, make: bool = False) -> Iterator[int]:
        """The folder in which a name lies, opened from the top without following links."""
        fs = self._fs
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(opened(fs, fs.open_folder(self.path)))
            path = ""
            for part in name.split("/")[:-1]:
                path += f"{part}/"
                if make and path not in self._prepared:
                    with contextlib.suppress(FileExistsError):
                        fs.make_folder(part, folder)
                    # Whoever made it: what is written in it is durable when it is.
                    fs.fsync(folder)
                folder = stack.enter_context(opened(fs, fs.open_folder(part, folder)))
                if make and path not in self._prepared:
                    self._sweep(folder, path)
                    self._prepared.add(path)
            yield folder

    def _become_writer(self) -> None:
        """Make the top folder where it is missing, and lock it for this writer; once."""
        with self._mutex:
            fs = self._fs
            if "" not in self._prepared:
                with contextlib.suppress(FileExistsError):
                    fs.make_folder(self.path)
                    with opened(fs, fs.open_folder(os.path.dirname(self.path))) as parent:
                        fs.fsync(parent)
            with opened(fs, fs.open_folder(self.path)) as top:
                if self._lock.acquire(top):
                    self._swept.clear()
                if "" not in self._prepared:
                    self._sweep(top, "")
                    self._prepared.add("")

    def _sweep(self, folder: int, path: str) -> None:
        """Remove the temporary files of a writer of this name that was killed."""
        if path in self._swept:
            return
        for name, is_folder in self._fs.list(folder):
            if not is_folder and durable.is_temporary(name, self._writer):
                self._fs.unlink(name, folder)
        self._swept.add(path)

    # ---- life

    def close(self) -> None:
        """Let others write. What they leave behind is looked for anew."""
        with self._mutex:
            self._prepared.clear()
            self._lock.release()

    def after_fork(self) -> None:
        """This is a forked child."""
        self._mutex = threading.Lock()
        self._prepared.clear()
        self._lock.forget()

    @contextlib.contextmanager
    def _failing(self, doing: str, name: str) -> Iterator[None]:
        """Say of an `OSError` what could not be done, to which file, and what to do about it."""
        path = self.path_of(name)
        try:
            yield
        except FileExistsError as error:
            raise CheckpointError(
                f"checkpoint {path!r} exists; each is written once, choose another name"
            ) from error
        except OSError as error:
            cure = _CURES.get(error.errno or 0, "")
            if error.errno == errno.ENOENT and doing != "read":
                cure = f"make the folder {os.path.dirname(self.path)!r}"
            raise CheckpointError(
                f"cannot {doing} checkpoint {path!r}: {error.strerror}{'; ' if cure else ''}{cure}"
            ) from error
