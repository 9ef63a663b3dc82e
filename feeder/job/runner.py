"""Runs a job from its beginning or from a checkpoint to its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from feeder.checkpoint.format import DamagedError
from feeder.errors import CheckpointError, ConfigError, ResumeError, StuckWorkerError
from feeder.job.checkpoints.multinode import LOAD, PARTIAL_LOAD, SAVE, MultiNodeCheckpointManager
from feeder.job.definition import Job
from feeder.job.groups import UPLOAD, TaskGroup
from feeder.job.session import Session
from feeder.workers.errors import in_words
from feeder.workers.public import public

logger = logging.getLogger("feeder")


@public("feeder.job")
class UploadTaskGroupBuilder:
    """Makes the tasks that upload the checkpoints of a job that is done. A base class.

    It has no state; the thread that calls `JobRunner.train` calls `build`.
    """

    def build(self, epoch: int, checkpoint_manager: MultiNodeCheckpointManager | None) -> TaskGroup:
        """The tasks, for the last epoch, which may be one that could not be saved
        (``checkpoint_manager.exists(epoch)``). It is called once in this process, and once in that
        of each node."""
        raise NotImplementedError


@public("feeder.job")
class JobRunner:
    """Runs a job. The thread that calls `train` owns it, and uses the session and the manager.

    Args:
        job: The job.
        checkpoint_manager: Saves an epoch when it is done, and before the first; without one
            nothing is saved.
        resume_from_epoch: The epoch to go on from; by default the newest that is complete, where
            there is one. That the job was put back to it is noted before it goes on, so that
            later runs, which name none, do not go on from what was saved after it.
        upload_task_group_builder: Makes what is run once when all epochs are done.
        retries: How often each epoch is done again where a task raises in it or a node dies: all
            nodes are restarted from the last epoch that was saved. It needs a checkpoint manager.
        on_save_error: "warn": a save that fails is logged and counted (`failed_saves`), and the
            job goes on; "raise": it ends the job. Only what storage does counts as such.
    """

    def __init__(
        self,
        job: Job,
        checkpoint_manager: MultiNodeCheckpointManager | None = None,
        resume_from_epoch: int | None = None,
        upload_task_group_builder: UploadTaskGroupBuilder | None = None,
        *,
        retries: int = 0,
        on_save_error: str = "warn",
    ) -> None:
        if not isinstance(job, Job):
            raise ConfigError(f"job is {job!r}, expected a Job")
        if on_save_error not in ("warn", "raise"):
            raise ConfigError(f"on_save_error is {on_save_error!r}, expected 'warn' or 'raise'")
        if type(retries) is not int or retries < 0:
            raise ConfigError(f"retries is {retries!r}, expected a whole number from 0 on")
        if retries and checkpoint_manager is None:
            raise ConfigError(
                f"retries is {retries}, and nothing is saved that an epoch could be done again "
                "from; give the runner a checkpoint manager"
            )
        self.job = job
        self.checkpoint_manager = checkpoint_manager
        self.resume_from_epoch = resume_from_epoch
        self.upload_task_group_builder = upload_task_group_builder
        self.failed_saves: list[int] = []
        """The epochs that could not be saved."""
        self._retries = retries
        self._on_save_error = on_save_error

    def train(self, session: Session) -> int:
        """Run the job, and return the number of its last epoch.

        From scratch: the init group, and epoch 0 is saved. Else: the workspaces are loaded from a
        checkpoint. Then epochs, each followed by the stop conditions and a save; the upload; the
        download group; the exit group. A job that was finished when it was saved runs no epoch.

        Raises what a task raised on a node, `CheckpointError` where there is nothing to resume
        from, `ResumeError` where a feed cannot go on from it, and `RemoteError` where a node's
        process is gone.
        """
        if not self.job.stop_conditions and self.job.max_epochs is None:
            raise ConfigError(
                "the job would never end; give it a stop condition, or an epoch_limiter"
            )
        session.open(self.job)
        epoch, finished = self._begin(session)
        # How often the epoch after the furthest that was done has failed: where saves fail too, one
        # is done again from further back, which may not begin the count anew.
        furthest, failures, error = epoch, 0, None
        while not finished:
            try:
                if error is not None:
                    epoch, finished = self._go_back(session, epoch, error)
                    error = None
                    continue
                finished = self._run_epoch(session, epoch + 1)
            except (CheckpointError, ConfigError, ResumeError, StuckWorkerError):
                raise  # Storage or the job itself: it would be so again.
            except Exception as failed:
                failures += 1
                if failures > self._retries:
                    raise
                logger.warning(
                    "epoch %d has failed, and is done again (%d of %d): %s",
                    epoch + 1, failures, self._retries, in_words(failed),
                )  # fmt: skip
                error = failed
            else:
                epoch += 1
                if epoch > furthest:
                    furthest, failures = epoch, 0
        self._upload(session, epoch)
        session.run(self.job.download_group)
        session.run(self.job.exit_group)
        return epoch

    def _run_epoch(self, session: Session, epoch: int) -> bool:
        """Do one epoch and save it; returns whether the job is finished after it."""
        session.run(self.job.epoch_group)
        finished_by = self._why_finished(session, epoch)
        if self.checkpoint_manager is not None:
            self.save_checkpoints(epoch, session, finished_by)
        return bool(finished_by)

    def _go_back(self, session: Session, done: int, error: Exception) -> tuple[int, bool]:
        """Restart all nodes from the last epoch up to `done` that was saved, which is returned,
        with whether the job is finished after it. Raises `error` where none was saved."""
        manager = self._manager()
        session.restart()
        epoch = self._load_newest(session, done)
        if epoch is None:
            raise error
        manager.report_checkpoint_stats(LOAD)
        return epoch, self._is_finished(manager.finished_by(epoch), epoch)

    def _begin(self, session: Session) -> tuple[int, bool]:
        """Do what comes before the first epoch; returns the epoch to go on from, and whether the
        job is finished."""
        manager = self.checkpoint_manager
        if manager is None:
            session.run(self.job.init_group)
            return 0, False
        nodes = self.job.nodes_to_checkpoint()
        manager.set_params(nodes)
        is_asked = self.resume_from_epoch is not None
        if is_asked:
            epoch = manager.get_resume_from_epoch_id(self.resume_from_epoch)
        else:
            epoch = self._load_newest(session)
        self.resume_from_epoch = epoch
        # Epoch 0 is saved too: a job that dies in its first epoch begins with the same weights.
        if epoch is None:
            session.run(self.job.init_group)
            session.run(manager.init(nodes))
            self.save_checkpoints(0, session)
            return 0, False
        if is_asked:
            session.run(manager.init(nodes, retrieve_from_epoch=epoch))
            # Noted before it is loaded: killed at any moment from here on, the next run, which
            # names no epoch, goes on from the same one and not from what was saved after it.
            self._put_back(manager, epoch)
            session.run(manager.load(epoch))
        manager.report_checkpoint_stats(LOAD)
        finished = self._is_finished(manager.finished_by(epoch), epoch)
        logger.info("the job goes on from epoch %d%s", epoch, ", its last" if finished else "")
        return epoch, finished

    def _load_newest(self, session: Session, most: int | None = None) -> int | None:
        """Load the newest epoch up to `most` whose parts are whole, which is returned; None where
        none was ever saved. Each node checks its own part while it loads it."""
        manager, nodes = self._manager(), self.job.nodes_to_checkpoint()
        damaged: list[int] = []
        later: list[int] = []
        while (epoch := manager.find_newest([*damaged, *later])) is not None:
            if most is not None and epoch > most:
                # Of a run that the user put aside: this one has not come so far.
                later.append(epoch)
                continue
            session.run(manager.init(nodes, retrieve_from_epoch=epoch))
            try:
                session.run(manager.load(epoch))
            except DamagedError as error:
                logger.warning("passed over: %s", error)
                damaged.append(epoch)
                # What other nodes have loaded of it goes.
                session.open(self.job)
            else:
                return epoch
        if damaged:
            raise CheckpointError(f"none of the epochs {damaged!r} can be loaded: all are damaged")
        return None

    def _put_back(self, manager: MultiNodeCheckpointManager, epoch: int) -> None:
        """Note an epoch that the user asked for, before anything is done with it."""
        try:
            manager.put_back(epoch)
        except CheckpointError as error:
            if self._on_save_error == "raise":
                raise
            logger.warning(
                "it cannot be noted that the job was put back to epoch %d; until its next save, "
                "a run that names no epoch goes on from the newest: %s", epoch, error,
            )  # fmt: skip

    def save_checkpoints(self, epoch: int, session: Session, finished_by: str = "") -> None:
        """Save an epoch on all nodes, and commit it. Raises `CheckpointError` where storage fails
        and `on_save_error` is "raise"."""
        manager = self._manager()
        # One step that fails is one failed save: the manifest comes last, so nothing half exists.
        try:
            if not manager.cp_accessible(None):
                path = manager.get_ckpt_db_name(manager.nodes[0], epoch)
                raise CheckpointError(
                    f"cannot write checkpoint {path!r}: its folder cannot be written to; make it, "
                    "or give this user the right to it"
                )
            session.run(manager.save(epoch))
            manager.write_checkpoint_metadata(epoch, finished_by)
        except CheckpointError as error:
            self.failed_saves.append(epoch)
            if self._on_save_error == "raise":
                raise
            logger.warning("epoch %d is not saved: %s", epoch, error)
        else:
            manager.report_checkpoint_stats(SAVE)

    def load_blobs_from_checkpoints(
        self, blob_names: Sequence[str], epoch: int, session: Session
    ) -> bool:
        """Load some entries of an epoch of all nodes into ``session.workspace``, as
        `MultiNodeCheckpointManager.load_blobs_locally` does; False, with nothing loaded, where
        the epoch is not complete."""
        manager = self._manager()
        nodes = self.job.nodes_to_checkpoint()
        loaded = manager.load_blobs_locally(nodes, blob_names, epoch, session)
        if loaded:
            manager.report_checkpoint_stats(PARTIAL_LOAD)
        return loaded

    def _why_finished(self, session: Session, epoch: int) -> str:
        if session.evaluate():
            return "condition"
        return "limit" if self._is_finished("", epoch) else ""

    def _is_finished(self, finished_by: str, epoch: int) -> bool:
        """A limit may have been raised since; what a condition has said stands."""
        limit = self.job.max_epochs
        return finished_by == "condition" or (limit is not None and epoch >= limit)

    def _upload(self, session: Session, epoch: int) -> None:
        if self.upload_task_group_builder is not None:
            group = self.upload_task_group_builder.build(epoch, self.checkpoint_manager)
            group.key = (UPLOAD, epoch)
            session.run(group)

    def _manager(self) -> MultiNodeCheckpointManager:
        if self.checkpoint_manager is None:
            raise ConfigError("the runner has no checkpoint manager; give it one")
        return self.checkpoint_manager
