"""The digits that come with the package, and the fetch function over them."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from demo.digits import load_digits

pytestmark = pytest.mark.served
SOURCE_SHA256 = "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"


def test_digits_are_as_in_their_source() -> None:
    """The checksum of the source's table: one line a row, 64 pixels and the label in decimals."""
    images, labels = load_digits()
    table = np.column_stack([images.reshape(-1, 64), labels])
    text = "".join(",".join(map(str, row)) + "\n" for row in table.tolist())
    assert hashlib.sha256(text.encode()).hexdigest() == SOURCE_SHA256
