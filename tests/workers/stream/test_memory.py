"""Memory that is used again: never under a live view, and again when the last one is gone."""

from __future__ import annotations

import importlib.util
import platform
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import feeder
from feeder.workers.stream import copying, memory
from feeder.workers.stream.copying import is_sole_owner
from feeder.workers.stream.memory import Memory, Pool
from needs import needs_counts
from project import printed
from small import WAIT_S, make

MIB = 1 << 20
SHAPE = (64, 256, 64)

VIEWS: dict[str, Callable[[Any], Any]] = {
    "slice": lambda a: a[3:5],
    "transpose of a slice": lambda a: a[1:3].transpose(2, 0, 1)[1:],
    "memoryview": lambda a: memoryview(a)[1:],
    "DLPack": np.from_dlpack,
    "iterator": lambda a: a.flat,
    "the array it is a view of": lambda a: a.base,
    "what names the memory": lambda a: np.asarray(a.base.base),
}


@pytest.fixture(params=VIEWS.values(), ids=VIEWS.keys())
def view_of(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    made: Callable[[Any], Any] = request.param
    return made


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def lent(pool: Pool, fill: int = 0) -> Any:
    array = pool.empty(SHAPE, np.uint8)
    array[...] = fill
    return array


def test_memory_is_not_used_again_under_a_live_view(view_of: Callable[[Any], Any]) -> None:
    pool = Pool()
    array = lent(pool, 7)
    view = view_of(array)
    del array
    others = [lent(pool, fill) for fill in range(3)]
    del others
    lent(pool, 9)
    assert (np.asarray(view).reshape(-1).view(np.uint8) == 7).all()


def test_memory_is_used_again_when_the_last_view_is_gone(view_of: Callable[[Any], Any]) -> None:
    pool = Pool()
    array = lent(pool)
    begin, view = address(array), view_of(array)
    del array
    other = lent(pool)
    assert address(other) != begin
    del view
    assert address(lent(pool)) == begin


def test_what_came_back_last_is_used_first_and_four_blocks_are_kept() -> None:
    pool = Pool()
    arrays = [lent(pool) for _ in range(9)]
    begins = [address(array) for array in arrays]
    while arrays:
        del arrays[0]
    taken = [lent(pool) for _ in range(4)]
    assert [address(array) for array in taken] == begins[:-5:-1]
    assert not pool._free


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((4 * MIB,), "u1", True),
        ((2, MIB // 2), "f4", True),
        ((2 * MIB,), "u1", True),
        ((2 * MIB - 1,), "u1", False),
        ((4 * MIB + 1,), "u1", False),
    ],
)
def test_a_block_is_used_for_what_it_fits(shape: tuple[int, ...], dtype: str, fits: bool) -> None:
    pool = Pool()
    block = pool.empty((4 * MIB,), "u1")
    begin = address(block)
    del block
    assert (address(pool.empty(shape, dtype)) == begin) == fits


@pytest.mark.parametrize("size", [0, 1, 512 * 1024 - 1, 8 * MIB + 1])
def test_small_and_huge_arrays_have_memory_of_their_own(size: int) -> None:
    pool = Pool()
    array = pool.empty((size,), np.uint8)
    assert array.flags.owndata and array.base is None
    del array
    assert not pool._free


@pytest.mark.parametrize("dtype", ["u1", "<f4", ">i8", "c8", "M8[s]", [("a", "i4"), ("b", "u1")]])
def test_an_array_is_what_numpy_gives(dtype: Any) -> None:
    array, wanted = Pool().empty((100, 7, 900), dtype), np.empty((100, 7, 900), dtype)
    assert type(array) is np.ndarray and type(array.base.base) is Memory
    assert (array.shape, array.dtype, array.strides) == (wanted.shape, wanted.dtype, wanted.strides)
    flags = ("c_contiguous", "writeable", "aligned")
    assert all(getattr(array.flags, flag) for flag in flags)


def test_threads_never_share_memory() -> None:
    pool = Pool()

    def use(mark: int) -> bool:
        sound = True
        for i in range(40):
            array = pool.empty((MIB,), np.uint8)
            view = array[i:]
            array[...] = mark
            del array
            sound = sound and bool((view == mark).all())
        return sound

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(use, range(8)))
    assert len(pool._free) <= 4


# ---- passing on


