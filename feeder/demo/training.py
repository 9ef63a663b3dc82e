"""The training run, a process of its own that may be killed at any moment.

It reports to its supervisor in JSON lines on stdout. Before each line but the first it takes one
byte from stdin, so that it is never more than one step ahead of what the supervisor has read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import xxhash

import feeder
from feeder.demo.digits import NUM_TRAINING_ROWS, DigitReader, load_digits
from feeder.demo.softmax import WEIGHTS_SHAPE, Bytes, Floats, accuracy, loss_and_gradient

NUM_WORKERS = 2
NUM_DEVICES = 2
BATCH_SIZE = 32
LEARNING_RATE = 0.1
MOMENTUM = 0.9


def num_steps(epochs: int) -> int:
    """Steps of a whole run: a step takes one batch from each device queue."""
    return -(-epochs * NUM_TRAINING_ROWS // (BATCH_SIZE * NUM_DEVICES))


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
    snapshot: bytes | None = None
    """The feed's position just after `step`; None at the very beginning."""

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
                snapshot=np.frombuffer(self.snapshot or b"", np.uint8),
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
                snapshot=archive["snapshot"].tobytes(),
            )


def sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def train_step(state: TrainingState, batches: list[feeder.Batch]) -> float:
    """One step over one batch from each device; returns the mean loss before it."""
    loss = 0.0
    gradient = np.zeros(WEIGHTS_SHAPE)
    num_rows = 0
    for batch in batches:  # always in the order of the devices: a sum of floats depends on it
        images, labels = batch["image"], batch["label"]
        batch_loss, batch_gradient = loss_and_gradient(state.weights, images, labels)
        loss += batch_loss
        gradient += batch_gradient
        num_rows += len(labels)
        state.digest = chain_digest(state.digest, batch)
    state.velocity = MOMENTUM * state.velocity - LEARNING_RATE * (gradient / num_rows)
    state.weights = state.weights + state.velocity
    state.step += 1
    return loss / num_rows


def chain_digest(before: bytes, batch: Mapping[str, Bytes]) -> bytes:
    """The digest of everything before and of this batch, byte for byte."""
    digest = xxhash.xxh3_128(before)
    for name in ("image", "label"):
        digest.update(batch[name].tobytes())
    return digest.digest()


def open_feed(state: TrainingState, epochs: int, seed: int) -> feeder.Coordinator:
    """Two workers, ragged chunks, two device queues; from the state's position in the stream."""
    images, labels = (column[:NUM_TRAINING_ROWS] for column in load_digits())
    return feeder.init_data_input_workers(
        ["image", "label"],
        DigitReader(images, labels, NUM_WORKERS, seed),
        batch_size=BATCH_SIZE,
        num_worker_threads=NUM_WORKERS,
        input_source_name="digits",
        devices=NUM_DEVICES,
        epochs=epochs,
        last_batch="carry",
        timeout=60.0,
        resume=state.snapshot,
    )


def rounds(feed: feeder.Feed) -> Iterator[list[feeder.Batch]]:
    """One batch from each device queue at a time, until the stream ends."""
    queues = [feed.on(device) for device in range(NUM_DEVICES)]
    while batches := [batch for queue in queues if (batch := next(queue, None)) is not None]:
        yield batches


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


def train(checkpoint: Path, *, epochs: int, steps_per_checkpoint: int, seed: int) -> None:
    """Train from the newest checkpoint to the end of the stream, reporting every step."""
    state = TrainingState.load(checkpoint)
    reporter = Reporter()
    reporter.send("start", step=state.step)
    with open_feed(state, epochs, seed) as coordinator:
        for batches in rounds(coordinator["digits"]):
            loss = train_step(state, batches)
            reporter.send("step", step=state.step, loss=loss, batches=state.digest.hex())
            if state.step % steps_per_checkpoint == 0:
                state.snapshot = bytes(coordinator.snapshot())
                state.save(checkpoint)
    images, labels = (column[NUM_TRAINING_ROWS:] for column in load_digits())
    reporter.send(
        "end",
        batches=state.digest.hex(),
        weights=xxhash.xxh3_128_hexdigest(state.weights.tobytes()),
        accuracy=accuracy(state.weights, images, labels),
    )


def main() -> None:
    """The command line of the child process."""
    parser = argparse.ArgumentParser(description="one life of the demo's training run")
    parser.add_argument("checkpoint", type=Path)
    for name in ("epochs", "steps-per-checkpoint", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = vars(parser.parse_args())
    train(options.pop("checkpoint"), **options)


if __name__ == "__main__":
    main()
