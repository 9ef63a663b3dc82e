"""The planted bugs that show when a feed is resumed, and not before."""

from __future__ import annotations

from planted.bug import Bug

_RESUME = "tests/conformance/test_resume.py::"
_ENDS = "tests/conformance/test_resume_ends.py::"
_VALUES = "tests/conformance/test_resume_values.py::"
_FORMAT = "tests/feeder/state/test_snapshot_format.py::"
_GAPS = "tests/feeder/feeds/test_races.py::"

RESUMING = (
    Bug(
        name="cut of the prefetched head",
        harm="A snapshot names the newest batch that is waiting, not the last one handed out: a "
        "resumed run skips all that was prefetched.",
        file="feeder/feeds/device_feed.py",
        symbol="DeviceFeed.__next__",
        old="// self._num_devices + 1, batch.place",
        new="// self._num_devices + 1, (self._ready[-1] if self._ready else batch).place",
        tests=(_GAPS + "test_a_position_is_that_of_the_batch_handed_out_however_many_wait",),
    ),
    Bug(
        name="cursor read too late",
        harm="The cursor is read when a chunk list is handed over, after the calls that follow in "
        "it: a resumed run skips their rows.",
        file="workers/fetch/scheduler.py",
        symbol="Partition.take_open",
        old="chunks, marks = self.chunks[:count], self.marks[:count]",
        new="chunks, marks = self.chunks[:count], self.marks[count - 1 : count] * count",
        tests=(_RESUME + "test_resumed_at_every_batch[keep-small-seek]",),
    ),
    Bug(
        name="turn forgotten",
        harm="A resumed run begins with worker 0, whoever's turn it was: every row comes, in "
        "another order.",
        file="feeder/state/token.py",
        symbol="_position_fields",
        old="return [epoch, turn, bits",
        new="return [epoch, 0, bits",
        tests=(
            _RESUME + "test_resumed_at_every_batch[keep-small-seek]",
            _RESUME + "test_resumed_at_every_batch[keep-small-replay]",
        ),
    ),
    Bug(
        name="epoch end off by one",
        harm="A run resumed between two epochs goes on at the second call of the new one: its "
        "first chunk is lost.",
        file="workers/stream/position.py",
        symbol="Partitions.next_epoch",
        old="calls = (0,) * num if self.pure else position.calls",
        new="calls = (1,) * num if self.pure else position.calls",
        tests=(_RESUME + "test_resumed_at_every_batch[keep-whole-pure]",),
    ),
    Bug(
        name="cursor of the epoch end lost",
        harm="A run resumed between two epochs is put back to before the end of the old one, which "
        "it ends once more: an epoch too few has rows.",
        file="workers/stream/merge.py",
        symbol="Merge._end_partition",
        old="mark = end.mark or position.marks[partition]",
        new="mark = position.marks[partition]",
        tests=(_RESUME + "test_resumed_at_every_batch[keep-whole-seek]",),
    ),
    Bug(
        name="leftover not resumed",
        harm="The rows that the last batch before a kill left over are gone after the resume: up "
        "to a chunk is lost each time.",
        file="workers/stream/resuming.py",
        symbol="StreamStart.leftover_chunks",
        old="return MergedChunks(span, columns, [num_rows], leftover.taken, leftover.digest)",
        new="return None",
        tests=(
            _RESUME + "test_resumed_at_every_batch[keep-large-pure]",
            _VALUES + "test_rows_left_over_are_those_of_then[repeatable-keep-large-seek]",
        ),
    ),
    Bug(
        name="None counted in replay",
        harm="Replay takes a call that gave nothing for one that gave a chunk: it stops early and "
        "the resumed run gives rows a second time, or refuses a sound function.",
        file="workers/fetch/calls.py",
        symbol="_replay",
        old="            yield TUNING.first_none_pause_s\n",
        new="            seen_calls += 1\n",
        tests=(_RESUME + "test_resumed_at_every_batch[keep-gaps-replay]",),
    ),
    Bug(
        name="replay not compared",
        harm="A fetch function that does not repeat itself is resumed by replay without a word: "
        "the stream goes on with other rows.",
        file="workers/fetch/calls.py",
        symbol="_replay",
        old="if seen_rows != rows or (seen_mark",
        new="if False and (seen_mark",
        tests=(
            _VALUES + "test_replay_names_the_worker_that_differs",
            "tests/feeder/state/test_fingerprint.py::test_a_replay_that_gives_other_rows_names_the_worker",
        ),
    ),
    Bug(
        name="leftover digest unchecked",
        harm="A resume from a token joins half of the old chunk with half of another, and nobody "
        "is told.",
        file="workers/stream/position.py",
        symbol="PartialChunk.differs_from",
        old="then.digest == now",
        new="True",
        tests=(
            _VALUES + "test_rows_fetched_again_that_differ_are_named[token-large-seek]",
            "tests/feeder/state/test_fingerprint.py::test_a_chunk_fetched_again_that_differs_is_named",
        ),
    ),
    Bug(
        name="rest of a round dealt again",
        harm="A run that goes on from one device's position with another number of devices begins "
        "in the middle of a round: batches that the other devices had come again.",
        file="workers/stream/rounds.py",
        symbol="begin",
        old="first = -rest - skip * num",
        new="first = -skip * num",
        tests=(
            "tests/conformance/test_elastic.py::"
            "test_every_device_of_every_step_goes_on_after_its_round[stream]",
        ),
    ),
    Bug(
        name="batches counted anew",
        harm="After a resume in a later epoch the count of batches begins anew: each is taken for "
        "another.",
        file="workers/stream/resuming.py",
        symbol="StreamStart.__init__",
        old="(cut.epoch, cut.index, cut.step) if cut",
        new="(cut.epoch, cut.index, cut.index) if cut",
        tests=(_GAPS + "test_after_a_resume_each_device_gets_the_batches_that_it_would_have_got",),
    ),
    Bug(
        name="seed not compared",
        harm="A snapshot is accepted by a feed with another seed: the run goes on with other draws "
        "than it began with.",
        file="workers/spec.py",
        symbol="StreamSpec.fingerprint",
        old='            "seed": self.seed,\n',
        new="",
        tests=(
            "tests/feeder/state/test_fingerprint.py::test_a_field_that_differs_is_told_with_both_values",
        ),
    ),
    Bug(
        name="snapshot checksum unchecked",
        harm="A checkpoint with a flipped bit is resumed from: wrong place, wrong rows.",
        file="feeder/state/snapshot.py",
        symbol="Snapshot.from_bytes",
        old="if _digest(numbers, [body]) != bytes(view[20:_HEAD_BYTES]):",
        new="if False:",
        tests=(_FORMAT + "test_every_flipped_bit_is_refused[snapshot]",),
    ),
    Bug(
        name="token checksum unchecked",
        harm="A token with a flipped bit is resumed from, at a wrong place.",
        file="feeder/state/token.py",
        symbol="_open",
        old="if token[3:_HEAD_BYTES] != xxhash.xxh3_64_digest(body):",
        new="if False:",
        tests=(_FORMAT + "test_every_flipped_bit_is_refused[token]",),
    ),
    Bug(
        name="any position is one of the stream",
        harm="A trainer that comes back with the checkpoint of another run has the feed begin "
        "there, and the others are given rows of other calls under the right numbers.",
        file="feeder/service/server/position_check.py",
        symbol="PositionCheck._is_same",
        old="return key(one, self._stream) == key(other, self._stream)",
        new="return True",
        tests=(
            "tests/feeder/service/server/test_other_runs.py::"
            "test_who_brings_a_position_of_another_run_is_told_so_alone[another step]",
        ),
    ),
)
