"""What a user's thread asks a server, by way of the I/O thread."""

from __future__ import annotations

from feeder.devices.one_shot_event import Bell
from feeder.errors import RemoteError


class Question:
    """A snapshot that is wanted. The I/O thread answers, and the user's thread waits, which may be
    interrupted: not so at a `Future` (see `Bell`)."""

    def __init__(self) -> None:
        self._bell = Bell()
        self._answer: bytes | RemoteError | None = None
        self.given_up = False
        """Whether nobody waits any more."""

    def answer(self, answer: bytes | RemoteError) -> None:
        """The first one counts."""
        if self._answer is None:
            self._answer = answer
        self._bell.ring()

    def refuse(self, why: str) -> None:
        """There is no snapshot."""
        self.answer(RemoteError(f"no snapshot: {why}; use state_dict()"))

    def result(self, timeout_s: float) -> bytes:
        """Wait for the snapshot's bytes. Raises `RemoteError` where there is none."""
        if not self._bell.wait(timeout_s):
            self.given_up = True
            self.refuse(f"no answer within {timeout_s:g} s")
        answer = self._answer
        assert answer is not None
        if isinstance(answer, RemoteError):
            raise answer
        return answer
