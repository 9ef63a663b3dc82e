"""The workers of a DataLoader: how they begin and end, who replaces them, whose draws are whose."""

from __future__ import annotations

import json
import logging
import os
import random
import select
import signal
import subprocess
import sys
import threading
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from needs import needs_framework

needs_framework("torch")

import torch
import torch.utils.data as tud
from torch.utils.data.distributed import DistributedSampler

import feeder
from adapters.loaders import Items
from feeder.adapters.torch import DataLoader, FeedLoader

# JAX says so of each fork once another test has imported it.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")

ROWS = list(range(24))


def deadly(folder: Path, how: str, *, once: bool) -> Items:
    """Ends its process at a sample: once, or each time."""

    def read(i: int) -> int:
        if i == 13 and not (once and (folder / "ended").exists()):
            (folder / "ended").touch()
            if how == "exits":
                os._exit(3)
            os.kill(os.getpid(), signal.SIGKILL)
        return i

    return Items(read)


def noisy(i: int) -> tuple[int, float, float, float]:
    """Draws from all generators of the process."""
    return i, random.random(), float(np.random.rand()), float(torch.rand(()))


class Sharded(tud.IterableDataset):
    """Is shared by its workers."""

    def __iter__(self) -> Any:
        info = tud.get_worker_info()
        return iter(ROWS if info is None else ROWS[info.id :: info.num_workers])


class Holds(tud.Dataset):
    """Has what cannot be pickled, and knows its worker."""

    def __init__(self) -> None:
        self.lock, self.file, self.setting = threading.Lock(), None, 0

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[int, bool, int]:
        with self.lock:
            return i, self.file is not None, self.setting


def rows(loader: Any) -> list[int]:
    return [int(x) for batch in loader for x in batch]


def batches(loader: Any) -> list[Any]:
    return [[part.tolist() for part in batch] for batch in loader]


# ---- life


@pytest.mark.parametrize("how", ["killed", "exits"])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_worker_that_ended_once_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, persistent: bool
) -> None:
    data = deadly(tmp_path, how, once=True)
    loader = DataLoader(data, 4, num_workers=2, persistent_workers=persistent)
    with caplog.at_level(logging.WARNING, "feeder"):
        assert rows(loader) == ROWS
    (record,) = [one for one in caplog.records if one.name == "feeder"]
    assert "while it read samples [12, 13, 14, 15]" in record.getMessage()
    assert rows(loader) == ROWS
    loader.close()


def test_a_sample_that_ends_each_worker_is_named(tmp_path: Path) -> None:
    loader = DataLoader(deadly(tmp_path, "killed", once=False), 4, num_workers=2)
    with pytest.raises(RuntimeError, match=r"SIGKILL.*samples \[12, 13, 14, 15\]; this happened 3"):
        rows(loader)


def test_a_sample_that_hangs_is_named() -> None:
    hangs = Items(lambda i: threading.Event().wait() if i == 5 else i)
    loader = DataLoader(hangs, 4, num_workers=2, timeout=0.2)
    with pytest.raises(RuntimeError, match=r"timed out after 0.2 seconds.*\[4, 5, 6, 7\]"):
        rows(loader)


def test_workers_see_the_data_set_as_it_is() -> None:
    data = Holds()
    loader = DataLoader(data, 4, num_workers=2, worker_init_fn=_open_file)
    for setting in range(2):
        data.setting = setting
        ((_, opened, seen),) = loader
        assert opened.all()
        assert seen.tolist() == [setting] * 4


def _open_file(worker_id: int) -> None:
    info = tud.get_worker_info()
    assert info is not None
    assert (info.id, info.num_workers) == (worker_id, 2)
    info.dataset.file = open(__file__)  # noqa: SIM115  # the worker's, which ends with it


