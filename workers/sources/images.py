"""A folder of images, one folder inside it per class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import PathLike, check_path
from feeder.workers.sources.pictures import ONE_SIZE, PictureOptions, Pictures, take_pictures
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.reading import Columns, Faults, OnError, stack
from feeder.workers.stream.batch import Call

_SUFFIXES = (
    ".bmp", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff",
    ".webp",
)  # fmt: skip


@public("feeder.sources")
def image_folder(
    path: PathLike, *, on_error: OnError = "raise", **options: Unpack[PictureOptions]
) -> Source:
    """Images in class folders, `path/class/image.jpg`: columns image and label.

    Classes, folders in them at any depth and, in each folder, files are sorted by name, byte by
    byte, as torchvision's `ImageFolder` sorts them. (With `order="dali"` the folders of a class are
    not looked into, as DALI's reader does not.) The label is the number of
    the class, int32 of (rows,), and `source.records.classes` holds their names. Images are uint8
    of (rows, height, width, 3), RGB, unless `transform` makes them something else; where they are
    not of one size, give a `resize` or a `crop`. Files are read and decoded in the thread that
    calls, without the GIL. Needs the extra `images`.

    Args:
        path: The folder.
        on_error: What to do about a file that cannot be read: "raise", or "skip", which leaves
            its row out and counts it in `source.skipped`.
        options: `PictureOptions`, and `OrderOptions`.

    Raises:
        ConfigError: the folder holds no images, or an option is wrong.
    """
    pictures, order = take_pictures(options)
    pictures.decoder.check()
    is_deep = order.get("order") != "dali"
    read = ImageRecords(path, pictures, on_error, is_deep=is_deep)
    return Source(read, list_shuffle=True, **order)


class ImageRecords:
    """The images of a folder of class folders. Listed once, then read-only: any thread reads."""

    kind = "image_folder"

    def __init__(
        self, path: PathLike, pictures: Pictures, on_error: OnError, *, is_deep: bool
    ) -> None:
        root = Path(check_path(path, "a folder of class folders"))
        if not root.is_dir():
            what = "is not a folder" if root.exists() else "does not exist"
            raise ConfigError(f"{os.fspath(path)!r} {what}, expected a folder of class folders")
        self.classes = tuple(_names_in(root, lambda entry: entry.is_dir()))
        """Names of the classes, in the order of their labels."""
        self._files: list[str] = []
        labels = []
        for label, folder in enumerate(root / name for name in self.classes):
            inner = _folders_in(folder, ()) if is_deep else [folder]
            for within in sorted(inner, key=os.fsencode):
                # Sorted here and not by the system: the order of a folder differs between file
                # systems, and the stream must not.
                files = _names_in(within, _is_image)
                self._files.extend(os.path.join(within, file) for file in files)
                labels += [label] * len(files)
        if not self._files:
            raise ConfigError(
                f"{os.fspath(path)!r} holds no images: expected files such as 'class/image.jpg' "
                f"ending in {', '.join(_SUFFIXES)}"
            )
        self._labels = np.array(labels, dtype=np.int32)
        self._root = root
        self._pictures = pictures
        self._faults = Faults(on_error)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def may_skip(self) -> bool:
        """Whether defective records are left out."""
        return self._faults.may_skip

    @property
    def skipped(self) -> int:
        """Reads of defective files that were left out."""
        return self._faults.skipped

    def name(self, index: int) -> str:
        """The file's path."""
        return repr(self._files[index])

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns | None:
        """Read and decode files."""
        good, images = [], []
        for index in indices.tolist():
            try:
                # Opened at the call: no process may hold a whole data set's files open.
                data = self._faults.attempt(Path(self._files[index]).read_bytes)
                images.append(self._pictures.decode(data, call, index))
                good.append(index)
            except Exception as error:
                self._faults.handle(self.name, index, error)
        if not good:
            return None
        image = stack(images, lambda i: self.name(good[i]), "image", ONE_SIZE, call)
        return image, self._labels[good]

    def describe(self) -> dict[str, Any]:
        """A digest of the files' names, and what is done to them."""
        hasher = xxhash.xxh3_64()
        for file in self._files:
            # Relative to the folder, so that a data set that was moved is the same one.
            hasher.update(os.fsencode(os.path.relpath(file, self._root)) + b"\0")
        return {"files": hasher.hexdigest(), **self._pictures.fingerprint_fields()}


def _folders_in(folder: Path, outer: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    """A folder and those in it at any depth, links included; `outer` tells which it lies in."""
    try:
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"{os.fspath(folder)!r} cannot be read: {error.strerror}") from error
    itself = status.st_dev, status.st_ino
    if itself in outer:
        raise ConfigError(f"{os.fspath(folder)!r} is a link to a folder that it lies in: remove it")
    yield folder
    for name in _names_in(folder, lambda entry: entry.is_dir()):
        yield from _folders_in(folder / name, (*outer, itself))


def _names_in(folder: Path, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """What a folder holds, sorted byte by byte."""
    try:
        with os.scandir(folder) as entries:
            return sorted((entry.name for entry in entries if is_wanted(entry)), key=os.fsencode)
    except OSError as error:
        raise ConfigError(f"{os.fspath(folder)!r} cannot be read: {error.strerror}") from error


def _is_image(entry: os.DirEntry[str]) -> bool:
    # A link that leads nowhere is a file that vanished, and not left out in silence.
    return entry.name.lower().endswith(_SUFFIXES) and not entry.is_dir()
