"""Files of tokens, as language models are trained on: one number after the other.

The records are cut from numbers, not found: record n begins at n times its length, so there is no
index, and a file of any size costs the same to open. Its header is looked at all the same: numbers
of another type would be wrong tokens, and no error.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import DTypeLike, NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import PathLike, whole
from feeder.workers.sources.far.ahead import Touch
from feeder.workers.sources.far.cache import Cache
from feeder.workers.sources.far.paths import FarPath, files_of, in_parallel
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.kept import Kept
from feeder.workers.sources.stores.offsets import MAPS_KEPT, order_of_files, told_of_files
from feeder.workers.sources.stores.reading import Columns, empty_for, has_place, stack
from feeder.workers.sources.stores.records import Records
from feeder.workers.stream.batch import Call
from feeder.workers.stream.chunks import native


@public("feeder.sources")
def tokens(
    path: PathLike | Iterable[PathLike],
    seq_len: int,
    dtype: DTypeLike,
    *,
    stride: int | None = None,
    as_type: DTypeLike | None = None,
    offset: int | None = None,
    cache: Cache | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[OrderOptions],
) -> Source:
    """Sequences from files of tokens: one column, (rows, seq_len).

    Record i of a file begins at its token i * stride; tokens at the end that make no sequence are
    left out, and no sequence runs from one file into the next. For inputs and targets that are
    one token ahead, take `seq_len=n + 1, stride=n`. The files are mapped into memory.

    Args:
        path: A file or a URL, a folder, several, or a pattern; one is read after the other.
        seq_len: Tokens of a sequence.
        dtype: Type of a token in the file.
        stride: Tokens from the beginning of a sequence to the next one's; None is `seq_len`.
        as_type: Type of the column, of whole numbers that hold every token, such as "int64", which
            PyTorch's embeddings take; None is `dtype`.
        offset: Bytes before the first token of each file; None is 0, and the size of the header of
            `.npy` files and of those of llm.c, whose type must be `dtype`. Of URLs it is looked
            for by a request for each.
        cache: A `feeder.Cache` that URLs are read through; None is that of FEEDER_CACHE.
        storage_options: How the store of a URL is reached, by the names of obstore, such as
            {"region": "eu-west-1"}; what is not given comes from the environment.
        options: `OrderOptions`.

    Raises:
        ConfigError: a file is missing, has a size that is no multiple of the type's, or is too
            short for a sequence; or an option is wrong.
        StorageError: an object is missing or refused, or its store does not answer.
    """
    paths = files_of(path, "a file of tokens", ("bin", "npy"), cache, storage_options)
    length = whole("seq_len", seq_len, 1)
    step = length if stride is None else whole("stride", stride, 1)
    kind = _whole_dtype("dtype", dtype)
    wanted = kind if as_type is None else _whole_dtype("as_type", as_type)
    # A token that does not fit would become another one.
    if not np.can_cast(kind, wanted):
        raise ConfigError(f"as_type is {wanted}, expected a type that holds every {kind}")
    start = None if offset is None else whole("offset", offset)
    return Source(TokenRecords(paths, length, kind, step, wanted, start), **options)


def _whole_dtype(name: str, dtype: DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"{name} is {dtype!r}: {error}") from error
    # Half-precision or signed bytes by mistake would give nonsense that trains.
    if found.kind not in "iu":
        raise ConfigError(f"{name} is {found}, expected a type of whole numbers")
    return found


class TokenRecords(Records):
    """Sequences from files of tokens, mapped read-only, and from objects: any thread reads."""

    kind = "tokens"
    skipped = 0
    may_skip = False

    def __init__(
        self,
        paths: Sequence[str],
        seq_len: int,
        dtype: np.dtype[Any],
        stride: int,
        as_type: np.dtype[Any],
        offset: int | None = None,
    ) -> None:
        self._paths = paths
        self._seq_len, self._dtype, self._stride = seq_len, dtype, stride
        self._as_type, self._offset = as_type, offset
        self.has_objects = any(isinstance(path, FarPath) for path in paths)
        find = in_parallel if self.has_objects else map
        self._extents = [*find(self._extent, self._paths)]
        """Of each file the byte of its first token, and its tokens."""
        # Only whole sequences: a shorter one would not fit into a batch.
        counts = [(size - seq_len) // stride + 1 for _, size in self._extents]
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts
        # Each map holds a descriptor.
        self._maps = Kept(MAPS_KEPT)

    def _extent(self, path: str) -> tuple[int, int]:
        offset = self._offset
        if isinstance(path, FarPath):
            size = path.known.size
            if offset is None:
                offset = _header_bytes(path, path.head(_HEAD_BYTES), size, self._dtype)
        else:
            try:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    head = file.read(12)
            except OSError as error:
                raise ConfigError(f"{path!r} cannot be read: {error.strerror}") from error
            if offset is None:
                offset = _header_bytes(path, head, size, self._dtype)
        held = max(0, size - offset)
        # The commonest mistake, a wrong dtype, is mostly seen here.
        if held % self._dtype.itemsize:
            raise ConfigError(
                f"{path!r} has {held} bytes{f' after the first {offset}' if offset else ''}, which "
                f"is no multiple of the {self._dtype.itemsize} bytes of a {self._dtype}: give the "
                "dtype that it was written with"
            )
        if held < self._seq_len * self._dtype.itemsize:
            raise ConfigError(
                f"{path!r} has {held // self._dtype.itemsize} tokens, fewer than a sequence of "
                f"{self._seq_len}"
            )
        return offset, held // self._dtype.itemsize

    def _rows(self, number: int) -> Callable[[int], NDArray[Any]]:
        """What gives the sequence of a file that begins at a token."""
        tokens, length = self._tokens(number), self._seq_len
        return lambda first: tokens[first : first + length]

    def _rows_of_objects(self, numbers: list[int], firsts: list[int]) -> list[NDArray[Any]]:
        """The sequences of files of which some are objects."""
        by_file: dict[int, list[int]] = {}
        for i, number in enumerate(numbers):
            by_file.setdefault(number, []).append(i)
        rows: dict[int, NDArray[Any]] = {}
        width = self._dtype.itemsize
        for number, chosen in by_file.items():
            path, (offset, _) = self._paths[number], self._extents[number]
            if isinstance(path, FarPath):
                starts = [offset + firsts[i] * width for i in chosen]
                joined = b"".join(path.pread_each(self._seq_len * width, starts))
                made = np.frombuffer(joined, self._dtype).reshape(-1, self._seq_len)
                rows.update(zip(chosen, made, strict=True))
            else:
                row = self._rows(number)
                rows.update((i, row(firsts[i])) for i in chosen)
        return [rows[i] for i in range(len(numbers))]

    def touches(self, indices: NDArray[np.int64], call: Call) -> Iterator[Touch]:
        """What sequences read of objects."""
        size = self._dtype.itemsize
        for number, first in zip(*self._places(indices), strict=True):
            path, (offset, _) = self._paths[number], self._extents[number]
            if isinstance(path, FarPath):
                yield path, offset + first * size, offset + (first + self._seq_len) * size

    def _tokens(self, number: int) -> NDArray[Any]:
        """The tokens of a file, mapped."""
        made: NDArray[Any] = self._maps.get(number, lambda: self._map(number))
        return made

    def _map(self, number: int) -> NDArray[Any]:
        path, (offset, size) = self._paths[number], self._extents[number]
        mapped = np.memmap(path, np.uint8, "r", offset)
        if len(mapped) != size * self._dtype.itemsize:
            raise ConfigError(
                f"{path!r} has {len(mapped)} bytes of tokens, and had {size * self._dtype.itemsize}"
                " when the source was made: make the source anew"
            )
        # A plain array over the map: each slice of a `memmap` runs Python code of NumPy's.
        return mapped.view(np.ndarray).view(self._dtype)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _places(self, indices: NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """The numbers of records' files, and their first tokens."""
        # `right`: a record whose number is the end of a file is the next file's first.
        numbers = np.searchsorted(self._ends, indices, side="right")
        inside = indices - self._starts[numbers]
        return numbers.tolist(), (inside * self._stride).tolist()

    def name(self, index: int) -> str:
        """Path and first token."""
        (number,), (first,) = self._places(np.array([index]))
        return f"{self._paths[number]!r} at token {first}"

    def read(self, indices: NDArray[np.int64], call: Call) -> Columns:
        """Copy sequences out of the files."""
        numbers, firsts = self._places(indices)
        if self.has_objects:
            rows = self._rows_of_objects(numbers, firsts)
        else:
            files = {number: self._rows(number) for number in set(numbers)}
            rows = [files[number](first) for number, first in zip(numbers, firsts, strict=True)]
        is_as_read = self._as_type == self._dtype
        column = stack(
            rows, lambda i: self.name(int(indices[i])), "tokens", call=call if is_as_read else None
        )
        if is_as_read:
            return (column,)
        # All rows at once: NumPy drops the GIL for each array that it makes another type of.
        if not has_place(call):
            return (column.astype(self._as_type),)
        cast = empty_for(call, column.shape, native(self._as_type))
        np.copyto(cast, column, casting="unsafe")
        return (cast,)

    def _objects(self) -> dict[str, str]:
        """What tells objects from others, beside their sizes."""
        if not self.has_objects:
            return {}
        told = [path.told if isinstance(path, FarPath) else "" for path in self._paths]
        return told_of_files(self._paths, told)

    def describe(self) -> dict[str, Any]:
        """The sizes of the files, how they are cut, and what another type tokens become."""
        described = {
            "tokens": [size for _, size in self._extents],
            **self._objects(),
            **order_of_files(self._paths),
            "dtype": self._dtype.str,
            "seq_len": self._seq_len,
            "stride": self._stride,
        }
        # Byte order is the machine's in a feed, so it is no other type.
        if native(self._as_type) != native(self._dtype):
            described["as_type"] = native(self._as_type).str
        if self._offset:
            described["offset"] = self._offset
        return described


