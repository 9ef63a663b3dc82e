"""Files of tokens, as language models are trained on: one number after the other, no header."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Unpack

import numpy as np
from numpy.typing import DTypeLike, NDArray

from feeder.workers.errors import ConfigError
from feeder.workers.public import public
from feeder.workers.sources.arguments import PathLike, list_paths, whole
from feeder.workers.sources.orders.options import OrderOptions
from feeder.workers.sources.source import Source
from feeder.workers.sources.stores.reading import Columns, empty_for, has_place, stack
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
    **options: Unpack[OrderOptions],
) -> Source:
    """Sequences from files of tokens: one column, (rows, seq_len).

    Record i of a file begins at its token i * stride; tokens at the end that make no sequence are
    left out, and no sequence runs from one file into the next. For inputs and targets that are
    one token ahead, take `seq_len=n + 1, stride=n`. The files are mapped into memory.

    Args:
        path: The file; of several, one is read after the other.
        seq_len: Tokens of a sequence.
        dtype: Type of a token in the file.
        stride: Tokens from the beginning of a sequence to the next one's; None is `seq_len`.
        as_type: Type of the column, of whole numbers that hold every token, such as "int64", which
            PyTorch's embeddings take; None is `dtype`.
        options: `OrderOptions`.

    Raises:
        ConfigError: a file is missing, has a size that is no multiple of the type's, or is too
            short for a sequence; or an option is wrong.
    """
    paths = list_paths(path, "a file of tokens")
    length = whole("seq_len", seq_len, 1)
    step = length if stride is None else whole("stride", stride, 1)
    kind = _whole_dtype("dtype", dtype)
    wanted = kind if as_type is None else _whole_dtype("as_type", as_type)
    # A token that does not fit would become another one.
    if not np.can_cast(kind, wanted):
        raise ConfigError(f"as_type is {wanted}, expected a type that holds every {kind}")
    return Source(TokenRecords(paths, length, kind, step, wanted), **options)


def _whole_dtype(name: str, dtype: DTypeLike) -> np.dtype[Any]:
    try:
        found = np.dtype(dtype)
    except TypeError as error:
        raise ConfigError(f"{name} is {dtype!r}: {error}") from error
    # Half-precision or signed bytes by mistake would give nonsense that trains.
    if found.kind not in "iu":
        raise ConfigError(f"{name} is {found}, expected a type of whole numbers")
    return found


class TokenRecords:
    """Sequences from files of tokens, mapped read-only: any thread reads."""

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
    ) -> None:
        self._paths = paths
        self._seq_len, self._dtype, self._stride = seq_len, dtype, stride
        self._as_type = as_type
        self._files = [self._open(path) for path in self._paths]
        # Only whole sequences: a shorter one would not fit into a batch.
        counts = [(len(file) - seq_len) // stride + 1 for file in self._files]
        self._ends = np.cumsum(counts)
        self._starts = self._ends - counts

    def _open(self, path: str) -> NDArray[Any]:
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise ConfigError(f"{path!r} cannot be read: {error.strerror}") from error
        # The commonest mistake, a wrong dtype, is mostly seen here.
        if size % self._dtype.itemsize:
            raise ConfigError(
                f"{path!r} has {size} bytes, which is no multiple of the {self._dtype.itemsize} "
                f"bytes of a {self._dtype}: give the dtype that it was written with"
            )
        if size < self._seq_len * self._dtype.itemsize:
            raise ConfigError(
                f"{path!r} has {size // self._dtype.itemsize} tokens, fewer than a sequence of "
                f"{self._seq_len}"
            )
        # A plain array over the map: each slice of a `memmap` runs Python code of NumPy's.
        return np.memmap(path, self._dtype, mode="r").view(np.ndarray)

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
        rows = [
            self._files[number][first : first + self._seq_len]
            for number, first in zip(*self._places(indices), strict=True)
        ]
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

    def describe(self) -> dict[str, Any]:
        """The sizes of the files, how they are cut, and what another type tokens become."""
        described = {
            "tokens": [len(file) for file in self._files],
            "dtype": self._dtype.str,
            "seq_len": self._seq_len,
            "stride": self._stride,
        }
        # Byte order is the machine's in a feed, so it is no other type.
        if native(self._as_type) != native(self._dtype):
            described["as_type"] = native(self._as_type).str
        return described
