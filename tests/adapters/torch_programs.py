"""Random programs over a DataLoader, run on PyTorch's and on feeder's: all that a script can see.

A program is data: what the data set is, the samplers, the arguments, and what the script does. It
is run with either class from the same seeds, and leaves a log. Killed and resumed it is run again
from a state, with new objects and other seeds, as a new process would have them; what a script
saves of generators itself (those of the process) is put back.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import json
import logging
import os
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import torch
import torch.utils.data as tud
from torch.utils.data.datapipes.iter import IterableWrapper

from feeder.adapters.torch import DataLoader

Pair = collections.namedtuple("Pair", "x y")


class Boxes(torch.Tensor):
    """A tensor of a class of its own."""


class OwnError(Exception):
    """An exception that takes more than a text."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)


# ---- data sets

ITEMS: dict[str, Callable[[int], Any]] = {
    "number": lambda i: i,
    "float": lambda i: i / 4,
    "text": lambda i: f"t{i}",
    "tensor": lambda i: torch.full((2, 3), i),
    "half": lambda i: torch.full((3,), float(i), dtype=torch.bfloat16),
    "tuple": lambda i: (torch.tensor(i), float(i)),
    "dict": lambda i: {"a": torch.arange(3) + i, "b": np.float32(i), "c": [i, str(i)]},
    "named": lambda i: Pair(i, torch.ones(2) * i),
    "array": lambda i: np.arange(4, dtype=np.int16) + i,
    "empty": lambda i: (torch.zeros(0), torch.zeros(2, 0, 3)),
    "uneven": lambda i: torch.zeros(1 + (i > 4)),
    "image": lambda i: torch.full((2, 3, 4, 4), i).to(memory_format=torch.channels_last),
}
RAGGED: dict[str, Callable[[int], Any]] = {
    "ragged": lambda i: torch.arange(i % 4),
    "object": lambda i: SimpleNamespace(i=i, x=torch.ones(i % 3)),
    "boxes": lambda i: torch.ones(i % 3 + 1, 4).as_subclass(Boxes),
    "none": lambda i: None if i % 2 else i,
}


class Data(tud.Dataset):
    """A map-style data set. `stage` is changed by the script."""

    def __init__(self, num: int, item: str, fails_at: int | None, error: str) -> None:
        self.num, self.item, self.fails_at, self.error = num, item, fails_at, error
        self.stage = 0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> Any:
        if i == self.fails_at:
            raise {"value": ValueError("no 7"), "key": KeyError(i), "own": OwnError(i, "own"),
                   "stop": StopIteration()}[self.error]  # fmt: skip
        return (ITEMS | RAGGED)[self.item](i + 1000 * self.stage)


class Together(Data):
    """The same, a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[indices.pop(0)] for _ in range(len(indices))]


class Counting(Data):
    """Its samples depend on how many it has given, which it keeps."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.given = 0

    def __getitem__(self, i: int) -> Any:
        self.given += 1
        return super().__getitem__(i), self.given

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Stream(tud.IterableDataset):
    """An iterable; `kind` says how it goes on."""

    def __init__(self, num: int, item: str, kind: str) -> None:
        self.num, self.item, self.kind = num, item, kind
        self.stage = self.at = self.begun = 0

    def _numbers(self) -> Iterator[int]:
        info = tud.get_worker_info()
        numbers = range(self.num)
        if "sharded" in self.kind and info is not None:
            numbers = numbers[info.id :: info.num_workers]
        return iter(numbers)

    def __iter__(self) -> Any:
        if "self" in self.kind:
            self.at, self._rest = 0, self._numbers()
            return self
        return ((ITEMS | RAGGED)[self.item](i + 1000 * self.stage) for i in self._numbers())

    def __next__(self) -> Any:
        i = next(self._rest)
        return (ITEMS | RAGGED)[self.item](i + 1000 * self.stage)


class Counted(Stream):
    """With a length, which may be wrong."""

    def __len__(self) -> int:
        return self.num + ("more" in self.kind) * 5 - ("less" in self.kind) * min(3, self.num)


class Resumed(Stream):
    """With a state, in each copy of it."""

    def __iter__(self) -> Any:
        numbers = list(self._numbers())
        begins, self.begun = self.begun, 0
        for at in range(begins, len(numbers)):
            self.at = at + 1
            yield (ITEMS | RAGGED)[self.item](numbers[at] + 1000 * self.stage)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun = self.at = state["at"]