_LLM_C = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Magic number and version of llm.c's files, and what their tokens are."""
_LLM_C_BYTES = 256 * 4
_HEAD_BYTES = 4096
"""So much of an object is read for its header; that of a `.npy` file of one axis has 128 bytes."""


def _header_bytes(path: str, head: bytes, size: int, dtype: np.dtype[Any]) -> int:
    """The bytes before the tokens of a file that says so itself; 0 of others.

    Raises:
        ConfigError: it says that it holds something else.
    """
    if head.startswith(b"\x93NUMPY"):
        try:
            kind_of_file, shape, offset = _npy_header(path, head)
        # NumPy raises much more of damaged bytes than it says.
        except Exception as error:
            raise ConfigError(f"{path!r} cannot be read as a .npy file: {error}") from error
        if kind_of_file != dtype or len(shape) != 1:
            raise ConfigError(
                f"{path!r} is a .npy file of {kind_of_file} and the shape {shape}, expected "
                f"one axis of {dtype}: give dtype={kind_of_file.str!r}, or read it with "
                "sources.arrays"
            )
        return offset
    magic, version, count = np.frombuffer(head[:12].ljust(12, b"\0"), "<i4").tolist()
    kind = _LLM_C.get((magic, version))
    if kind is None:
        _check_megatron(path, dtype)
        return 0
    if dtype != np.dtype(kind) or size != _LLM_C_BYTES + count * dtype.itemsize:
        raise ConfigError(
            f"{path!r} begins as a file of llm.c with {count} tokens of {kind}, and has {size} "
            f"bytes for tokens of {dtype}: give dtype={kind!r}, write it anew if it was truncated, "
            "or give offset=0 if it is no such file"
        )
    return _LLM_C_BYTES


