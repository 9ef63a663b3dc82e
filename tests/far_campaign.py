"""Reads far sources while their store fails, and kills processes that share a cache.

`--faults` injects so many into the answers of a store, of programs that are drawn, each of which
gives what the same files give on a disk. `--kills` sends SIGKILL to readers of one cache, two at a
time, at random moments. The cache keeps its bound and every foreign file. Run by `scripts/nightly
far`; the exit status is 0 when nothing was otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import feeder
from far_files import CHANGES, KINDS, make, read, small_store, write_files
from far_server import far_server
from feeder.workers.sources.far.folder import Folder
from project import ROOT, TESTS

ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}"}
FAULTS = ["500", "502", "503", "429", "408", "425", "cut", "shifted", "gone"]
CACHE_BYTES = 40 * 4096


def inject(num_faults: int, seed: int, folder: Path) -> int:
    """Read far sources until so many faults were met; returns how many were. Raises if anything is
    other than near."""
    draw, lock, met = random.Random(seed), threading.Lock(), 0
    files = folder / "files"
    files.mkdir()
    write_files(files)

    def fault(number: int, path: str, span: tuple[int, int] | None) -> str:
        nonlocal met
        with lock:
            is_one = draw.random() < share
            met += is_one
            return draw.choice(FAULTS) if is_one else ""

    with small_store(files) as store:
        store.fault, program = fault, 0
        while met < num_faults:
            program += 1
            with lock:
                kind, change, share = (
                    draw.choice([*KINDS]), draw.choice([*CHANGES]), draw.uniform(0, 0.7)
                )  # fmt: skip
            size, threads = random.Random(program).randint(1, 17), 1 + program % 3
            # Some share a cache with those before them.
            path = folder / f"cache {program // 5}"
            with feeder.Cache(path, CACHE_BYTES) as cache:
                foreign = path / "blocks" / "foreign"
                foreign.parent.mkdir(exist_ok=True)
                foreign.write_text("mine")
                far = KINDS[kind]("s3://bucket", cache=cache, storage_options=store.options())
                found = read(make(kind, CHANGES[change](far), size, threads))[0]
            near = read(make(kind, CHANGES[change](KINDS[kind](files)), size, threads))[0]
            assert found == near, f"program {program}: {kind}, {change}, seed {seed}"
            check(path, CACHE_BYTES)
            assert foreign.read_text() == "mine"
            store.asked.clear()
    return met


def kill(num_kills: int, seed: int, folder: Path) -> int:
    """Kill readers of one cache; returns how many were killed. Raises if one has read other bytes,
    or the cache is not as it should be."""
    draw, path, killed = random.Random(seed), folder / "shared", 0
    with far_server() as far:
        far.objects["b/x"] = np.arange(60_000, dtype="<u2").tobytes()
        command = [sys.executable, "-m", "far_child", "read", f"{far.address}/b/x", str(path)]
        while killed < num_kills:
            children = [
                subprocess.Popen(
                    [*command, str(CACHE_BYTES), str(draw.random())], stdout=subprocess.PIPE,
                    env=ENVIRONMENT,
                )
                for _ in range(min(2, num_kills - killed))
            ]  # fmt: skip
            for child in children:
                assert child.stdout is not None
                # It says a line after each of its calls: they are the clock.
                for _ in range(draw.randrange(1, 60)):
                    assert child.stdout.readline() == b"right\n"
                child.kill()
                killed += 1
            for child in children:
                child.communicate(timeout=20)
            check(path, CACHE_BYTES)
            far.asked.clear()
    cache = Folder(str(path), CACHE_BYTES)
    assert cache.verify()[1] == []
    cache.prune(CACHE_BYTES)
    assert not [*path.glob("blocks/??/*.partial")]
    cache.close()
    return killed


def check(path: Path, max_bytes: int) -> None:
    """Raise if blocks take more than they may."""
    taken = sum(-(-file.stat().st_size // 4096) * 4096 for file in path.glob("blocks/??/*"))
    assert taken <= max_bytes, f"{taken} bytes"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/nightly far", description=__doc__)
    add = parser.add_argument
    add("--faults", type=int, default=2000, metavar="N", help="answers that fail (2000)")
    add("--kills", type=int, default=20, metavar="N", help="processes killed (20)")
    add("--seed", type=int, default=1, metavar="S", help="of all that is random (1)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="far-") as folder:
        met = inject(options.faults, options.seed, Path(folder))
        killed = kill(options.kills, options.seed, Path(folder))
    print(f"{met} faults and {killed} kills changed nothing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
