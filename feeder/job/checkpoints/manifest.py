"""Manifests: each makes an epoch of several nodes one checkpoint.

A manifest is a checkpoint without entries, whose meta names the part of every node with its
digest. It is written last and once: an epoch without one does not exist, however many of its
parts do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from feeder.checkpoint.feed_meta import check_steps
from feeder.errors import CheckpointError, ResumeError

# Raised when an older reader would misread what is written.
MANIFEST_VERSION = 1
_VERSION = "manifest"


def is_manifest(meta: Mapping[str, Any]) -> bool:
    """Whether what is said of a checkpoint makes it a manifest."""
    return _VERSION in meta


class Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of one node, as a manifest has it."""

    digest: bytes
    """The digest of the part, as its database has it."""
    num_bytes: int
    """Its length in bytes."""
    steps: dict[str, int]
    """The number of the next batch of each of the node's feeds."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One epoch of a job, complete on all its nodes."""

    generation: int
    """Counts the runs of the job: what a later run wrote counts as newer, whatever its epoch."""
    epoch: int
    """How many epochs were done; 0 after the init group."""
    finished_by: str
    """Why the job was finished after it: "condition", "limit", or empty where it was not."""
    parts: Annotated[dict[str, Part], msgspec.Meta(min_length=1)]
    """The part of each node, by the name that the node has in files."""

    def check_steps(self, path: str) -> None:
        """Raise `ResumeError` where a feed stands at different steps on different nodes, with all
        that do; `path` is for the message."""
        try:
            check_steps({name: {"feeds": part.steps} for name, part in self.parts.items()})
        except ResumeError as error:
            raise ResumeError(f"epoch {self.epoch} in {path!r}: {error}") from None

    def meta(self) -> dict[str, Any]:
        """As what a checkpoint's meta holds."""
        fields: dict[str, Any] = msgspec.to_builtins(self, builtin_types=(bytes,))
        return {_VERSION: MANIFEST_VERSION, **fields}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], path: str) -> Manifest:
        """The reverse of `meta`. Raises `CheckpointError` for what is no manifest, or a newer
        one."""
        version = meta.get(_VERSION)
        if type(version) is int and version > MANIFEST_VERSION:
            raise CheckpointError(
                f"manifest {path!r} has version {version}, expected {MANIFEST_VERSION}; update "
                "feeder, or name another epoch"
            )
        fields = {key: value for key, value in meta.items() if key != _VERSION}
        try:
            return msgspec.convert(fields, cls)
        except msgspec.ValidationError as error:
            raise CheckpointError(
                f"{path!r} is no manifest of an epoch: {error}; move it away, or name another epoch"
            ) from error
