"""A folder of images, one folder inside it per class.

The listing is the order: it is sorted by bytes, as directory entries come in any order, and it is
taken once, so that a file that comes or goes later is named and does not shift the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import xxhash
from numpy.typing import NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import PathLike, check_path
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.far.cache import Cache
from feeder.workers.sources.far.objects import is_url
from feeder.workers.sources.far.paths import Far, FarPath
from feeder.workers.sources.pictures import ONE_SIZE, PictureOptions, Pictures, take_pictures
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.reading import Columns, Faults, OnError, stack
from feeder.workers.sources.stores.records import Records
from feeder.workers.stream.batch import Call

_SUFFIXES = (
    ".bmp", ".jp2", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tif", ".tiff",
    ".webp",
)  # fmt: skip


@public("feeder.sources")
def image_folder(
    path: PathLike,
    *,
    cache: Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
    **options: Unpack[PictureOptions],
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
        path: The folder, or a URL, of which there is one listing. (Folders without an object are no
            classes there.)
        cache: A `feeder.Cache` that a URL is read through; None is that of FEEDER_CACHE.
        storage_options: How the store of a URL is reached, by the names of obstore, such as
            {"region": "eu-west-1"}; what is not given comes from the environment.
        on_error: What to do about a file that cannot be read: "raise", or "skip", which leaves
            its row out and counts it in `source.skipped`.
        options: `PictureOptions`, and `OrderOptions`.

    Raises:
        ConfigError: the folder holds no images, or an option is wrong.
        StorageError: the listing is refused, or the store does not answer.
    """
    pictures, order = take_pictures(options)
    pictures.decoder.check()
    is_deep = order.get("order") != "dali"
    root = check_path(path, "a folder of class folders")
    if is_url(root):
        classes, files = _of_store(root, Far(cache, storage_options), is_deep=is_deep)
    elif storage_options is not None:
        raise ConfigError("storage_options are given, and the folder is no URL")
    else:
        classes, files = _of_folder(Path(root), is_deep=is_deep)
    read = ImageRecords(root, classes, files, pictures, on_error)
    return Source(read, list_shuffle=True, **order)


class ImageRecords(Records):
    """The images of a folder of class folders. Listed once, then read-only: any thread reads."""

    kind = "image_folder"

    def __init__(
        self, root: str, classes: Sequence[str], files: Sequence[Sequence[str]],
        pictures: Pictures, on_error: OnError,
    ) -> None:  # fmt: skip
        """`files` are those of each class."""
        self.classes = tuple(classes)
        """Names of the classes, in the order of their labels."""
        self._files = [file for of_class in files for file in of_class]
        if not self._files:
            raise ConfigError(
                f"{root!r} holds no images: expected files such as 'class/image.jpg' ending in "
                f"{', '.join(_SUFFIXES)}"
            )
        counts = [len(of_class) for of_class in files]
        self._labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
        self.has_objects = is_url(root)
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
                data = self._faults.attempt(partial(_content, self._files[index]))
                images.append(self._pictures.decode(data, call, index))
                good.append(index)
            except Exception as error:
                self._faults.handle(self.name, index, error)
        if not good:
            return None
        image = stack(images, lambda i: self.name(good[i]), "image", ONE_SIZE, call)
        return image, self._labels[good]

    def touches(self, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """What images are as objects."""
        for index in indices.tolist():
            file = self._files[index]
            if isinstance(file, FarPath):
                yield file, 0, file.known.size

    def describe(self) -> dict[str, Any]:
        """A digest of the files' names, and what is done to them."""
        hasher = xxhash.xxh3_64()
        for file in self._files:
            # Relative to the folder, so that a data set that was moved is the same one.
            name = (
                file[len(self._root) :] if self.has_objects else os.path.relpath(file, self._root)
            )
            hasher.update(os.fsencode(name.lstrip("/")) + b"\0")
        known = "".join(file.told for file in self._files if isinstance(file, FarPath))
        objects = {"objects": xxhash.xxh3_64_hexdigest(known.encode())} if known else {}
        return {**objects, "files": hasher.hexdigest(), **self._pictures.fingerprint_fields()}


def _content(file: str) -> bytes:
    if isinstance(file, FarPath):
        return file.pread(file.known.size, 0)
    return Path(file).read_bytes()


def _of_folder(root: Path, *, is_deep: bool) -> tuple[list[str], list[list[str]]]:
    """The classes of a folder, and the images of each."""
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise ConfigError(f"{os.fspath(root)!r} {what}, expected a folder of class folders")
    classes = _names_in(root, lambda entry: entry.is_dir())
    found: list[list[str]] = []
    for folder in (root / name for name in classes):
        inner = _folders_in(folder, ()) if is_deep else [folder]
        # Sorted here and not by the system: the order of a folder differs between file systems, and
        # the stream must not.
        found.append([
            os.path.join(within, file)
            for within in sorted(inner, key=os.fsencode)
            for file in _names_in(within, _is_image)
        ])  # fmt: skip
    return classes, found


def _of_store(root: str, far: Far, *, is_deep: bool) -> tuple[list[str], list[list[str]]]:
    """The same of a URL."""
    by_class: dict[str, list[tuple[bytes, bytes, str]]] = {}
    for path in far.listed(root):
        folder, _, name = path[len(root.rstrip("/")) + 1 :].rpartition("/")
        if not folder:
            continue
        name_of_class = folder.partition("/")[0]
        images = by_class.setdefault(name_of_class, [])
        if name.lower().endswith(_SUFFIXES) and (is_deep or folder == name_of_class):
            images.append((folder.encode(), name.encode(), path))
    classes = sorted(by_class, key=str.encode)
    return classes, [[path for *_, path in sorted(by_class[name])] for name in classes]


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
