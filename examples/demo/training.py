"""A trainer, a process of its own that may be killed at any moment: it reads one queue.

It reports to its supervisor in JSON lines on stdout. Before each line but the first it takes one
byte from stdin, so that it is never more than one step ahead of what the supervisor has read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

import feeder
from demo.digits import NUM_TRAINING_ROWS, load_digits
from demo.serving import FEED
from demo.softmax import WEIGHTS_SHAPE, Bytes, Floats, accuracy, loss_and_gradient

LEARNING_RATE = 0.1
MOMENTUM = 0.9
SERVER_AWAY_S = 15.0
"""For how long the trainer looks for a server: one starts in a fraction of a second."""


@dataclass(slots=True, kw_only=True)
class TrainingState:
    """All that a checkpoint holds: the model and the position in the stream, side by side."""

    step: int = 0
    """Steps done."""
    weights: Floats = field(default_factory=lambda: np.zeros(WEIGHTS_SHAPE))
    """The model."""
    velocity: Floats = field(default_factory=lambda: np.zeros(WEIGHTS_SHAPE))
    """The optimizer's state."""
    digest: bytes = bytes(16)
    """Chained digest (xxh3, 128 bits) of every byte of every batch so far, in order."""
    position: bytes | None = None
    """The consumer's position just after `step`, of its state dict; None where none is known."""

    def save(self, path: Path) -> None:
        """Write the checkpoint whole or not at all, whenever the process is killed."""
        beside = path.with_suffix(".tmp")
        with beside.open("wb") as file:
            np.savez(
                file,
                step=np.int64(self.step),
                weights=self.weights,
                velocity=self.velocity,
                digest=np.frombuffer(self.digest, np.uint8),
                position=np.frombuffer(self.position or b"", np.uint8),
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
        sync_folder(path.parent)

    @classmethod
    def load(cls, path: Path) -> TrainingState:
        """The newest checkpoint, or the state at the very beginning where there is none yet."""
        if not path.exists():
            return cls()
        with np.load(path, allow_pickle=False) as archive:
            return cls(
                step=int(archive["step"]),
                weights=archive["weights"],
                velocity=archive["velocity"],
                digest=archive["digest"].tobytes(),
                position=archive["position"].tobytes(),
            )


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def train_step(state: TrainingState, batch: Mapping[str, Bytes]) -> float:
    """One step over one batch; returns the mean loss before it."""
    images, labels = batch["image"], batch["label"]
    loss, gradient = loss_and_gradient(state.weights, images, labels)
    state.digest = chain_digest(state.digest, batch)
    state.velocity = MOMENTUM * state.velocity - LEARNING_RATE * (gradient / len(labels))
    state.weights = state.weights + state.velocity
    state.step += 1
    return loss / len(labels)


def chain_digest(before: bytes, batch: Mapping[str, Bytes]) -> bytes:
    """The digest of everything before and of this batch, byte for byte."""
    digest = xxhash.xxh3_128(before)
    for name in ("image", "label"):
        digest.update(batch[name].tobytes())
    return digest.digest()


def connect(state: TrainingState, address: str, queue: int) -> feeder.Consumer:
    """The queue's consumer, from the state's position on: it rejoins, whether its server, the
    other trainer or nobody was killed with it."""
    return feeder.connect(
        address,
        feed=FEED,
        queue=queue,
        resume=state.position,
        rejoin=state.position is not None,
        timeout=SERVER_AWAY_S,
        reconnect=SERVER_AWAY_S,
    )


class Reporter:
    """Sends lines to the supervisor, each after the one before it has been read."""

    def __init__(self) -> None:
        """Nothing has been sent yet."""
        self._unread = False

    def send(self, event: str, **fields: int | float | str) -> None:
        """Send one line; ends the process where the supervisor is gone."""
        if self._unread and not os.read(sys.stdin.fileno(), 1):
            raise SystemExit(1)
        sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
        sys.stdout.flush()
        self._unread = True


def train(checkpoint: Path, address: str, *, queue: int, steps_per_checkpoint: int) -> None:
    """Train from the newest checkpoint to the end of the stream, reporting every step."""
    state = TrainingState.load(checkpoint)
    reporter = Reporter()
    reporter.send("start", step=state.step)
    with connect(state, address, queue) as consumer:

        def save() -> None:
            state.position = consumer.state_dict()["feeder"]
            state.save(checkpoint)

        if state.position is None:
            save()  # so that every later life has a position to rejoin at
        for batch in consumer:
            loss = train_step(state, batch)
            reporter.send("step", step=state.step, loss=loss, batches=state.digest.hex())
            if state.step % steps_per_checkpoint == 0:
                save()
    images, labels = (column[NUM_TRAINING_ROWS:] for column in load_digits())
    reporter.send(
        "end",
        batches=state.digest.hex(),
        weights=xxhash.xxh3_128_hexdigest(state.weights.tobytes()),
        accuracy=accuracy(state.weights, images, labels),
    )


def main() -> None:
    """The command line of a trainer's process."""
    parser = argparse.ArgumentParser(description="one life of one of the demo's trainers")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("address")
    for name in ("queue", "steps-per-checkpoint"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = vars(parser.parse_args())
    train(options.pop("checkpoint"), options.pop("address"), **options)


if __name__ == "__main__":
    main()
