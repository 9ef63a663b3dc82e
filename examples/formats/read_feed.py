"""Reads one queue of a server, in shared memory or in frames, without feeder, as
docs/design/wire-protocol.md specifies it, with pyzmq, msgpack, NumPy and xxhash."""

import array
import mmap
import os
import socket
import struct
from pathlib import Path

import msgpack
import numpy as np
import xxhash
import zmq


class Reader:
    """The batches of a queue of the only feed of a server."""

    def __init__(self, address, checksum="full"):
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.linger = 1000
        self.dealer.rcvtimeo = 10_000
        self.dealer.connect(address)
        self.opened, self.unix, self.arenas, self.checksum = None, None, {}, checksum
        self.used, self.waiting, self.frames = 0, (), ()

    def open(self, *, queue=0, shared=True, token=None):
        """Take the queue, and say that batches can come."""
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        self.say(
            "Open",
            version=5,
            feed="",
            queue=queue,
            token=token,
            credit=4,
            hold=1,
            intent="start",
            undecided=token is None,
            takeover=False,
            consumer=os.urandom(16),
            attempt=0,
            ended=[],
            who="a reader",
            boot_id=boot_id if shared else "",
            checksum=self.checksum,
        )
        self.opened = self.hear("Opened")[0]
        self.generation, self.token = self.opened["generation"], self.opened["token"]
        if self.opened["shared"] is not None:
            self.unix = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.unix.connect(self.opened["shared"]["path"])
            self.unix.send(self.opened["shared"]["nonce"])
        plane, why = ("shared", "") if self.unix else ("frames", "frames were asked for")
        self.tell("Attached", plane=plane, reason=why)

    def say(self, kind, **fields):
        self.dealer.send(msgpack.packb({"type": kind, **fields}))

    def tell(self, kind, **fields):
        self.say(kind, generation=self.generation, **fields)

    def hear(self, *kinds):
        """The next message of some kinds, and the frames after it; others pass by."""
        while True:
            first, *frames = self.dealer.recv_multipart()
            message = msgpack.unpackb(first)
            if message["type"] == "Fault":
                raise RuntimeError(f"{message['kind']}: {message['text']}")
            if message["type"] in kinds:
                return message, frames

    def __iter__(self):
        """(epoch, index, step, rows) and the columns, as arrays of their own, of each batch."""
        while (group := self.next_group()) is not None:
            (sequence, epoch, index, step, stride, real, length, slots, checksums, shapes,
             tokens, span, *places) = group  # fmt: skip
            assert sequence == self.used
            rows = self.spec["batch_size"] if shapes is None else length
            for at, slot in enumerate(slots):
                memory = self.memory_of(slot)
                columns = self.columns(memory, rows, length, shapes, checksums[at])
                self.used += 1
                self.tell(
                    "Used",
                    sequence=self.used,
                    pending=0,
                    begun=True,
                    slots=[slot] if slot >= 0 else [],
                    report=[0.0, 0.0, 0, 0],
                )
                numbers = epoch, index + at * stride, step + at * stride
                if span is None:
                    self.token = tokens[at]
                else:
                    place = [values[at] if values else 0 for values in places]
                    self.token = token_of(self.opened, stride, numbers, span, *place)
                yield (*numbers, real), columns

    def next_group(self):
        """A group; none at the end."""
        while not self.waiting:
            message, self.frames = self.hear("Spec", "Arena", "Batches", "End")
            if message["type"] == "Spec":
                self.spec = message
            elif message["type"] == "Arena":
                self.take_arena()
            elif message["type"] == "Batches":
                self.waiting = message["groups"]
            else:
                assert message["sequence"] == self.used
                self.token = message["token"]
                return None
        group, *self.waiting = self.waiting
        return group

    def memory_of(self, slot):
        if slot < 0:
            return b"".join(self.frames)
        number, index = divmod(slot, 65536)
        memory, slot_bytes = self.arenas[number]
        return memory[index * slot_bytes : (index + 1) * slot_bytes]

    def columns(self, memory, rows, length, shapes, checksum):
        places, size = self.layout(rows, shapes)
        assert checksum == self.checksum_of(memory[:size]), "damaged"
        return {
            column["name"]: np.ndarray(shape, column["dtype"], memory, offset).take(
                range(length), column["axis"]
            )
            for column, (shape, offset) in zip(self.spec["columns"], places, strict=True)
        }

    def take_arena(self):
        """Map the arena that has come over the unix connection."""
        data, ancillary, _, _ = self.unix.recvmsg(24, socket.CMSG_SPACE(4))
        number, slot_bytes, num_slots = struct.unpack("<QQQ", data)
        (descriptor,) = array.array("i", ancillary[0][2])
        mapped = mmap.mmap(descriptor, slot_bytes * num_slots, prot=mmap.PROT_READ)
        os.close(descriptor)
        self.arenas[number] = memoryview(mapped), slot_bytes

    def layout(self, rows, shapes):
        """Shape and offset of each column, and the bytes of all."""
        places, size = [], 0
        for i, column in enumerate(self.spec["columns"]):
            shape = list(column["shape"] if shapes is None else shapes[i])
            shape.insert(column["axis"], rows)
            places.append((shape, size))
            size += -(-int(np.prod(shape)) * np.dtype(column["dtype"]).itemsize // 64) * 64
        return places, max(size, 64)

    def checksum_of(self, memory):
        if self.checksum == "off":
            return 0
        if self.checksum == "sampled" and len(memory) > 32768:
            starts = range(0, len(memory) - 1024, 65536)
            blocks = [bytes(memory[start : start + 1024]) for start in starts]
            memory = b"".join(blocks) + bytes(memory[-1024:])
        return xxhash.xxh3_64_intdigest(memory)

    def close(self):
        """Leave the queue, if one was taken."""
        if self.opened is not None:
            self.tell("Bye")
            self.hear("Farewell")
        if self.unix is not None:
            self.unix.close()
        self.context.destroy(linger=0)


def token_of(opened, stride, numbers, span, k, taken, digest):
    """The token after a batch that ended in a span."""
    pure, epoch, turn, live, calls, rows, marks, ring, firsts, new_marks, chunk_rows = span
    before = calls
    calls, rows, marks = list(calls), list(rows), list(marks)
    partition, last = ring[(k - 1) % len(ring)], firsts[(k - 1) % len(ring)] + (k - 1) // len(ring)
    mark = marks[partition]
    for i, of in enumerate(ring):
        count = max(0, -(-(k - i) // len(ring)))
        if count == 0:
            continue
        calls[of], rows[of] = firsts[i] + count, rows[of] + count * chunk_rows
        if new_marks[i] is not None:
            if of == partition and count > 1:
                mark = mark_after(new_marks[i], count - 1)
            marks[of] = mark_after(new_marks[i], count)
    after = [(partition + j) % len(live) for j in range(1, len(live))] + [partition]
    turn = next(other for other in after if live[other] or other == partition)
    leftover = [partition, last, taken, chunk_rows, digest, mark]
    if pure:
        leftover[:2] = 0, partition + len(live) * last
        live, turn, calls, rows, marks = [True], 0, [sum(before) + k], [0], [None]
    bits = sum(1 << i for i, alive in enumerate(live) if alive)
    position = [epoch, turn, bits.to_bytes(-(-len(live) // 8), "little"), calls, rows, marks, []]
    fingerprint = xxhash.xxh3_64_digest(fingerprint_value(opened["fingerprint"]))
    epoch, index, step = numbers
    began = msgpack.unpackb(opened["token"][11:])
    start, num, *rest = began[8]
    if "rounds" in msgpack.unpackb(opened["fingerprint"]) and epoch != began[3]:
        start = step - index
    dealing = [start % num, num, *rest]
    body = msgpack.packb(
        [opened["name"], opened["number"], fingerprint, epoch, index + 1, step + 1, position,
         leftover if taken else None, dealing]
    )  # fmt: skip
    return b"FT\x03" + xxhash.xxh3_64_digest(body) + body


def mark_after(runs, count):
    return next(mark for end, mark in runs if count <= end)


def fingerprint_value(packed):
    """The fields of a fingerprint as what is digested: sorted tuples."""
    fields = sorted(msgpack.unpackb(packed).items())
    return msgpack.packb([msgpack.ExtType(1, msgpack.packb([*field])) for field in fields])
