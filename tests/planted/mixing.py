"""Bugs of sources that are put together: draws, passes, blocks, windows, and what errors say."""

from __future__ import annotations

from planted.bug import Bug

_NAIVE = "tests/conformance/test_steps.py::test_a_composition_is_the_naive_one_from_every_place[{}]"
_SHARED = "tests/conformance/test_steps.py::test_ranks_executors_and_servers_change_nothing[{}]"
_FILES = "tests/workers/sources/test_changed_files.py::"

MIXING = (
    Bug(
        name="one generator for all maps",
        harm="Maps that follow one another draw the same numbers: the noise of one is the crop of "
        "the next.",
        file="workers/sources/steps/each.py",
        symbol="Mapped.samples",
        old='own = part_of(call, f"map/{self.traits.depth}")',
        new="own = call",
        tests=(
            "tests/workers/sources/test_steps.py::test_maps_and_parts_draw_each_for_themselves",
            _NAIVE.format("mixture"),
        ),
    ),
    Bug(
        name="passes begun anew",
        harm="A source that is repeated begins its first pass again in each epoch of the mixture: "
        "what comes late in it is never read.",
        file="workers/sources/mixture.py",
        symbol="MixRoute.__call__",
        old="counters += np.array(self.segments[-1].after)[parts] * call.epoch",
        new="pass",
        tests=(
            _NAIVE.format("mixture by schedule"),
            "tests/workers/sources/test_mixture.py::test_passes_of_a_source_are_its_own_epochs",
        ),
    ),
    Bug(
        name="blocks alike",
        harm="Each block of a mixture has its sources in the same order: a batch of half a block "
        "never has the rare ones.",
        file="workers/sources/mixture.py",
        symbol="_draw",
        old="_mixed(blocks + segment.block, size, key)",
        new="_mixed(blocks * 0, size, key)",
        tests=(
            _NAIVE.format("mixture"),
            "tests/workers/sources/test_mixture.py::"
            "test_weights_that_fit_the_lengths_give_each_record_once",
        ),
    ),
    Bug(
        name="window by the first row",
        harm="A document goes into any row with room: a tenth of the places is padding again.",
        file="workers/sources/packing.py",
        symbol="best_fit",
        old="at = bisect_left(room, (length, -1))",
        new="at = len(room) - 1 if room and room[-1][0] >= length else len(room)",
        tests=(
            _NAIVE.format("packed mixture"),
            "tests/workers/sources/test_packing.py::test_windows_are_what_a_naive_packer_makes",
        ),
    ),
    Bug(
        name="a part without a name",
        harm="An error in one of forty sources names record 7 of the mixture, and nobody knows "
        "whose it is.",
        file="workers/sources/steps/routed.py",
        symbol="Routed.name_in",
        old="return self._of(number) + name_in(part, int(positions[0]), own)",
        new="return self.name(index)",
        tests=(
            "tests/workers/sources/test_mixture.py::"
            "test_an_error_names_the_source_of_the_mixture[pack]",
        ),
    ),
    Bug(
        name="the same places, other content",
        harm="A shard that was written anew with records in the same places passes for the old "
        "one, and a resumed run reads other data.",
        file="workers/sources/stores/offsets.py",
        symbol="_told",
        old="whole[1:]",
        new="whole[_HEADS:]",
        tests=(
            _FILES + "test_a_file_that_has_changed_is_named_at_a_resume[tar-written_anew]",
            _FILES + "test_a_file_that_has_changed_is_named_at_a_resume[tfrecord-written_anew]",
        ),
    ),
    Bug(
        name="a window kept for all epochs",
        harm="The next epoch hands out the batches of the one before where the window is still "
        "kept: what is shuffled anew depends on what a process has made.",
        file="workers/sources/steps/ragged.py",
        symbol="Budgeted.read",
        old="(call.seed, call.epoch, window), lambda",
        new="window, lambda",
        tests=(_NAIVE.format("batches by tokens"), _SHARED.format("batches by tokens")),
    ),
)
