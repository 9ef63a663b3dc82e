"""Runs a server and its trainers in child processes, kills them, and starts them again."""

from __future__ import annotations

import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import TracebackType

import numpy as np

from demo.children import Child
from demo.runs import (
    EVERYBODY,
    NUM_TRAINERS,
    SERVER,
    Kill,
    Life,
    Result,
    Run,
    Step,
    Training,
    trainer_name,
)

RUN_LIMIT_S = 120.0
"""A run that takes longer is stuck: one takes a few seconds."""

VICTIMS = ((SERVER,), (trainer_name(0),), (trainer_name(1),), EVERYBODY)
"""Who is killed, in turn."""

Watch = Callable[[int, tuple[int, ...]], None]
"""Called with the number of kills so far and the step that each trainer has reported, which goes
back where a trainer does steps again."""


class TrainingFailed(Exception):
    """A process ended in another way than the one it was meant to."""


def draw_kills(num_kills: int, num_steps: int, seed: int) -> list[Kill]:
    """A random step out of each of `num_kills` equal stretches of the run, never the last step;
    the victims take turns."""
    edges = np.linspace(1, num_steps, num_kills + 1).astype(int)
    rng = np.random.default_rng(seed)
    return [
        Kill(step=int(rng.integers(low, high)), victims=VICTIMS[(number + seed) % len(VICTIMS)])
        for number, (low, high) in enumerate(pairwise(edges))
    ]


def server_command(address: str, epochs: int, seed: int, status: int | None = None) -> list[str]:
    """The command that serves the digits at `address`, and shows how at the port `status`."""
    module = [sys.executable, "-P", "-m", "demo.serving"]
    command = [*module, address, f"--epochs={epochs}", f"--seed={seed}"]
    return command if status is None else [*command, f"--status={status}"]


