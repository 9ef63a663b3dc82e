"""What a cache asks of a store, and what it does if its disk or the store fails."""

from __future__ import annotations

import errno
import gc
import logging
import os
import pickle  # noqa: TID251  # as executors do
import signal
import time
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

import feeder
from far_server import FarServer
from feeder.errors import ConfigError, StorageError
from feeder.workers.sources.far import blocks as module
from feeder.workers.sources.far import cache as cache_module
from feeder.workers.sources.far import objects as objects_module
from feeder.workers.sources.far.blocks import BLOCK_BYTES, Blocks
from feeder.workers.sources.far.cache import blocks_of_this_process
from feeder.workers.sources.far.folder import Folder
from feeder.workers.sources.far.objects import Objects
from feeder.workers.sources.far.paths import FarFile, FarPath
from small import Aside

pytestmark = pytest.mark.foreign_sockets

NUM_BLOCKS = 40
BLOCK = 1024


class Bench:
    """A cache, and an object of many blocks that is read through it."""

    def __init__(self, far: FarServer, cache: Blocks) -> None:
        self.far, self.cache, self.data = far, cache, far.objects["b/x"]
        self.objects = Objects()
        self.one = self.objects.known(f"{far.address}/b/x")
        cache.register([self.one], self.objects)

    def check(self, start: int, stop: int) -> None:
        """What is read is what the object has there."""
        assert self.cache.read(self.one, start, stop) == self.data[start:stop]

    def foresee(self, *numbers: int, reader: str = "me") -> None:
        """Each of these blocks is for a step of its own."""
        for number in numbers:
            span = (self.one, number * BLOCK, (number + 1) * BLOCK)
            self.cache.foresee(reader, [span])

    def files(self) -> list[Path]:
        """Of the blocks that lie in the folder."""
        return [*Path(self.cache.path).glob("blocks/??/*")]


@pytest.fixture
def small(far: FarServer, monkeypatch: pytest.MonkeyPatch) -> FarServer:
    """A store with an object of many blocks."""
    monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    far.objects["b/x"] = os.urandom(BLOCK * NUM_BLOCKS - 10)
    return far


@pytest.fixture
def bench(tmp_path: Path, small: FarServer) -> Iterator[Bench]:
    made = Bench(small, Blocks(str(tmp_path / "cache"), 32 * 8192))
    yield made
    made.cache.close()


def test_blocks_that_lie_together_are_one_request(bench: Bench) -> None:
    end = NUM_BLOCKS * BLOCK - 10
    bench.check(10, 20)
    bench.check(1000, 9 * BLOCK)
    bench.check(BLOCK * (NUM_BLOCKS - 1), 10**9)
    bench.check(10**9, 10**9 + 5)
    assert [span for _, span in bench.far.asked] == [
        (0, BLOCK), (BLOCK, 9 * BLOCK), ((NUM_BLOCKS - 1) * BLOCK, end)
    ]  # fmt: skip
    bench.check(0, 9 * BLOCK)
    assert len(bench.far.asked) == 3
    stats = bench.cache.stats()
    assert (stats["requests"], stats["bytes"], stats["coming"]) == (3, 9 * BLOCK + end % BLOCK, 0)


