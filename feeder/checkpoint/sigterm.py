"""The wish to do something before SIGTERM takes its course."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from feeder.errors import ConfigError


class Termination:
    """At the first SIGTERM something is asked for; the second takes the course that the first
    would have taken. `pass_on` sends it, when what was asked for is done."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._before: Any = None
        self._installed = self._asked = False

    def install(self) -> None:
        """Wait for the signal from now on. Raises `ConfigError` outside the main thread, which
        alone may."""
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "on_sigterm is True, and the coordinator is started outside the main thread; "
                "start it there, or leave on_sigterm at False"
            )
        self._before = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL
        self._installed = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # It may interrupt whatever the main thread is doing: `ask` must take no lock.
        if not self._asked:
            self._asked = True
            self._ask()
            return
        self.restore()
        signal.raise_signal(signal.SIGTERM)

    def pass_on(self) -> None:
        """What was asked for is done: the signal takes its course. From any thread."""
        os.kill(os.getpid(), signal.SIGTERM)

    def restore(self) -> None:
        """Leave the signal to whoever had it before; nothing outside the main thread, and where
        somebody else has taken it since."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)