@needs_counts
@pytest.mark.parametrize("hold", [lambda a: a, lambda a: a.base, lambda a: a[1:], weakref.ref])
def test_joined_memory_has_a_sole_owner_while_nobody_else_holds_it(hold: Any) -> None:
    arrays = [np.ndarray(8, np.uint8, bytearray(8))]
    assert is_sole_owner(arrays, 0)
    held = hold(arrays[0])
    assert not is_sole_owner(arrays, 0)
    del held
    assert is_sole_owner(arrays, 0)


@needs_counts
def test_a_view_that_somebody_holds_is_an_owner(view_of: Callable[[Any], Any]) -> None:
    arrays = [lent(Pool())]
    view = view_of(arrays[0])
    assert not is_sole_owner(arrays, 0)
    del view
    assert is_sole_owner(arrays, 0)


def test_nothing_has_a_sole_owner_without_the_interpreters_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "_GIL", False)
    assert not is_sole_owner([np.ndarray(8, np.uint8, bytearray(8))], 0)


def test_part_of_lent_memory_has_no_sole_owner_beside_the_rest() -> None:
    array = lent(Pool())
    arrays = [array[:32]]
    assert not is_sole_owner(arrays, 0)
    assert not is_sole_owner([lent(Pool()).T], 0)


@needs_counts
@pytest.mark.parametrize("least", [1, 1 << 40])
def test_who_owns_lent_memory_is_told_whatever_the_pool_lends(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The references of a sole owner are counted when the module is imported."""
    monkeypatch.setattr(memory, "_LEAST_BYTES", least)
    spec = importlib.util.spec_from_file_location("another_copying", copying.__file__)
    assert spec is not None and spec.loader is not None
    another = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(another)
    monkeypatch.undo()
    arrays = [lent(Pool())]
    assert another.is_sole_owner(arrays, 0)
    view = arrays[0][1:]
    assert not another.is_sole_owner(arrays, 0) and len(view)


def batches_of(pool: Pool, begins: list[int], **settings: Any) -> feeder.Coordinator:
    """A feed of ten batches of one chunk each, whose addresses `begins` gets."""

    def fetch(call: feeder.Call) -> tuple[Any]:
        if call.index == 10:
            raise StopIteration
        array = lent(pool, call.index)
        begins.append(address(array))
        return (array,)

    # Not repeatable: else the first call is made twice.
    return make(fetch, ["x"], len(lent(pool)), num_worker_threads=1, repeatable=False, **settings)


@needs_counts
@pytest.mark.parametrize("writable", [False, True])
def test_a_chunk_in_lent_memory_is_the_batch(writable: bool) -> None:
    pool, begins = Pool(), list[int]()
    with batches_of(pool, begins, writable=writable) as coordinator:
        batches = list(coordinator["train"])
    assert [address(batch["x"]) for batch in batches] == begins
    assert all((batch["x"] == i).all() for i, batch in enumerate(batches))
    assert all(batch["x"].flags.writeable == writable for batch in batches)


@pytest.mark.parametrize("writable", [False, True])
def test_a_feed_goes_round_in_the_memory_of_batches_that_were_dropped(writable: bool) -> None:
    pool, begins = Pool(), list[int]()
    with batches_of(pool, begins, writable=writable, max_buffered_batches=1) as coordinator:
        for i, batch in enumerate(coordinator["train"]):
            assert (batch["x"] == i).all()
            if writable:
                batch["x"][...] = 255
            del batch
    assert len(set(begins)) < len(begins)


CHURN = """
import resource

import numpy as np

from feeder.workers.stream.memory import keep_freed_memory

KEEP
for i in range(21):
    if i == 1:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(1_000_000, np.uint8) for _ in range(40)]
    del arrays
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
ALL_FAULTS = 20 * 40 * 1_000_000 // 4096


def count_faults(keep: str, **settings: str) -> int:
    """Page faults of a process that makes 800 arrays of 1 MB, 40 at a time."""
    return int(printed("-c", CHURN.replace("KEEP", keep), limit_s=WAIT_S, **settings))


# Without the interpreter's lock memory is not malloc's: it is kept anyhow.
@needs_counts
@pytest.mark.process
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds are glibc's")
def test_malloc_keeps_what_is_freed_for_the_next_chunks() -> None:
    assert count_faults("keep_freed_memory()") < ALL_FAULTS // 4
    assert count_faults("") > ALL_FAULTS // 2
    # A threshold that the user has set stays.
    assert count_faults("keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072") > ALL_FAULTS // 2
