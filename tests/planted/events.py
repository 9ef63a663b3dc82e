"""Waits for events, and records of them, each left out in turn: on a GPU nobody would notice, but
for rows that are wrong now and then."""

from __future__ import annotations

from planted.bug import Bug

_WAITS = "tests/feeder/devices/cuda/test_waits.py::test_a_device_that_hears_is_not_blamed"
_COPIER = "feeder/devices/cuda/copier.py"
_QUEUE = "feeder/devices/cuda/queue.py"
_OTHER = "tests/feeder/devices/cuda/test_streams.py::"

EVENTS = (
    Bug(
        name="copy does not wait for user",
        harm="A batch is copied into a slot that the step before still reads: it trains on rows of "
        "two batches.",
        file=_COPIER,
        symbol="Copier._load",
        old="            driver.wait(stream, event)\n",
        new="            pass\n",
        tests=(f"{_WAITS}[run]",),
    ),
    Bug(
        name="user's end not recorded",
        harm="The same: what the copy waits for was never put after the user's work.",
        file=_COPIER,
        symbol="Copier._let_go",
        old="                self.driver.record(lease.slot.freed, lease.stream)\n",
        new="",
        tests=(f"{_WAITS}[run]",),
    ),
    Bug(
        name="user's end on the copy stream",
        harm="The same: the event is put after the copies, in the place of the user's work.",
        file=_COPIER,
        symbol="Copier._let_go",
        old="self.driver.record(lease.slot.freed, lease.stream)",
        new="self.driver.record(lease.slot.freed, self._stream)",
        tests=(f"{_WAITS}[run]",),
    ),
    Bug(
        name="user does not wait for copy",
        harm="A step begins on rows that are still on their way.",
        file=_QUEUE,
        symbol="CudaQueue._hand_out",
        old="            self.driver.wait(stream, slot.ready)\n",
        new="",
        tests=(f"{_WAITS}[run]",),
    ),
    Bug(
        name="copy not recorded",
        harm="The same: what the step waits for was never put after the copy.",
        file=_COPIER,
        symbol="Copier._load",
        old="        driver.record(ready, stream)\n",
        new="",
        tests=(f"{_WAITS}[run]",),
    ),
    Bug(
        name="current stream does not wait",
        harm="A step on a stream of its own is fine, but PyTorch, which DLPack puts after CuPy's "
        "current stream, reads rows that are still on their way.",
        file=_QUEUE,
        symbol="CudaQueue._hand_out",
        old="                self.driver.wait(current, slot.ready)\n",
        new="                pass\n",
        tests=(_OTHER + "test_cupys_current_stream_comes_after_the_copy_too",),
    ),
    Bug(
        name="every second batch unwaited",
        harm="Two batches of one copy are handed to two streams, and the second begins too early.",
        file=_QUEUE,
        symbol="CudaQueue._hand_out",
        old="        if seen != self._waited:\n",
        new="        if self._waited is None or seen[0] != self._waited[0]:\n",
        tests=(_OTHER + "test_batches_of_one_copy_on_different_streams_all_come_after_it",),
    ),
    Bug(
        name="host does not wait for copy",
        harm="The next batch is written into a pinned slot that the last one is still copied from.",
        file=_COPIER,
        symbol="Copier._land",
        old="        self.driver.synchronize(flights[0].done)\n",
        new="",
        tests=(f"{_WAITS}[run]",),
    ),
    Bug(
        name="end of copy not recorded",
        harm="The same: what the host waits for was never put after the copy.",
        file=_COPIER,
        symbol="Copier._load",
        old="        driver.record(done, stream)\n",
        new="",
        tests=(f"{_WAITS}[run]",),
    ),
    Bug(
        name="one copy done, all done",
        harm="The same, for copies that were begun after the one that was waited for.",
        file=_COPIER,
        symbol="Copier._land",
        old="if not flights or not self.driver.is_done(flights[0].done):",
        new="if not flights:",
        tests=(f"{_WAITS}[run]",),
    ),
    Bug(
        name="memory goes under a copy",
        harm="A consumer that leaves unpins memory that the GPU still reads: the driver fails, or "
        "the machine does.",
        file=_COPIER,
        symbol="Copier.drain",
        old="                self.driver.drain(stream)\n",
        new="                pass\n",
        tests=(f"{_WAITS}[leave]",),
    ),
)
