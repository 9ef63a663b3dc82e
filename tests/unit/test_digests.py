"""Digests of chunks: what they tell, and what they do not."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from workers.digests import digest_chunk, hash_chunk


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


def test_a_digest_does_not_depend_on_the_layout_in_memory() -> None:
    rows = np.arange(24).reshape(4, 6)
    layouts = [rows, np.asfortranarray(rows), np.repeat(rows, 2, axis=1)[:, ::2]]
    assert len({digest_chunk((array,)) for array in layouts}) == 1
    assert len({hash_chunk((array,)) for array in layouts}) == 1


def test_a_digest_leaves_out_the_padding_of_structured_dtypes() -> None:
    pair = np.dtype([("flag", "i1"), ("value", "<f8")], align=True)
    padded = np.dtype([("pairs", pair, (2,)), ("last", "i1")], align=True)
    once, again = (np.frombuffer(bytes([fill]) * 80, padded).copy() for fill in (0, 255))
    for rows in (once, again):
        rows["pairs"]["flag"], rows["pairs"]["value"], rows["last"] = 1, [[2, 3], [4, 5]], [6, 7]
    assert once.tobytes() != again.tobytes()
    for digest in (digest_chunk, hash_chunk):
        assert digest((once,)) == digest((again,)) == digest((again.repeat(2)[::2],))
    again["pairs"]["value"][1, 1] = 6
    for digest in (digest_chunk, hash_chunk):
        assert digest((once,)) != digest((again,))


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