def free_port() -> int:
    """A port of this host alone that nobody listens at: each server of the demo takes it after the
    other, so that a page that was opened once goes on."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def training_command(
    checkpoint: Path, address: str, queue: int, steps_per_checkpoint: int
) -> list[str]:
    """The command of a trainer that goes on from `checkpoint`."""
    return [
        sys.executable, "-P", "-m", "demo.training", str(checkpoint), address,
        f"--queue={queue}", f"--steps-per-checkpoint={steps_per_checkpoint}",
    ]  # fmt: skip


def run_training(
    kills: Sequence[Kill],
    watch: Watch,
    *,
    epochs: int,
    steps_per_checkpoint: int,
    seed: int,
    status: int | None = None,
    before_end: Callable[[], None] = lambda: None,
) -> Run:
    """One whole run: whom each of `kills` names is killed and started again, trainers from their
    own newest checkpoint. Its server shows a page at the port `status`, where one is given, until
    `before_end` has returned, which is called when the last batch has been trained on.

    Raises TrainingFailed where a process ends in any other way.
    """
    with tempfile.TemporaryDirectory(prefix="feeder-demo-") as name:
        folder = Path(name)
        address = f"ipc://{folder / 'feed.sock'}"

        def serve() -> Child:
            return Child(server_command(address, epochs, seed, status), folder)

        def train(queue: int) -> Child:
            checkpoint = folder / f"checkpoint-{queue}.npz"
            command = training_command(checkpoint, address, queue, steps_per_checkpoint)
            return Child(command, folder)

        with Company(serve, train, watch) as company:
            for kill in kills:
                company.advance(kill.step)
                company.kill(kill)
            company.advance(None)
            before_end()
            company.end()
            return company.run(kills)


class Trainer:
    """The trainer of one queue, over all its processes."""

    def __init__(self, name: str, start: Callable[[], Child]) -> None:
        self.name = name
        self.lives: list[Life] = []
        """Its processes that are over."""
        self.result: Result | None = None
        """What its last process reported at the end."""
        self._start_child = start
        self.start()

    def start(self) -> None:
        """Start its next process."""
        self.step = -1
        """The last step that it reported; -1 while it has not even said where it begins."""
        self._begin = 0
        self._steps: list[Step] = []
        self.child = self._start_child()

    def follow(self) -> bool:
        """Read one report; False where there is none, since the process has ended."""
        report = self.child.read()
        if report is None:
            return False
        match report.pop("event"):
            case "start":
                self.step = self._begin = report["step"]
            case "step":
                self.step = report.pop("step")
                self._steps.append(Step(number=self.step, **report))
            case "end":
                self.result = Result(**report)
                self.bury()
        return True

    def bury(self) -> None:
        """Its process is over."""
        self.lives.append(Life(start=self._begin, steps=tuple(self._steps), result=self.result))


class Company:
    """A server and its trainers; a context manager that leaves no process behind."""

    def __init__(
        self, serve: Callable[[], Child], train: Callable[[int], Child], watch: Watch
    ) -> None:
        """Start them all."""
        self._serve = serve
        self._watch = watch
        self._num_kills = 0
        self._late = False
        self._server = serve()
        self._trainers = [
            Trainer(trainer_name(queue), partial(train, queue)) for queue in range(NUM_TRAINERS)
        ]
        self._watchdog = threading.Timer(RUN_LIMIT_S, self._bite)
        self._watchdog.start()

    def _bite(self) -> None:
        self._late = True
        for child in self._children:
            child.kill()

    @property
    def _children(self) -> list[Child]:
        return [self._server, *(trainer.child for trainer in self._trainers)]

    def advance(self, step: int | None) -> None:
        """Follow the trainers until each has reported `step`, or, with None, its end.

        The one that is behind is read first: none gets more than a step ahead of another, but
        where that one does steps again.
        """
        while trainers := [trainer for trainer in self._trainers if trainer.result is None]:
            behind = min(trainers, key=lambda trainer: trainer.step)
            if behind.step == step:
                return
            if not behind.follow():
                self._fail(behind.name, behind.child, "report more")
            self._watch(self._num_kills, tuple([max(0, t.step) for t in self._trainers]))
            if behind.step != step:
                behind.child.acknowledge()

    def kill(self, kill: Kill) -> None:
        """Kill whom `kill` names, at the very report of its step, and start them again."""
        victims = [trainer for trainer in self._trainers if trainer.name in kill.victims]
        if SERVER in kill.victims:
            self._server.kill()
        for trainer in victims:
            trainer.child.kill()
            if trainer.step != kill.step:
                self._fail(trainer.name, trainer.child, f"be killed at step {kill.step}")
            trainer.bury()
            trainer.child.close()
            trainer.start()
        if SERVER in kill.victims:
            self._server.close()
            self._server = self._serve()
        self._num_kills += 1
        for trainer in self._trainers:
            if trainer not in victims:
                trainer.child.acknowledge()

    def end(self) -> None:
        """Wait until all have ended, the server last."""
        for trainer in self._trainers:
            if trainer.child.end():
                self._fail(trainer.name, trainer.child, "end well")
        if self._server.end():
            self._fail(SERVER, self._server, "end well")

    def _fail(self, name: str, child: Child, plan: str) -> None:
        code = child.end()
        limit = f" (it may take {RUN_LIMIT_S} s)" if self._late else ""
        self._server.kill()
        words = "\n".join(filter(None, (child.last_words(), self._server.last_words())))
        raise TrainingFailed(
            f"{name}, meant to {plan}, ended with code {code}{limit}\n{words}".rstrip()
        )

    def run(self, kills: Sequence[Kill]) -> Run:
        """What has been done."""
        trainings = []
        for trainer in self._trainers:
            assert trainer.result is not None
            trainings.append(Training(lives=tuple(trainer.lives), result=trainer.result))
        return Run(trainings=tuple(trainings), kills=tuple(kills))

    def __enter__(self) -> Company:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._watchdog.cancel()
        self._watchdog.join()
        for child in self._children:
            child.close()
