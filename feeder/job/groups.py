"""Tasks, the nodes that they are pinned to, and the groups that they are in."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ClassVar, TypeVar

from feeder.errors import ConfigError
from feeder.job.checkpoints.locations import check_node
from feeder.workers.public import public

LOCAL = "local"
"""The node of what is pinned to none."""

UPLOAD = "upload_group"
"""The key of the groups that an `UploadTaskGroupBuilder` makes; their number is the epoch."""

T = TypeVar("T")


class BlockLocal:
    """Something that a `with` block makes the current one of its kind, in this thread."""

    # Each class below has a variable of its own, with the object and the one that was current
    # before it. A context variable and no global: two threads may make two jobs at a time.

    _current: ClassVar[ContextVar[Any]]

    def __enter__(self: T) -> T:
        current = type(self)._current  # type: ignore[attr-defined]
        current.set((self, current.get()))
        return self

    def __exit__(self, *error: object) -> None:
        _, outer = self._current.get()
        self._current.set(outer)


@public("feeder.job")
class Node(BlockLocal):
    """Pins what is made in its `with` block to a node: ``with Node("trainer_0"): ...``"""

    _current: ClassVar[ContextVar[Any]] = ContextVar("node", default=None)

    def __init__(self, name: str) -> None:
        self.name = check_node(name)

    @classmethod
    def current(cls) -> str:
        """The name of the node that the innermost block is of; "local" outside of all."""
        entered = cls._current.get()
        return LOCAL if entered is None else str(entered[0].name)


@public("feeder.job")
class TaskGroup(BlockLocal):
    """Tasks that are run together: nodes all at once, and each node its own in the order in which
    they were made.

    In its `with` block, tasks are added to it.
    """

    _current: ClassVar[ContextVar[Any]] = ContextVar("group", default=None)

    def __init__(self, key: tuple[str, int] | None = None) -> None:
        self.key = key
        """How a node in another process finds the group; None where it cannot."""
        self.tasks: list[Task] = []

    def used_nodes(self) -> list[str]:
        """The nodes that it has tasks for, in the order in which they came."""
        return list(dict.fromkeys(task.node for task in self.tasks))

    def of(self, node: str) -> list[Task]:
        """The tasks of a node."""
        return [task for task in self.tasks if task.node == node]

    @classmethod
    def current(cls) -> TaskGroup:
        """The group that the innermost block is of. Raises `ConfigError` outside of all."""
        entered = cls._current.get()
        if entered is None:
            raise ConfigError(
                "a task is made outside of all groups; make it in a block, as in "
                "'with job.epoch_group:', or give it group="
            )
        return entered[0]  # type: ignore[no-any-return]


@public("feeder.job")
class Task:
    """A function over a node's workspace, which is run each time that its group is.

    Args:
        function: Called as ``function(workspace)``; what it returns is not used.
        node: The node it is pinned to; by default that of the ``with Node(...)`` block.
        group: The group it is added to; by default that of the innermost block.
        name: What messages call it; by default the function's own name.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        *,
        node: str | None = None,
        group: TaskGroup | None = None,
        name: str | None = None,
    ) -> None:
        if not callable(function):
            raise ConfigError(f"task is {function!r}, expected a function of a workspace")
        self.function = function
        self.node = Node.current() if node is None else check_node(node)
        self.name = name or getattr(function, "__name__", type(function).__name__)
        (group or TaskGroup.current()).tasks.append(self)

    def __repr__(self) -> str:
        return f"<Task {self.name!r} on {self.node!r}>"
