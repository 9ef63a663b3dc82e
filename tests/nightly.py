"""Runs campaigns, each with a seed and bounds in count and time, and tells what each has found.

Without names all of them run, one after the other. One name with options of its own runs that
campaign alone, as long as it takes, with these after those of its bound; --help tells which it has.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, NamedTuple

from project import ROOT


class Campaign(NamedTuple):
    """One of them."""

    about: str
    command: str
    """A Python module, or a script of the project."""
    bound: str
    """The options that bound it, and those that take the seed."""
    minutes: int
    """It has failed if it is not done by then."""


CAMPAIGNS = {
    "tests": Campaign(
        "tests that are too long for a commit; takes no seed", "pytest", "-q -m nightly tests", 60),
    "streams": Campaign(
        "draws programs of a feed and its resumes, and compares them with the naive stream",
        "property.campaign", "--examples 2000 --seed {seed}", 60),
    "second-oracle": Campaign(
        "compares programs of a feed and its resumes with a second stream, from the pages alone",
        "property.second_campaign", "--programs 10000 --seed {seed}00000", 30),
    "schedules": Campaign(
        "runs small feeds in many schedules of their threads: all with few preemptions, some drawn",
        "schedules.campaign", "--preemptions 2 --runs 20000 --seed {seed}00000", 60),
    "schedules-planted": Campaign(
        "plants bugs of threads: a schedule finds each; exhaustive: takes no seed",
        "schedules.campaign", "--planted", 30),
    "histories": Campaign(
        "draws runs that are edited and resumed, beside a naive model, and replays them",
        "property.histories", "--histories 1000 --seed {seed}", 90),
    "transcripts": Campaign(
        "changes one row of random batches, each of which a transcript finds",
        "transcripts", "--changes 100000 --seed {seed}", 15),
    "asked": Campaign(
        "asks feeds of random compositions which records come when, and compares all rows",
        "property.asked", "--rows 300000 --seed {seed}", 60),
    "chaos": Campaign(
        "kills and stops servers and trainers, and compares every batch",
        "chaos.campaign", "--faults 500 --seed {seed}", 60),
    "executors": Campaign(
        "kills processes that fetch, and their trainers",
        "chaos.campaign", "--executors 200 --seed {seed}", 30),
    "actors": Campaign(
        "kills Ray actors, nodes of their cluster, and drivers",
        "chaos.campaign", "--actors 40 --seed {seed}", 30),
    "soak": Campaign(
        "reconnects again and again, and sees that nothing grows",
        "chaos.campaign", "--soak 50000 --seed {seed}", 30),
    "networks": Campaign(
        "cuts, slows and garbles networks between hosts of its own, which needs root",
        "chaos.campaign", "--networks 60 --seed {seed}", 60),
    "servers": Campaign(
        "kills servers that share one stream, and compares the one order",
        "chaos.campaign", "--servers 25 --seed {seed}", 30),
    "crowds": Campaign(
        "has 300 consumers leave a server beside busy loops",
        "chaos.campaign", "--crowds 20 --seed {seed}", 60),
    "planted": Campaign(
        "plants bugs in copies of the project, which named tests catch; exhaustive: takes no seed",
        "planted.plant", "", 60),
    "fuzz": Campaign(
        "gives hostile bytes to every way in", "fuzz.campaign", "--inputs 5000 --seed {seed}", 60),
    "explore": Campaign(
        "visits all interleavings of a served feed's membership; exhaustive: takes no seed",
        "simulation.explore", "--queues 3 --deaths 1 --servers 0 --rollbacks 0", 60),
    "simulate": Campaign(
        "runs whole services by a virtual clock, with the faults of each seed",
        "simulation.simulate", "--runs 10000 --seed {seed}0000", 30),
    "simulate-epochs": Campaign(
        "the same with rounds of an epoch",
        "simulation.simulate", "--rounds epoch --runs 5000 --seed {seed}0000", 30),
    "simulate-sources": Campaign(
        "the same with feeds of sources, which are edited, leave records out and fail",
        "simulation.simulate", "--sources --runs 5000 --seed {seed}0000", 30),
    "simulate-planted": Campaign(
        "plants bugs that the service once had: a run finds each; exhaustive: takes no seed",
        "simulation.planted", "", 60),
    "simulate-actors": Campaign(
        "an hour of a thousand actors, of which a tenth is killed each minute",
        "simulation.hour", "--seed {seed}", 60),
    "crash-states": Campaign(
        "loses the power of a disk and kills processes while they save checkpoints",
        "crashes.command", "--states 100000 --kills 2000 --seed {seed}", 30),
    "far": Campaign(
        "reads through stores that fail, and kills readers that share a cache",
        "far_campaign", "--faults 100000 --kills 200 --seed {seed}", 60),
    "kill-trainers": Campaign(
        "kills jobs of PyTorch DDP, and compares what they train",
        "adapters.killing", "--kills 50 --seed {seed}", 30),
    "torch": Campaign(
        "draws programs over a DataLoader and its resumes, and compares feeder's with PyTorch's",
        "adapters.torch_programs", "--programs 18000 --with-workers 2000 --seed {seed}", 60),
    "jax": Campaign(
        "draws jobs for JAX's arrays over a sharding, and kills each at every step",
        "adapters.jax_programs", "--configurations 300 --seed {seed}", 60),
    "tensorflow": Campaign(
        "draws jobs for TensorFlow's loops and Keras' fit, and kills each at every step",
        "adapters.tf_programs", "--configurations 300 --seed {seed}", 60),
    "lightning": Campaign(
        "draws jobs for Lightning's fit, and kills each at every step",
        "adapters.lightning_programs", "--configurations 300 --seed {seed}", 60),
    "hf": Campaign(
        "draws jobs for Hugging Face's Trainer, and kills each at every step",
        "adapters.hf_programs", "--configurations 300 --seed {seed}", 60),
    "accelerate": Campaign(
        "draws jobs for loops of Accelerate, and kills each at every step",
        "adapters.accelerate_programs", "--configurations 300 --seed {seed}", 60),
    "formats": Campaign(
        "draws files of every format, and damages them: a source reads what their library reads",
        "adapters.formats", "--inputs 250 --seed {seed}", 90),
    "mutate": Campaign(
        "plants sampled mutants, and counts those that tests notice",
        "scripts/mutate", "--mutants 300 --seed {seed}", 150),
    "mutate-adapters": Campaign(
        "the same in the adapters", "scripts/mutate", "--adapters --mutants 40 --seed {seed}", 150),
}  # fmt: skip
"""By their names, in the order in which they run."""


def words_of(name: str, seed: int, more: list[str], log: IO[str] | None = None) -> list[str]:
    """The words of a campaign's command, whose environment is made, if it has one of its own."""
    _, command, bound, _ = CAMPAIGNS[name]
    start = [sys.executable, "-m", command]
    if command.startswith("scripts/"):
        start = [str(ROOT / command)]
    elif command.startswith("adapters"):
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        venv = os.environ.get("FEEDER_VENV", str(ROOT / ".venv-adapters"))
        make = f". {shlex.quote(str(ROOT / 'scripts/lib.sh'))}; environment adapters"
        there = os.environ | {"FEEDER_VENV": venv}
        # With -e, else a package that cannot be installed counts as installed.
        subprocess.run(["bash", "-euc", make], check=True, env=there, stdout=log, stderr=log)
        start[0] = f"{venv}/bin/python"
    return [*start, *bound.format(seed=seed).split(), *more]


