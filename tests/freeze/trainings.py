"""What feeder keeps in checkpoints of trainers that count batches themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from freeze.loaders import NUM, SIZE, from_json, to_json

SAVED = 3
"""Which of a training's checkpoints, from 0: of a step within its first epoch."""
THEN = 6


class Training(NamedTuple):
    """A training, and where in a checkpoint of it the position is."""

    run: Callable[[Path, Path | None], tuple[list[Any], list[tuple[Path, int]]]]
    """Trains in a folder, from a checkpoint if there is one: its log, and each checkpoint with how
    much was logged by then."""
    read: Callable[[Path], Any]
    """The position in a checkpoint."""
    write: Callable[[Path, Any], None]
    """Put another one there."""


def source() -> Any:
    from adapters.loaders import Source

    return Source("shuffle", NUM, SIZE, False, False, 0, False)


def of_lightning(loader: str) -> Training:
    import torch

    from adapters.lightning_programs import Fit, run

    fit = Fit(loader, (source(),), "min_size", 2, -1, 1, None, None, 1, 0, "batch")

    def load(path: Path) -> dict[str, Any]:
        checkpoint: dict[str, Any] = torch.load(path, weights_only=False)
        return checkpoint

    def write(path: Path, position: Any) -> None:
        checkpoint = load(path)
        checkpoint["callbacks"]["FeedCheckpoint"] = position
        # Lightning keeps the states of the loaders, too, as it has read them.
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = []
        torch.save(checkpoint, path)

    return Training(
        lambda folder, resume: run(fit, loader, folder, resume=resume, moment="batch"),
        lambda path: load(path)["callbacks"]["FeedCheckpoint"], write,
    )  # fmt: skip


def of_hf(loader: str) -> Training:
    from adapters.hf_programs import Training as Trained
    from adapters.hf_programs import run

    training = Trained(
        "feed trainer", loader, source(), 2, -1, 1, "steps", False, None, "constant"
    )  # fmt: skip

    def load(path: Path) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((path / "trainer_state.json").read_text())
        return state

    def write(path: Path, position: Any) -> None:
        state = load(path)
        state["stateful_callbacks"]["FeedCallback"] = position
        (path / "trainer_state.json").write_text(json.dumps(state))

    return Training(
        lambda folder, resume: run(training, folder, resume=resume),
        lambda path: load(path)["stateful_callbacks"]["FeedCallback"], write,
    )  # fmt: skip


def of_accelerate(loader: str) -> Training:
    import torch

    from adapters.accelerate_programs import Loop, run

    loop = Loop(source(), 2, 1, None, False, None)
    name = "dl_state_dict.bin"
    return Training(
        lambda folder, resume: run(loop, folder, name=loader, resume=resume),
        lambda path: torch.load(path / name, weights_only=False),
        lambda path, position: torch.save(position, path / name),
    )


TRAININGS: dict[str, Callable[[], Training]] = {
    "lightning": lambda: of_lightning("feeder"),
    "lightning, FeedLoader": lambda: of_lightning("feed"),
    "hf": lambda: of_hf("feeder"),
    "hf, FeedLoader": lambda: of_hf("feed"),
    "accelerate": lambda: of_accelerate("feeder"),
}


def state_of(name: str, folder: Path) -> dict[str, Any]:
    """The position in a checkpoint, and what was logged from there on."""
    training = TRAININGS[name]()
    log, saved = training.run(folder, None)
    path, at = saved[SAVED]
    return {"state": to_json(training.read(path)), "then": str(log[at : at + THEN])}


def rest(name: str, state: Any, folder: Path) -> str:
    """What is logged if a checkpoint has a position that was kept."""
    training = TRAININGS[name]()
    _, saved = training.run(folder, None)
    path, _ = saved[SAVED]
    training.write(path, from_json(state))
    resumed = folder / "resumed"
    resumed.mkdir()
    log, _ = training.run(resumed, path)
    return str(log[:THEN])


def make(folder: Path) -> dict[str, Any]:
    made = {}
    for name in TRAININGS:
        own = folder / name
        own.mkdir()
        made[name] = state_of(name, own)
    return made
