"""Bugs in how jobs are saved and resumed."""

from __future__ import annotations

from planted.bug import Bug

_MANAGERS = "tests/feeder/job/test_managers.py::"
_SESSIONS = "tests/feeder/job/test_sessions.py::"
_UPSTREAM = "tests/conformance/test_upstream_jobs.py::"

RUNNING = (
    Bug(
        name="finished flag forgotten",
        harm="A job that is done and is started once more trains an epoch too many, on no data or "
        "on the first of it again: the original did.",
        file="feeder/job/runner.py",
        symbol="JobRunner._is_finished",
        old='return finished_by == "condition" or (limit is not None and epoch >= limit)',
        new="return limit is not None and epoch >= limit",
        tests=(
            _UPSTREAM + "test_a_finished_job_runs_no_further_epoch_and_finds_that_out_by_itself",
        ),
    ),
    Bug(
        name="newest by its number alone",
        harm="A job that diverged and was put back to an earlier epoch is resumed, after the next "
        "crash, from where it had diverged.",
        file="feeder/job/checkpoints/epochs.py",
        symbol="Epochs._names",
        old="key=lambda name: self._parse(name)[1:])",
        new="key=lambda name: self._parse(name)[2])",
        tests=(_MANAGERS + "test_a_job_that_was_put_back_goes_on_from_there[file]",),
    ),
    Bug(
        name="overtaken run saves on",
        harm="A run that was thought dead writes its parts over those of the run that has taken "
        "over.",
        file="feeder/job/checkpoints/timeline.py",
        symbol="Timeline._check_alone",
        old="if not self._has_begun or self._epochs.runs(after=generation):",
        new="if False:",
        tests=(_MANAGERS + "test_a_run_that_was_overtaken_saves_nothing_more",),
    ),
    Bug(
        name="part not compared with its manifest",
        harm="The part of another epoch that has come under a part's name is loaded: nodes go on "
        "from different epochs.",
        file="feeder/job/checkpoints/parts.py",
        symbol="load_part",
        old="if loaded.digest != request.digest:",
        new="if False:",
        tests=(_MANAGERS + "test_a_part_that_is_exchanged_at_the_last_moment_is_not_loaded[file]",),
    ),
    Bug(
        name="parts of other nodes taken",
        harm="A job that has a node in common with another writes that node's parts over the "
        "other's, which cannot be resumed any more.",
        file="feeder/job/checkpoints/epochs.py",
        symbol="Epochs.check_others",
        old="if set(nodes) & set(self.nodes) and nodes != self.nodes:",
        new="if False:",
        tests=(_MANAGERS + "test_other_nodes_than_were_saved_are_refused[None-nodes2]",),
    ),
    Bug(
        name="epoch committed without a node",
        harm="An epoch that one node could not save counts as whole, and the job cannot be "
        "resumed from what is said to be its newest.",
        file="feeder/job/session.py",
        symbol="Session._ask",
        old="""\
        if error is not None:
            raise error
        return {node: answers[node] for node in requests}""",
        new="""\
        return {node: answers[node] for node in requests if answers[node] is not None}""",
        tests=(_SESSIONS + "test_a_save_that_fails_on_one_node_commits_nothing[threads]",),
    ),
    Bug(
        name="bug taken for a failed save of a node",
        harm="A mistake in what is to be saved is logged at each epoch as a failed save, and seen "
        "when there is nothing to resume from.",
        file="feeder/job/runner.py",
        symbol="JobRunner.save_checkpoints",
        old="        except CheckpointError as error:\n            self.failed_saves",
        new="        except Exception as error:\n            self.failed_saves",
        tests=(_SESSIONS + "test_a_bug_in_what_is_saved_is_no_failed_save[threads]",),
    ),
    Bug(
        name="some entries of some nodes",
        harm="Evaluation runs on a model of which the parts of one node are missing.",
        file="feeder/job/checkpoints/partial.py",
        symbol="find_partial",
        old="""\
                logger.info("there is no complete checkpoint %r", database.path_of(name))
                return None""",
        new="                continue",
        tests=(
            _MANAGERS + "test_nothing_is_loaded_where_one_part_is_missing[file-part]",
            _UPSTREAM
            + "test_names_and_entries_of_nodes_that_were_saved_by_jobs_of_their_own[file]",
        ),
    ),
    Bug(
        name="steps not compared",
        harm="Nodes whose feeds stand at different steps are resumed: they never see one batch of "
        "the same step again.",
        file="feeder/job/checkpoints/manifest.py",
        symbol="Manifest.check_steps",
        old='check_steps({name: {"feeds": part.steps} for name',
        new="check_steps({name: {} for name",
        tests=(_SESSIONS + "test_feeds_at_different_steps_are_refused_with_all_of_them[threads]",),
    ),
    Bug(
        name="leftovers of an epoch kept",
        harm="A task finds in the workspace what an epoch before has left there, but not after a "
        "resume: the resumed run goes another way.",
        file="feeder/job/workspace.py",
        symbol="Workspace.forget_new",
        old="self._arrays = {name: self._arrays[name] for name in self._kept if",
        new="self._arrays = {name: self._arrays[name] for name in self._arrays if",
        tests=(
            "tests/feeder/job/test_workspace.py::"
            "test_what_is_put_there_later_is_not_saved_and_is_gone_after_the_epoch",
        ),
    ),
    Bug(
        name="orphaned nodes",
        harm="A runner that is killed leaves its nodes behind, which hold memory and devices.",
        file="feeder/job/child.py",
        symbol="run_listener",
        old="    requests.put(None)\n    busy.release()",
        new="    busy.release()",
        tests=("tests/feeder/job/test_session_errors.py::test_a_node_whose_runner_is_gone_ends",),
    ),
)
