"""The table of campaigns: what can be started, and what is said of one that fails or hangs."""

from __future__ import annotations

import importlib.util
import os

import pytest

import nightly
from nightly import CAMPAIGNS, Campaign, main
from project import ROOT


def test_every_campaign_can_be_found() -> None:
    for name, (about, command, bound, _) in CAMPAIGNS.items():
        assert ("{seed}" in bound) != ("takes no seed" in about), name
        if command.startswith("scripts/"):
            assert os.access(ROOT / command, os.X_OK), name
        elif not command.startswith("adapters."):  # their frameworks may not be here
            assert importlib.util.find_spec(command), name


@pytest.mark.process
def test_each_is_told_with_its_seed_and_count_and_one_failure_fails_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("FEEDER_VENV", "OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(name, "/dev/null/venv")
    monkeypatch.setattr(nightly, "CAMPAIGNS", {
        "lacking": Campaign("", "adapters.lacking", "", 1),
        "good": Campaign("", "platform", "--seed={seed}", 1),
        "bad": Campaign("", "no.such.module", "", 1),
        "slow": Campaign("", "http.server", "0", 0),
    })  # fmt: skip
    assert main(["--seed", "7"]) == 1
    lacking, _, good, bad, bad_too, slow, slow_too, count = capsys.readouterr().out.splitlines()
    assert "its environment cannot be made" in lacking
    assert good.startswith("good") and "seed 7" in good and "Linux" in good
    assert "No module named" in bad and "FAILED with exit status 1" in bad_too
    assert "not done within 0 minutes" in slow and "FAILED" in slow_too
    assert count == "4 campaigns, 3 failed: lacking bad slow"
