"""States that users have kept: they are made as they were, and a loader goes on from each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from freeze import trainings
from freeze.golden import changes, kept
from freeze.loaders import MADE, rest, states_of
from needs import needs_framework

needs_framework(
    "torch", "lightning", "transformers", "accelerate", "jax", "tensorflow", "megatron.core"
)
needs_framework("torchtitan")

# What the libraries' own imports say is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

FROZEN = json.loads(kept("loaders"))
IN_CHECKPOINTS = json.loads(kept("trainings"))


def test_each_is_frozen() -> None:
    assert list(FROZEN) == list(MADE)
    assert list(IN_CHECKPOINTS) == list(trainings.TRAININGS)


@pytest.mark.parametrize("name", MADE)
def test_a_state_is_as_it_was_and_is_gone_on_from(name: str) -> None:
    assert changes(FROZEN[name], states_of(name)) == []
    for golden in FROZEN[name].values():
        assert rest(name, golden["state"]) == golden["then"]


@pytest.mark.parametrize("name", trainings.TRAININGS)
def test_a_training_goes_on_from_what_is_in_its_checkpoint(name: str, tmp_path: Path) -> None:
    golden = IN_CHECKPOINTS[name]
    (tmp_path / "again").mkdir()
    assert changes(golden, trainings.state_of(name, tmp_path)) == []
    assert trainings.rest(name, golden["state"], tmp_path / "again") == golden["then"]


def test_lightning_goes_on_from_a_checkpoint_of_before_there_were_ranks(tmp_path: Path) -> None:
    golden = IN_CHECKPOINTS["lightning, FeedLoader"]
    (said,) = golden["state"]["ranks"]
    before = {"loaders": [one["state"] for one in said["loaders"]]}
    assert trainings.rest("lightning, FeedLoader", before, tmp_path) == golden["then"]