class Epochs(Resumed):
    """The same, and its state has the epochs that it was read whole."""

    epochs = 0

    def __iter__(self) -> Any:
        for sample in super().__iter__():
            yield self.epochs, sample
        self.at, self.epochs = 0, self.epochs + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.epochs = state["epochs"]


class Sticky(Resumed):
    """The same as `Resumed`, and what was loaded stays."""

    begins = 0

    def __iter__(self) -> Any:
        self.begun = self.begins
        return super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begins = self.at = state["at"]


class OwnState(Stream):
    """Its own iterator, which has a state once it is one."""

    def __iter__(self) -> Any:
        self._all, self._at = list(self._numbers()), 0
        return self

    def __next__(self) -> Any:
        if self._at >= len(self._all):
            raise StopIteration
        self._at += 1
        return (ITEMS | RAGGED)[self.item](self._all[self._at - 1] + 1000 * self.stage)

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


# ---- samplers


class Global(tud.Sampler):
    """Draws from a generator of the process, at once or one by one."""

    def __init__(self, num: int, of: str) -> None:
        self.num, self.of = num, of

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num))
        if self.of == "random":
            random.shuffle(order)
        elif self.of == "numpy":
            np.random.shuffle(order)
        elif self.of == "torch":
            order = torch.randperm(self.num).tolist()
        return iter(order)

    def __len__(self) -> int:
        return self.num


class Own(tud.Sampler):
    """Draws from a generator of its own, one by one."""

    def __init__(self, num: int, seed: int, of: str) -> None:
        self.num = num
        self.rng = random.Random(seed) if of == "random" else np.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.num):
            yield int(self.rng.random() * self.num)

    def __len__(self) -> int:
        return self.num


class Remembered(tud.Sampler):
    """Has a state."""

    def __init__(self, num: int) -> None:
        self.num, self.epoch, self.at = num, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.num:
            self.at += 1
            yield (7 * self.at + self.epoch) % self.num
        self.at, self.epoch = 0, self.epoch + 1

    def __len__(self) -> int:
        return self.num

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.at = state["epoch"], state["at"]


class Spent(Remembered):
    """Says of its end that it has given all, until it is iterated over."""

    is_loaded = False

    def __iter__(self) -> Iterator[int]:
        self.at, self.is_loaded = self.at * self.is_loaded, False
        while self.at < self.num:
            self.at += 1
            yield 7 * self.at % self.num

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.is_loaded = True


class Told(Remembered):
    """Says only which epoch it is in."""

    def __iter__(self) -> Iterator[int]:
        self.at = 0
        yield from super().__iter__()

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": 0}


class Outer(tud.Sampler):
    """Wraps another one."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        yield from self.sampler

    def __len__(self) -> int:
        return len(self.sampler)


class Grouped(tud.Sampler):
    """Reads another one ahead, and gives what it has read in order of size."""

    def __init__(self, sampler: Any) -> None:
        self.parts = [sampler]

    def __iter__(self) -> Iterator[Any]:
        inner = iter(self.parts[0])
        while group := sorted(islice(inner, 5)):
            yield from group

    def __len__(self) -> int:
        return len(self.parts[0])


class Halves(Outer):
    """Gives halves of batches."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self.sampler:
            half = len(batch) // 2
            yield from filter(None, (batch[:half], batch[half:]))


SAMPLERS = (
    "none", "shuffle", "shuffle, generator", "sequential", "random", "replacement", "weighted",
    "weighted, generator", "subset", "global random", "global numpy", "global torch", "own random",
    "own numpy", "remembered", "distributed", "outer random", "outer outer global numpy", "spent",
    "told", "grouped remembered", "grouped own random", "grouped weighted, generator",
)  # fmt: skip

AMBIGUOUS = ("spent", "grouped remembered")


def make_sampler(kind: str, num: int, seed: int) -> Any:
    """A sampler, new; `seed` is that of generators of its own."""
    if kind.startswith("outer "):
        return Outer(make_sampler(kind.removeprefix("outer "), num, seed))
    if kind.startswith("grouped "):
        return Grouped(make_sampler(kind.removeprefix("grouped "), num, seed))
    generator = torch.Generator().manual_seed(seed)
    weights = torch.ones(num)
    match kind:
        case "sequential":
            return tud.SequentialSampler(range(num))
        case "random":
            return tud.RandomSampler(range(num))
        case "replacement":
            return tud.RandomSampler(range(num), replacement=True, num_samples=num + 3)
        case "weighted":
            return tud.WeightedRandomSampler(weights, num)
        case "weighted, generator":
            return tud.WeightedRandomSampler(weights, num, generator=generator)
        case "subset":
            return tud.SubsetRandomSampler(range(0, num, 2))
        case "remembered" | "spent" | "told":
            return {"remembered": Remembered, "spent": Spent, "told": Told}[kind](num)
        case "distributed":
            return tud.DistributedSampler(range(num), 2, 1, shuffle=True, seed=5)
    how, of = kind.split()
    return Global(num, of) if how == "global" else Own(num, seed, of)


