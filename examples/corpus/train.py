"""Trains one rank on the served corpus, and goes on where the job was killed, with any number of
ranks: `run.py` starts it, and the server.
"""

import argparse
import hashlib
import json
import os
import sys

import numpy as np

import feeder

TOKENS = 257  # the bytes of a text, and padding


def train(counts, batch):
    """Learn from a batch which token follows which; returns the loss before."""
    tokens, documents = batch["tokens"], batch["segment_ids"]
    # A pair lies within one document of a row, and padding is in none.
    is_pair = (documents[:, 1:] == documents[:, :-1]) & batch["loss_mask"][:, 1:]
    first, second = tokens[:, :-1][is_pair], tokens[:, 1:][is_pair]
    chances = (counts[first, second] + 1) / (counts.sum(axis=1) + TOKENS)[first]
    np.add.at(counts, (first, second), 1)
    return -np.log(chances).mean()


def load(checkpoint):
    """The model, and the position of the job; None at the start."""
    if not os.path.exists(checkpoint):
        return np.zeros((TOKENS, TOKENS), np.int64), None
    with np.load(checkpoint) as saved:
        return saved["counts"], saved["position"].tobytes()


def save(checkpoint, counts, batch):
    """The position is a token of one batch, and is right for all ranks."""
    position = np.frombuffer(batch.cut.token(), np.uint8)
    with open(checkpoint + ".new", "wb") as file:
        np.savez(file, counts=counts, position=position)
    os.replace(checkpoint + ".new", checkpoint)


def wait_for_the_others():
    """What an all-reduce is in a real job: no rank is a step ahead. `run.py` answers."""
    if not sys.stdin.readline():
        sys.exit("the job has ended")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("checkpoint")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="batches of all ranks together")
    parser.add_argument("--every", type=int, default=4, help="batches between checkpoints")
    args = parser.parse_args()
    counts, position = load(args.checkpoint)
    with feeder.connect(args.address, queue=args.rank, resume=position) as feed:
        for number, batch in enumerate(feed, 1):
            if batch.step >= args.steps:
                break
            loss = train(counts, batch)
            digest = hashlib.sha256(b"".join(map(bytes, batch.arrays()))).hexdigest()
            print(json.dumps({"step": batch.step, "loss": loss, "rows": digest}), flush=True)
            wait_for_the_others()
            if args.rank == 0 and number % args.every == 0:
                save(args.checkpoint, counts, batch)


if __name__ == "__main__":
    main()
