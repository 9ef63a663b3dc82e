"""A consumer that reconnects again and again leaves nothing behind, here and in the server."""

from __future__ import annotations

import pytest

from chaos.running import run_chaos

pytestmark = pytest.mark.process


@pytest.mark.timeout(120)
def test_nothing_grows_over_fifty_reconnects() -> None:
    status, output = run_chaos("--soak", "5000", limit_s=110)
    assert status == 0, output
    assert "nothing grew" in output
