"""Megatron's external loader, behind the iterator that Megatron puts around it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from needs import needs_framework

needs_framework("torch", "megatron.core")

with warnings.catch_warnings():
    # What the libraries' own imports say is not ours.
    warnings.simplefilter("ignore")
    import torch
    from megatron.core.rerun_state_machine import RerunDataIterator

import feeder
from feeder.adapters.megatron import ExternalLoader
from feeder.adapters.torch import FeedLoader

NUM, SIZE = 22, 4
STEPS = -(-NUM // SIZE)


def external(**settings: Any) -> ExternalLoader:
    return ExternalLoader(FeedLoader(list(range(NUM)), SIZE, shuffle=True, **settings))


def iterator(loader: ExternalLoader) -> Any:
    """What Megatron makes of a loader of type "external"."""
    return RerunDataIterator(iter(loader))


def take(batches: Any, num: int) -> list[list[int]]:
    return [next(batches).tolist() for _ in range(num)]


@pytest.mark.parametrize("at", [0, 1, STEPS - 1, STEPS, STEPS + 2, 2 * STEPS])
def test_a_state_goes_on_over_epochs(tmp_path: Path, at: int) -> None:
    whole = take(iterator(external()), 3 * STEPS)
    batches = iterator(external())
    take(batches, at)
    # Megatron asks what it iterates over, and writes a file for each data-parallel rank.
    torch.save({"dataloader_state_dict": batches.iterable.save_state()}, tmp_path / "rank000.pt")
    state = torch.load(tmp_path / "rank000.pt", weights_only=True)["dataloader_state_dict"]
    again = external()
    again.restore_state_rank(state)
    assert take(iterator(again), 3 * STEPS - at) == whole[at:]
    # The one that it was taken of, too.
    take(batches, 3)
    batches.iterable.restore_state(state)
    assert take(batches, 3) == whole[at : at + 3]


def test_epochs_end_and_an_empty_one_is_an_error() -> None:
    batches = external(epochs=2)
    assert len(list(batches)) == 2 * STEPS
    empty = ExternalLoader(FeedLoader(iter(()), SIZE))
    with pytest.raises(feeder.FeedError, match="is an iterator, which is read once"):
        next(empty)
