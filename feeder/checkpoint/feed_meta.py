"""What a checkpoint says of the feeds whose positions it holds, and whether those of several nodes
belong together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from feeder.errors import CheckpointError, ResumeError
from feeder.state.snapshot import Snapshot

SNAPSHOT_ENTRY = "snapshot"
"""The entry that holds the position of feeds."""


def make_meta(
    snapshot: Snapshot, step: int | None, meta: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The meta of a checkpoint with a position: the trainer's own step number, where it gave one,
    and the number of the next batch of each feed."""
    check_step(step)
    feeds = {f"{state.name}[{state.number}]": state.summary[2] for state in snapshot.states}
    return {**(meta or {}), "step": step, "feeds": feeds}


def check_step(step: Any) -> None:
    """Raise `CheckpointError` unless it is a trainer's step number, or None."""
    if step is not None and type(step) is not int:
        raise CheckpointError(f"step is {step!r}, expected a whole number, or None")


def check_steps(nodes: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `ResumeError` unless the positions of all nodes were taken at the same step.

    `nodes` has, for each node, what is said of its position: the `meta` that `save` stored. The
    trainers' own step numbers must be equal, and each feed must stand at the same batch on every
    node that has it. All that differ are listed.
    """
    # A feed's step is the number of its next batch: equal where nodes have done the same steps.
    told = {node: {"step": meta.get("step"), **meta.get("feeds", {})} for node, meta in
            nodes.items()}  # fmt: skip
    keys = sorted({key for said in told.values() for key in said}, key=str)
    differing = []
    for key in keys:
        steps = {node: said[key] for node, said in told.items() if key in said}
        if len(set(steps.values())) > 1:
            name = "the trainers' step" if key == "step" else f"feed {key!r}"
            listed = ", ".join(f"{node!r} at {step!r}" for node, step in sorted(steps.items()))
            differing.append(f"{name}: {listed}")
    if differing:
        raise ResumeError(
            f"the nodes' positions are not of one step: {'; '.join(differing)}; resume from a "
            "checkpoint that all nodes made at the same step"
        )
