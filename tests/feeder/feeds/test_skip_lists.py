"""The steps of a spike are left out: a run goes back to a position before them and excludes their
records, which come no more, while all others come as they would have."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import feeder
from feeder import sources
from feeder.cli import main
from feeder.errors import ConfigError

UNIT = 1000
EPOCHS = 3


def feed(
    sizes: dict[str, int], bad: dict[str, list[range]], size: int, **settings: Any
) -> feeder.Coordinator:
    """Record r of source k is k * UNIT + r; one source alone is no mixture."""
    parts = {}
    for number, (name, num) in enumerate(sizes.items()):
        source = sources.arrays(np.arange(num) + number * UNIT)
        parts[name] = source.exclude(bad[name]).shuffle() if name in bad else source.shuffle()
    made = parts[""] if "" in parts else sources.mix({k: (part, 1) for k, part in parts.items()})
    return feeder.init_data_input_workers(
        ["x"], made, size, epochs=EPOCHS, coordinator=feeder.Coordinator(), **settings
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_records_of_a_spike_come_no_more_and_all_others_do(seed: int) -> None:
    draw = random.Random(seed)
    sizes = {"": 60} if seed % 2 else {"web": 50, "code": draw.randint(20, 50)}
    size = draw.randint(1, 7)
    with feed(sizes, {}, size) as coordinator:
        run = [(b.epoch, b["x"].tolist(), b.cut, coordinator.state_dict())
               for b in coordinator["train"]]  # fmt: skip
    of_epoch = sum(epoch == 0 for epoch, *_ in run)
    first = draw.randrange(1, of_epoch - 2)
    spike = range(first, min(of_epoch, first + draw.randint(1, 5)))
    at = draw.randrange(first)
    position = run[at][3]
    bad = feed(sizes, {}, size, resume=position)["train"].records_in(spike)
    # What the naive reader of the batches says of it.
    names = list(sizes)
    wrong = {row for step in spike for row in run[step][1]}
    assert {names.index(k) * UNIT + r for k, those in bad.items() for one in those for r in one} \
        == wrong  # fmt: skip
    rows: dict[int, list[int]] = {epoch: [] for epoch in range(EPOCHS)}
    with feed(sizes, bad, size, resume=position, edit="a spike") as coordinator:
        for batch in coordinator["train"]:
            rows[batch.epoch] += batch["x"].tolist()
    had = [row for _, those, *_ in run[: at + 1] for row in those]
    rest = [row for epoch, those, *_ in run[at + 1 :] for row in those if epoch == 0]
    assert not wrong & {row for those in rows.values() for row in those}
    if "" in sizes:
        # The old rest, without them.
        assert rows[0] == [row for row in rest if row not in wrong]
    every = Counter(n * UNIT + r for n, num in enumerate(sizes.values()) for r in range(num))
    for row in wrong:
        del every[row]
    assert Counter(had) + Counter(rows[0]) == every
    assert all(Counter(rows[epoch]) == every for epoch in range(1, EPOCHS))


def test_steps_whose_records_are_not_known_are_refused() -> None:
    filtered = sources.arrays(np.arange(9)).filter(lambda row: True)
    coordinator = feeder.init_data_input_workers(
        ["x"], filtered, 2, coordinator=feeder.Coordinator()
    )
    with pytest.raises(ConfigError, match="are not known before they are read"):
        coordinator["train"].records_in(range(2))


def test_the_log_tells_what_is_excluded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with feed({"": 60}, {}, 4) as coordinator:
        batches = [next(coordinator["train"]) for _ in range(6)]
        state = coordinator.state_dict()
    bad = {"": [range(0, 1), range(7, 9)]}
    edited = feed({"": 60}, bad, 4, resume=state, edit="a spike")
    edited.checkpoint(tmp_path / "feed.snapshot")
    had = [b.step for b in batches for row in b["x"].tolist() if row in (0, 7, 8)]
    assert f"{len(had)} of the 3 records that are excluded have come already" in caplog.text
    assert main(["log", str(tmp_path / "feed.snapshot")]) == 0
    assert "60 records, 3 excluded: 0, 7 to 8; " in capsys.readouterr().out
