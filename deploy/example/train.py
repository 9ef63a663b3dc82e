"""A trainer of the examples: softmax regression over one queue, from its own checkpoint on.

Where the server is and which queue to read it takes from the environment, as `feeder.connect` does:
FEEDER_ADDRESSES, FEEDER_QUEUE, or what torchrun, Slurm and Kubernetes say. Of its own it has:

    TRAIN_CHECKPOINT  file that weights and position are kept in; without it nothing is kept
    TRAIN_STEPS       number of the step that is its last; without it it goes on until SIGTERM
    TRAIN_STEP_S      seconds that a step takes beyond the arithmetic (0), as a larger model's would
    TRAIN_KEYS        directory of `feeder keygen`, for a server with keys
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

import feeder

WEIGHTS_SHAPE = (64 + 1, 10)  # pixels and a bias, by class
LEARNING_RATE = 0.1
SAVED_EVERY = 100
CONNECT_S = 60.0


def main() -> int:
    """Train until there is a reason to stop; the position is saved with the weights."""
    # At any moment: what is lost since the last save is trained again, the very same.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    checkpoint = os.environ.get("TRAIN_CHECKPOINT", "")
    last_step = int(os.environ.get("TRAIN_STEPS", "0"))
    pause_s = float(os.environ.get("TRAIN_STEP_S", "0"))
    weights, state = load(checkpoint)
    with feeder.connect(
        resume=state,
        rejoin=state is not None,  # the others may have gone on
        keys=os.environ.get("TRAIN_KEYS"),
        timeout=CONNECT_S,
    ) as consumer:
        print(f"reading {consumer!r}", flush=True)
        for number, batch in enumerate(consumer, 1):
            loss, gradient = loss_and_gradient(weights, batch["image"], batch["label"])
            weights -= LEARNING_RATE / batch.rows * gradient
            is_last = last_step > 0 and batch.step >= last_step
            if number % SAVED_EVERY == 0 or is_last:
                save(checkpoint, weights, consumer.state_dict())
                print(f"step {batch.step}  loss {loss / batch.rows:.4f}", flush=True)
            if is_last:
                break
            threading.Event().wait(pause_s)
    return 0


def loss_and_gradient(
    weights: np.ndarray, images: np.ndarray, labels: np.ndarray
) -> tuple[float, np.ndarray]:
    """Cross-entropy and its gradient, each summed over the rows of a batch."""
    rows = np.arange(len(labels))
    inputs = np.column_stack([images.reshape(len(rows), -1) / 16.0, np.ones(len(rows))])
    scores = inputs @ weights
    scores -= scores.max(axis=1, keepdims=True)
    shares = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    loss = -float(np.log(shares[rows, labels]).sum())
    shares[rows, labels] -= 1.0
    return loss, inputs.T @ shares


def load(checkpoint: str) -> tuple[np.ndarray, dict[str, bytes] | None]:
    """Weights and position; of a new trainer where there is no checkpoint."""
    if not checkpoint or not Path(checkpoint).exists():
        return np.zeros(WEIGHTS_SHAPE), None
    with np.load(checkpoint, allow_pickle=False) as kept:
        return kept["weights"], {"feeder": kept["feeder"].tobytes()}


def save(checkpoint: str, weights: np.ndarray, state: dict[str, bytes]) -> None:
    """Write weights and position together, or neither."""
    if not checkpoint:
        return
    path = Path(checkpoint)
    new = path.with_suffix(".new.npz")
    np.savez(new, weights=weights, feeder=np.frombuffer(state["feeder"], np.uint8))
    os.replace(new, path)


if __name__ == "__main__":
    sys.exit(main())
