"""Checkpoints in a folder of a file system."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from typing import Any

from feeder import durable
from feeder.checkpoint.names import is_name
from feeder.durable import Fs, opened
from feeder.errors import CheckpointError

_CURES = {
    errno.ENOENT: "; make the folder that it lies in",
    errno.EACCES: "; give this user the right to write there, or name another folder",
    errno.EPERM: "; give this user the right to write there, or name another folder",
    errno.EROFS: "; name a folder that can be written to",
    errno.ELOOP: "; symbolic links are not followed, put a folder or a file there",
    errno.ENOTDIR: "; put a folder there, not a file or a symbolic link",
    errno.ENOSPC: "; free some space",
    errno.EDQUOT: "; free some space",
}


class LocalReader:
    """One open file."""

    def __init__(self, fs: Fs, file: int, path: str) -> None:
        self._fs, self._file = fs, file
        self.path = path
        self.size = fs.size(file)

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer with the bytes from offset `at` on."""
        left = buffer
        while left:
            with failing("read", self.path):
                num = self._fs.read_into(self._file, left, at)
                if not num:
                    raise OSError(errno.EIO, "the file ended while it was read")
            left, at = left[num:], at + num


class LocalFolder:
    """A folder whose files are checkpoints. Only files and folders that this user alone may read
    are made; symbolic links are not followed, so that nothing outside is read or written."""

    def __init__(self, path: str, writer: str, fs: Fs) -> None:
        self.path = os.path.abspath(path)
        self._writer = writer
        self._fs = fs
        self._mutex = threading.Lock()
        self._lock: int | None = None
        self._durable: set[str] = set()

    def path_of(self, name: str) -> str:
        """Where a checkpoint lies, for messages."""
        return os.path.join(self.path, name)

    # ---- written

    def create(self, name: str, parts: list[Any]) -> None:
        """Write a file once; durable when it returns. Raises `CheckpointError`."""
        self._take_lock()
        path = self.path_of(name)
        try:
            with failing("write", path), self._folder_of(name, make=True) as folder:
                durable.write(
                    self._fs, folder, name.split("/")[-1], parts, replace=False,
                    writer=self._writer,
                )  # fmt: skip
        except CheckpointError as error:
            if isinstance(error.__cause__, FileExistsError):
                raise CheckpointError(
                    f"checkpoint {path!r} exists; each is written once, choose another name"
                ) from error.__cause__
            raise

    def remove(self, name: str) -> None:
        """Take a file away. Raises `CheckpointError`."""
        with failing("remove", self.path_of(name)), self._folder_of(name) as folder:
            self._fs.unlink(name.split("/")[-1], folder)

    # ---- read

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[LocalReader]:
        """Open a file for a block. Raises `CheckpointError`."""
        path, fs = self.path_of(name), self._fs
        with contextlib.ExitStack() as stack:
            with failing("read", path):
                folder = stack.enter_context(self._folder_of(name))
                file = stack.enter_context(opened(fs, fs.open(name.split("/")[-1], folder)))
                reader = LocalReader(fs, file, path)
            yield reader

    def names(self, prefix: str) -> list[str]:
        """Files under the folder that may be checkpoints, by their names."""
        start = prefix.rpartition("/")[0]
        with failing("list", self.path_of(start)), contextlib.ExitStack() as stack:
            try:
                folder = stack.enter_context(self._folder_of(f"{start}/_" if start else "_"))
            except FileNotFoundError:
                self._check_parent()
                return []
            found = list(self._walk(folder, f"{start}/" if start else "", prefix))
        return [name for name in found if name.startswith(prefix)]

    def _walk(self, folder: int, path: str, prefix: str) -> Iterator[str]:
        fs = self._fs
        for name, is_folder in fs.list(folder):
            if not is_name(path + name):
                continue
            if not is_folder:
                yield path + name
            elif f"{path}{name}/".startswith(prefix[: len(path) + len(name) + 1]):
                with opened(fs, fs.open_folder(name, folder)) as inner:
                    yield from self._walk(inner, f"{path}{name}/", prefix)

    def _check_parent(self) -> None:
        """A folder that is not there yet holds nothing; one that nobody can make is a mistake."""
        with opened(self._fs, self._fs.open_folder(os.path.dirname(self.path))):
            pass

    # ---- folders

    @contextlib.contextmanager
    def _folder_of(self, name: str, *, make: bool = False) -> Iterator[int]:
        """The folder in which a name lies, opened from the top without following links."""
        fs = self._fs
        with contextlib.ExitStack() as stack:
            if make:
                self._make_top()
            folder = stack.enter_context(opened(fs, fs.open_folder(self.path)))
            path = ""
            for part in name.split("/")[:-1]:
                path += f"{part}/"
                if make and path not in self._durable:
                    with contextlib.suppress(FileExistsError):
                        fs.make_folder(part, folder)
                    # Whoever made it: what is written in it is durable when it is.
                    fs.fsync(folder)
                    self._durable.add(path)
                folder = stack.enter_context(opened(fs, fs.open_folder(part, folder)))
            yield folder

    def _make_top(self) -> None:
        if "" in self._durable:
            return
        fs = self._fs
        try:
            fs.make_folder(self.path)
        except FileExistsError:
            pass
        else:
            with opened(fs, fs.open_folder(os.path.dirname(self.path))) as parent:
                fs.fsync(parent)
        self._durable.add("")

    # ---- one writer

    def _take_lock(self) -> None:
        """Become the one writer of this name; once. Raises `CheckpointError` naming the other."""
        with self._mutex:
            if self._lock is not None:
                return
            name = f".writer-{self._writer}.lock"
            with failing("lock", self.path_of(name)), self._folder_of(name, make=True) as folder:
                fs = self._fs
                file = fs.open(name, folder, os.O_RDWR | os.O_CREAT)
                try:
                    self._lock_file(file)
                    self._sweep(folder)
                except BaseException:
                    fs.close(file)
                    raise
                self._lock = file

    def _lock_file(self, file: int) -> None:
        fs = self._fs
        try:
            fs.lock(file)
        except BlockingIOError as error:
            buffer = bytearray(64)
            num = fs.read_into(file, memoryview(buffer), 0)
            holder = bytes(buffer[:num]).split(b"\n")[0].decode(errors="replace") or "not known"
            raise CheckpointError(
                f"{self.path!r} has a writer {self._writer!r} already, process {holder}; end it, "
                "close its store, or give this one another writer="
            ) from error
        durable.write_all(fs, file, f"{os.getpid()}\n".ljust(64).encode())

    def _sweep(self, folder: int) -> None:
        """Remove the temporary files of a writer of this name that was killed."""
        for name, is_folder in self._fs.list(folder):
            if not is_folder and durable.temporary_of(self._writer, name):
                self._fs.unlink(name, folder)

    def close(self) -> None:
        """Let others write."""
        with self._mutex:
            file, self._lock = self._lock, None
        if file is not None:
            self._fs.close(file)


@contextlib.contextmanager
def failing(doing: str, path: str) -> Iterator[None]:
    """Say of an `OSError` what could not be done, to which file, and what to do about it."""
    try:
        yield
    except OSError as error:
        cure = _CURES.get(error.errno or 0, "")
        raise CheckpointError(f"cannot {doing} checkpoint {path!r}: {error}{cure}") from error
