"""How long `import feeder` takes, over the packages that it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness import Measures, Settings, interleave, time_of
from report import Goal, Report, spread

ROOT = Path(__file__).parents[2]
NEEDED = "import numpy, zmq, msgpack, msgspec, xxhash"
PROGRAMS = {
    "what it needs": NEEDED,
    "import feeder": f"{NEEDED}; import feeder",
    "the front door": f"{NEEDED}; import feeder; feeder.init_data_input_workers, feeder.connect",
    "every public name": f"{NEEDED}; import feeder; [getattr(feeder, n) for n in feeder.__all__]",
}
ASKED_MS = {"import feeder": 20.0, "the front door": 35.0}


def importing(settings: Settings) -> Report:
    """Fresh interpreters, one after the other; of each repetition the best of a few counts."""
    times = interleave(
        [lambda name=name: _measure(name, settings) for name in PROGRAMS],  # type: ignore[misc]
        settings.repetitions,
    )
    base = times["what it needs"]
    over = {name: times[name].minus(base) for name in PROGRAMS if name != "what it needs"}
    return Report(
        case="import",
        title="fresh interpreters, in ms",
        head=("program", "ms", "over what it needs"),
        rows=tuple(
            (name, spread(time), spread(over[name]) if name in over else "")
            for name, time in times.items()
        ),
        measures=times,
        goals=tuple(
            Goal(
                what=f"{name}, over the packages that it needs",
                asked=asked,
                measured=over[name],
                unit="ms",
                at_most=True,
            )
            for name, asked in ASKED_MS.items()
        ),
    )


def _measure(name: str, settings: Settings) -> Measures:
    command = [sys.executable, "-c", PROGRAMS[name]]
    # Modules are compiled once, as where they are installed, also in a shell that forbids it.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    runs = [
        time_of(lambda: subprocess.run(command, cwd=ROOT, check=True, env=environment))
        for _ in range(settings.tries)
    ]
    return {name: min(runs) * 1e3}
