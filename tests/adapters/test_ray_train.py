"""Ray Train: a job whose worker fails goes on from the position in its reported checkpoint."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from needs import needs_framework

needs_framework("torch", "ray")

from adapters.examples import printed
from adapters.ray_child import EPOCHS, FAILS_AT, NUM, SIZE
from feeder.adapters.torch import FeedLoader

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.timeout(300)
def test_a_job_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    # Ray's sockets have their paths, which may not be long.
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        printed(
            "-W", "ignore", "-m", "adapters.ray_child", tmp_path, limit_s=280.0,
            RAY_CHILD_TMP=folder, RAY_USAGE_STATS_ENABLED="0", CUDA_VISIBLE_DEVICES="",
        )  # fmt: skip
    for rank in range(2):
        with FeedLoader(list(range(NUM)), SIZE, shuffle=True, rank=rank, world_size=2) as loader:
            whole = [batch.tolist() for _ in range(EPOCHS) for batch in loader]
        lines = (tmp_path / f"rank{rank}").read_text().splitlines()
        steps = [json.loads(line) for line in lines]
        # Two steps were done again: the last checkpoint was of step 6, an epoch's end.
        assert [step for step, _ in steps] == [*range(1, FAILS_AT + 1), *range(7, 13)]
        assert all(batch == whole[step - 1] for step, batch in steps)
