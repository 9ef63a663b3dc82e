"""The bugs that are planted where positions are stored."""

from __future__ import annotations

from planted.bug import Bug

_POWER = (
    "tests/crashes/test_power_loss.py::"
    "test_after_a_few_losses_of_power_all_that_was_acknowledged_is_there"
)
_STORE = "tests/feeder/checkpoint/test_store.py::"
_FORMAT = "tests/feeder/checkpoint/test_format.py::"
_POLICY = "tests/feeder/checkpoint/test_checkpointing.py::"

STORING = (
    Bug(
        name="file not synced",
        harm="After a loss of power the newest checkpoint is there by its name, and is empty.",
        file="feeder/durable.py",
        symbol="write",
        old="            fs.fsync(file)\n",
        new="",
        tests=(_POWER,),
    ),
    Bug(
        name="folder not synced",
        harm="After a loss of power the checkpoint that was acknowledged is not there, and the one "
        "before it has been removed.",
        file="feeder/durable.py",
        symbol="write",
        old="        fs.fsync(folder)\n",
        new="",
        tests=(_POWER,),
    ),
    Bug(
        name="checkpoint overwritten",
        harm="Two nodes that are given one name by mistake overwrite each other's part.",
        file="feeder/durable.py",
        symbol="_name_once",
        old="        fs.link(temporary, name, folder)\n",
        new="        fs.rename(temporary, name, folder)\n",
        tests=(_STORE + "test_a_name_is_written_once",),
    ),
    Bug(
        name="temporary file left",
        harm="Each save on a full disk leaves a file, so that it stays full.",
        file="feeder/durable.py",
        symbol="write",
        old="                fs.unlink(made, folder)\n",
        new="                pass\n",
        tests=(
            "tests/crashes/test_io_errors.py::"
            "test_whichever_call_fails_the_one_before_loads_and_nothing_is_left_over"
            "[write-ENOSPC-once]",
        ),
    ),
    Bug(
        name="second writer let in",
        harm="Two processes that write into one folder retire each other's checkpoints.",
        file="feeder/checkpoint/local.py",
        symbol="LocalFolder._become_writer",
        old="                if self._lock.acquire(top):\n",
        new="                if True:\n",
        tests=(
            _STORE + "test_two_writers_of_one_name_are_refused_with_the_first_ones_name",
            _POLICY + "test_a_second_process_that_writes_there_is_refused_at_the_start",
        ),
    ),
    Bug(
        name="link followed",
        harm="A link in the folder has a checkpoint read and written outside of it.",
        file="feeder/durable.py",
        symbol="OsFs.open_folder",
        old="        nofollow = 0 if inside is None else os.O_NOFOLLOW\n",
        new="        nofollow = 0\n",
        tests=(_STORE + "test_links_that_lead_out_are_not_followed",),
    ),
    Bug(
        name="bytes not compared",
        harm="A flipped bit of an array is loaded as a weight.",
        file="feeder/checkpoint/format.py",
        symbol="read_entry",
        old="!= placed.digest",
        new="is None",
        tests=(_FORMAT + "test_every_flipped_bit_is_refused",),
    ),
    Bug(
        name="size taken at its word",
        harm="A damaged length has the loader ask for more memory than there is.",
        file="feeder/checkpoint/format.py",
        symbol="read_header",
        old="    if reader.size != _HEAD_BYTES + header_bytes + data_bytes:\n",
        new="    if reader.size < 0:\n",
        tests=(
            _FORMAT
            + "test_lengths_are_compared_with_the_file_before_anything_is_read[1000000000000000]",
        ),
    ),
    Bug(
        name="latest not read",
        harm="The newest checkpoint is damaged, and a job that could go on from the one before "
        "does not start.",
        file="feeder/checkpoint/store.py",
        symbol="CheckpointStore.latest",
        old="return self.verify(name).name",
        new="return name",
        tests=(_FORMAT + "test_damage_is_seen_through_the_store_and_passed_over",),
    ),
    Bug(
        name="cut after the mark",
        harm="Nodes that count to the same batch are cut at different ones, and their checkpoint "
        "is refused when it is needed.",
        file="feeder/checkpoint/triggers.py",
        symbol="CheckpointTriggers.first_in",
        old="                    return i + 1, batch.turn",
        new="                    return len(batches), batch.turn",
        tests=(_POLICY + "test_the_cut_is_at_the_batch_though_many_were_taken_at_once",),
    ),
    Bug(
        name="bug taken for a full disk",
        harm="A mistake in the code is logged as a failed save, for ever, and nothing is stored.",
        file="feeder/checkpoint/saving.py",
        symbol="Saver._save",
        old="            self._store(snapshot, step)\n        except CheckpointError as error:\n",
        new="            self._store(snapshot, step)\n        except Exception as error:\n",
        tests=(_POLICY + "test_a_mistake_of_the_code_is_no_failed_save[warn]",),
    ),
    Bug(
        name="latest of nothing but damage",
        harm="All checkpoints are damaged, and the job begins anew without a word.",
        file="feeder/checkpoint/resuming.py",
        symbol="_latest",
        old="    if store.is_empty():\n",
        new="    if store.latest() is None:\n",
        tests=(_POLICY + "test_latest_does_not_begin_anew_where_all_are_damaged",),
    ),
    Bug(
        name="fastest queue tells the round",
        harm="A server stores the position of its fastest trainer: started again, it skips what "
        "the others have not had.",
        file="feeder/service/server/watermark.py",
        symbol="LowWatermark._settle",
        old="        used = min(self._rounds)\n",
        new="        used = max(self._rounds)\n",
        tests=(
            "tests/feeder/service/server/test_checkpoints.py::test_the_slowest_queue_tells_the_round",
            "tests/feeder/service/server/test_checkpoints.py::"
            "test_with_two_queues_it_is_the_newest_round_that_both_have_used",
        ),
    ),
)
