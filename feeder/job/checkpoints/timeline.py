"""The epochs of one job over all its runs: where each is read, and which run may write."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from feeder.checkpoint.tolerate import tolerate_failed_removal
from feeder.errors import CheckpointError
from feeder.job.checkpoints.epochs import Epochs, in_order
from feeder.job.checkpoints.locations import CheckpointLocation
from feeder.job.checkpoints.manifest import Manifest, Part


class Timeline:
    """Writes epochs into one location, and reads them from there or from others.

    Each run of a job is a generation, one above all that have committed before. What a run
    commits counts as newer than whatever an earlier one did, so that a job that was put back to an
    earlier epoch goes on from there. A run that sees a newer one save commits nothing more; nor
    does one whose generation another has begun to save as, as two that began at once have the same.

    The thread that runs the job owns it.
    """

    def __init__(
        self,
        location: CheckpointLocation,
        others: Sequence[CheckpointLocation],
        nodes: Sequence[str],
    ) -> None:
        self._epochs = Epochs(location, nodes)
        self._readable = [self._epochs, *(Epochs(other, nodes) for other in others)]
        self._run_id = os.urandom(8).hex()
        self._generation: int | None = None
        self._has_begun = False
        """Whether it is written down that this run saves."""
        self._known: dict[int, list[int]] = {}
        """The generations that have committed each epoch, or tried to. Only this run adds any."""

    def begin_run(self) -> None:
        """Begin a run. Raises `CheckpointError` where the place holds epochs of some of the nodes
        with others."""
        self._generation, self._has_begun = None, False
        try:
            self._epochs.check_others()
            self._scan()
        except CheckpointError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            # There is no such folder yet: the first save makes it, or says why it cannot.

    def _scan(self) -> int:
        """Find out what is there, once in a run."""
        self._known = self._epochs.generations()
        used = [*self._epochs.runs(), *(number for of in self._known.values() for number in of)]
        self._generation = max(used, default=0) + 1
        return self._generation

    def find(self, epoch: int) -> tuple[CheckpointLocation, Manifest]:
        """An epoch that is complete, and where. Raises `CheckpointError`."""
        *others, last = self._readable
        epochs = next((epochs for epochs in others if epochs.has(epoch)), last)
        return epochs.location, epochs.find(epoch)

    def is_complete(self, epoch: int) -> bool:
        """Whether an epoch is complete anywhere. Raises `CheckpointError`."""
        return any(epochs.is_complete(epoch) for epochs in self._readable)

    def take_back(self, epoch: int) -> int:
        """Let an epoch exist no longer, so that its parts can be written; returns the generation
        of this run. Raises `CheckpointError` where another run has taken over."""
        # Before the parts are written: a part that is overwritten under a manifest would make that
        # one claim what is no longer there.
        generation = self._check_alone()
        self._epochs.take_back(epoch, self._known.get(epoch, ()))
        self._known.pop(epoch, None)
        return generation

    def put_back(self, epoch: int) -> None:
        """Make an epoch of the past the newest, as of this run: its manifest is written once more,
        with the same parts. So it stays the one to go on from where this run ends before it has
        saved anything. Nothing is written where it is the newest, or lies in another location."""
        if self._epochs.has(epoch) and not self._epochs.is_newest(epoch):
            self._check_alone()
            manifest = self._epochs.find(epoch)
            self.commit(epoch, manifest.finished_by, manifest.parts)

    def _check_alone(self) -> int:
        """The generation of this run. Raises `CheckpointError` where another run has taken over.

        A run writes down that it saves, once, before it writes anything else; the store lets one
        run of a generation do so. All others look for those that came after them: one listing
        from a name on, however many epochs there are."""
        generation = self._scan() if self._generation is None else self._generation
        if not self._has_begun:
            self._has_begun = self._epochs.note_run(generation, self._run_id)
        if not self._has_begun or self._epochs.runs(after=generation):
            raise CheckpointError(
                f"another run of nodes {self._epochs.nodes!r} has saved into "
                f"{self._epochs.location.url!r}; end one of the two, or give it another place"
            )
        return generation

    def commit(self, epoch: int, finished_by: str, parts: Mapping[str, Part]) -> Manifest:
        """Make an epoch exist, and return its manifest. Raises `CheckpointError`."""
        assert self._generation is not None, "parts are saved before they are committed"
        manifest = Manifest(
            generation=self._generation, epoch=epoch, finished_by=finished_by, parts=dict(parts)
        )
        # Noted first: a write that fails may have been done all the same, and is then taken back
        # too.
        self._known.setdefault(epoch, []).append(self._generation)
        self._epochs.commit(manifest)
        return manifest

    def retire(self, keep: int) -> None:
        """Remove the oldest epochs until `keep` are left. What cannot be removed is named in the
        log, and stays."""
        if len(self._known) > keep:
            for epoch in in_order(self._known)[:-keep]:
                with tolerate_failed_removal():
                    self._epochs.remove(epoch, self._known[epoch])
                    del self._known[epoch]
