"""Jobs: what is done once, what in each epoch, and when it is enough. No thread, no node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ClassVar

from feeder.errors import ConfigError
from feeder.job.checkpoints.locations import check_node
from feeder.job.groups import BlockLocal, Node, TaskGroup
from feeder.job.workspace import check_name
from feeder.workers.public import public

GROUPS = ("init_group", "epoch_group", "download_group", "exit_group")

Condition = Callable[[Any], Any] | str
"""A function of a node's workspace, or the name of an array in it."""


@public("feeder.job")
class Job(BlockLocal):
    """Work of several nodes, in four groups of tasks, with a checkpoint after each epoch.

    `init_group` is run once, and not when the job is resumed: it makes the arrays of each
    workspace. `epoch_group` is run until a stop condition holds at the end of an epoch. Then
    come `download_group` and `exit_group`, once each.

    What an epoch works on is what the init group has made: arrays are saved, and put back at a
    resume. What is no array, but has a position or a state (readers, coordinators, models), is
    named to the job by `add_object`, so that it can be made again at a resume.

    In its `with` block the job is the current one, and tasks go into its `epoch_group` unless
    they are in the block of another group. The thread that makes a job owns it; once it runs,
    nothing writes it.

    Args:
        init_group, epoch_group, download_group, exit_group: Groups that are made already.
        stop_conditions: Pairs of a node and a condition, as `add_stop_condition` makes them.
        nodes_to_checkpoint: The nodes whose workspaces are saved; by default all that the init
            group or an object is on.
    """

    _current: ClassVar[ContextVar[Any]] = ContextVar("job", default=None)

    def __init__(
        self,
        init_group: TaskGroup | None = None,
        epoch_group: TaskGroup | None = None,
        download_group: TaskGroup | None = None,
        exit_group: TaskGroup | None = None,
        stop_conditions: Sequence[tuple[str, Condition]] | None = None,
        nodes_to_checkpoint: Sequence[str] | None = None,
    ) -> None:
        self.init_group = _keyed("init_group", init_group)
        self.epoch_group = _keyed("epoch_group", epoch_group)
        self.download_group = _keyed("download_group", download_group)
        self.exit_group = _keyed("exit_group", exit_group)
        self.stop_conditions: list[tuple[str, Condition]] = list(stop_conditions or ())
        self.objects: dict[str, dict[str, Callable[[], Any]]] = {}
        """The functions that make the objects of each node, by name."""
        self.max_epochs: int | None = None
        """After how many epochs it is finished, whatever the conditions say."""
        self._nodes_to_checkpoint = [check_node(node) for node in nodes_to_checkpoint or ()]

    # ---- made

    @classmethod
    def current(cls) -> Job:
        """The job that the innermost block is of. Raises `ConfigError` outside of all."""
        entered = cls._current.get()
        if entered is None:
            raise ConfigError("there is no current job here; make it one: 'with Job() as job:'")
        return entered[0]  # type: ignore[no-any-return]

    def __enter__(self) -> Job:
        # Tasks that are made in the job's block are what each epoch does, as in Caffe2.
        self.epoch_group.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.epoch_group.__exit__(*error)

    def add_object(self, name: str, make: Callable[[], Any], *, node: str | None = None) -> None:
        """Name an object of a node's workspace that is no array.

        Args:
            name: What the workspace calls it.
            make: Called without arguments whenever the workspace begins anew, also at a resume. A
                coordinator is saved as its snapshot, and started when a task first asks for it;
                anything else must have `state_dict` and `load_state_dict`, of values that
                msgpack holds.
            node: The node; by default that of the ``with Node(...)`` block.
        """
        objects = self.objects.setdefault(_node(node), {})
        if check_name(name) in objects:
            raise ConfigError(f"object {name!r} is there already; give this one another name")
        if not callable(make):
            raise ConfigError(
                f"object {name!r} is made by {make!r}, expected a function without arguments: a "
                "resumed job makes it anew"
            )
        objects[name] = make

    def add_stop_condition(self, condition: Condition, *, node: str | None = None) -> None:
        """Finish the job after the epoch at whose end the condition holds: a function of a node's
        workspace, or the name of an array in it, true when any of its elements is."""
        if not callable(condition) and not isinstance(condition, str):
            raise ConfigError(
                f"stop condition is {condition!r}, expected a function of a workspace, or the "
                "name of an array in it"
            )
        self.stop_conditions.append((_node(node), condition))

    # ---- asked

    def nodes(self) -> list[str]:
        """All nodes that have anything to do."""
        groups = [node for name in GROUPS for node in self.group(name).used_nodes()]
        others = [*self.objects, *(node for node, _ in self.stop_conditions)]
        return list(dict.fromkeys([*groups, *others, *self._nodes_to_checkpoint]))

    def nodes_to_checkpoint(self) -> list[str]:
        """The nodes whose workspaces are saved."""
        # What was made for a node has to be saved for it; a node with epochs' tasks alone has
        # nothing.
        used = [*self.init_group.used_nodes(), *self.objects]
        return self._nodes_to_checkpoint or list(dict.fromkeys(used))

    def conditions_of(self, node: str) -> list[Condition]:
        """The stop conditions of a node."""
        return [condition for of, condition in self.stop_conditions if of == node]

    def group(self, name: str) -> TaskGroup:
        """One of the four groups by its name."""
        group: TaskGroup = getattr(self, name)
        return group

    def plan(self) -> list[Any]:
        """The names of all that the job consists of: equal where two processes have made the same
        job."""
        # Names alone: functions cannot be compared across processes.
        tasks = [[[t.node, t.name] for t in self.group(name).tasks] for name in GROUPS]
        objects = [[node, sorted(made)] for node, made in sorted(self.objects.items())]
        return [tasks, objects, [node for node, _ in self.stop_conditions], self.max_epochs]


@public("feeder.job")
def epoch_limiter(job: Job, num_epochs: int) -> None:
    """Finish a job after so many epochs, those before a resume counted. A job that has ended so
    goes on when it is run again with a higher limit."""
    if type(num_epochs) is not int or num_epochs < 1:
        raise ConfigError(f"num_epochs is {num_epochs!r}, expected a whole number from 1 on")
    job.max_epochs = num_epochs


def _keyed(name: str, group: TaskGroup | None) -> TaskGroup:
    group = TaskGroup() if group is None else group
    # The key is how nodes in other processes find the group; one group cannot have two.
    if group.key not in (None, (name, 0)):
        raise ConfigError(f"{name} is another group already; give each a group of its own")
    group.key = (name, 0)
    return group


def _node(name: str | None) -> str:
    return Node.current() if name is None else check_node(name)
