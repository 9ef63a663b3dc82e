"""The algorithm of Caffe2's `data_workers`, written again from a description of its behaviour.

It is what the feeder is measured against, so nothing is done to make it slow: no logging, no
metrics, no per-batch checks, and the blobs of the device queue are warm buffers that are swapped,
never allocated again. What it costs and what it loses is the algorithm's own:

- fetchers put whole chunks into one internal queue, bounded in chunks, waiting 0.5 s at a time;
- the enqueuer grows a batch with `np.append`, starting from a copy of its first chunk;
- rows over the batch size go back to the *tail* of the internal queue without waiting, and are
  dropped where the fetchers have filled it in the meantime;
- each blob is copied once more when it is fed, and moves through a device queue of its own.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Fetch = Callable[[int, int], Sequence[Array]]

POLL_S = 0.5
DEVICE_QUEUE_BATCHES = 4


def drain(items: queue.Queue[Any]) -> None:
    """Throw away what is queued, so that a blocked `put` can go on."""
    with suppress(queue.Empty):
        while True:
            items.get_nowait()


class BlobQueue:
    """The device queue of one blob: four filled buffers; both ends swap buffers, none copies."""

    def __init__(self) -> None:
        self.filled: queue.Queue[Array | None] = queue.Queue(DEVICE_QUEUE_BATCHES)
        self._spare: deque[Array] = deque()
        self._dequeued: Array | None = None

    def feed(self, values: Array) -> None:
        """Copy one batch of this blob into a buffer, and wait for room in the queue."""
        buffer = self._spare.popleft() if self._spare else np.empty_like(values)
        np.copyto(buffer, values)
        self.filled.put(buffer)

    def dequeue(self) -> Array | None:
        """Wait for the next batch, valid until the next call; None once the feed has ended."""
        if self._dequeued is not None:
            self._spare.append(self._dequeued)
        self._dequeued = self.filled.get()
        return self._dequeued

    def end(self) -> None:
        """Wake the reader with None."""
        drain(self.filled)
        self.filled.put(None)


class OriginalFeed:
    """Fetchers, an internal queue of `max_buffered_chunks` chunks, and one enqueuer."""

    def __init__(
        self,
        input_blob_names: Sequence[str],
        fetch_fun: Fetch,
        batch_size: int,
        num_worker_threads: int = 2,
        max_buffered_chunks: int = 100,
    ) -> None:
        self._fetch_fun = fetch_fun
        self._batch_size = batch_size
        self._active = False
        self._internal: queue.Queue[Sequence[Array]] = queue.Queue(max_buffered_chunks)
        self._blob_queues = [BlobQueue() for _ in input_blob_names]
        self._enqueuer = Thread(target=self._run_enqueuer, daemon=True)
        self._fetchers = [
            Thread(target=self._run_fetcher, args=(worker_id,), daemon=True)
            for worker_id in range(num_worker_threads)
        ]

    def start(self) -> None:
        """Start every thread."""
        self._active = True
        for thread in (self._enqueuer, *self._fetchers):
            thread.start()

    def stop(self, hurry: bool = False) -> bool:
        """End every thread; True where all of them ended.

        `hurry` empties the internal queue as well, so that no fetcher waits out its poll. The
        original has nothing like it: it is for those who have measured what they wanted.
        """
        self._active = False
        if hurry:
            drain(self._internal)
        while self._enqueuer.is_alive():
            for blob_queue in self._blob_queues:
                drain(blob_queue.filled)
            self._enqueuer.join(timeout=0.01)
        for fetcher in self._fetchers:
            fetcher.join(timeout=5.0)
        for blob_queue in self._blob_queues:
            blob_queue.end()
        return not any(fetcher.is_alive() for fetcher in self._fetchers)

    def dequeue(self) -> list[Array | None]:
        """The next batch: one array per blob, valid until the next call."""
        return [blob_queue.dequeue() for blob_queue in self._blob_queues]

    def _run_fetcher(self, worker_id: int) -> None:
        while self._active:
            self._put(self._fetch_fun(worker_id, self._batch_size))

    def _put(self, chunk: Sequence[Array]) -> None:
        rows = chunk[0].shape[0]
        assert all(column.shape[0] == rows for column in chunk)
        while self._active:
            try:
                return self._internal.put(chunk, block=True, timeout=POLL_S)
            except queue.Full:
                continue

    def _get(self) -> Sequence[Array] | None:
        while self._active:
            try:
                return self._internal.get(block=True, timeout=POLL_S)
            except queue.Empty:
                continue
        return None

    def _run_enqueuer(self) -> None:
        while self._active:
            batch = self._next_batch()
            if batch is not None:
                for blob_queue, values in zip(self._blob_queues, batch, strict=True):
                    blob_queue.feed(values)

    def _next_batch(self) -> list[Array] | None:
        batch: list[Array] = [np.array([]) for _ in self._blob_queues]
        while batch[0].shape[0] < self._batch_size:
            chunk = self._get()
            if chunk is None:
                return None
            for i, column in enumerate(chunk):
                if batch[i].shape[0] == 0:
                    batch[i] = column.copy()
                else:
                    batch[i] = np.append(batch[i], column, axis=0)
        return self._trim(batch)

    def _trim(self, batch: list[Array]) -> list[Array]:
        size = self._batch_size
        if batch[0].shape[0] > size:
            with suppress(queue.Full):  # where it is full, these rows are lost
                self._internal.put([column[size:] for column in batch], block=False)
            batch = [column[:size] for column in batch]
        return batch
