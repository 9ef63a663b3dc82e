"""Feeds of random compositions say which records each batch has, and when each record comes."""

from __future__ import annotations

import pytest

import parts
from property.asked import run

pytestmark = pytest.mark.timeout(300)  # of many compositions


# Two of the first take a second.
SEEDS = range(200) if parts.is_full else [seed for seed in range(20) if seed not in (3, 11)]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_told_is_what_came(seed: int) -> None:
    assert run(seed)["feeds"] == 1
