"""Memory of chunks is written again when nobody looks at it, at neither end, and not before."""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from feeder import Call, Processes
from feeder.executors.actor import _Frames
from feeder.executors.blocks import Reader, Writer
from feeder.executors.child import _Function
from feeder.executors.wire import Calls, Load, Made
from feeds import running
from remote import ROWS, Big, filled

ONE = {"input_blob_names": ["x"], "batch_size": ROWS}


# ---- The two ends, in one process


class Ends:
    """A process's blocks, and the same as the other end sees them."""

    def __init__(self) -> None:
        self.writer, self.reader = Writer(), Reader()

    def send(self, *chunks: np.ndarray) -> list[np.ndarray]:
        """Return what comes of an answer with these arrays."""
        places = [self.writer.place(chunk, number) for number, chunk in enumerate(chunks)]
        self.reader._dtypes = [chunk.dtype for chunk in chunks]
        blocks, fresh, descriptors, dropped = self.writer.lend()
        self.reader.add(fresh, [os.dup(one) for one in descriptors])
        self.writer.sent()
        roots = self.reader.open(blocks)
        arrays = [self.reader.array(place, roots) for place in places]
        self.reader.drop(dropped)
        return arrays

    def give_back(self) -> None:
        """The other end has let go of what it does not look at."""
        self.writer.free(self.reader.freed())

    @property
    def num_bytes(self) -> int:
        return self.reader.num_bytes


SIZES = st.sampled_from((0, 1, 63, 64, 65, 4096, 70_000, 500_000, 1_048_576, 3_000_000))


Answers = list[tuple[list[int], bool, int]]
"""Of each answer the sizes of its arrays, whether they lie in a block, and what is let go of."""


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.lists(SIZES, min_size=1, max_size=4), st.booleans(), st.integers(0, 9)))
)
def test_no_block_is_written_under_an_array(answers: Answers) -> None:
    ends = Ends()
    held: dict[int, tuple[np.ndarray, bytes]] = {}
    kept: list[tuple[np.ndarray, bytes]] = []
    for number, (sizes, is_made, drop) in enumerate(answers):
        answer(ends, number, sizes, is_made, held, kept)
        # The fetch function keeps some of its arrays for a while, whoever looks at the batches.
        del kept[: -1 - drop % 3]
        for key in [key for key in held if (key + drop) % 3 == 0]:
            del held[key]
        ends.give_back()
        assert all(array.tobytes() == wanted for array, wanted in (*held.values(), *kept))


def answer(
    ends: Ends, number: int, sizes: list[int], is_made: bool,
    held: dict[int, tuple[np.ndarray, bytes]], kept: list[tuple[np.ndarray, bytes]],
) -> None:  # fmt: skip
    """Send arrays of these sizes, and note what came, and the first of those that were sent."""
    make = ends.writer.empty if is_made else np.empty
    chunks = [filled(make((size,), np.uint8), number + i) for i, size in enumerate(sizes)]
    wanted = [chunk.tobytes() for chunk in chunks]
    kept.append((chunks[0], wanted[0]))
    for i, array in enumerate(ends.send(*chunks)):
        held[10 * number + i] = array, wanted[i]


@pytest.mark.served  # as much work as feeds that are served
def test_blocks_are_used_again() -> None:
    ends = Ends()
    for number in range(200):
        (array,) = ends.send(filled(ends.writer.empty((2_000_000,), np.uint8), number))
        assert array[1] == (31 + number * 7919) % 251
        del array
        ends.give_back()
    assert ends.num_bytes < 5_000_000


def test_small_answers_that_are_held_keep_no_blocks() -> None:
    ends = Ends()
    held = []
    for number in range(200):
        held += ends.send(filled(ends.writer.empty((8192,), np.uint8), number))
        ends.give_back()
    assert ends.num_bytes < 3_000_000
    for number, array in enumerate(held):
        assert array.tobytes() == filled(np.empty((8192,), np.uint8), number).tobytes()


def test_a_chunk_of_the_block_is_not_copied() -> None:
    ends = Ends()
    made = ends.writer.empty((4, 250_000), np.uint8)
    (array,) = ends.send(made)
    made[2, 7] = 99
    assert array[2, 7] == 99
    # One that was made for an earlier answer is: the other end may have had its block already.
    (again,) = ends.send(made)
    made[2, 7] = 98
    assert (array[2, 7], again[2, 7]) == (98, 99)