# ---- programs


@dataclasses.dataclass(frozen=True)
class Program:
    """What a script does."""

    data: str
    num: int
    item: str
    sampler: str
    batches: str
    batch_size: int | None
    drop_last: bool
    collate: str
    workers: int
    persistent: bool
    fails_at: int | None
    error: str
    shares: bool
    """Whether others draw from the loader's generator, too."""
    actions: tuple[tuple[str, Any], ...]

    @property
    def is_iterable(self) -> bool:
        return self.data.startswith("stream")


def collate_list(samples: list[Any]) -> Any:
    """The samples as they are."""
    return samples


def collate_object(samples: list[Any]) -> Any:
    """An object."""
    return SimpleNamespace(samples=samples, num=len(samples))


def make_data(program: Program) -> Any:
    """The data set, new."""
    if program.is_iterable:
        kind = program.data.removeprefix("stream ")
        if kind == "pipe":
            numbers = IterableWrapper(range(program.num)).shuffle().sharding_filter()
            return numbers.map((ITEMS | RAGGED)[program.item])
        named = {"own state": OwnState, "epochs": Epochs, "sticky": Sticky}
        plain = Resumed if "state" in kind else Counted if "len" in kind else Stream
        return named.get(kind, plain)(program.num, program.item, kind)
    cls = {"together": Together, "counting": Counting}.get(program.data, Data)
    return cls(program.num, program.item, program.fails_at, program.error)


def make_loader(program: Program, cls: Any, seed: int, **changed: Any) -> Any:
    """A loader, with a data set and samplers of its own."""
    data = make_data(program)
    named: dict[str, Any] = {"num_workers": program.workers, **changed}
    if named["num_workers"]:
        named["persistent_workers"] = program.persistent
    if program.collate != "default":
        named["collate_fn"] = collate_list if program.collate == "list" else collate_object
    if program.is_iterable:
        return cls(data, program.batch_size, drop_last=program.drop_last, **named)
    if program.sampler == "shuffle, generator":
        named |= {"shuffle": True, "generator": torch.Generator().manual_seed(seed)}
    elif program.sampler == "shuffle":
        named["shuffle"] = True
    elif program.sampler != "none":
        named["sampler"] = make_sampler(program.sampler, program.num, seed)
    if program.batches != "size" and "sampler" in named and program.batch_size is not None:
        inner = tud.BatchSampler(named.pop("sampler"), program.batch_size, program.drop_last)
        outer = {"outer": Outer, "halves": Halves}.get(program.batches)
        named["batch_sampler"] = inner if outer is None else outer(inner)
        return cls(data, **named)
    return cls(data, program.batch_size, drop_last=program.drop_last, **named)