def test_what_worker_init_fn_raises_is_raised() -> None:
    def fails(worker_id: int) -> None:
        raise KeyError(f"worker {worker_id}")

    with pytest.raises(KeyError, match="worker 0"):
        rows(DataLoader(ROWS, 4, num_workers=1, worker_init_fn=fails))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_is_left_leaves_no_process(persistent: bool) -> None:
    loader = DataLoader(ROWS, 2, num_workers=2, persistent_workers=persistent)
    pids = set()
    for _ in range(3):
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        pids |= {worker.pid for worker in iterator._team.workers}
        del iterator
    assert len(pids) == (2 if persistent else 6)
    del loader
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_forked_child_does_not_read_its_parents_batches() -> None:
    iterator = iter(DataLoader(ROWS, 4, num_workers=1))
    next(iterator)
    reads, writes = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            next(iterator)
        except feeder.ForkedError:
            os.write(writes, b"named")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reads, 10) == b"named"
    os.close(reads)
    os.close(writes)
    assert rows(iterator) == ROWS[4:]


SCRIPT = """
import sys, threading
import torch.utils.data as tud
from feeder.adapters.torch import DataLoader

class Data(tud.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        if i == 3:
            threading.Event().wait()
        return i

iterator = iter(DataLoader(Data(), 1, num_workers=2))
next(iterator)
print(*[worker.pid for worker in iterator._team.workers], iterator._team._zygote_pid, flush=True)
sys.stdin.read()
"""


def test_the_trainers_death_ends_all() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        pids = [os.pidfd_open(int(pid)) for pid in trainer.stdout.readline().split()]
        trainer.kill()
        for pid in pids:
            poll = select.poll()
            poll.register(pid, select.POLLIN)
            assert poll.poll(30_000)
            os.close(pid)


OTHERS = """
from feeder.adapters.torch import DataLoader

if __name__ == "__main__":
    for method in ("spawn", "forkserver"):
        loader = DataLoader(list(range(8)), 4, num_workers=1, multiprocessing_context=method)
        print([batch.tolist() for batch in loader])
"""


def test_other_start_methods_give_the_same(tmp_path: Path) -> None:
    # multiprocessing keeps processes of its own for them.
    script = tmp_path / "script.py"
    script.write_text(OTHERS)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[[0, 1, 2, 3], [4, 5, 6, 7]]\n" * 2, done.stderr


# ---- values


def test_what_cannot_be_sent_is_named() -> None:
    loader = DataLoader(ROWS, 2, num_workers=1, collate_fn=lambda batch: {"f": [lambda: 0, batch]})
    with pytest.raises(TypeError, match=r"batch\['f'\]\[0\].*worker.*samples \[0, 1\]"):
        next(iter(loader))


