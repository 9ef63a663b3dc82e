"""The bugs that are planted, in the order in which a row meets them."""

from __future__ import annotations

from planted.bug import Bug
from planted.events import EVENTS
from planted.mixing import MIXING
from planted.resuming import RESUMING
from planted.running import RUNNING
from planted.showing import SHOWING
from planted.storing import STORING

_STREAM = "tests/conformance/test_stream.py::test_stream_is_the_naive_one"
_ASSEMBLER = "tests/workers/stream/test_assembler.py::"
_KEYWORDS = "tests/feeder/feeds/test_keywords.py::test_a_keyword_does_what_it_says"
_PLACES = "tests/conformance/test_rows_per_call.py::"
_GAPS = "tests/feeder/feeds/test_races.py::"

FEEDING = (
    Bug(
        name="swapped workers",
        harm="The workers' chunks come in the reverse of their turns: a stream that is repeatable, "
        "but is another than the one promised, and another for every number of rounds at hand.",
        file="workers/stream/merge.py",
        symbol="Merge._next_ring",
        old="for i in range(partition + 1, partition + size):",
        new="for i in range(partition + size - 1, partition, -1):",
        tests=(
            "tests/workers/stream/test_merge.py::test_a_ring_takes_one_chunk_of_each_live_worker_in_turn",
            _STREAM + "[3-small-seek]",
        ),
    ),
    Bug(
        name="schema by arrival",
        harm="Where two workers disagree about a dtype, the first to arrive is right and the "
        "other is blamed: now the one, now the other.",
        file="workers/pipeline.py",
        symbol="Pipeline._make_fetcher",
        old="        calls = (\n            make_calls(",
        new="""\
        release, arrange = self.channel.release, self.schema.arrange

        def look_first(partition, *args, **kwargs):
            arrange(partition.chunks)
            return release(partition, *args, **kwargs)

        self.channel.release = look_first
        calls = (
            make_calls(""",
        tests=(_GAPS + "test_the_worker_whose_turn_is_later_is_blamed_whichever_came_first",),
    ),
    Bug(
        name="epoch begun early",
        harm="A quick worker is called for the next epoch while a slow one is still in this: a "
        "fetch function that reshuffles at the epoch's end hands out rows of two epochs mixed.",
        file="workers/fetch/scheduler.py",
        symbol="Scheduler._begin_epoch",
        old="if not all(self._is_over(one)",
        new="if not any(self._is_over(one)",
        tests=(
            "tests/workers/fetch/test_scheduler.py::"
            "test_no_epoch_begins_before_all_workers_have_ended_the_one_before",
        ),
    ),
    Bug(
        name="another device's slot",
        harm="Rows dropped at the end of an epoch leave a slot to the batch after the next, which "
        "is another device's: a server is told to free what that one's consumer never had.",
        file="workers/stream/assembler.py",
        symbol="Assembler._copy_whole",
        old="        self._slot = None\n        if self._places is None or not",
        new="        slot = self._slots.take_slot(self.device, self.schema.columns, self._size)\n"
        "        if self._places is None or not",
        tests=(
            _ASSEMBLER + "test_a_batch_lies_in_a_slot_of_its_own_device[0-stream]",
            "tests/feeder/service/server/test_leftover_rows.py::"
            "test_a_slot_that_dropped_rows_were_written_to_stays_with_its_queue[frames]",
        ),
    ),
    Bug(
        name="rest beside calls beyond the end",
        harm="A call beyond the end of an epoch is still writing when the epoch's last rows are "
        "handed out: its rows come where the padding was.",
        file="workers/stream/assembler.py",
        symbol="Assembler.end_epoch",
        old="if self._places is not None and not self._older:",
        new="if False:",
        tests=(_PLACES + "test_a_call_beyond_the_end_writes_into_no_batch[2-pad]",),
    ),
    Bug(
        name="place of another call",
        harm="Calls write each other's rows over: some are lost, others come twice.",
        file="workers/stream/placement.py",
        symbol="Plan.of_call",
        old="return self.first_turn + batches, part",
        new="return self.first_turn + batches, 0",
        tests=(_PLACES + "test_the_stream_is_the_naive_one",),
    ),
    Bug(
        name="slot that is looked at",
        harm="A fetch function that keeps an array of an earlier call finds the rows of a later "
        "one in it: what it returns depends on when its server's consumer gave the slot back.",
        file="feeder/service/memory/memfd.py",
        symbol="ArenaSlot.open",
        old="if self.written() is not None:",
        new="if False:",
        tests=(
            "tests/feeder/feeds/test_rows_per_call.py::"
            "test_a_server_says_so_where_the_arrays_of_all_calls_are_kept",
        ),
    ),
    Bug(
        name="too few rows",
        harm="A call in the middle of an epoch that gives fewer rows than it has to is taken for "
        "the last one: later rows come at places where others expect theirs.",
        file="workers/stream/merge.py",
        symbol="Merge._check_rows",
        old="rows[i] < expected:",
        new="rows[i] < 0:",
        tests=(
            "tests/feeder/feeds/test_rows_per_call.py::"
            "test_a_call_that_gives_another_number_of_rows_is_named[1-1-in process]",
        ),
    ),
    Bug(
        name="draws without the seed",
        harm="Another seed gives the same augmentations: five runs that were to be averaged are "
        "one run done five times.",
        file="workers/stream/batch.py",
        symbol="Call.rng",
        old="return _generator(self.seed, _DRAWS_OF_CALL",
        new="return _generator(0, _DRAWS_OF_CALL",
        tests=(
            "tests/conformance/test_stream.py::test_seed_alone_changes_what_a_pure_function_draws",
            f"{_KEYWORDS}[seed]",
        ),
    ),
    Bug(
        name="retry without seek",
        harm="A call that failed half-way is made again from where it broke off: its rows are "
        "skipped in silence.",
        file="workers/fetch/calls.py",
        symbol="WorkerCalls.undo",
        old="""\
    def undo(self) -> None:
        self._seek()""",
        new="""\
    def undo(self) -> None:
        return""",
        tests=(_GAPS + "test_a_call_is_made_again_from_where_the_failed_one_began",),
    ),
    Bug(
        name="timeout ignored",
        harm="A source that has gone silent hangs the training for ever, where `timeout` was to "
        "end it: the original shipped this for three months.",
        file="workers/fetch/channel.py",
        symbol="StallDetector.__init__",
        old="self._timeout_s = timeout_s",
        new="self._timeout_s = 1e9",
        tests=(f"{_KEYWORDS}[timeout]",),
    ),
    Bug(
        name="bound ignored",
        harm="The fetchers run ahead without an end and the process is killed for its memory.",
        file="workers/fetch/scheduler.py",
        symbol="BufferBudget.room_rows",
        old="return self.max_rows - self.rows - self.kept_rows",
        new="return self.max_rows",
        tests=(
            "tests/workers/fetch/test_scheduler.py::test_the_bound_is_on_rows_and_on_bytes",
            "tests/workers/fetch/test_running_ahead.py::"
            "test_memory_is_bounded_however_many_threads_call_a_pure_function",
        ),
    ),
    Bug(
        name="leftover dropped",
        harm="Of every chunk that does not end with a batch the rest is lost: with large chunks "
        "most of the data is never seen.",
        file="workers/stream/assembler.py",
        symbol="Assembler.add",
        old="            i, taken = j, last\n",
        new="            i, taken = j + (last > 0), 0\n",
        tests=(
            _ASSEMBLER + "test_batches_are_the_rows_cut_at_every_fifth",
            _STREAM + "[3-large-replay]",
        ),
    ),
    Bug(
        name="leftover at the tail",
        harm="The rest of a chunk comes after chunks that were fetched later, as in the original: "
        "rows change their order, and a resumed run differs from one that was not disturbed.",
        file="workers/stream/assembler.py",
        symbol="Assembler.add",
        old="            i, taken = j, last\n",
        new="""\
            i, taken = j + (last > 0), 0
            if last:
                rest = rows[j] - last
                for arrays, axis in zip(merged.columns, self.schema.axes, strict=True):
                    arrays += [np.moveaxis(np.moveaxis(arrays[j], axis, 0)[last:], 0, axis)]
                rows.append(rest)
                ends.append(ends[-1] + rest)
""",
        tests=(
            _ASSEMBLER + "test_batches_are_the_rows_cut_at_every_fifth",
            _STREAM + "[3-large-replay]",
        ),
    ),
    Bug(
        name="shared chunk passed on",
        harm="An array that the fetch function keeps, in a cache perhaps, is the user's batch: "
        "what the one writes to it the other reads.",
        file="workers/stream/copying.py",
        symbol="is_sole_owner",
        old="return sys.getrefcount(arrays[i]) == _SOLE_REFERENCES",
        new="return True",
        tests=(
            _GAPS + "test_a_cache_of_the_fetch_function_is_not_the_users_to_write",
            _ASSEMBLER + "test_a_chunk_that_somebody_else_can_see_is_copied",
        ),
    ),
    Bug(
        name="padding counted as real",
        harm="With last_batch='pad' the repeated rows are counted in `batch.rows`: the last row of "
        "an epoch weighs many times in every mean over the data.",
        file="workers/stream/batch.py",
        symbol="Batch.__init__",
        old="        self.rows = rows\n",
        new="        self.rows = len(arrays[0])\n",
        tests=(_ASSEMBLER + "test_the_end_of_an_epoch", f"{_KEYWORDS}[last_batch]"),
    ),
    Bug(
        name="slot given back early",
        harm="A batch that the user still holds is written over by a later one: `list(feed)` holds "
        "the same rows many times.",
        file="feeder/devices/slots.py",
        symbol="HostSlot.lease",
        old="self._pool.watch(root, self)",
        new="self._pool.watch(root[:], self)",
        tests=(
            "tests/feeder/devices/test_slots.py::test_a_view_of_any_kind_keeps_its_slot",
            "tests/feeder/devices/test_slots.py::test_a_list_of_a_feed_holds_different_batches",
        ),
    ),
    Bug(
        name="frames not checked",
        harm="Bytes that changed on the way are trained on: over a network nothing else sums up "
        "what came, but for the sixteen bits of TCP.",
        file="feeder/service/client/lease.py",
        symbol="DataPath._take_frames",
        old="                self._check(memories, group, 0)\n",
        new="",
        tests=(
            "tests/feeder/service/server/test_frames.py::test_a_spoiled_batch_is_refused_and_comes_again"
            "[looked at-flip-full-batch 2 is corrupt]",
        ),
    ),
    Bug(
        name="error overtakes batches",
        harm="An error is raised as soon as it is known, and the batches before it, which were "
        "good, are never handed out: the step at which a run fails depends on timing.",
        file="feeder/devices/host.py",
        symbol="HostQueue._take",
        old="and self._batches and not isinstance(self._ending, ClosedError):",
        new="and self._batches and not isinstance(self._ending, FeedError):",
        tests=(_GAPS + "test_batches_before_an_error_arrive_however_early_it_is_known",),
    ),
    Bug(
        name="stop forgets the batcher",
        harm="A stop with full device queues waits for a thread that nobody wakes, and then blames "
        "it for being stuck.",
        file="feeder/devices/host.py",
        symbol="HostQueue.close",
        old="            self._drained.notify_all()\n",
        new="            pass\n",
        tests=(_GAPS + "test_a_stop_wakes_a_batcher_in_the_middle_of_a_group",),
    ),
    Bug(
        name="fetchers not woken",
        harm="A feed that has once stood at its bound stays there: nobody tells the fetchers that "
        "the user has taken batches, and the training hangs.",
        file="workers/fetch/channel.py",
        symbol="Channel._wake_fetcher",
        old="if self._scheduler.pause_ends < self._wakes_at or self._policy.has_work():",
        new="if False:",
        tests=(f"{_KEYWORDS}[max_buffered_batches]",),
    ),
    Bug(
        name="a worker called ahead is not put back",
        harm="A function that has been called is resumed: workers of which the position has no "
        "cursor go on where they are, and the rows in between are lost without a word.",
        file="workers/fetch/calls.py",
        symbol="WorkerCalls.put_back",
        old="(is_new or not self._resumed)",
        new="True",
        tests=(
            "tests/workers/fetch/test_origins.py::test_the_same_function_is_resumed_in_the_same_process",
            "tests/workers/fetch/test_origins.py::test_a_served_function_goes_back_any_number_of_times",
        ),
    ),
    Bug(
        name="two threads merge",
        harm="The batcher goes on while a fetcher merges inline: both take chunks and fill slots, "
        "and batches have rows twice, in any order.",
        file="workers/fetch/channel.py",
        symbol="Channel._wait_for",
        old="if not policy.inline and any(one.chunk_lists for one in policy.awaited):",
        new="if any(one.chunk_lists for one in policy.awaited):",
        tests=("tests/workers/fetch/test_channel.py::test_the_merge_is_one_threads_at_a_time",),
    ),
    Bug(
        name="a call that turned slow holds others up",
        harm="While one call of a function that was quick so far does not return, no other worker "
        "is called: in the order of arrival, too, the training hangs.",
        file="workers/fetch/policy.py",
        symbol="ConcurrencyPolicy.batcher_looks",
        old="            self._set_kind(partition, CallKind.COMPUTES)\n",
        new="            pass\n",
        tests=(
            "tests/workers/fetch/test_channel.py::test_a_quick_call_is_waited_for_only_while_somebody_looks",
        ),
    ),
    Bug(
        name="a turn is not broken up",
        harm="One of many quick workers does not return any more, and those after it in its turn "
        "are called by nobody: the training hangs, though they have rows.",
        file="workers/fetch/channel.py",
        symbol="Channel._look",
        old="            self._take_back(self._round, now)\n",
        new="            pass\n",
        tests=(
            "tests/workers/fetch/test_channel.py::"
            "test_a_call_that_does_not_return_holds_no_partition_of_its_turn",
        ),
    ),
    Bug(
        name="a few workers take all room",
        harm="Some workers are called again and again while the batch waits for others: what they "
        "give fills the bound, and all others are called one at a time.",
        file="workers/fetch/policy.py",
        symbol="ConcurrencyPolicy._in_turn",
        old="if merged is None or partition.made - merged < ahead[partition.number]:",
        new="if True:",
        tests=(
            "tests/workers/fetch/test_policy.py::"
            "test_a_partition_is_called_ahead_of_the_merge_by_its_share_of_the_bound",
        ),
    ),
)

BUGS = FEEDING + MIXING + RESUMING + STORING + RUNNING + SHOWING + EVENTS
