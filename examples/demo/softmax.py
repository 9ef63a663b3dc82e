"""Softmax regression: 64 pixels in, 10 classes out, in float64 and a fixed order of operations."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]

NUM_PIXELS = 64
NUM_CLASSES = 10
WEIGHTS_SHAPE = (NUM_PIXELS + 1, NUM_CLASSES)
"""Pixels and one bias row, by class."""


def loss_and_gradient(weights: Floats, images: Bytes, labels: Bytes) -> tuple[float, Floats]:
    """Cross-entropy and its gradient, each summed over the rows of one batch."""
    inputs = with_bias(images)
    scores = inputs @ weights
    scores -= scores.max(axis=1, keepdims=True)
    exponentials = np.exp(scores)
    totals = exponentials.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float((np.log(totals[:, 0]) - scores[rows, labels]).sum())
    errors = exponentials / totals
    errors[rows, labels] -= 1.0
    return loss, inputs.T @ errors


def accuracy(weights: Floats, images: Bytes, labels: Bytes) -> float:
    """Share of the images that the model names correctly."""
    return float(np.mean((with_bias(images) @ weights).argmax(axis=1) == labels))


def with_bias(images: Bytes) -> Floats:
    """Images as rows of 64 pixels in 0..1 and a one, (rows, 65)."""
    inputs = np.ones((len(images), NUM_PIXELS + 1))
    np.divide(images.reshape(len(images), NUM_PIXELS), 16.0, out=inputs[:, :NUM_PIXELS])
    return inputs
