"""How long `import feeder` takes, over the packages that it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from harness import Measures, Settings, interleave, time_of
from report import Goal, Report, spread

ROOT = Path(__file__).parents[2]
NEEDED = "import numpy, zmq, msgpack, msgspec"
PROGRAMS = {
    "what it needs": NEEDED,
    "import feeder": f"{NEEDED}; import feeder",
    "every public name": f"{NEEDED}; import feeder; [getattr(feeder, n) for n in feeder.__all__]",
}
ASKED_MS = 20.0


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
        goals=(
            Goal(
                what="import feeder, over numpy, zmq, msgpack and msgspec",
                asked=ASKED_MS,
                measured=over["import feeder"],
                unit="ms",
                at_most=True,
            ),
        ),
    )


def _measure(name: str, settings: Settings) -> Measures:
    command = [sys.executable, "-c", PROGRAMS[name]]
    runs = [
        time_of(lambda: subprocess.run(command, cwd=ROOT, check=True))
        for _ in range(settings.tries)
    ]
    return {name: min(runs) * 1e3}