@pytest.mark.parametrize("is_kept", (False, True))
def test_what_a_call_has_written_in_its_place_is_copied_only_if_it_is_kept(is_kept: bool) -> None:
    writer, kept = Writer(), []

    def fetch(call: Call) -> Any:
        (array,) = chunk = Big(9)(call)
        kept.append(array if is_kept else None)
        return chunk

    load = Load(
        function=b"remote:plain", is_path=True, sizes=[], names=["x"], axes=[0], rows_per_call=ROWS,
        pure=True, seekable=False, seed_globals=False, first_worker_id=0, num_workers=1, seed=0,
        log_level=0, is_far=False, begins=None,
    )  # fmt: skip
    function = _Function(load, os.memfd_create("unused"), np.zeros(2, np.uint64), writer)
    function._fetch = fetch
    for index in range(3):
        made, _ = function.call(Calls(index, 0, 0, ROWS, 1, 2**30, None, []))
        writer.sent()
    # The first call had no place.
    num_bytes = sum([used for _, used in made.blocks])
    assert num_bytes == (2 if is_kept else 1) * ROWS * 2**18


@pytest.mark.served  # likewise
def test_many_arrays_of_one_answer_need_few_descriptors() -> None:
    ends = Ends()
    chunks = [filled(ends.writer.empty((1_100_000,), np.uint8), i) for i in range(300)]
    places = [ends.writer.place(chunk, 0) for chunk in chunks]
    blocks, fresh, descriptors, _ = ends.writer.lend()
    assert len(places) == 300 and len(fresh) == len(blocks) == len(descriptors) < 250
    ends.writer.sent()


# ---- Through a feed


def mapped() -> int:
    """Return how many blocks this process has mapped."""
    return Path("/proc/self/maps").read_text().count("/memfd:feeder-chunks")


def bytes_of(coordinator: Any) -> int:
    (figures,) = coordinator.figures().feeds
    return int(figures.executor.bytes)


class Dealer:
    """A socket that has sent small parts at once, and others later."""

    def __init__(self) -> None:
        self.later = threading.Event()

    def send(self, part: Any, flags: int = 0, copy: bool = True, track: bool = False) -> Any:
        is_small = copy or len(part) < zmq.COPY_THRESHOLD
        return zmq.MessageTracker(*[] if is_small else [self.later])

    def send_multipart(self, parts: Any, **named: Any) -> Any:
        return [self.send(part, **named) for part in parts][-1]


def test_a_block_is_written_anew_when_zeromq_has_sent_all_of_a_message() -> None:
    writer = Writer()
    # The second does not fit into the first block.
    for number, size in enumerate((1_000_000, 60_000)):
        writer.place(np.zeros(size, np.uint8), number)
    blocks, *_ = writer.lend()
    frames = object.__new__(_Frames)
    frames._owner, frames._later, frames._under_way = threading.get_ident(), deque(), deque()
    frames.blocks, dealer = writer, Dealer()
    vars(frames)["_dealer"] = dealer
    frames.send(Made([], [], 0, b"", [], blocks, [], []))
    assert len(blocks) == 2 and not frames.take_sent()
    dealer.later.set()
    assert frames.take_sent() == [number for number, _ in blocks]


@pytest.mark.process
def test_large_chunks_that_were_taken_are_freed() -> None:
    gc.collect()
    before = mapped()
    with running(Big(150), executor=Processes(2), max_buffered_bytes=2**22, **ONE) as (
        coordinator,
        feed,
    ):
        for batch in feed:
            assert batch["x"][1, 3] == filled(np.empty((ROWS, 2**18), np.uint8), batch.index)[1, 3]
            del batch
        assert bytes_of(coordinator) < 100 * 2**20
        del feed
    del coordinator
    gc.collect()
    assert mapped() <= before


@pytest.mark.process
def test_batches_that_are_kept_need_no_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with running(Big(150), executor=Processes(2), **ONE) as (_, feed):
        kept = list(islice(feed, 120))
        assert len(os.listdir("/proc/self/fd")) < before + 40
    for batch in kept:
        assert batch["x"][1, 3] == filled(np.empty((ROWS, 2**18), np.uint8), batch.index)[1, 3]