class Locked(tud.Dataset):
    """What no process can be sent."""

    def __init__(self) -> None:
        self.settings = {"lock": threading.Lock()}

    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset": Locked()}, r"dataset.settings\['lock'\] \(lock\) cannot be sent"),
        ({"dataset": ROWS, "collate_fn": lambda rows: rows}, r"collate_fn \(function\) cannot be"),
    ],
)
def test_what_cannot_be_spawned_is_named(settings: Any, said: str) -> None:
    loader = DataLoader(**settings, num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(TypeError, match=said):
        iter(loader)
    # multiprocessing starts it before it sends anything, and keeps it.
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_names_its_sample(num_workers: int) -> None:
    fails = Items(lambda i: {}["nothing"] if i == 5 else i)
    iterator = iter(DataLoader(fails, 4, num_workers=num_workers))
    next(iterator)
    with pytest.raises(KeyError) as raised:
        next(iterator)
    told = str(raised.value) + "".join(getattr(raised.value, "__notes__", ()))
    assert "while reading sample 5" in told
    # PyTorch's loader gives the next batch, too.
    assert next(iterator).tolist() == [8, 9, 10, 11]


def test_draws_do_not_depend_on_the_number_of_workers() -> None:
    runs = []
    for num_workers in (1, 2):
        torch.manual_seed(4)
        loader = DataLoader(Items(noisy), 4, shuffle=True, num_workers=num_workers)
        runs.append([batches(loader), batches(loader)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]


def test_draws_are_resumed_with_other_workers() -> None:
    torch.manual_seed(4)
    loader = DataLoader(Items(noisy), 4, shuffle=True, num_workers=2)
    iterator = iter(loader)
    next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    rest = batches(iterator)
    again = DataLoader(Items(noisy), 4, shuffle=True, num_workers=1)
    again.load_state_dict(state)
    assert batches(again) == rest


def test_an_iterable_goes_on_with_as_many_readers_as_it_had() -> None:
    iterator = iter(loader := DataLoader(Sharded(), 4, num_workers=2))
    next(iterator)
    again = DataLoader(Sharded(), 4, num_workers=1)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert rows(again) == rows(iterator)
    # The next loop has its own number.
    assert rows(again) == ROWS


# ---- ranks


def ranked(num: int, rank: int, ranks: int, **named: Any) -> DataLoader:
    sampler: Any = DistributedSampler(range(num), ranks, rank, shuffle=True, seed=3)
    return DataLoader(Items(noisy, num), 2, sampler=sampler, **named)


def test_draws_of_samples_are_those_of_any_number_of_ranks() -> None:
    def draws(ranks: int) -> dict[int, Any]:
        found = {}
        for rank in range(ranks):
            torch.manual_seed(rank)
            for batch in ranked(24, rank, ranks, num_workers=1):
                numbers, *drawn = [part.tolist() for part in batch]
                found |= dict(zip(numbers, zip(*drawn, strict=True), strict=True))
        return found

    assert draws(1) == draws(3)


def test_a_sampler_of_another_epoch_is_an_error() -> None:
    loader = ranked(24, 0, 2)
    loader.sampler.set_epoch(2)
    next(iter(loader))
    again = ranked(24, 0, 2)
    again.load_state_dict(loader.state_dict())
    assert again.sampler.epoch == 2
    again.sampler.set_epoch(1)
    with pytest.raises(feeder.ResumeError, match=r"epoch 2 .* called with 1"):
        iter(again)


# ---- states


def test_states_that_do_not_fit_are_refused_by_name() -> None:
    state = DataLoader(ROWS, 4).state_dict()
    for named, what in (
        ({"batch_size": 3}, "batch_size: 4 then, 3 now"),
        ({"dataset": ROWS[:5]}, "samples: 24 then, 5 now"),
        ({"shuffle": True}, "sampler: 'SequentialSampler' then, 'RandomSampler' now"),
        ({"drop_last": True}, "drop_last: False then, True now"),
    ):
        loader = DataLoader(**({"dataset": ROWS, "batch_size": 4} | named))
        with pytest.raises(feeder.ResumeError, match=what):
            loader.load_state_dict(state)
    stream = (Sharded(), 4)
    for then, now in ((0, 2), (2, 0)):
        loader = DataLoader(*stream, num_workers=now)
        with pytest.raises(feeder.ResumeError, match="is_read_by_workers"):
            loader.load_state_dict(DataLoader(*stream, num_workers=then).state_dict())
    with pytest.raises(feeder.ResumeError, match="FeedLoader"):
        DataLoader(ROWS, 4).load_state_dict(FeedLoader(ROWS, 4).state_dict())
    with pytest.raises(feeder.ResumeError, match="one of DataLoader"):
        FeedLoader(ROWS, 4).load_state_dict(state)
    with pytest.raises(feeder.ResumeError, match="damaged"):
        DataLoader(ROWS, 4).load_state_dict(state | {"turn": None})


def test_a_sampler_that_gives_other_samples_is_an_error() -> None:
    class Changes(tud.Sampler):
        def __init__(self, first: int) -> None:
            self.first = first

        def __iter__(self) -> Any:
            return iter([self.first, 1, 2, 3])

        def __len__(self) -> int:
            return 4

    loader = DataLoader(ROWS, 2, sampler=Changes(0))
    next(iter(loader))
    again = DataLoader(ROWS, 2, sampler=Changes(9))
    again.load_state_dict(loader.state_dict())
    with pytest.raises(feeder.ResumeError, match="other samples"):
        iter(again)


def test_what_a_sampler_has_beside_its_order_is_left_alone() -> None:
    class Scored(tud.WeightedRandomSampler):
        def __init__(self) -> None:
            super().__init__([1.0] * 24, 24)
            self.model, self.kind = torch.nn.Sequential(torch.nn.Linear(1, 1)), tud.DataLoader

    loader = DataLoader(ROWS, 4, sampler=Scored())
    next(iter(loader))
    state = loader.state_dict()
    assert state["samplers"] == []
    with torch.no_grad():
        loader.sampler.model[0].weight.fill_(7)
    loader.load_state_dict(state)
    assert len(list(loader)) == 5
    assert loader.sampler.model[0].weight.item() == 7


def test_what_is_feeders_own_gives_a_feed_loader() -> None:
    source = feeder.sources.arrays(np.arange(8))
    assert isinstance(DataLoader(source, batch_size=4), FeedLoader)
    with pytest.raises(feeder.ConfigError, match="executor is an argument of FeedLoader"):
        DataLoader(ROWS, 4, executor=feeder.Threads(2))


def test_a_seed_is_alike_in_each_run() -> None:
    orders = []
    for manual in (1, 2):
        torch.manual_seed(manual)
        loader = DataLoader(ROWS, 4, shuffle=True, seed=7)
        next(iter(loader))
        orders.append([rows(loader), rows(loader)])
    assert orders[0] == orders[1]
    assert orders[0][0] != orders[0][1]
    assert sorted(orders[0][0]) == ROWS


@pytest.mark.parametrize("at", range(4))
def test_a_trainer_tells_the_epoch_of_a_loop_that_goes_on(at: int) -> None:
    def loop(state: Any = None) -> tuple[Any, Any]:
        loader = DataLoader(list(range(10)), 4, shuffle=True, seed=7)
        if state is not None:
            loader.load_state_dict(state)
        iterator = iter(loader)
        loader.sampler.set_epoch(0)
        return loader, iterator

    loader, iterator = loop()
    for _ in range(at):
        next(iterator)
    again, rest = loop(loader.state_dict())
    assert [rows(rest), rows(again)] == [rows(iterator), rows(loader)]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_was_given_before_its_turn_is_not_given_again(workers: int) -> None:
    reads, writes = os.pipe()
    # Sample 0 is not there before somebody writes.
    late = Items(lambda i: i if i or os.read(reads, 1) else -1)
    try:
        loader = DataLoader(late, 2, num_workers=2, in_order=False)
        loop = iter(loader)
        given = [next(loop).tolist() for _ in range(4)]
        state = json.loads(json.dumps(loader.state_dict()))
        os.write(writes, b"." * 8)  # Each loop that is begun may read it.
        assert sorted(given + [batch.tolist() for batch in loop]) == in_twos(ROWS)
        again = DataLoader(late, 2, num_workers=workers, in_order=False)
        again.load_state_dict(state)
        loop = iter(again)
        given.append(next(loop).tolist())
        again.load_state_dict(again.state_dict())
        rest = [batch.tolist() for batch in again]
    finally:
        os.close(reads)
        os.close(writes)
    assert [0, 1] not in given[:4] and sorted(given + rest) == in_twos(ROWS)


class Shrinks(tud.IterableDataset):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Any:
        return iter(range(self.num))


@pytest.mark.filterwarnings("ignore:the loader is resumed by reading")
@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterable_that_has_shrunk_is_told(workers: int) -> None:
    loader = DataLoader(Shrinks(24), 4, num_workers=workers)
    loop = iter(loader)
    for _ in range(3):
        next(loop)
    again = DataLoader(Shrinks(9), 4, num_workers=workers)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(feeder.ResumeError, match="has fewer samples than"):
        next(iter(again))


def in_twos(numbers: list[int]) -> list[list[int]]:
    return [numbers[i : i + 2] for i in range(0, len(numbers), 2)]
