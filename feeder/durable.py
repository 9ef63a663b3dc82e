"""Files that are whole or not there, whenever the power goes.

`write` is the only way in which feeder puts something on a disk that has to survive: a temporary
file, fsync, its name, fsync of the folder; when it returns the file is there for good. All that
it asks of the operating system goes through an `Fs`, so that tests can put a disk of their own
under the code that is shipped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
from collections.abc import Iterable, Iterator
from typing import Any

# What link raises on file systems that have no second names, as FAT and some network ones.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_numbers = itertools.count()


class Fs:
    """The calls that feeder makes to a file system: the operating system's own. It has no state;
    any thread may use it.

    Folders and open files are descriptors; names are of one component and never followed if they
    are symbolic links. Every method raises `OSError`.
    """

    def open_folder(self, path: str, inside: int | None = None) -> int:
        """Open a folder: of any path, or of a name inside another folder."""
        nofollow = 0 if inside is None else os.O_NOFOLLOW
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | nofollow, dir_fd=inside)

    def make_folder(self, path: str, inside: int | None = None) -> None:
        """Make a folder that only its user may enter."""
        os.mkdir(path, 0o700, dir_fd=inside)

    def open(self, name: str, folder: int, flags: int = os.O_RDONLY) -> int:
        """Open a regular file; one that is made only its user may read."""
        # Without O_NONBLOCK a pipe of that name would wait for somebody at its other end.
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(name, flags, 0o600, dir_fd=folder)
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        raise OSError(errno.EINVAL, "not a regular file", name)

    def close(self, handle: int) -> None:
        """Close a file or a folder."""
        os.close(handle)

    def size(self, file: int) -> int:
        """Its length in bytes."""
        return os.fstat(file).st_size

    def read_into(self, file: int, buffer: memoryview, at: int) -> int:
        """Read bytes from offset `at` on; returns how many came."""
        return os.preadv(file, [buffer], at)

    def write(self, file: int, data: memoryview) -> int:
        """Write bytes at the end of what was written; returns how many went."""
        return os.write(file, data)

    def fsync(self, handle: int) -> None:
        """Make a file's bytes durable, or a folder's names."""
        os.fsync(handle)

    def link(self, old: str, new: str, folder: int) -> None:
        """Give a file a second name that nothing has yet."""
        os.link(old, new, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)

    def rename(self, old: str, new: str, folder: int) -> None:
        """Give a file another name, whatever had that before."""
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)

    def unlink(self, name: str, folder: int) -> None:
        """Take a name away."""
        os.unlink(name, dir_fd=folder)

    def list(self, folder: int) -> list[tuple[str, bool]]:
        """The files and folders in a folder, each with whether it is one; nothing
        else, and no links."""
        with os.scandir(folder) as entries:
            return [
                (entry.name, not is_file)
                for entry in entries
                if (is_file := entry.is_file(follow_symlinks=False))
                or entry.is_dir(follow_symlinks=False)
            ]

    def lock(self, file: int) -> None:
        """Lock a file against everybody else until it is unlocked or this process ends;
        `BlockingIOError` if somebody has it."""
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, file: int) -> None:
        """Let others lock it."""
        fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def opened(fs: Fs, handle: int) -> Iterator[int]:
    """Close a file or a folder at the end of a block."""
    try:
        yield handle
    finally:
        fs.close(handle)


def write(
    fs: Fs, folder: int, name: str, parts: Iterable[Any], *, replace: bool, writer: str = ""
) -> None:
    """Write bytes to a file that is whole or not there; durable when it returns.

    An existing file is replaced, or left as it is with `FileExistsError`. Raises `OSError`; then
    no temporary file is left. `writer` says whose temporary files may be removed when they are
    found later.
    """
    temporary, file = _make_temporary(fs, folder, writer)
    names = [temporary]
    try:
        with opened(fs, file):
            for part in parts:
                write_all(fs, file, part)
            fs.fsync(file)
        if replace:
            fs.rename(temporary, name, folder)
        else:
            _name_once(fs, folder, temporary, name, names)
        fs.fsync(folder)
    except BaseException:
        # What was not acknowledged is taken away again, so that it can be written anew.
        for made in names:
            with contextlib.suppress(OSError):
                fs.unlink(made, folder)
        raise


def write_all(fs: Fs, file: int, part: Any) -> None:
    """Write all of a part: the operating system may take less than it is given."""
    left = memoryview(part).cast("B")
    while left:
        left = left[fs.write(file, left) :]


def is_temporary(name: str, writer: str) -> bool:
    """Whether a file's name is that of a temporary file of a writer's."""
    return name.startswith(f".{writer}~") and name.endswith(".partial")


def _make_temporary(fs: Fs, folder: int, writer: str) -> tuple[str, int]:
    """A new file that nobody else has, and its name."""
    while True:
        name = f".{writer}~{os.getpid()}.{next(_numbers)}.partial"
        with contextlib.suppress(FileExistsError):
            return name, fs.open(name, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def _name_once(fs: Fs, folder: int, temporary: str, name: str, names: list[str]) -> None:
    """Give a temporary file its name, `FileExistsError` where something has it, and keep `names`
    at those that it has."""
    try:
        fs.link(temporary, name, folder)
        names.append(name)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # This file system has no second names. What is there is not overwritten, but for one that
        # comes between the look and the renaming.
        with contextlib.suppress(FileNotFoundError), opened(fs, fs.open(name, folder)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error
        fs.rename(temporary, name, folder)
        names[:] = [name]
    else:
        # One that stays is removed by the next writer of the name.
        with contextlib.suppress(OSError):
            fs.unlink(temporary, folder)
            names.remove(temporary)
