"""A fork of the zygote does as an interpreter that was started, and is taken only where it can."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zygote
from project import ROOT

pytestmark = pytest.mark.process

END_S = 30.0

ENDS = {
    "its end": "",
    "a status": "raise SystemExit(3)",
    "a message": "raise SystemExit('why')",
    "an error": "def f(): g()\ndef g(): 1 / 0\nf()",
    "an error with a cause": "try: 1 / 0\nexcept Exception as error: raise ValueError from error",
    "a hook": "import sys; sys.excepthook = lambda *a: print(a[0], a[2].tb_lineno); 1 / 0",
    "no Python": "1 /",
    "an interrupt": "raise KeyboardInterrupt",
    "a signal": "import os; os.kill(os.getpid(), 15)",
    "threads": "import atexit, threading\natexit.register(print, 'exit')\n"
    "threading.Timer(0.1, print, ['thread']).start()",
    "an import": "import no_such_module",
}
HAS = {
    "words": "print(sys.argv, sys.orig_argv, sys.path, sys.flags.safe_path or sys.path[:1])",
    "names": "print(sorted(globals().items(), key=str), __name__, sys.modules['__main__'])",
    "files": "print(sys.stdin, sys.stdout, sys.stderr, sys.stdout.buffer)",
    "descriptors": "print(os.listdir('/proc/self/fd'), os.get_inheritable(1))",
    "signals": "print([(n, signal.getsignal(n)) for n in signal.valid_signals()],"
    "signal.pthread_sigmask(0, []))",
    "place": "print(os.getcwd(), os.getppid(), sorted(os.environ.items()), os.umask(0))",
    "threads": "print(threading.enumerate()[0].name, threading.get_native_id() == os.getpid())",
    "input": "print(sys.stdin.read(), input.__name__)",
}
IMPORTS = "import os, signal, sys, threading\n"


def both(*words: str, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    """Run a command, forked and started, and return what came of it, which is the same."""
    # Of this process's own: a library in C, such as readline, may have set others.
    env = dict(os.environ)
    settings = {"capture_output": True, "timeout": END_S, "env": env, **settings}
    forked = subprocess.run([sys.executable, *words], **settings)
    with zygote.paused():
        started = subprocess.run([sys.executable, *words], **settings)
    for one in (forked, started):
        one.args = None
    assert vars(forked) == vars(started)
    return forked


def is_forked(*words: str, **settings: Any) -> bool:
    """Return whether a command is forked: a started one says so of the zygote's modules."""
    code = "import sys; print('feeder.cli' in sys.modules)"
    command = [sys.executable, *words, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, **settings)
    return done.stdout == "True\n"


@pytest.fixture
def own_zygote(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A zygote of what this process is now: tests before this one may have changed its
    environment, and that takes starts from then on."""
    made = zygote.Zygote()
    monkeypatch.setattr(zygote, "zygote", made)
    yield
    monkeypatch.undo()
    made.close()


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_as_one_that_was_started(code: str) -> None:
    both("-c", code)


@pytest.mark.parametrize("code", HAS.values(), ids=HAS)
def test_it_has_what_one_has_that_was_started(code: str, tmp_path: Path) -> None:
    done = both("-c", IMPORTS + code, "a", "b", cwd=tmp_path, input=b"some\n")
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("own_zygote")
def test_what_only_a_start_can_give_is_started(tmp_path: Path) -> None:
    assert is_forked()
    assert is_forked("-P", "-W", "error")
    assert not is_forked("-O")
    assert not is_forked(env={**os.environ, "PYTHONHASHSEED": "1"})
    assert not is_forked(env={**os.environ, "LC_ALL": "C"})
    (tmp_path / "numpy.py").touch()
    assert not is_forked(cwd=tmp_path)
    (tmp_path / "numpy.py").rename(tmp_path / "other.py")
    assert is_forked(cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    (tmp_path / "feeder").mkdir()
    (tmp_path / "feeder" / "__init__.py").touch()
    assert not is_forked(cwd=tmp_path)
    with pytest.raises(FileNotFoundError, match="no/such/folder"):
        is_forked(cwd="no/such/folder")