def run(name: str, seed: int, log: Path) -> tuple[int, str]:
    """Run a campaign; returns its exit status, and the last line that it said."""
    minutes = CAMPAIGNS[name].minutes
    with log.open("w+") as file:
        try:
            words = words_of(name, seed, [], file)
        except subprocess.CalledProcessError as error:
            return error.returncode, "its environment cannot be made"
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=file,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            status = -1
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = log.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return status, last if status >= 0 else f"not done within {minutes} minutes: {last}"


def run_all(names: list[str], seed: int) -> int:
    """Run campaigns, and print a line for each; returns the exit status."""
    failed, folder = [], Path(tempfile.mkdtemp(prefix="nightly-"))
    for name in names:
        began, log = time.monotonic(), folder / f"{name}.log"
        status, last = run(name, seed, log)
        seconds = time.monotonic() - began
        print(f"{name:17} seed {seed} {seconds:6.0f} s  {last}", flush=True)
        if status:
            failed.append(name)
            print(f"    FAILED with exit status {status}, see {log}", flush=True)
    print(f"{len(names)} campaigns, {len(failed)} failed: {' '.join(failed) or 'none'}")
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    """The command; does not return where one campaign takes the place of this process."""
    today = int(time.time() // 86400)
    if arguments[1:] and arguments[0] in CAMPAIGNS and arguments[1].startswith("-"):
        words = words_of(arguments[0], today, arguments[1:])
        os.execv(words[0], words)
    parser = argparse.ArgumentParser(prog="scripts/nightly", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CAMPAIGNS))
    parser.add_argument("--seed", type=int, default=today, help="what is drawn (today's number)")
    parser.add_argument("--list", action="store_true", help="say what they are, and run none")
    options = parser.parse_args(arguments)
    names = options.names or list(CAMPAIGNS)
    if unknown := [name for name in names if name not in CAMPAIGNS]:
        parser.error(f"there is no campaign {unknown[0]!r}: {', '.join(CAMPAIGNS)}")
    if options.list:
        for name in names:
            about, command, bound, minutes = CAMPAIGNS[name]
            print(f"{name:17} {about}\n{'':17} {command} {bound}, {minutes} minutes")
        return 0
    return run_all(names, options.seed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
