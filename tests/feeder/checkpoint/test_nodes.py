"""The feeds of several nodes are cut at the same step, and others are not resumed from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import feeder
from feeder.checkpoint.feed_meta import check_steps
from feeder.checkpoint.store import CheckpointStore
from small import Aside, Pure, ids, make

NODES = ("trainer_0", "trainer_1", "trainer_2")


def make_node(folder: Path, node: str, **settings: Any) -> feeder.Coordinator:
    """Return one node's coordinator, which shares a folder with the others."""
    store = CheckpointStore(folder, writer=node)
    coordinator = feeder.Coordinator(feeder.Checkpointing(store, every_batches=10))
    seed = NODES.index(node)
    return make(Pure(num_calls=67), coordinator=coordinator, seed=seed, **settings)


def run_node(folder: Path, node: str, num_batches: int, **settings: Any) -> list[int]:
    with make_node(folder, node, **settings) as coordinator:
        return ids(next(coordinator["train"]) for _ in range(num_batches))


def metas(folder: Path, number: int) -> dict[str, dict[str, Any]]:
    """Return what is said of each node's checkpoint of a number."""
    store = CheckpointStore(folder)
    return {node: store.get(f"{node}.{number:08d}").meta for node in NODES}


def test_every_node_is_cut_at_the_same_step_however_far_it_came(tmp_path: Path) -> None:
    nodes = [
        Aside(lambda node=node, num=num: run_node(tmp_path, node, num))  # type: ignore[misc]
        for node, num in zip(NODES, (12, 15, 19), strict=True)
    ]
    for node in nodes:
        node.result()
    said = metas(tmp_path, 0)
    check_steps(said)
    assert {meta["feeds"]["train[0]"] for meta in said.values()} == {10}
    wanted = run_node(tmp_path / "other", NODES[1], 40)
    with make_node(tmp_path, NODES[1], resume="latest") as resumed:
        assert ids(next(resumed["train"]) for _ in range(30)) == wanted[40:]


def test_the_trainers_own_steps_are_compared_too() -> None:
    said = {
        "a": {"step": 7, "feeds": {"train[0]": 5, "val[0]": 1}},
        "b": {"step": None, "feeds": {"train[0]": 5}},
        "c": {"step": 7, "feeds": {"train[0]": 5, "val[0]": 2}},
    }
    with pytest.raises(feeder.ResumeError) as caught:
        check_steps(said)
    assert "the trainers' step: 'a' at 7, 'b' at None, 'c' at 7" in str(caught.value)
    assert "feed 'val[0]': 'a' at 1, 'c' at 2" in str(caught.value)
    assert "train" not in str(caught.value).replace("trainers", "")
    check_steps({"a": said["a"]})
    check_steps({"a": said["a"], "b": {"step": 7, "feeds": {"other[0]": 9}}})
    check_steps({})
