"""A job of Ray Train that fails once in the middle of an epoch, and is started again by Ray."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

NUM, SIZE, EPOCHS, FAILS_AT = 22, 2, 2, 8


def train_fn(config: dict[str, Any]) -> None:
    """What a worker runs."""
    import torch

    from feeder.adapters.torch import FeedLoader

    rank = train.get_context().get_world_rank()
    # Rank and world size are those of torch.distributed, which TorchTrainer has set up.
    loader = FeedLoader(list(range(NUM)), SIZE, shuffle=True)
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            loader.load_state_dict(torch.load(Path(folder) / "feed.pt"))
    with (Path(config["notes"]) / f"rank{rank}").open("a") as notes:
        while loader.epoch < EPOCHS:
            for batch in loader:
                print(json.dumps([loader.step, batch.tolist()]), file=notes, flush=True)
                if loader.step == FAILS_AT and not checkpoint:
                    raise RuntimeError("this worker fails")
                if loader.step % 3:
                    train.report({"step": loader.step})
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    # One rank's is one for all.
                    if rank == 1:
                        torch.save(loader.state_dict(), Path(folder) / "feed.pt")
                    saved = Checkpoint.from_directory(folder) if rank == 1 else None
                    train.report({"step": loader.step}, checkpoint=saved)
    loader.close()


def main(folder: str) -> None:
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False,
        object_store_memory=100_000_000, _temp_dir=os.environ["RAY_CHILD_TMP"],
    )  # fmt: skip
    TorchTrainer(
        train_fn,
        train_loop_config={"notes": folder},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(
            name="job", storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
