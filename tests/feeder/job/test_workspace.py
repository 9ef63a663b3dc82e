"""Workspaces: what tasks put there, what is saved of it, and what a checkpoint makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import feeder
import jobs
from feeder.job import Reader, Workspace
from feeder.state import codec


class Model:
    """Has a state of its own."""

    made = 0

    def __init__(self) -> None:
        Model.made += 1
        self.weights: dict[str, Any] = {"layer": np.zeros(2), "steps": (1, 2)}

    def state_dict(self) -> dict[str, Any]:
        return self.weights

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights = state


@pytest.mark.parametrize(
    "value",
    [3, 2.5, True, 1j, "text", b"bytes", [1, 2], np.float32(1), np.arange(4), np.zeros((0, 3))],
)
def test_numbers_and_texts_are_arrays(value: Any) -> None:
    workspace = Workspace()
    workspace["x"] = value
    assert isinstance(workspace["x"], np.ndarray)
    assert np.array_equal(workspace["x"], value)


@pytest.mark.parametrize("value", [None, {}, object(), Reader(()), [1, "a", None]])
def test_what_is_no_array_is_refused_with_the_cure(value: Any) -> None:
    with pytest.raises(feeder.ConfigError, match=r"'x' is .*, expected an array.*add_object\(name"):
        Workspace()["x"] = value


def test_it_is_a_mapping_of_arrays_and_objects() -> None:
    workspace = Workspace({"reader": lambda: Reader(range(3))})
    workspace["x"] = 1
    assert (sorted(workspace), len(workspace), "x" in workspace) == (["reader", "x"], 2, True)
    del workspace["x"]
    with pytest.raises(KeyError, match=r"no 'x' in this workspace, expected one of \['reader'\]"):
        workspace["x"]
    with pytest.raises(feeder.ConfigError, match="'reader' is an object of the job"):
        workspace["reader"] = 3
    with pytest.raises(feeder.ConfigError, match="name is 'state/x', expected"):
        workspace["state/x"] = 3


def test_objects_are_made_when_they_are_first_asked_for_and_once_for_each_beginning() -> None:
    Model.made = 0
    workspace = Workspace({"model": Model})
    workspace.empty()
    assert Model.made == 0
    assert workspace["model"] is workspace["model"]
    workspace.empty()
    workspace.empty()
    workspace["model"]
    assert Model.made == 2


def test_what_is_put_there_later_is_not_saved_and_is_gone_after_the_epoch() -> None:
    workspace = Workspace({"model": Model})
    workspace["kept"] = 1
    workspace.settle()
    workspace["added"], workspace["kept"] = 2, 3
    assert sorted(workspace.entries()[0]) == ["kept", "state/model"]
    workspace.forget_new()
    assert sorted(workspace) == ["kept", "model"] and workspace["kept"] == 3


def test_what_was_to_be_saved_and_is_gone_is_named() -> None:
    workspace = Workspace()
    workspace["x"] = workspace["y"] = 1
    workspace.settle()
    del workspace["x"]
    with pytest.raises(feeder.ConfigError, match=r"\['x'\] were there after the init group, and"):
        workspace.entries()


def test_states_come_back_exactly() -> None:
    workspace = Workspace({"model": Model, "reader": lambda: Reader(range(9))})
    workspace["x"] = np.arange(3)
    workspace["model"].weights = {"layer": np.array([0.5, 1.5]), "steps": (3, 4, 2**70)}
    workspace["reader"].read(5)
    workspace.settle()
    entries, steps = workspace.entries()
    other = Workspace({"model": Model, "reader": lambda: Reader(range(9))})
    other["stale"] = 1
    other.load(entries)
    assert sorted(other) == ["model", "reader", "x"] and steps == {}
    assert other["model"].weights["steps"] == (3, 4, 2**70)
    assert other["model"].weights["layer"].tolist() == [0.5, 1.5]
    assert (other["reader"].position, other["x"].tolist()) == (5, [0, 1, 2])


def test_a_coordinator_runs_no_thread_before_it_is_asked_for() -> None:
    workspace = Workspace({"feeds": jobs.make_feeds})
    entries, _ = workspace.entries()  # the suite fails a test that leaves a thread
    workspace.load(entries)


@pytest.mark.parametrize(
    ("saved", "there"), [({"a": Model}, {}), ({}, {"a": Model}), ({"a": Model}, {"b": Model})]
)
def test_a_checkpoint_with_other_objects_is_refused(
    saved: dict[str, Any], there: dict[str, Any]
) -> None:
    entries, _ = Workspace(saved).entries()
    with pytest.raises(feeder.CheckpointError) as caught:
        Workspace(there).load(entries)
    mine, theirs = ([f"state/{name}" for name in names] for names in (there, saved))
    assert str(caught.value) == (
        f"the checkpoint holds objects {theirs!r}, the job has {mine!r}; name the same ones with "
        "job.add_object"
    )


@pytest.mark.parametrize("make", [list, lambda: None, lambda: np.arange(3)])
def test_an_object_without_a_state_is_refused(make: Any) -> None:
    with pytest.raises(feeder.ConfigError, match="expected a coordinator, or something with stat"):
        Workspace({"x": make})["x"]


def test_a_state_that_msgpack_does_not_hold_is_refused() -> None:
    workspace = Workspace({"model": Model})
    workspace["model"].weights = {"layer": object()}
    with pytest.raises(feeder.ConfigError, match="the state of 'model' cannot be saved: cannot sa"):
        workspace.entries()


@pytest.mark.parametrize(("entries", "said"), [
    ({"state/reader": b"\xc1"}, "entry 'state/reader' of the checkpoint holds no state"),
    ({"state/reader": np.arange(3)}, "entry 'state/reader' of the checkpoint is ndarray, expected"),
    ({"state/reader": codec.pack(Reader(()).state_dict()), "x": b"1"}, "entry 'x' .* is bytes"),
])  # fmt: skip
def test_entries_that_are_no_state_or_no_array_are_refused(
    entries: dict[str, Any], said: str
) -> None:
    with pytest.raises(feeder.CheckpointError, match=said):
        Workspace({"reader": lambda: Reader(())}).load(entries)


@pytest.mark.parametrize("state", [
    None, {}, {"rows": 3}, {"rows": 3, "position": "1"}, {"rows": 3, "position": -1},
    {"rows": 3, "position": 4}, {"rows": 3.0, "position": 1},
])  # fmt: skip
def test_a_reader_refuses_what_is_no_position_of_its_own(state: Any) -> None:
    with pytest.raises(feeder.ResumeError, match="is no position of a reader"):
        Reader(range(3)).load_state_dict(state)
