"""Processes that fetch are killed, several at once, and trainers with them: the same bits."""

from __future__ import annotations

import pytest

from chaos.running import run_chaos
from needs import needs

pytestmark = pytest.mark.process


@pytest.mark.timeout(180)
def test_forty_kills_change_nothing() -> None:
    status, output = run_chaos("--executors", "40", "--seed", "7", limit_s=170)
    assert status == 0, output


@pytest.mark.timeout(240)
def test_kills_of_actors_nodes_and_drivers_change_nothing() -> None:
    needs("ray")
    status, output = run_chaos("--actors", "12", "--seed", "3", limit_s=230)
    assert status == 0, output
