"""Processes of their own, and examples that are run several times in one: to import a framework
costs more than to run them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import project
from project import ROOT

_BETWEEN = "---- the next run"
_RUNS = f"""
import runpy, sys
script, *runs = sys.argv[1:]
for run in runs:
    sys.argv = [script, *run.split("\\n")]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert not end.code, end
    print({_BETWEEN!r}, flush=True)
"""


printed = partial(project.printed, limit_s=220.0)


def launched(num: int, *command: Any, **settings: Any) -> list[str]:
    """The lines that so many ranks print, sorted."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num)
    return sorted(printed(*launcher, *command, **settings).splitlines())


def check_goes_on(example: str, stop_at: int, folder: Path, **env: str) -> None:
    """See that an example that was stopped, and is started again, says at last what it says where
    it is not stopped."""
    runs = [folder / "whole"], [folder / "halves", stop_at], [folder / "halves"]
    arguments = ["\n".join(map(str, run)) for run in runs]
    told = printed("-c", _RUNS, ROOT / "examples" / example, *arguments, folder=folder, **env)
    whole, stopped, rest = (text.splitlines()[-1] for text in told.split(f"{_BETWEEN}\n")[:-1])
    assert "weights" in whole
    assert stopped != whole == rest
