"""Reads a feed that actors fetch, and goes on where it was stopped, on any number of actors:

ray start --head --num-cpus 2
python examples/ray_fetch/train.py position --stop-at 40
python examples/ray_fetch/train.py position --actors 1-4
"""

import argparse
import hashlib
import os

import numpy as np
import ray

import feeder


def fetch(call: feeder.Call) -> list[np.ndarray]:
    """A batch of text made numbers; it stands for what your machine has too few cores for."""
    if call.index == 100:
        raise StopIteration
    words = [f"word{(call.index * 31 + i * 7) % 1000}" for i in range(64 * 16)]
    numbers = {f"word{i}": i for i in range(1000)}
    return [np.array([numbers[word] for word in words]).reshape(64, 16)]


def main() -> None:
    """Train, or as good as."""
    parser = argparse.ArgumentParser()
    parser.add_argument("position", help="a file")
    parser.add_argument("--actors", default="2", help="N, or FEWEST-MOST")
    parser.add_argument("--stop-at", type=int, help="end after so many steps")
    args = parser.parse_args()
    ray.init(address="auto", log_to_driver=False)
    resume = None
    if os.path.exists(args.position):
        with open(args.position, "rb") as file:
            resume = file.read()
    coordinator = feeder.init_data_input_workers(
        ["tokens"], fetch, 64, executor=f"ray:{args.actors}", epochs=2, resume=resume
    )
    with coordinator:
        for batch in coordinator["train"]:
            digest = hashlib.sha256(batch["tokens"].tobytes()).hexdigest()[:8]
            print(f"step {batch.cut.step}: {digest}", flush=True)
            if batch.cut.step == args.stop_at:
                with open(args.position + ".new", "wb") as file:
                    file.write(batch.cut.token())
                os.replace(args.position + ".new", args.position)
                return


if __name__ == "__main__":
    main()
