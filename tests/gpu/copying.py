"""A GPU whose memory is poisoned before it is written again, and a user whose work is late."""

from __future__ import annotations

from typing import Any

import numpy as np

from feeder import Batch
from feeder.devices.cuda.cupydriver import CupyDriver, open_gpu
from standin.numbered import ROWS, rows_of

POISON = 0xA5
_DELAY_BYTES = 32 * 2**20


class Poisoning(CupyDriver):
    """The driver as it is shipped, but for the poison."""

    num_copies = 0
    registers = True
    """Whether memory that is there already may be registered."""

    def copy_in(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        self.num_copies += 1
        self._runtime.memsetAsync(target, POISON, num_bytes, stream.ptr)
        super().copy_in(target, source, num_bytes, stream)

    def copy_within(self, target: int, source: int, num_bytes: int, stream: Any) -> None:
        with self._bound():
            self._runtime.memsetAsync(target, POISON, num_bytes, stream.ptr)
        super().copy_within(target, source, num_bytes, stream)

    def register(self, memory: memoryview) -> Any:
        if not self.registers:
            raise RuntimeError("not in this test")
        return super().register(memory)


def open_poisoning(made: list[Poisoning], name: str, ordinal: int) -> Poisoning:
    """Open a GPU so, and add it to a list."""
    driver = open_gpu(name, ordinal)
    made.append(Poisoning(driver._cupy, name, ordinal))
    return made[-1]


class LateReader:
    """Gives a stream the copying back of each batch, behind work that takes a while."""

    def __init__(self, driver: CupyDriver, stream: Any, num_bytes: int, *, delays: int = 1) -> None:
        self._runtime = driver._runtime
        self._stream = stream
        self._delays = delays
        self._scratch = driver.alloc_device(_DELAY_BYTES)
        self._host = driver.alloc_pinned(num_bytes)
        self._at = 0
        self._seen: list[tuple[tuple[int, ...], list[tuple[int, Any, Any]]]] = []

    def read(self, batch: Batch) -> None:
        """Returns before anything is done; the batch may be let go of."""
        runtime, places = self._runtime, []
        for _ in range(self._delays):
            runtime.memsetAsync(self._scratch.address, 0, _DELAY_BYTES, self._stream.ptr)
        for array in batch.arrays():
            target = self._host.address + self._at
            kind = runtime.memcpyDeviceToHost
            runtime.memcpyAsync(target, array.data.ptr, array.nbytes, kind, self._stream.ptr)
            places.append((self._at, array.dtype, array.shape))
            self._at += array.nbytes + -array.nbytes % 16
        self._seen.append(((batch.epoch, batch.index, batch.step, batch.rows), places))

    def records(self) -> list[Any]:
        """What was read, when all work is done: as `feeds.note` writes it down."""
        self._runtime.streamSynchronize(self._stream.ptr)
        view = self._host.view
        return [
            (
                *head,
                tuple(
                    (dtype.str, shape, np.ndarray(shape, dtype, view, at).tobytes())
                    for at, dtype, shape in places
                ),
            )
            for head, places in self._seen
        ]


def assert_vectors(got: list[np.ndarray], num: int) -> None:
    """See that these are the vectors of so many batches."""
    assert len(got) == num
    wanted = [rows_of(step * ROWS, ROWS)[1] for step in range(num)]
    assert [step for step in range(num) if not np.array_equal(got[step], wanted[step])] == []
