"""The workspace of a node: named arrays, and objects with a position or a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np

from feeder.checkpoint.feed_meta import make_meta
from feeder.errors import CheckpointError, ConfigError
from feeder.feeds.coordinator import Coordinator
from feeder.state import codec
from feeder.state.state_dict import STATE_KEY
from feeder.workers.public import public

FEED, STATE = "feed/", "state/"
"""The beginnings of the entries of coordinators and of other objects."""


@public("feeder.job")
class Workspace(MutableMapping[str, Any]):
    """The arrays and objects of one node, by name; for tasks, and saved after each epoch.

    What is set is an array, or what NumPy makes one of. Objects are named to the job
    (`Job.add_object`) and cannot be set here. Which names are saved is settled by the init group:
    what later epochs add is gone when the epoch is, as it would be after a resume.

    One thread at a time uses it: the one that answers for the node.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Any]] | None = None) -> None:
        self._makers = dict(makers or {})
        self._arrays: dict[str, Any] = {}
        self._objects: dict[str, Any] = {}
        self._kept: list[str] = []

    # ---- for tasks

    def __getitem__(self, name: str) -> Any:
        if name in self._makers:
            made = self._object(name)
            # Started when a task asks, and not when it is made: a feed that is about to be put back
            # must not have run.
            if isinstance(made, Coordinator):
                made.start()
            return made
        if name not in self._arrays:
            raise KeyError(f"no {name!r} in this workspace, expected one of {sorted(self)!r}")
        return self._arrays[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if check_name(name) in self._makers:
            raise ConfigError(
                f"{name!r} is an object of the job, and is made by it; set another name"
            )
        array = np.asarray(value)
        if array.dtype.hasobject or isinstance(value, np.ma.MaskedArray):
            raise ConfigError(
                f"{name!r} is {type(value).__name__}, expected an array, or numbers that are one; "
                "name other objects to the job: job.add_object(name, make)"
            )
        self._arrays[name] = array

    def __delitem__(self, name: str) -> None:
        del self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._arrays, *self._makers])

    def __len__(self) -> int:
        return len(self._arrays) + len(self._makers)

    # ---- life

    def empty(self) -> None:
        """Empty it; its objects are made anew when they are next asked for."""
        self.close()
        self._arrays.clear()
        self._kept = []

    def settle(self) -> None:
        """Note which arrays there are: these are saved from now on."""
        self._kept = list(self._arrays)

    def forget_new(self) -> None:
        """Drop what has been added since it was settled."""
        self._arrays = {name: self._arrays[name] for name in self._kept if name in self._arrays}

    def close(self) -> None:
        """Stop its feeds, and let go of its objects."""
        # Other objects have no end of their own that a workspace could know of.
        for made in self._objects.values():
            if isinstance(made, Coordinator):
                made.stop()
        self._objects.clear()

    # ---- saved

    def entry_names(self) -> list[str]:
        """The names of the entries of a checkpoint of it."""
        return [*self._kept, *map(self._entry_name, self._makers)]

    def entries(self) -> tuple[dict[str, Any], dict[str, int]]:
        """The entries of a checkpoint of it, and at which step each feed stands. The arrays are the
        workspace's own."""
        # A checkpoint with fewer arrays than the one before could not be told from a lost
        # workspace.
        missing = [name for name in self._kept if name not in self._arrays]
        if missing:
            raise ConfigError(
                f"{missing!r} were there after the init group, and are gone; set them again"
            )
        entries = {name: self._arrays[name] for name in self._kept}
        steps: dict[str, int] = {}
        for name in self._makers:
            made = self._object(name)
            if isinstance(made, Coordinator):
                snapshot = made.snapshot()
                entries[FEED + name] = bytes(snapshot)
                steps |= make_meta(snapshot, None)["feeds"]
            else:
                entries[STATE + name] = _pack(name, made.state_dict())
        return entries, steps

    def load(self, entries: Mapping[str, Any]) -> None:
        """Begin anew with what a checkpoint holds. Raises `CheckpointError` where that is not what
        the job has, and what an object raises that cannot go on from its state."""
        # Everything is made anew, so that nothing of what ran before is left in an object.
        self.empty()
        mine = {self._entry_name(name): self._object(name) for name in self._makers}
        theirs = [name for name in entries if name.startswith((FEED, STATE))]
        if set(mine) != set(theirs):
            raise CheckpointError(
                f"the checkpoint holds objects {sorted(theirs)!r}, the job has {sorted(mine)!r}; "
                "name the same ones with job.add_object"
            )
        for name, value in entries.items():
            if isinstance(value, bytes) is not (name in mine):
                raise CheckpointError(
                    f"entry {name!r} of the checkpoint is {type(value).__name__}, expected bytes "
                    "of an object and an array of anything else; load another one"
                )
            if name not in mine:
                self._arrays[name] = value
            elif isinstance(mine[name], Coordinator):
                mine[name].load_state_dict({STATE_KEY: value})
            else:
                mine[name].load_state_dict(_unpack(name, value))
        self.settle()

    # ---- objects

    def _object(self, name: str) -> Any:
        """An object, made where it is not there yet."""
        if name not in self._objects:
            made = self._makers[name]()
            if not isinstance(made, Coordinator) and not _has_state(made):
                raise ConfigError(
                    f"object {name!r} is {type(made).__name__}, expected a coordinator, or "
                    "something with state_dict and load_state_dict"
                )
            self._objects[name] = made
        return self._objects[name]

    def _entry_name(self, name: str) -> str:
        return (FEED if isinstance(self._object(name), Coordinator) else STATE) + name


def check_name(name: Any) -> str:
    """A name for the workspace; raises `ConfigError` where it can be none."""
    if isinstance(name, str) and name and not name.startswith((FEED, STATE)):
        return name
    raise ConfigError(
        f"name is {name!r}, expected a str that is not empty and does not begin with {FEED!r} or "
        f"{STATE!r}"
    )


def _pack(name: str, state: Any) -> bytes:
    try:
        return codec.pack(state)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the state of {name!r} cannot be saved: {error}") from error


def _unpack(name: str, state: bytes) -> Any:
    try:
        return codec.unpack(state)
    except ValueError as error:
        raise CheckpointError(
            f"entry {name!r} of the checkpoint holds no state: {error}; load another one"
        ) from error


def _has_state(made: Any) -> bool:
    methods = ("state_dict", "load_state_dict")
    return all(callable(getattr(made, method, None)) for method in methods)
