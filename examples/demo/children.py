"""A child process of the demo: its reports are read, and it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

END_S = 20.0

# One thread per matrix product: the order of a child's sums must not depend on the machine's load.
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

# A child imports from where this process does: `demo` lies in a folder that nobody installs.
IMPORT_PATH = os.pathsep.join(filter(None, sys.path))


class Child:
    """A process whose stdin and stdout are ours; it ends by itself where its stdin is closed."""

    def __init__(self, command: Sequence[str], folder: Path) -> None:
        """Start it; what it leaves behind when it is killed lies in `folder`."""
        self._errors = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | ONE_THREAD | {"TMPDIR": str(folder), "PYTHONPATH": IMPORT_PATH},
        )

    def read(self) -> dict[str, Any] | None:
        """Its next report; None where it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line.endswith(b"\n") else None

    def acknowledge(self) -> None:
        """Let it send one report more."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the next read says how
            os.write(self._process.stdin.fileno(), b".")

    def kill(self) -> None:
        """SIGKILL, and wait until it is dead; harmless where it is. From any thread."""
        self._process.kill()
        self._process.wait()

    def end(self) -> int:
        """Close its stdin and wait for its end, which is enforced; returns its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.returncode

    def last_words(self) -> str:
        """What it wrote to stderr, once it has ended."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").rstrip()

    def close(self) -> None:
        """Kill it and close what is ours of it; harmless when done before."""
        self.kill()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            if file is not None:
                file.close()
