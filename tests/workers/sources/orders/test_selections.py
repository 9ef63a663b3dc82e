"""Records but for some ranges, against sets of numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from feeder.workers.sources.orders.edited import Selection, differing, ranges_of


@pytest.mark.parametrize("seed", range(40))
def test_a_selection_is_a_set(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(1, 30)
    out = {draw.randrange(size) for _ in range(draw.randint(0, size))}
    one = Selection(size, ranges_of(out))
    kept = [record for record in range(size) if record not in out]
    every = np.arange(-3, size + 4)
    assert every[one.holds(every)].tolist() == kept
    assert (len(one), one.num_excluded) == (len(kept), len(out))
    assert one.at(np.arange(len(kept))).tolist() == kept
    ranks = one.ranks(np.arange(size + 1)).tolist()
    assert ranks == [sum(record < n for record in kept) for n in range(size + 1)]


@pytest.mark.parametrize("seed", range(40))
def test_what_differs_makes_each_set_of_the_other(seed: int) -> None:
    draw = random.Random(seed)
    one, other = ({draw.randrange(20) for _ in range(draw.randint(0, 20))} for _ in range(2))
    differ = differing(ranges_of(one), ranges_of(other))
    assert differ == ranges_of(one ^ other)
    assert differing(differ, ranges_of(one)) == ranges_of(other)
    assert differing(differ, ranges_of(other)) == ranges_of(one)
