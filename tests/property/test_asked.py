"""Feeds of random compositions say which records each batch has, and when each record comes."""

from __future__ import annotations

import pytest

import parts
from property.asked import run

pytestmark = pytest.mark.timeout(300)  # of many compositions


@pytest.mark.parametrize("first", range(0, 100 if parts.is_full else 20, 4))
def test_what_is_told_is_what_came(first: int) -> None:
    done = sum((run(seed) for seed in range(first + 1, first + 4)), run(first))
    assert done["rows"] > 20