def plain(value: Any) -> Any:
    """A value as something that can be compared, its class and dtype in it."""
    if isinstance(value, torch.Tensor):
        data = value.as_subclass(torch.Tensor)
        return (
            type(value).__name__,
            str(data.dtype),
            tuple(data.shape),
            data.stride(),
            data.tolist(),
        )
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, str(value.dtype), value.tolist()
    if isinstance(value, dict):
        return type(value).__name__, [(key, plain(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [plain(part) for part in value]
    if isinstance(value, SimpleNamespace):
        return "SimpleNamespace", plain(vars(value))
    return type(value).__name__, value


def save_generators() -> Any:
    """Those of the process, as a script saves them."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def load_generators(state: Any) -> None:
    """The reverse."""
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def seed_all(seed: int) -> None:
    """Seed those of the process."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@dataclasses.dataclass
class Killed:
    """What is left of a run: where in the program it was, and what it had saved."""

    action: int
    taken: int
    state: Any
    generators: Any
    errors: int
    log_length: int


class Run:
    """One run of a program."""

    def __init__(self, program: Program, cls: Any, seed: int = 1, **changed: Any) -> None:
        self.program = program
        self.log: list[Any] = []
        self.kills: list[Killed] = []
        seed_all(seed)
        self.saves = False
        self.reloads = False
        """Whether each loop goes back to where it stands, by the loader's state."""
        self.strikes = False
        """Whether a worker of each loop is killed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.loader = make_loader(program, cls, seed, **changed)

    def go(self, first: int = 0, taken: int = 0, errors: int = 0) -> Run:
        """Run it, from an action on, of whose batches so many were taken, or failed."""
        self.errors = errors
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number, (name, value) in list(enumerate(self.program.actions))[first:]:
                getattr(self, f"_{name}")(number, value, taken if number == first else 0)
        return self

    def _save(self, number: int, taken: int) -> None:
        if self.saves:
            state = json.loads(json.dumps(self.loader.state_dict()))
            self.kills.append(
                Killed(number, taken, state, save_generators(), self.errors, len(self.log))
            )

    def _save_failed(self) -> None:
        """A state after a batch that failed is one of the batch before."""
        if self.saves and self.kills:
            state = json.loads(json.dumps(self.loader.state_dict()))
            last = self.kills[-1]
            again = dataclasses.replace(last, state=state, generators=save_generators())
            self.kills.append(again)

    def _loop(self, number: int, most: int | None, taken: int) -> None:
        """Take batches of a new iterator, all of them or some."""
        num = taken
        try:
            iterator = iter(self.loader)
        except Exception as error:
            self._failed(error)
            return
        if not taken:
            self._save(number, 0)
        self.errors = self.errors if taken else 0
        while most is None or num < most:
            try:
                batch = next(iterator)
            except StopIteration:
                self.log.append("end")
                self._save(number + 1, 0)
                return
            except Exception as error:
                self._save_failed()
                self._failed(error)
                self.errors += 1
                num += 1
                if self.errors > 3:
                    # Left: `valid` says of which samplers nobody knows what that means.
                    self.saves &= self.program.sampler not in AMBIGUOUS
                    return
                continue
            self.log.append(plain(batch))
            num += 1
            for part in (self.loader, self.loader.sampler) if self.program.shares else ():
                if (generator := getattr(part, "generator", None)) is not None:
                    torch.rand((), generator=generator)
            self._save(number, num)
            if self.strikes and num == 1:
                worker = iterator._team.workers[-1]
                os.kill(worker.pid, signal.SIGKILL)
            if self.reloads and num == 2:
                self.loader.load_state_dict(json.loads(json.dumps(self.loader.state_dict())))
                iterator = iter(self.loader)

    def _failed(self, error: Exception) -> None:
        self.log.append(("error", type(error).__name__, _essence(error)))

    def _two(self, number: int, most: int, taken: int) -> None:
        """Two iterators at once."""
        first, second = iter(self.loader), iter(self.loader)
        for _ in range(most):
            for iterator in (first, second):
                try:
                    self.log.append(plain(next(iterator, "over")))
                except Exception as error:
                    self._failed(error)

    def _stage(self, number: int, stage: int, taken: int) -> None:
        """Change the data set."""
        self.loader.dataset.stage = stage

    def _weights(self, number: int, first: int, taken: int) -> None:
        """Change what is drawn."""
        sampler = self.loader.sampler
        if isinstance(sampler, tud.WeightedRandomSampler):
            sampler.weights = torch.zeros(self.program.num, dtype=torch.double)
            sampler.weights[first % self.program.num :] = 1

    def _draw(self, number: int, value: Any, taken: int) -> None:
        """A trainer draws, too."""
        self.log.append((random.random(), float(np.random.rand()), float(torch.rand(()))))

    def _length(self, number: int, value: Any, taken: int) -> None:
        try:
            self.log.append(len(self.loader))
        except TypeError:
            self.log.append("no length")


def _essence(error: Exception) -> str:
    """What an error says of the user's own one: not the processes, numbers and traceback."""
    text = str(error)
    # In workers PyTorch stacks into a storage, which may be the first thing that does not fit.
    if "stack expects each tensor" in text or "resize storage that is not" in text:
        return "uneven"
    return text.rstrip().splitlines()[-1].strip() if "Original Traceback" in text else text


@st.composite
def programs(draw: Any, most_workers: int) -> Program:
    """Draw a program, with some workers if there may be any."""
    data = draw(st.sampled_from((
        "map", "map", "map", "together", *(() if most_workers else ("counting",)),
        "stream plain", "stream self", "stream sharded", "stream len", "stream len more",
        "stream len less", "stream sharded state", "stream state", "stream own state",
        "stream epochs", "stream sticky", "stream pipe",
    )))  # fmt: skip
    is_ragged = draw(st.booleans())
    collate = draw(st.sampled_from(("list", "object") if is_ragged else ("default", "list")))
    actions = draw(st.lists(st.one_of(
        st.tuples(st.just("loop"), st.none()), st.tuples(st.just("loop"), st.none()),
        st.tuples(st.just("loop"), st.integers(0, 5)), st.tuples(st.just("two"), st.integers(1, 4)),
        st.tuples(st.just("stage"), st.integers(1, 3)), st.tuples(st.just("draw"), st.none()),
        st.tuples(st.just("weights"), st.integers(0, 5)), st.tuples(st.just("length"), st.none()),
    ), min_size=1, max_size=5))  # fmt: skip
    return Program(
        data=data,
        num=draw(st.integers(1, 23)),
        item=draw(st.sampled_from(tuple(RAGGED if is_ragged else ITEMS))),
        sampler=draw(st.sampled_from(SAMPLERS)),
        batches=draw(st.sampled_from(("size", "size", "sampler", "outer", "halves"))),
        batch_size=draw(st.sampled_from((1, 2, 3, 4, 7, None))),
        drop_last=draw(st.booleans()),
        collate=collate,
        workers=draw(st.integers(min(1, most_workers), most_workers)),
        persistent=draw(st.booleans()),
        fails_at=draw(st.sampled_from((None, None, None, 0, 3, 5))),
        error=draw(st.sampled_from(("value", "key", "own", "stop"))),
        shares=draw(st.booleans()),
        actions=tuple(actions),
    )


def valid(program: Program) -> Program:
    """The same, without what PyTorch refuses, and what nobody knows: how far the workers had read
    that persist after a loop that was left."""
    if program.data == "stream epochs" and any(value is not None for _, value in program.actions):
        program = dataclasses.replace(program, persistent=False)
    if program.sampler in AMBIGUOUS:
        # After a loop that was left one begins anew, and with its state it does not; the other one
        # may have nothing left.
        actions = tuple(one for one in program.actions if one[0] != "two" and not one[1])
        program = dataclasses.replace(program, actions=actions, fails_at=None)
    if program.batch_size is None:
        return dataclasses.replace(program, drop_last=False)
    return program


def compare(program: Program) -> None:
    """Run it on both classes, kill it after each batch, and resume it."""
    program = valid(program)
    want = Run(program, tud.DataLoader).go().log
    run = Run(program, DataLoader)
    run.saves = not any(name in ("two", "stage", "weights") for name, _ in program.actions)
    assert run.go().log == want
    if run.saves:
        again = Run(program, DataLoader)
        again.reloads = True
        assert again.go().log == want
    if program.workers:
        struck = Run(program, DataLoader)
        struck.strikes = True
        assert struck.go().log == want
    # Each resume begins processes: with workers after some batches, and not after each.
    for killed in run.kills[:: 1 if not program.workers else max(1, len(run.kills) // 3)]:
        left = want[killed.log_length :]
        resumed = resume(program, killed, saves=True)
        assert resumed.log == left, (killed.action, killed.taken)
        for later in resumed.kills[1:2]:
            again = resume(program, later).log
            assert again == left[later.log_length :], (killed.taken, later.action, later.taken)
        is_of_loop = killed.action == len(program.actions) - 1
        if program.workers and is_of_loop and not program.is_iterable:
            # In other workers, or in none: what later loops draw is another matter.
            other = (program.workers + killed.taken) % 4
            # Without workers PyTorch keeps strides that it loses in them; errors name no worker.
            other = other or int(program.item == "image" or program.fails_at is not None)
            assert resume(program, killed, num_workers=other).log == left, (killed.taken, other)


def resume(program: Program, killed: Killed, *, saves: bool = False, **changed: Any) -> Run:
    """The run of a new process that goes on where another one was killed."""
    run = Run(program, DataLoader, seed=77, **changed)
    run.saves = saves
    run.loader.load_state_dict(copy.deepcopy(killed.state))
    load_generators(killed.generators)
    return run.go(killed.action, killed.taken, killed.errors)


def main() -> None:
    """The command of the campaign: draw programs, and count them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--programs", type=int, default=18000, help="without workers")
    parser.add_argument("--with-workers", type=int, default=2000)
    told, began = parser.parse_args(), time.monotonic()
    logging.disable()
    for num, most_workers in ((told.programs, 0), (told.with_workers, 3)):

        @hypothesis.seed(told.seed)
        @hypothesis.settings(
            max_examples=num, database=None, deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        )  # fmt: skip
        @hypothesis.given(programs(most_workers))
        def run_one(program: Program) -> None:
            compare(program)

        run_one()
    seconds = time.monotonic() - began
    print(f"seed {told.seed}: {told.programs} programs, {told.with_workers} with workers, in "
          f"{seconds:.0f} s, 0 differ")  # fmt: skip


if __name__ == "__main__":
    main()
