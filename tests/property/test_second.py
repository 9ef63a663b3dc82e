"""The product gives the stream that the pages for users tell, by a second oracle."""

from __future__ import annotations

import pytest

import parts
from property.second_campaign import Draws, execute

DRAWS: Draws = {}
"""What the pages do not compute is the same in all programs."""


@pytest.mark.parametrize("seed", range(1, 500 if parts.is_full else 60))
def test_a_program_gives_what_the_pages_tell(seed: int) -> None:
    execute(seed, DRAWS)
