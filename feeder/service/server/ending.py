"""When a server ends by itself. Rules: no sockets, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from feeder.errors import FeedError, ResumeError
from feeder.service.server.group import Desk


class Ending:
    """Whether a server is over: with `exit_when="acknowledged"` when every queue of every feed has
    had everything. Where a feed has failed, nobody is waited for who is not there: the trainer
    that was told may have been the one to come for other queues, too."""

    def __init__(self, desks: Mapping[str, Desk], exit_when: str) -> None:
        self._desks = desks
        self._ends = exit_when == "acknowledged"
        self.is_over = False
        """Whether consumers have had all that they can have."""
        self.failure: FeedError | None = None
        """Why it is over before everything was used."""

    def look(self) -> None:
        """Find out whether it is over now."""
        if not self._ends:
            return
        desks = self._desks.values()
        if all(desk.acknowledged for desk in desks):
            self.is_over = True
            return
        told = [desk.feed.told for desk in desks]
        # A position that does not fit is the failure of who brought it.
        failures = [error for error in told if error and not isinstance(error, ResumeError)]
        leases = [lease for desk in desks for lease in desk.leases if lease is not None]
        if failures and all(lease.is_settled for lease in leases):
            self.is_over, self.failure = True, failures[0]
