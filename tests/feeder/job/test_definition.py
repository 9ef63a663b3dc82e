"""Jobs as they are written down: nodes, groups, tasks, objects, conditions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import feeder
import feeder.job
import jobs
from feeder.job import Job, Node, Reader, Task, TaskGroup, epoch_limiter
from project import printed


def nothing(workspace: Any) -> None: ...


def test_tasks_are_in_the_innermost_group_and_on_the_innermost_node() -> None:
    with Job() as job, Node("a"):
        assert Job.current() is job
        Task(nothing, name="1")
        with job.init_group, Node("b"):
            Task(nothing, name="2")
            Task(nothing, name="3", node="c", group=job.exit_group)
        Task(nothing, name="4")
        assert Node.current() == "a"
    assert [(t.node, t.name) for t in job.epoch_group.tasks] == [("a", "1"), ("a", "4")]
    assert [(t.node, t.name) for t in job.init_group.tasks] == [("b", "2")]
    assert [(t.node, t.name) for t in job.exit_group.tasks] == [("c", "3")]
    assert job.download_group.tasks == []
    assert Node.current() == "local"


def test_nodes_that_are_saved_are_those_of_the_init_group_and_of_objects() -> None:
    with Job() as job:
        with Node("trained"), job.init_group:
            Task(nothing)
        with Node("fed"):
            job.add_object("reader", lambda: Reader(()))
        with Node("works"):
            Task(nothing)
        job.add_stop_condition("done", node="watched")
    assert job.nodes_to_checkpoint() == ["trained", "fed"]
    assert job.nodes() == ["trained", "works", "fed", "watched"]
    chosen = Job(init_group=job.init_group, nodes_to_checkpoint=["other"])
    assert chosen.nodes_to_checkpoint() == ["other"]
    assert chosen.nodes() == ["trained", "other"]


def test_what_is_current_is_a_matter_of_each_thread() -> None:
    seen: list[Any] = []

    def look() -> None:
        seen.append(Node.current())
        try:
            Job.current()
        except feeder.ConfigError as error:
            seen.append(str(error))

    with Job(), Node("a"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == ["local", "there is no current job here; make it one: 'with Job() as job:'"]


def test_a_job_is_left_by_an_error_too() -> None:
    with pytest.raises(jobs.Odd), Job() as job, Node("a"), job.init_group:
        raise jobs.Odd
    assert Node.current() == "local"
    for current in (Job.current, TaskGroup.current):
        with pytest.raises(feeder.ConfigError):
            current()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Task(nothing), "a task is made outside of all groups; make it in a block"),
        (lambda: Task(3, group=TaskGroup()), "task is 3, expected a function of a workspace"),
        (lambda: Task(nothing, node="a/b", group=TaskGroup()), "node is called 'a/b', expected"),
        (lambda: Node("a b"), "node is called 'a b', expected"),
        (lambda: Job().add_object("", Reader), "name is '', expected a str"),
        (lambda: Job().add_object("feed/x", Reader), "name is 'feed/x', expected a str"),
        (lambda: Job().add_object("state/x", Reader), "name is 'state/x', expected a str"),
        (lambda: Job().add_object("x", Reader(())), "is made by <.*Reader.*expected a function"),
        (lambda: Job().add_object("x", Reader, node="a/b"), "node is called 'a/b', expected"),
        (lambda: Job().add_stop_condition(3), "stop condition is 3, expected a function"),
        (lambda: Job().add_stop_condition("x", node=""), "node is called '', expected"),
        (lambda: epoch_limiter(Job(), 0), "num_epochs is 0, expected a whole number from 1 on"),
        (lambda: epoch_limiter(Job(), True), "num_epochs is True, expected"),
        (lambda: Job(nodes_to_checkpoint=["a/b"]), "node is called 'a/b', expected"),
        (lambda: Job(init_group=Job().exit_group), "init_group is another group already"),
        (lambda: Reader(()).read(-1), "num_rows is -1, expected 0 or more"),
        (lambda: feeder.job.JobRunner(Job(), on_save_error="stop"), "on_save_error is 'stop', exp"),
        (lambda: feeder.job.JobRunner(jobs.make_single), "job is <function .*, expected a Job"),
    ],
)
def test_what_makes_no_job_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(feeder.ConfigError, match=message):
        make()


def test_an_object_is_named_once_for_each_node() -> None:
    job = Job()
    job.add_object("reader", lambda: Reader(()), node="a")
    job.add_object("reader", lambda: Reader(()), node="b")
    with pytest.raises(feeder.ConfigError, match="object 'reader' is there already"):
        job.add_object("reader", lambda: Reader(()), node="a")


def test_a_reader_goes_on_from_its_state_and_refuses_that_of_other_rows() -> None:
    reader = Reader(np.arange(10) ** 2)
    assert [*map(int, reader.read(3))] == [0, 1, 4]
    state = reader.state_dict()
    assert [*map(int, reader.read(30))] == [9, 16, 25, 36, 49, 64, 81] and reader.finished
    assert reader.read(3) == []
    again = Reader(np.arange(10) ** 2)
    again.load_state_dict(state)
    assert (again.position, again.finished) == (3, False)
    with pytest.raises(feeder.ResumeError, match="stood in 10 rows and has 9 now"):
        Reader(range(9)).load_state_dict(state)


# ---- the names of the package


@pytest.mark.process
@pytest.mark.fresh
def test_extras_are_imported_when_they_are_used() -> None:
    code = "import sys, feeder.job; assert not {'ray', 'lmdb', 'zmq', 'obstore'} & {*sys.modules}"
    printed("-c", code)
