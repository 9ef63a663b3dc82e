"""Every number of the engine that was chosen by measuring, with its reason.

None of them changes a batch: a wrong value costs time or memory, never a row. Limits of formats
and protocols are no tuning and stand where they are checked.

The dates say when a value was measured last. Where no machine is named, it was one with two cores.
"""

from __future__ import annotations

import os
from typing import Any

_KIB = 1024
_MIB = 1024 * 1024


class Tuning:
    """The tuning constants. Frozen, so any thread may read them; a test passes its own."""

    # A plain class: to compile the methods of a dataclass of so many fields takes a millisecond and
    # more of each import.
    def __init__(self, **changed: Any) -> None:
        constants = {name: getattr(Tuning, name) for name in Tuning.__annotations__}
        if unknown := changed.keys() - constants:
            raise TypeError(f"no tuning constants: {sorted(unknown)}")
        # Its own attributes: they are read faster than those of the class.
        vars(self).update(constants, **changed)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{name} is a constant: make another Tuning")

    def replace(self, **changed: Any) -> Tuning:
        """The same with some constants changed."""
        return Tuning(**{**vars(self), **changed})

    ticket_s: float = 0.0005
    remote_ticket_s: float = 0.002
    """A ticket is for as many calls as take about so long; the second if a process makes them."""
    # To draw and to wake for each call takes longer than a quick call; a call that takes longer is
    # alone on its ticket. A process sends what it has after a millisecond.

    # ---- when the merge is woken, and how often it looks by itself

    grace_s: float = 0.0005
    """For so long a merge that waits lets a chunk list grow."""
    # Handing over each chunk at once passes one-row chunks one by one: 30 times slower. Without the
    # grace 1 MB batches from one-row chunks come at 0.02 of their pace (2026-11-24).

    slow_look_s: float = 10.0
    """So often a wait for chunks looks at what it waits for, where nothing wakes it."""
    # Every chunk list and every close wakes it, and the timeout has a deadline of its own. So this
    # only bounds what a lost wake-up would cost; not measured (2026-11-21).

    # ---- how far fetchers run ahead

    ahead_bytes: int = 8 * _MIB
    """While the merge is busy, and so much was handed over, a partition that has something to
    collect is not called."""
    # Above it rows have left every cache before they are copied: 4.3 MB chunks came two to three
    # times slower (2026-11-21); such batches, filled, come at 0.73 of their pace without the rule
    # (2026-11-24).

    max_computing: int = max(1, len(os.sched_getaffinity(0)) - 1)
    """So many fetchers compute while the merge is busy: one core is the merge's."""
    # A second fetcher beside the merge costs four tenths of what both get done: 20 MB batches from
    # filled 7-row chunks came at 410/s, and come at 510 to 640/s (2026-11-21). Limited always, and
    # not only while the merge is busy, 1 MB batches came a fifth to a third slower.

    waiting_list_s: float = 0.001
    """A chunk list waits for something else, such as a disk, if it waited for more than this."""
    # A chunk list that computes waits for the interpreter alone, and that for less (2026-11-21).

    turn_s: float = 0.0005
    """A fetcher holds as many partitions at once as it calls in so long."""
    # To ask for each under the lock takes longer than a quick call: 64 workers of 8 KB batches take
    # 48 us of CPU a batch one by one, and 19 to 23 in turns (2026-11-27).

    turns_compared: int = 16
    """Of so many partitions whose turn it is the one is called that has been called least."""
    # By turn alone a partition is called that is ahead already, and its rows grow cold: 20 MB
    # batches from filled 7-row chunks came at 0.6 of their pace. To compare all of 1,000 takes
    # 0.1 ms (2026-11-25).

    max_lists: int = 256
    """So many chunk lists of a partition may wait to be collected."""
    # Chunk lists without rows count in no bound: this one keeps a function that gives empty chunks
    # from filling the memory (2026-11-21).

    # ---- how large a chunk list is

    list_bytes: int = 16 * _MIB
    list_batches: int = 64
    """A chunk list has at most so many bytes, and the rows of so many batches."""
    # Smaller, and threads wake each other more than they work: 64 kB and 8 batches gave half the
    # 8 KB batches per second, 8 MiB nine tenths of a server's 1 MB batches. 32 MiB and 128 batches
    # gave no more (2026-11-22).

    list_calls: int = 512
    """A chunk list has at most so many calls."""
    # Of more chunks the first have left the caches when they are merged. A chunk without rows
    # counts as one with a row (2026-11-21).

    part_bytes: int = 4 * _MIB
    """Of larger batches a chunk list has so many bytes, and no whole batch."""
    # A whole 20 MB batch of each worker leaves every cache before it is merged. With 8 MiB such
    # batches from filled 7-row chunks came a tenth slower (2026-11-22).

    bound_share: int = 2
    """All chunk lists that are being filled have the bound divided by this together."""
    # With a quarter of the bound 8 KB batches came a fifth slower than with half of it
    # (2026-11-22).

    lists_remembered: int = 16
    """A large chunk list of a feed is forgotten over so many lists of each partition."""
    # The reason stands at `BufferBudget.add_calls`. That it is forgotten slowly was measured, the
    # number was not (2026-11-24).

    outgrown_times: int = 2
    """A chunk list so many times larger than expected stops calls for which there is no room."""
    # Lists of one feed differ by less, as a rule; not measured (2026-11-24).

    # ---- calls that gave nothing

    first_none_pause_s: float = 0.001
    last_none_pause_s: float = 0.25
    """A call that gave None is made again after so long; doubled up to the second."""
    # An idle source costs no core, and its next row is late by a quarter of a second at most; not
    # measured (2026-11-21).

    progress_s: float = 5.0
    """So often a replay tells how far it has come."""
    # For a person who reads the log; no figure depends on it (2026-11-21).

    # ---- threads

    switch_interval_s: float = 0.001
    """The interpreter's switch interval while threads of the engine run."""
    # Beside a thread that computes in Python each hand-over waits for it. With Python's own 5 ms
    # 8 KB batches came at 8,300/s, and come at 33,000/s; 2 ms gave half of that. 0.5 ms gave twice
    # as much, and left the busy thread half of its pace (2026-11-22).

    # ---- hand-over to the device queues

    group_bytes: int = 16 * _MIB
    group_batches: int = 64
    """Batches are handed over in groups of so many bytes or batches."""
    # With groups of 4 MiB threads wake each other more than they work: 1 MB batches came at
    # 16,500/s, and come at 20,000/s; 32 MiB gave no more (2026-11-22).

    yield_bytes: int = 8 * _MIB
    """Where more than this goes round, the enqueuer waits until the user has taken a group."""
    # More leaves the caches on the way, and a copy into buffers that no cache holds takes up to
    # three times as long (2026-11-21).

    # ---- copies (`stream/copying.py`)

    drop_gil_bytes: int = 256 * _KIB
    """Arrays of this size and larger are copied by NumPy, which lets go of the interpreter."""
    # To get the interpreter back takes milliseconds beside a busy thread, which is worth it only
    # where the copy takes as long as a switch of threads (2026-11-21).

    kept_bytes: int = 256 * _KIB
    """Smaller arrays are copied into a message, larger ones are sent from where they are."""
    # A part of a message of its own costs more than the copy of a smaller array (2026-11-23).

    join_bytes: int = 8 * _KIB
    """Arrays of at most this size, on average, are copied by `bytes.join`."""
    # Above it the second copy costs more than the calls that it saves (2026-11-21).

    piece_bytes: int = 512 * _KIB
    """Large arrays are copied in pieces of this size."""
    # Of a larger piece a core's second cache keeps nothing; smaller ones are copied slower
    # (2026-11-23).

    pieces_from_bytes: int = 8 * _MIB
    """Arrays of this size and larger are copied in pieces."""
    # Copied at once they pass by the caches, and the next reader of the batch fetches it from
    # memory: 7 to 22 % of a served 20 MB batch. Smaller ones in pieces push others out of the
    # caches (2026-11-23).

    kept_view_times: int = 2
    """A view of an array that is more than so many times larger is copied, and not sent."""
    # Sent, it would keep the whole array until its batch is used, and the bound counts the view
    # alone: memory is bounded by so many times the bound (by reckoning, 2026-11-23).

    # ---- memory of chunks (`stream/memory.py`)

    pool_from_bytes: int = 512 * _KIB
    pool_to_bytes: int = 8 * _MIB
    """Sources make chunks of these sizes in memory that is used again."""
    # malloc does so by itself for smaller ones; free blocks count in no bound, so larger ones are
    # not kept (2026-11-21).

    pool_blocks: int = 4
    """So many free blocks are kept: at most 32 MiB."""
    # Free blocks count in no bound, so they are few; the number was not measured (2026-11-21).

    slots_kept: int = 2
    """So many slots of a device may be kept by the fetch function while slots are short."""
    # Their memory is missing to the batches ahead. With two the calls wait no longer for slots that
    # may never come back; not measured (2026-11-25).

    pool_block_times: int = 2
    """A free block that is more than so many times too large is left for larger arrays."""
    # Else it would serve small arrays, and hold memory that counts in no bound; not measured
    # (2026-11-21).

    malloc_shown_bytes: int = 32 * _MIB - 64 * _KIB
    """malloc is shown a block of this size, so that it keeps what is freed."""
    # glibc follows freed blocks up to 32 MiB, its own few bytes included. 1 MB batches came at
    # 9,000/s in a fresh process, and come at 19,500/s (2026-11-21).

    # ---- records and orders (`sources/`)

    record_join_bytes: int = 8 * _KIB
    """Records of at most this size are copied twice or three times, all at once."""
    # That takes less time than to copy them one by one (2026-11-21).

    joined_bytes: int = _MIB
    """Rows of one call that have at most so many bytes together are joined, whatever their size."""
    # A join lets nobody else run, so larger columns are copied row by row (2026-11-24).

    mapped_from_bytes: int = 64 * _KIB
    """Where records of this size and larger lie in the map of an LMDB is found out and kept."""
    # To find out where a record lies takes 2 us, as long as to copy 50 KB. Found out once, 100 KB
    # records come 1.25 to 1.4 times as fast (2026-11-22).

    mapped_together: int = 4
    """So many records that lie at the same distance are copied at once, and no fewer."""
    # With fewer NumPy lets go of the interpreter too often (2026-11-22).

    mapped_in_vain: int = 8
    """After so many calls whose records lie unevenly, more than others, no more is found out."""
    # Then it costs and gains nothing; not measured (2026-11-22).

    keys_sampled: int = 16
    """So many keys of an LMDB are looked up before all of it is taken to be numbered."""
    # One key takes microseconds, and reading all of them 0.3 us each. A gap between the samples is
    # found when its record is read, so this changes no batch; not measured (2026-11-24).

    spare_transactions: int = 16
    """So many read transactions of an LMDB are kept for calls to come."""
    # More calls than that are rarely under way at once; not measured (2026-11-21).

    datum_tails: int = 64 * _KIB
    """So many different ends of records are remembered, with the labels that they mean."""
    # A record whose ends were seen before is not parsed. The memory is bounded for data sets in
    # which each label is another (2026-11-22).

    keeps_gil_elements: int = 500
    """Random numbers are drawn for so many elements at a time."""
    # For more NumPy lets go of the interpreter in every operation, and waits 1 to 5 ms for it
    # beside a busy thread (2026-11-21).

    kept_blocks: int = 4
    """So many blocks of a permutation are kept, since calls of some threads share a block."""
    # Not measured apart (2026-11-24).

    few_engines: int = 20
    """Fewer random engines than this are seeded one by one."""
    # For few, NumPy's arrays cost more than the loop; not measured apart (2026-11-22).

    few_swaps: int = 1 << 16
    """So few swaps of a shuffle are made one by one, since NumPy lets go of the interpreter."""
    # Beside a busy Python thread that costs more than the loop (2026-11-22).

    swaps_drawn: int = 1 << 20
    swaps_followed: int = 1 << 18
    """So many swaps of a shuffle are drawn at once, and so many followed at once."""
    # What is followed lies in a core's caches (2026-11-22).

    lists_kept: int = 4
    """So many shuffled lists, or keyed permutations, of an order are kept."""
    # Calls of two epochs are under way at once where one goes over into the next, and two feeds may
    # share a source (2026-11-21).

    tables_kept: int = 64
    """So many batches of mapped tables, and so many footers of Parquet files, are kept open."""
    # Rows of one call lie anywhere. A batch that is mapped costs no memory of its own, and to parse
    # a footer takes 15 us for each of its groups (2026-11-25).

    record_attempts: int = 4
    """So often a record is read before an `OSError` makes it a defective one that is left out."""
    # As `retries=3` makes a call. Defective records are few, so that it costs nothing (2026-11-27).

    skips_listed: int = 100
    """So many records that are left out are named, in the log and in the list of a source."""
    # A data set with one bad record in a hundred would fill a disk, and snapshots (2026-11-27).

    maps_kept: int = 64
    """So many files of tokens, and so many indexes of files, are mapped at once."""
    # Each map holds a descriptor, of which a process has 1,024 by default. To map a file anew takes
    # 15 us, about as long as to open it (2026-11-27).

    stretches_kept: int = 16
    """So many MiB of the content of a compressed file are kept."""
    # Threads that read in order stand within some calls of each other (2026-11-28).

    inflated_kept: int = 8
    """So many compressed files are being decompressed at once, by each source."""
    # Each has a descriptor, and the MiB above; not measured (2026-11-28).

    index_bytes_kept: int = 64 * _MIB
    """So many bytes of indexes of files are kept in memory, by each source; others are mapped."""
    # A million records. Rows of a shuffle lie in any file (2026-11-27).

    group_bytes_kept: int = 256 * _MIB
    """So many bytes of decoded row groups are kept in a process, and the last group in any case."""
    # A group has 100 MB and more if a file is one group, and eight of them took 1.9 GB in each
    # process; 1.0 GB are left, of which half are groups that are being decoded (2026-11-27).

    permutations_kept: int = 64
    """So many permutations of windows are kept, where a shuffle keeps records together."""
    # Rows of one call lie in a few windows, and calls of some threads in the same ones; not
    # measured (2026-11-25).

    window_block: int = 4096
    window_blocks: int = 32
    """A windowed shuffle is walked in blocks of so many steps, and so many blocks are kept."""
    # Calls that come a little out of order find their answer made. A block takes about 1 ms
    # (2026-11-21).

    window_checkpoints: int = 64
    window_checkpoint_bytes: int = 16 * _MIB
    """So many states of the walk are kept to go back to, with so many bytes together."""
    # They bound memory; not measured (2026-11-21).

    window_spare_rounds: int = 16
    """A window is found by walking so many rounds of it back."""
    # Something of it stays unknown with a probability of exp(-16). Then all is walked: slower, and
    # the same answer (2026-11-22).

    window_states: int = 1024
    """So many states of the random engine are kept, for the cursors of positions to come."""
    # They bound memory; not measured (2026-11-22).


TUNING = Tuning()
"""What the product runs with."""
