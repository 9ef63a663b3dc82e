"""A node: its workspace, and how it does what a session asks of it, the same in every session."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from feeder.errors import ConfigError, RemoteError
from feeder.job.checkpoints.databases import open_database
from feeder.job.checkpoints.parts import LoadPart, NoteEntries, SavePart, load_part, save_part
from feeder.job.definition import Condition, Job
from feeder.job.groups import TaskGroup
from feeder.job.messages import (
    Begin,
    Done,
    End,
    Evaluate,
    Failed,
    Fetch,
    Plan,
    Request,
    RunTasks,
    decode_request,
    encode,
)
from feeder.job.workspace import Workspace
from feeder.state import codec
from feeder.workers.errors import in_words

FindGroup = Callable[[tuple[str, int]], TaskGroup]


class NodeHost:
    """One node of a job. One thread at a time asks it for something, and owns its fields."""

    def __init__(self, node: str, job: Job, find_group: FindGroup) -> None:
        self.node = node
        self.workspace = Workspace(job.objects.get(node))
        self._job = job
        self._find_group = find_group
        # Kept from save to save. A new one looks for what a killed writer has left, which takes a
        # listing of the parts of all epochs.
        self._open_database = lru_cache(maxsize=1)(open_database)
        self._has_begun = False
        self.ended = False
        """Whether it has been told to stop everything."""

    def answer(self, request: Request) -> Any:
        """Do what is asked, and return plain values and arrays. Raises whatever a task does, and
        `RemoteError` where it was never told to begin."""
        # A node that was started again, as Ray starts an actor again, has lost its workspace. The
        # session does not know: it must not go on with an empty one, and save that.
        if not self._has_begun and not isinstance(request, Plan | Begin | End):
            raise RemoteError(
                f"node {self.node!r} was started again since the session was opened, and has lost "
                "its workspace; run the job again, which goes on from the last checkpoint"
            )
        match request:
            case Plan():
                return self._job.plan()
            case Begin():
                self.workspace.empty()
                self._has_begun = True
                return None
            case RunTasks():
                return self._run(self._find_group(request.key))
            case Evaluate():
                return [self._holds(c) for c in self._job.conditions_of(self.node)]
            case Fetch():
                # Copies: in a session of threads the arrays would else be the tasks' own.
                return {name: np.copy(self.workspace[name]) for name in request.names}
            case NoteEntries():
                return self.workspace.entry_names()
            case SavePart():
                return msgspec.to_builtins(
                    save_part(request, *self.workspace.entries(), self._open_database),
                    builtin_types=(bytes,),
                )
            case LoadPart():
                loaded, receipt = load_part(request)
                self.workspace.load(loaded.entries)
                return msgspec.to_builtins(receipt, builtin_types=(bytes,))
            case End():
                self.ended = True
                return self.workspace.close()

    def answer_bytes(self, data: bytes) -> bytes:
        """The same, for a session in another process: bytes in, bytes out, and never an
        exception."""
        try:
            return encode(Done(answer=codec.pack(self.answer(decode_request(data)))))
        except Exception as error:
            return encode(failure(error))

    def _run(self, group: TaskGroup) -> None:
        for task in group.of(self.node):
            try:
                task.function(self.workspace)
            except Exception as error:
                error.add_note(f"in task {task.name!r} on node {self.node!r}")
                raise
        # What the init group has made is what is saved from now on; what an epoch adds would not be
        # there after a resume, so it is not there after the epoch either.
        if group.key is not None and group.key[0] == "init_group":
            self.workspace.settle()
        if group.key is not None and group.key[0] == "epoch_group":
            self.workspace.forget_new()

    def _holds(self, condition: Condition) -> bool:
        if callable(condition):
            return bool(condition(self.workspace))
        if condition not in self.workspace:
            raise ConfigError(
                f"stop condition {condition!r} is not in the workspace of {self.node!r}, expected "
                f"one of {sorted(self.workspace)!r}"
            )
        return bool(np.any(self.workspace[condition]))


def failure(error: BaseException) -> Failed:
    """An exception as a message."""
    # Text alone goes to the other process: nothing that is received is ever unpickled.
    kind, _, text = in_words(error).partition(": ")
    stack = "".join(traceback.format_exception(error))
    return Failed(kind=kind, text=_sendable(text), stack=_sendable(stack))


def _sendable(text: str) -> str:
    """A text without what is no UTF-8, as in the names of files that are none either."""
    return text.encode(errors="replace").decode()
