"""States that users have kept: they are made as they were, and a loader goes on from each."""

from __future__ import annotations

import json

import pytest

from freeze.golden import changes, kept
from freeze.loaders import MADE, rest, states_of
from needs import needs_framework

needs_framework("torch", "lightning", "transformers", "jax", "tensorflow", "megatron.core")
needs_framework("torchtitan")

# What the libraries' own imports say is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")

FROZEN = json.loads(kept("loaders"))


def test_each_is_frozen() -> None:
    assert list(FROZEN) == list(MADE)


@pytest.mark.parametrize("name", MADE)
def test_a_state_is_as_it_was_and_is_gone_on_from(name: str) -> None:
    assert changes(FROZEN[name], states_of(name)) == []
    for golden in FROZEN[name].values():
        assert rest(name, golden["state"]) == golden["then"]
