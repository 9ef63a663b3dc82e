"""The digits that come with the package, and the fetch function over them."""

from __future__ import annotations

import hashlib
from collections import Counter
from itertools import chain

import numpy as np
import pytest

from demo.digits import DigitReader, load_digits

pytestmark = pytest.mark.served
SOURCE_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"


def test_digits_are_as_in_their_source() -> None:
    """The checksum of the source's table: one line a row, 64 pixels and the label in decimals."""
    images, labels = load_digits()
    table = np.column_stack([images.reshape(-1, 64), labels])
    text = "".join(",".join(map(str, row)) + "\n" for row in table.tolist())
    assert hashlib.sha256(text.encode()).hexdigest() == SOURCE_SHA256


@pytest.fixture
def reader() -> DigitReader:
    numbers = np.arange(200, dtype=np.uint8)
    return DigitReader(numbers.reshape(200, 1, 1), numbers, num_workers=3, seed=1)


def read_epoch(reader: DigitReader, worker_id: int) -> list[list[int]]:
    """The labels of each chunk up to the end of the epoch."""
    chunks = []
    while True:
        try:
            images, labels = reader(worker_id, 32)
        except StopIteration:
            return chunks
        assert np.array_equal(images[:, 0, 0], labels)
        chunks.append(labels.tolist())


def test_workers_read_every_row_once_an_epoch_in_another_order(reader: DigitReader) -> None:
    epochs = [[list(chain(*read_epoch(reader, i))) for i in range(3)] for _ in range(2)]
    for epoch in epochs:
        assert Counter(chain(*epoch)) == Counter(range(200))
    assert epochs[0] != epochs[1]
    assert list(map(sorted, epochs[0])) == list(map(sorted, epochs[1]))


def test_seek_goes_on_from_every_cursor(reader: DigitReader) -> None:
    chunks, cursors = [], []
    for _ in range(2):
        while True:
            cursors.append(reader.cursor(2))
            try:
                chunks.append(reader(2, 32)[1].tolist())
            except StopIteration:
                chunks.append([])
                break
    for index, cursor in enumerate(cursors):
        reader.seek(2, list(cursor))
        rest = []
        for _ in chunks[index:]:
            try:
                rest.append(reader(2, 32)[1].tolist())
            except StopIteration:
                rest.append([])
        assert rest == chunks[index:]
