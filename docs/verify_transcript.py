"""Reads transcripts of feeder, by the format that docs/transcripts.md tells, without feeder.

    python verify_transcript.py run/train.0.0.transcript
    python verify_transcript.py A/train.0.0.transcript B/train.0.0.transcript

One file is checked cell by cell, and the number of its steps and the chain after its last one are
printed. Of two files the first step that differs is printed, too. The exit status is 0 if all is as
it should be, 1 if steps differ, 2 if a file is damaged, and otherwise 3 if the last bytes of a file
do not fit its chain, as after a write that was cut off, or a change of the last cell.

`step_digest` computes what a step's cell has to say from the rows that the step is said to have
had. It needs NumPy and xxhash; all else is Python's own.
"""

import hashlib
import json
import struct
import sys

CELL = 32


class Damaged(Exception):
    """A file is no transcript, or was changed."""


class Transcript:
    """The steps of one file: `digests[step]` is what the cell of a step says, `chain[step]` the
    chain after it. `settings` are pairs of a digest of settings and the first step that had
    them, `rest` is the number of bytes at the end that are no whole cell."""

    def __init__(self, data):
        begins = data.find(b"\n") + 1
        try:
            self.line = json.loads(data[:begins])
            if self.line["feeder"] != "transcript" or self.line["format"] != 1:
                raise ValueError(self.line)
        except (ValueError, KeyError, TypeError) as error:
            raise Damaged(f"the first line is none of a transcript of format 1: {error}") from error
        self.digests, self.chain, self.settings = {}, {}, []
        told, step, stride, news = hashlib.sha256(data[:begins]), None, 1, None
        at = begins
        while at + CELL <= len(data):
            says, chain = data[at : at + 16], data[at + 16 : at + CELL]
            after = told.copy()
            after.update(says)
            if after.digest()[:16] != chain:
                break
            told, at = after, at + CELL
            if says[0]:
                if step is None:
                    raise Damaged("no mark says which step is the first")
                if news is not None:
                    self.settings.append((news, step))
                    news = None
                self.digests[step], self.chain[step] = says, chain
                step += stride
            elif says[1] == 1:
                stride, step = struct.unpack(">IQ", says[4:])
            elif says[1] == 2:
                news = says[8:]
        self.last_chain = told.digest()[:16]
        self.rest = len(data) - at
        # A write that was cut off leaves a part of a cell, and zeros.
        if any(data[at + CELL :]):
            raise Damaged(
                f"the cell at byte {at} is not of the chain: it or one before was changed"
            )


def read(path):
    """The transcript in a file. Raises `Damaged`."""
    with open(path, "rb") as file:
        return Transcript(file.read())


def step_digest(step, epoch, index, rows, columns):
    """What the cell of a step says: its number, its epoch, its number in the epoch, its real rows,
    and its columns, a dict of arrays in the order of the feed's names."""
    import numpy
    import xxhash

    described = [[name, array.dtype.str, list(array.shape)] for name, array in columns.items()]
    told = struct.pack("<4Q", step, epoch, index, rows)
    told += json.dumps(described, separators=(",", ":")).encode()
    for array in columns.values():
        values = numpy.ascontiguousarray(array)
        if values.dtype.names:
            values = without_padding(values)
        told += values.tobytes()
    digest = xxhash.xxh3_128(told).digest()
    return digest if digest[0] else b"\x80" + digest[1:]


def without_padding(values):
    """The same rows of several fields, with zeros between the fields."""
    import numpy

    cleared = numpy.frombuffer(bytearray(values.nbytes), values.dtype).reshape(values.shape)
    for name in values.dtype.names:
        field = values[name]
        cleared[name] = without_padding(field) if field.dtype.names else field
    return cleared


def first_difference(one, other):
    """The first step that differs, or that one of them alone has; None if there is none."""
    steps = sorted(one.digests.keys() | other.digests.keys())
    return next((n for n in steps if one.digests.get(n) != other.digests.get(n)), None)


def main(paths):
    """Check one file, or compare two."""
    if len(paths) not in (1, 2):
        print(__doc__)
        return 2
    found = []
    for path in paths:
        try:
            found.append(read(path))
        except (Damaged, OSError) as error:
            print(f"{path}: {error}")
            return 2
        steps = sorted(found[-1].digests)
        told = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
        print(f"{path}: {len(steps)} cells, {told}, chain {found[-1].last_chain.hex()}")
        if rest := found[-1].rest:
            print(f"{path}: the last {rest} bytes do not fit the chain: a cut write or a change")
    if len(found) == 2:
        first = first_difference(*found)
        print("all steps are equal" if first is None else f"step {first} is the first that differs")
        if first is not None:
            return 1
    return 3 if any(one.rest for one in found) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
