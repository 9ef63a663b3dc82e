"""The caches of this process: the user's `Cache`, that of the environment, and those of unpickled
sources. Of a folder all these have the same blocks, so that none is asked for twice.
"""

from __future__ import annotations

import atexit
import copyreg
import os
import time
from threading import Lock
from typing import Any, Self
from weakref import WeakSet, WeakValueDictionary

from feeder.workers.errors import ConfigError
from feeder.workers.forks import call_in_child
from feeder.workers.public import public
from feeder.workers.sources.arguments import PathLike, check_path, whole
from feeder.workers.sources.far.blocks import BLOCK_BYTES, Blocks
from feeder.workers.sources.far.objects import ENDING

_LEAST_BYTES = 16 * BLOCK_BYTES

_EXIT_S = 2.0
"""The end of the interpreter waits so long for requests that are under way."""

_every: WeakSet[Blocks] = WeakSet()
_shared: WeakValueDictionary[tuple[str, int], Blocks] = WeakValueDictionary()
_in_memory: list[Blocks] = []


class _Making:
    """The lock under which blocks are shared."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self.lock = Lock()
        call_in_child(self._start)


_making = _Making()


def _make(path: str, max_bytes: int) -> Blocks:
    blocks = Blocks(path, max_bytes)
    _every.add(blocks)
    return blocks


def blocks_of_this_process(path: str, max_bytes: int) -> Blocks:
    """The blocks of a folder; those in memory if there is no path."""
    with _making.lock:
        if not path:
            if not _in_memory:
                _in_memory.append(_make("", 0))
            return _in_memory[0]
        blocks = _shared.get((path, max_bytes))
        if blocks is None:
            blocks = _shared[path, max_bytes] = _make(path, max_bytes)
        return blocks


# Pickled they are the same cache in another process.
copyreg.pickle(Blocks, lambda blocks: (blocks_of_this_process, (blocks.path, blocks.max_bytes)))


def totals() -> dict[str, int]:
    """The figures of all caches of this process, added up."""
    total: dict[str, int] = {}
    for blocks in [*_every]:
        for name, value in blocks.stats().items():
            total[name] = total.get(name, 0) + value
    return total


@atexit.register
def _close_at_exit() -> None:
    # No thread should be in a request when the interpreter goes; a store that answers slowly does
    # not hold it up for long.
    ENDING.set()
    end = time.monotonic() + _EXIT_S
    for blocks in [*_every]:
        blocks.close(max(0.0, end - time.monotonic()))


@public("feeder")
class Cache:
    """What sources of URLs have read, on this host's disk: at most `max_bytes`, for all feeds and
    processes that name the same folder.

    Sources take it as `cache=`; without it they take that of the variable FEEDER_CACHE, as
    "FOLDER,BYTES", and otherwise 256 MiB of memory. It holds blocks of 1 MiB with their checksums;
    a process that is killed leaves none that is not whole. Each feed brings blocks before it uses
    them, in the order in which it will use them, and the block that is used farthest in the future
    goes first. If the disk is full or cannot be written to, blocks are kept in memory, and the log
    says so once. It deletes nothing that it did not make.

    Any thread uses it. A pickled cache is the same folder in another process.
    """

    def __init__(self, path: PathLike, max_bytes: int) -> None:
        """
        Args:
            path: A folder that is new, empty or a cache already; on a disk of this host. A `~` at
                its start is the user's home folder.
            max_bytes: The most that blocks take of it, at any time; 16 MiB at least.

        Raises:
            ConfigError: the folder holds other files, or an argument is wrong.
        """
        folder = _folder(check_path(path, "a folder for a cache"))
        self._blocks = _make(folder, whole("max_bytes", max_bytes, _LEAST_BYTES))

    @property
    def path(self) -> str:
        """The folder."""
        return self._blocks.path

    @property
    def max_bytes(self) -> int:
        """The most that blocks take of it."""
        return self._blocks.max_bytes

    def __reduce__(self) -> Any:
        return _unpickled, (self._blocks,)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ask for nothing more in advance, and wait for what is on its way. Sources can still be
        read; blocks stay on the disk."""
        self._blocks.close()

    def stats(self) -> dict[str, int]:
        """Figures of this process: `requests`, `bytes`, `retries`, `slower` (answers by which a
        store asked for fewer requests), `stalls` and `damaged` answers; `hits`, reads of blocks
        that were there, and `waits`, those that had to wait; blocks that are `wanted` and not asked
        for yet, and `coming`; and bytes `ahead`, that were asked for in advance and are not used
        yet."""
        return self._blocks.stats()


def _unpickled(blocks: Blocks) -> Cache:
    cache = Cache.__new__(Cache)
    cache._blocks = blocks
    return cache


def blocks_of(given: Any) -> Blocks:
    """The blocks of the cache that a source was given, or of that of the environment, or those in
    memory.

    Raises:
        ConfigError: what was given is no cache, or the variable says nothing that is one.
    """
    if isinstance(given, Cache):
        return given._blocks
    if given is not None:
        raise ConfigError(f"cache is {given!r}, expected a feeder.Cache")
    text = os.environ.get("FEEDER_CACHE", "")
    if not text:
        return blocks_of_this_process("", 0)
    path, comma, num_bytes = text.rpartition(",")
    if not comma or not path or not num_bytes.strip().isdecimal():
        raise ConfigError(f"FEEDER_CACHE is {text!r}, expected FOLDER,BYTES")
    try:
        given_bytes = int(num_bytes)
    except ValueError as error:  # Python converts no number of more than 4,300 digits
        raise ConfigError(f"FEEDER_CACHE has a number of {len(num_bytes)} digits") from error
    most = whole("the number of bytes of FEEDER_CACHE", given_bytes, _LEAST_BYTES)
    return blocks_of_this_process(_folder(path), most)


def _folder(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
