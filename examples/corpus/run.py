"""Serves the corpus to two ranks, kills them all, goes on with three, and compares the order:

python examples/corpus/run.py
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from corpus import make

HERE = Path(__file__).parent
STEPS, KILLED_AT = 60, 25


def calm():
    """What each batch is in a run without a server, ranks and kills: a digest of its rows."""
    with make() as coordinator:
        return {
            batch.step: hashlib.sha256(b"".join(map(bytes, batch.arrays()))).hexdigest()
            for batch in islice(coordinator["train"], STEPS)
        }


def start(stack, command, **pipes):
    child = stack.enter_context(subprocess.Popen([sys.executable, *command], cwd=HERE, **pipes))
    stack.callback(child.kill)  # SIGKILL: nobody says goodbye
    return child


def job(folder, ranks, kill_at=None):
    """Serve and train, up to the last step or to the one where all are killed; returns what each
    batch was."""
    address, seen = f"ipc://{folder}/{ranks}.sock", {}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with ExitStack() as stack:
        serve = ["-m", "feeder", "serve", "corpus:make", "--bind", address]
        start(stack, [*serve, "--queues", str(ranks)])
        train = ["train.py", address, f"{folder}/checkpoint.npz", f"--steps={STEPS}"]
        trainers = [start(stack, [*train, f"--rank={i}"], **pipes) for i in range(ranks)]
        while trainers:
            # A rank of which nothing more comes has ended.
            said = {trainer: trainer.stdout.readline() for trainer in trainers}
            trainers = [trainer for trainer in trainers if said[trainer]]
            reports = [json.loads(said[trainer]) for trainer in trainers]
            seen |= {report["step"]: report["rows"] for report in reports}
            if kill_at is not None and max(seen) >= kill_at:
                break
            for trainer in trainers:
                trainer.stdin.write("go on\n")
    steps = sorted(seen)
    print(f"{ranks} ranks: steps {steps[0]} to {steps[-1]}" + (", killed" if kill_at else ""))
    return seen


def compare(whole, killed, resumed):
    """What is wrong with a job that was killed and resumed; empty where nothing is."""
    first = min(resumed)
    wrong = [f"step {step} is missing" for step in whole if step not in killed | resumed]
    wrong += [
        f"step {step} is not in its place"
        for step in sorted(killed | resumed)
        for seen in (killed, resumed)
        if seen.get(step, whole.get(step)) != whole.get(step)
    ]
    return wrong if 0 < first <= max(killed) + 1 else [*wrong, f"resumed at step {first}"]


def main():
    whole = calm()
    with tempfile.TemporaryDirectory(prefix="corpus-") as folder:
        killed = job(folder, 2, KILLED_AT)
        resumed = job(folder, 3)
    wrong = compare(whole, killed, resumed)
    print("\n".join(wrong) or f"EQUAL: {len(whole)} batches, as of a run that nobody killed")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