def _npy_header(path: str, head: bytes) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """The type and the shape of an array in a file, and the byte where it begins."""
    if not isinstance(path, FarPath):
        array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        return array.dtype, array.shape, int(array.offset)
    file = io.BytesIO(head)
    version = np.lib.format.read_magic(file)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0
    }[version]  # fmt: skip
    shape, _, dtype = read(file)
    if file.tell() + np.prod(shape, dtype=np.int64) * dtype.itemsize != path.known.size:
        raise ValueError(f"{path.known.size} bytes are no array of {shape}")
    return dtype, shape, file.tell()


_MEGATRON = ["uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"]
"""The types of Megatron's datasets, by their codes from 1 on."""


def _check_megatron(path: str, dtype: np.dtype[Any]) -> None:
    """Raise ConfigError where the index of Megatron's that lies beside a file has another dtype."""
    stem, suffix = os.path.splitext(path)
    # Of an object it would be one more request for each.
    if suffix != ".bin" or not os.path.isfile(f"{stem}.idx"):
        return
    with open(f"{stem}.idx", "rb") as file:
        head = file.read(18)
    # Magic number, version 1 of 8 bytes, and the code.
    kind = dict(enumerate(_MEGATRON, 1)).get(head[17]) if len(head) == 18 else None
    if head.startswith(b"MMIDIDX\0\0") and kind is not None and dtype != np.dtype(kind):
        raise ConfigError(
            f"{path!r} has tokens of {kind}, says {stem + '.idx'!r}, and dtype is {dtype}: give "
            f"dtype={kind!r}, or offset=0 if it is another file's index"
        )
