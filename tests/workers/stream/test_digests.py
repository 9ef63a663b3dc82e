"""Digests of chunks: what they tell, and what they do not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from feeder.workers.stream.digests import digest_chunk, hash_chunk


def test_a_digest_tells_dtype_shape_order_and_every_byte_of_a_small_chunk() -> None:
    base = np.arange(24, dtype=np.int16)
    chunks: list[Any] = [
        (base,), (base.view(np.uint16),), (base.reshape(4, 6),), (base.reshape(6, 4),),
        (base[:-1],), (base, base), (base[:12], base[12:]), (base[::-1],), (),
    ]  # fmt: skip
    for i in range(base.nbytes):
        changed = base.copy()
        changed.view(np.uint8)[i] ^= 1
        chunks.append((changed,))
    digests = [digest_chunk(arrays) for arrays in chunks]
    assert len(set(digests)) == len(digests)


PAIR = np.dtype([("flag", "i1"), ("value", "<f8")], align=True)


has_80_bits = pytest.mark.skipif(np.finfo("g").nmant != 63, reason="long doubles are no longer")


@pytest.mark.parametrize(
    "dtype",
    [
        PAIR,
        np.dtype([("pairs", PAIR, (2,)), ("last", "i1")]),
        np.dtype([("pairs", PAIR, (2,)), ("last", "i1")], align=True),
        np.dtype([("pair", PAIR), ("pairs", [("inner", PAIR, (2, 2))], (1, 3))]),
        np.dtype({"names": ["a", "b"], "formats": ["<i4", ">u2"], "offsets": [8, 1]}),
        pytest.param(np.dtype("g"), marks=has_80_bits),
        pytest.param(np.dtype([("x", "G", (2,)), ("n", "i1")]), marks=has_80_bits),
        pytest.param(np.dtype(">g"), marks=has_80_bits),
        pytest.param(np.dtype([("x", ">G")]), marks=has_80_bits),
    ],
    ids=[
        "fields", "in arrays", "padded too", "deeper", "offsets", "long", "long in arrays",
        "the other byte order", "complex in it",
    ],
)  # fmt: skip
@pytest.mark.parametrize("digest", [digest_chunk, hash_chunk])
def test_padding_counts_as_zeros(dtype: np.dtype[Any], digest: Any) -> None:
    zeros = np.zeros(5, dtype)
    is_padding = _bytes_of_padding(dtype)
    assert 0 < is_padding.sum() < len(is_padding)
    found = {digest((zeros,)), digest((np.asfortranarray(zeros.repeat(2)[::2]),))}
    for fill in range(1, 20):
        rows = zeros.copy()
        rows.view(np.uint8).reshape(5, -1)[:, is_padding] = fill
        found.add(digest((rows,)))
    assert len(found) == 1
    for at in np.flatnonzero(~is_padding):
        rows = zeros.copy()
        rows.view(np.uint8).reshape(5, -1)[3, at] = 1
        assert digest((rows,)) not in found


def _bytes_of_padding(dtype: np.dtype[Any]) -> Any:
    """Which bytes of a row are of no field: those that change none when they change."""
    is_padding = np.zeros(dtype.itemsize, np.bool_)
    for at in range(dtype.itemsize):
        rows = np.zeros(2, dtype)
        rows.view(np.uint8)[at] = 1
        is_padding[at] = str(rows[0]) == str(rows[1])
    return is_padding


def test_padding_counts_as_zeros_in_the_samples_of_a_large_chunk() -> None:
    zeros = np.zeros(5_000, PAIR)
    filled = zeros.copy()
    filled.view(np.uint8).reshape(5_000, -1)[:, _bytes_of_padding(PAIR)] = 7
    assert digest_chunk((zeros,)) == digest_chunk((filled,))
    for at in (0, 4_999):
        changed = zeros.copy()
        changed["flag"][at] = 1
        assert digest_chunk((zeros,)) != digest_chunk((changed,))


@pytest.mark.parametrize("num_bytes", [16_385, 20_001, 1_000_003])
def test_a_digest_of_a_large_chunk_samples_all_parts_of_it(num_bytes: int) -> None:
    base = np.zeros(num_bytes, np.uint8)
    digest = digest_chunk((base,))
    stretch = num_bytes // 255
    for at in range(0, num_bytes - stretch, stretch):
        base[at : at + stretch] = 1
        assert digest_chunk((base,)) != digest
        base[at : at + stretch] = 0
    assert digest_chunk((base,)) == digest


def test_the_whole_hash_sees_every_byte_of_a_large_chunk() -> None:
    base = np.zeros(100_000, np.uint8)
    digest = hash_chunk((base,))
    for at in itertools.chain(range(0, 100_000, 997), [99_999]):
        base[at] = 1
        assert hash_chunk((base,)) != digest
        base[at] = 0
    assert hash_chunk((base,)) == digest