def test_what_is_foreseen_is_brought_in_few_requests_before_it_is_read(bench: Bench) -> None:
    bench.foresee(*range(NUM_BLOCKS // 2))
    for number in range(NUM_BLOCKS // 2):
        bench.cache.enter("me", number)
        bench.check(number * BLOCK, (number + 1) * BLOCK)
        bench.cache.leave("me", [number])
    bench.cache.close()
    # 8 KiB of room for each; a quarter of the room is 8 blocks ahead. The first come one by one.
    assert bench.cache.stats()["bytes"] == BLOCK * NUM_BLOCKS // 2
    assert len(bench.far.asked) <= 10


def test_a_reader_that_is_slower_than_its_store_makes_few_requests(bench: Bench) -> None:
    cache = bench.cache
    bench.foresee(*range(NUM_BLOCKS))
    for number in range(NUM_BLOCKS):
        cache.enter("me", number)
        bench.check(number * BLOCK, (number + 1) * BLOCK)
        cache.leave("me", [number])
        # All that was asked for is there before the next step.
        with cache._idle:
            assert cache._idle.wait_for(lambda: not cache._active, 20)
    # 16 blocks ahead; five requests bring 40.
    assert cache.stats()["bytes"] == len(bench.data)
    assert len(bench.far.asked) <= 7
    assert cache.stats()["waits"] <= 1


def test_a_process_that_may_have_no_more_threads_reads_what_is_right(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Thread] = []

    class Few(Thread):
        def start(self) -> None:
            started.append(self)
            # Some start, so that others fail while blocks arrive.
            if len(started) % 3:
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(module, "Thread", Few)
    bench.foresee(*range(NUM_BLOCKS))
    for number in range(NUM_BLOCKS):
        bench.cache.enter("me", number)
        bench.check(number * BLOCK, (number + 5) * BLOCK)
        bench.cache.leave("me", [number])
    bench.cache.close()
    assert len(started) > 2
    assert bench.cache._active == 0
    for number in range(NUM_BLOCKS):
        bench.check(number * BLOCK, (number + 1) * BLOCK)


def test_what_may_get_a_neighbour_waits_while_enough_is_on_its_way(bench: Bench) -> None:
    cache = bench.cache

    def next_run(wanted: list[int], num_coming: int) -> list[int]:
        cache._pending = OrderedDict.fromkeys(wanted)
        cache._coming = {100 + i: Future() for i in range(num_coming)}
        return cache._next_wanted()

    # The run that was wanted last is short: it waits while enough of others comes.
    assert next_run([0, 1], 5) == [0, 1]
    assert next_run([0, 1], 6) == []
    # One that is whole, or after which others were wanted, waits while two do.
    assert next_run([*range(8)], 15) == [*range(8)]
    assert next_run([0, 1, 9], 15) == [0, 1]
    assert next_run([*range(8)], 16) == []
    # What a call needs now waits for nothing.
    cache._urgent = {1}
    assert next_run([1, 0], 30) == [1]
    # Those behind it come along, but for a reader that begins.
    assert next_run([1, 2, 0], 30) == [1, 2]
    cache._first = {1}
    assert next_run([1, 2, 0], 30) == [1]
    cache._coming = {}


def test_several_readers_of_a_block_make_one_request(bench: Bench) -> None:
    asked, go = Event(), Event()

    def fault(number: int, path: str, span: Any) -> str:
        asked.set()
        go.wait(20)
        return ""

    bench.far.fault = fault
    readers = [Aside(lambda: bench.check(5, 50)) for _ in range(3)]
    assert asked.wait(20)
    go.set()
    for reader in readers:
        reader.result()
    assert len(bench.far.asked) == 1


def test_a_request_that_fails_is_told_to_all_who_wait_and_leaves_no_room_taken(
    bench: Bench,
) -> None:
    bench.far.fault = lambda number, path, span: "403"
    bench.cache.foresee("me", [(bench.one, 0, 3 * BLOCK)])
    bench.cache.enter("me", 0)
    with pytest.raises(StorageError, match="is refused"):
        bench.check(0, 3 * BLOCK)
    bench.cache.leave("me", [0])
    bench.cache.close()
    assert not bench.files()
    bench.far.fault = lambda number, path, span: ""
    bench.check(0, 9)


def test_a_disk_that_fails_is_told_once_and_memory_takes_its_place(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(file: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".partial"):
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    monkeypatch.setattr(bench.cache, "_memory_room", 4 * BLOCK)
    with caplog.at_level(logging.WARNING, "feeder"):
        for start in (0, 2000, 4000, 0, 2000):
            bench.check(start, start + 1500)
    assert [record.getMessage() for record in caplog.records] == [
        f"the cache {bench.cache.path!r} cannot be written (No space left on device): blocks are "
        "kept in memory, at most 0 MiB"
    ]
    assert bench.cache._memory_bytes <= 4 * BLOCK
    assert not bench.files()
    monkeypatch.undo()


def test_a_folder_that_cannot_be_made_is_told_and_memory_takes_its_place(
    tmp_path: Path, small: FarServer, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "feeder"):
        bench = Bench(small, Blocks(str(tmp_path / "file" / "cache"), 32 * 8192))
        for _ in range(2):
            bench.check(0, 5)
    assert len(caplog.records) == 1
    assert len(small.asked) == 1
    bench.cache.close()


def test_blocks_that_another_process_removed_are_brought_again(bench: Bench) -> None:
    bench.foresee(0)
    bench.cache.enter("me", 0)
    bench.check(0, 100)
    bench.cache.close()
    for path in bench.files():
        path.unlink()
    bench.check(0, 100)
    assert len(bench.far.asked) == 2


def test_all_is_there_until_another_process_removes_a_block(bench: Bench) -> None:
    for number in range(NUM_BLOCKS):
        assert not bench.cache.has_all()
        bench.foresee(number)
        bench.cache.enter("me", number)
        bench.check(number * BLOCK, number * BLOCK + 9)
        bench.cache.leave("me", [number])
    bench.cache.close()
    assert bench.cache.has_all()
    bench.files()[0].unlink()
    bench.cache._open.clear()
    bench.check(0, 10**9)
    assert not bench.cache.has_all()


@pytest.mark.parametrize("failing", ["open", "remove"])
def test_a_block_that_is_there_and_cannot_be_read_or_removed_is_brought_into_memory(
    bench: Bench, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.check(0, 10)
    (path,) = bench.files()
    if failing == "remove":
        path.write_bytes(path.read_bytes()[:-1] + b"?")

    def fails(*_: Any) -> Any:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Folder, failing, fails)
    for _ in range(2):
        bench.check(5, 10)
        bench.check(5, BLOCK + 5)
    assert path.exists()
    # The block once more, and once the one after it.
    assert len(bench.far.asked) <= 4
    monkeypatch.undo()


@pytest.mark.parametrize("which", ["open", "claim"])
def test_blocks_that_are_held_open_make_room_for_others(
    bench: Bench, which: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for at in (0, 0, BLOCK):
        bench.check(at, at + 10)
    assert len(bench.cache._open) == 1
    there = getattr(Folder, which)

    def too_many(*arguments: Any) -> Any:
        if bench.cache._open:
            raise OSError(errno.EMFILE, "Too many open files")
        return there(*arguments)

    monkeypatch.setattr(Folder, which, too_many)
    at = BLOCK if which == "open" else 5 * BLOCK
    bench.check(at, at + 10)
    assert not caplog.records
    assert not bench.cache._memory


@pytest.mark.parametrize("how", ["cut", "changed"])
def test_a_block_that_somebody_cuts_or_changes_while_it_is_used_is_brought_again(
    bench: Bench, how: str
) -> None:
    for _ in range(2):
        bench.check(0, 10)
    (path,) = bench.files()
    if how == "cut":
        os.truncate(path, 30)
    else:
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(bytes([bench.data[BLOCK - 1] ^ 1]))
        os.utime(path, ns=(1, 1))
        # It is seen if the block is opened again.
        bench.cache._open.clear()
    for _ in range(2):
        bench.check(0, BLOCK)
    assert len(bench.far.asked) == 2
    assert path.stat().st_size > BLOCK


def test_a_file_that_nobody_closes_is_forgotten(bench: Bench) -> None:
    file = FarFile(FarPath(bench.one, bench.cache, bench.objects), to_end=True)
    # As if the garbage collector came while this thread holds it.
    with bench.cache._lock:
        del file
        gc.collect()
    assert bench.cache.stats()["wanted"] == 0
    assert not bench.cache._foresight._readers


def test_the_end_of_the_interpreter_does_not_wait_for_a_slow_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_EXIT_S", 0.0)
    monkeypatch.setattr(cache_module, "ENDING", Event())
    monkeypatch.setattr(cache_module, "_every", {bench.cache})
    bench.cache._active = 1
    cache_module._close_at_exit()
    bench.cache._active = 0
    # And who waits for a request sees it end.
    assert objects_module.RETRY_S + objects_module._REQUEST_S < module._WAIT_S


def test_the_table_is_told_when_a_block_that_was_used_is_needed_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(bench.cache.path, bench.cache.max_bytes)
    bench.check(0, 10)
    (entry,) = folder.entries()
    folder.rank([(entry.key, 5.0)])
    monkeypatch.setattr(module, "_RANK_S", -1.0)
    other = Bench(bench.far, Blocks(bench.cache.path, bench.cache.max_bytes))
    other.foresee(0, 0)
    other.cache.enter("me", 0)
    other.cache.leave("me", [0])
    (entry,) = folder.entries()
    assert time.time() - 60 < entry.due < time.time() + 60
    for each in (other.cache, folder):
        each.close()


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_bytes is 5, expected a whole number of at least"):
        feeder.Cache(tmp_path / "x", 5)
    with pytest.raises(ConfigError, match="path is 3"):
        feeder.Cache(3, 1 << 30)  # type: ignore[arg-type]
    (tmp_path / "mine").write_text("")
    with pytest.raises(ConfigError, match="no cache of feeder's"):
        feeder.Cache(tmp_path, 16 * BLOCK_BYTES)


def test_a_cache_that_is_unpickled_is_one_in_each_process(tmp_path: Path) -> None:
    with feeder.Cache(tmp_path / "x", 16 * BLOCK_BYTES) as cache:
        copies = [pickle.loads(pickle.dumps(cache)) for _ in range(2)]
        assert copies[0]._blocks is copies[1]._blocks
        assert (copies[0].path, copies[0].max_bytes) == (cache.path, cache.max_bytes)
        copies[0].close()


@pytest.mark.process
def test_a_forked_child_reads_blocks_that_are_there_and_is_told_of_others(bench: Bench) -> None:
    bench.check(0, 10)
    # Whatever other threads hold is theirs.
    with bench.cache._lock, bench.objects._lock, cache_module._making.lock:
        child = os.fork()
        if not child:
            signal.alarm(20)
            status = 1
            try:
                bench.objects.counts()
                blocks_of_this_process("", 0)
                # Of whatever is made here no request may be made either.
                with pytest.raises(feeder.ForkedError, match="spawn"):
                    Objects().known(bench.one.url)
                bench.check(5, 10)
                with pytest.raises(feeder.ForkedError, match="spawn"):
                    bench.check(5 * BLOCK, 6 * BLOCK)
                status = 0
            finally:
                os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    bench.check(5 * BLOCK, 6 * BLOCK)


def test_what_a_reader_waits_for_is_asked_for_first(bench: Bench) -> None:
    cache = bench.cache
    bench.foresee(0, 1, 2, 3, reader="a")
    bench.foresee(35, reader="b")
    # As if all requests were under way.
    cache._active = 16
    cache.enter("a", 0)
    cache.enter("b", 0)
    assert [*cache._pending] == [35, 0, 1, 2, 3]
    cache._active = 0
    bench.check(35 * BLOCK, 36 * BLOCK)


def test_the_credentials_that_were_given_last_are_used(bench: Bench) -> None:
    cache, far = bench.cache, bench.far
    far.objects["b/empty"], far.objects["b/y"] = b"", b"y" * 3000
    empty = bench.objects.known(f"{far.address}/b/empty")
    cache.register([empty], bench.objects)
    other = bench.objects.known(f"{far.address}/b/y")
    cache.register([other], bench.objects)
    newer = Objects()
    cache.register([bench.one, empty], newer)
    bench.check(0, 5)
    assert cache.read(other, 2000, 3000) == b"y" * 1000
    assert (newer.counts()["requests"], bench.objects.counts()["requests"]) == (1, 1)
    # Those of the file before end where the next one begins.
    end = (NUM_BLOCKS - 1) * BLOCK
    bench.check(end, end + 2 * BLOCK)
    cache.foresee("me", [(bench.one, end, end + BLOCK), (other, 0, 1000)])
    cache.enter("me", 0)
    assert cache.read(other, 0, 1000) == b"y" * 1000
    cache.close()
    assert newer.counts()["requests"] == 2
