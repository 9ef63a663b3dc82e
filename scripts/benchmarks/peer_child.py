"""One measurement of one loader, in a process of its own: what `bench peers` starts.

It is called with what to do and with its arguments, and writes lines of JSON.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from peer_loaders import PEERS, SEED, Loader
from peer_works import WORKS

MEMORY_LOOKS = 12
"""How often in an epoch the memory is looked at: each look stops the process for milliseconds."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Do what the command line names."""
    task, loader, work, workers, samples, folder, *rest = sys.argv[1:]
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)

    def make(*, draws: bool) -> Loader:
        chosen = WORKS[work]
        dataset = chosen.make(Path(folder), int(samples), draws=draws)
        return PEERS[loader].make(dataset, chosen.batch_size, int(workers))

    # What it imports is no part of its start.
    importlib.import_module(PEERS[loader].module)
    TASKS[task](make, -(-int(samples) // WORKS[work].batch_size), *rest)


# ---- tasks


def timed(make: Callable[..., Loader], num_batches: int) -> None:
    """The time to the first batch, the pace of the epoch behind its first tenth, and its work."""
    warm, seen, count = max(2, num_batches // 10), 0, 0
    begin = time.perf_counter()
    loader = make(draws=True)
    first_s = from_s = from_cpu = 0.0
    from_count = 0
    for number, batch in enumerate(loader, 1):
        numbers = np.asarray(batch[-1])
        count += len(numbers)
        seen += int(numbers.sum())
        if number == 1:
            first_s = time.perf_counter() - begin
        if number == warm:
            from_s, from_cpu, from_count = time.perf_counter(), cpu_of_tree(), count
        if number == num_batches:
            # Before the loop ends, and the workers with it.
            to_s, to_cpu = time.perf_counter(), cpu_of_tree()
    loader.close()
    if seen != count * (count - 1) // 2:
        raise RuntimeError("samples were lost, or came twice")
    timed_samples = count - from_count
    _tell(
        {
            "samples/s": timed_samples / (to_s - from_s),
            "first batch, ms": first_s * 1e3,
            "CPU, µs/sample": (to_cpu - from_cpu) * 1e6 / timed_samples,
        }
    )


def checked(make: Callable[..., Loader], num_batches: int) -> None:
    """The digest of all samples, whatever their order, and the most memory at so many looks."""
    total, most = 0, 0.0
    stride = max(1, num_batches // MEMORY_LOOKS)
    loader = make(draws=False)
    for number, batch in enumerate(loader, 1):
        total += sum(row for _, row in _rows(batch))
        if number % stride == 0:
            most = max(most, memory_of_tree())
    loader.close()
    _tell({"digest": f"{total % 2**64:016x}", "peak, MB": most / 1e6})


def run(make: Callable[..., Loader], num_batches: int, at: str, file: str) -> None:
    """An epoch, row by row; after `at` batches its state is saved."""
    _give(make(draws=True), int(at), file)


def resumed(make: Callable[..., Loader], num_batches: int, file: str) -> None:
    """The rest of an epoch, from a saved state on."""
    try:
        loader = make(draws=True)
        loader.load(torch.load(file, weights_only=False))
        _give(loader, 0, file)
    except Exception as error:
        # A finding: some take another number of workers for a mistake.
        _tell({"error": type(error).__name__})


def _give(loader: Loader, at: int, file: str) -> None:
    for number, batch in enumerate(loader, 1):
        if number == at:
            torch.save(loader.state(), file)
        _tell(list(_rows(batch)))
    _tell("end")
    loader.close()


TASKS: Mapping[str, Callable[..., None]] = {
    "timed": timed, "checked": checked, "run": run, "resumed": resumed,
}  # fmt: skip


# ---- rows, work and memory


def _rows(batch: Any) -> Iterator[tuple[int, int]]:
    """The number of each sample, and the digest of its bytes."""
    columns = [np.asarray(column) for column in batch]
    for i, number in enumerate(columns[-1].tolist()):
        found = xxhash.xxh3_64()
        for column in columns[:-1]:
            found.update(np.ascontiguousarray(column[i]).tobytes())
        found.update(number.to_bytes(8, "little"))
        yield number, found.intdigest()


def tree() -> list[int]:
    """This process and all below it."""
    found, parents = [os.getpid()], _parents()
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found


def _parents() -> dict[int, int]:
    return {int(entry.name): int(fields[1]) for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and (fields := _stat(int(entry.name)))}  # fmt: skip


def _stat(pid: int) -> list[str]:
    """The fields of a process behind its name, from its state on; none where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def cpu_of_tree() -> float:
    """Seconds of processors that the tree has used, with those of its processes that were waited
    for."""
    return sum(sum(map(int, _stat(pid)[11:15])) for pid in tree()) / _TICKS_PER_S


def memory_of_tree() -> float:
    """Bytes in memory of all processes, shared ones shared out among those that have them."""
    total = 0
    for pid in tree():
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def _tell(what: Any) -> None:
    print(json.dumps(what), flush=True)
