"""Jobs that are made anew in every process, by a function that is named and never sent."""

from __future__ import annotations

import importlib
from typing import Any

from feeder.errors import ConfigError
from feeder.job.definition import GROUPS, Job
from feeder.job.groups import UPLOAD, TaskGroup
from feeder.job.runner import JobRunner


def check_factory(factory: object) -> str:
    """MODULE:ATTR; raises `ConfigError` where it is not. Nothing is imported."""
    if isinstance(factory, str):
        module, colon, attribute = factory.partition(":")
        words = [*module.split("."), *attribute.split(".")]
        # `__main__` of a node's process is another module than that of the runner.
        if colon and all(map(str.isidentifier, words)) and module != "__main__":
            return factory
    raise ConfigError(
        f"factory is {factory!r}, expected 'MODULE:ATTR', a function in a module that every "
        "process can import, as in 'package.jobs:make'"
    )


class MadeJob:
    """A job that a factory has made in this process, for one of its nodes. Owned by the main thread
    of the node's process."""

    def __init__(self, factory: str) -> None:
        """Import the factory and call it. Raises `ConfigError`, and whatever it raises."""
        made = _find(check_factory(factory))()
        self._runner: JobRunner | None = None
        if isinstance(made, JobRunner):
            self._runner, made = made, made.job
        if not isinstance(made, Job):
            raise ConfigError(
                f"{factory!r} returned {type(made).__name__}, expected a Job, or a JobRunner"
            )
        self.job: Job = made

    def group(self, key: tuple[str, int]) -> TaskGroup:
        """The group of a key. Raises `ConfigError` where there is none."""
        name, number = key
        if name in GROUPS:
            return self.job.group(name)
        runner = self._runner
        if name != UPLOAD or runner is None or runner.upload_task_group_builder is None:
            raise ConfigError(
                f"a node cannot make group {name!r}; let the factory return a JobRunner that has "
                "the upload_task_group_builder"
            )
        # The manager that the factory made here has not begun a run, and knows no nodes yet.
        if runner.checkpoint_manager is not None:
            runner.checkpoint_manager.set_params(self.job.nodes_to_checkpoint())
        return runner.upload_task_group_builder.build(number, runner.checkpoint_manager)


def _find(factory: str) -> Any:
    module, _, attribute = factory.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # The module is there, and one that it imports is not.
        raise ConfigError(f"factory {factory!r}: no module {error.name!r} is found") from error
    except AttributeError as error:
        raise ConfigError(f"factory {factory!r}: there is no {attribute!r} in it") from error
    if not callable(found):
        raise ConfigError(f"factory {factory!r} is {type(found).__name__}, expected a function")
    return found
