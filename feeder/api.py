"""`init_data_input_workers`, the front door: it adds a feed to a coordinator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from feeder.errors import ConfigError
from feeder.feeds.coordinator import Coordinator
from feeder.workers.public import public

# Guards the coordinator of the process: two threads may add their first feeds at a time.
_lock = threading.Lock()
_default: Coordinator | None = None


@public("feeder")
def init_data_input_workers(
    input_blob_names: Sequence[str],
    fetch_fun: Callable[..., Any],
    batch_size: int | None = None,
    num_worker_threads: int = 2,
    input_source_name: str = "train",
    max_buffered_batches: int = 100,
    init_fun: Callable[[Any, Any], Any] | None = None,
    external_loggers: Sequence[Any] | None = None,
    dont_rebatch: bool = False,
    batch_columns: Sequence[int] | None = None,
    timeout: float = 600.0,
    *,
    max_buffered_bytes: int | None = None,
    devices: int | str | Sequence[str] = ("cpu",),
    seed: int = 0,
    epochs: int | None = 1,
    last_batch: str = "keep",
    last_round: str = "uneven",
    rounds: str = "stream",
    global_batch_size: int | None = None,
    order: str = "ticket",
    num_threads: int | None = None,
    retries: int = 0,
    retry_backoff_s: float = 1.0,
    repeatable: bool = True,
    writable: bool = False,
    version: str = "",
    depth: int = 0,
    resume: Any = None,
    skip: int = 0,
    coordinator: Coordinator | None = None,
) -> Coordinator:
    """Add a feed to a coordinator: fetcher threads call `fetch_fun`, and batches of exactly
    `batch_size` rows come out of ``coordinator[input_source_name]``.

    Names, order and defaults are those of Caffe2's `data_workers.init_data_input_workers`,
    without its net.

    Args:
        input_blob_names: The names of the columns, in the order in which `fetch_fun` returns
            them.
        fetch_fun: ``fetch(worker_id, batch_size)``, whose n-th chunk depends on worker and n
            alone, or ``fetch(call)``, a pure function of a `Call`. Returns a sequence of arrays,
            or a mapping by name, each with the same number of rows, any number of them. None
            means nothing right now; raising StopIteration ends the epoch, after which the
            function must start over. With ``cursor(worker_id)`` and ``seek(worker_id, cursor)``
            the first form is resumed at once instead of by replay; `cursor` must work before the
            first call too.
        batch_size: Rows per batch; also the hint that `fetch_fun` is given. None only with
            `global_batch_size`.
        num_worker_threads: Number of worker ids, W. Part of the stream.
        input_source_name: The name of the feed.
        max_buffered_batches: Bound on the rows between `fetch_fun` and the user, in batches; or
            1 MiB of rows, where that is more (not with `dont_rebatch`).
        init_fun: Called as ``init_fun(feed, coordinator)`` once, before any thread starts.
        external_loggers: Objects whose ``log(dict)`` gets statistics each minute and at the stop.
        dont_rebatch: Make each chunk with rows a batch, of whatever size.
        batch_columns: The axis of each column that is rows; all 0 by default.
        timeout: Seconds for which `fetch_fun` may give nothing while a batch is waited for, or
            another device's user may take nothing.
        max_buffered_bytes: Bound on the same rows in bytes; whichever is reached first. None is
            1 GiB, or a quarter of the memory of the container where that is less.
        devices: A number of host queues, or names: ``("cpu:0", "cpu:1")``, or of GPUs:
            ``("cuda:0", "cuda:1")``, whose batches are arrays of CuPy. Batch number `step` goes to
            device `step` modulo their number. A position may be resumed with any number of them:
            where it lies in the middle of a round, the rest of that round is made and dropped.
        seed: Seed of `Call.rng`, from 0 to 2**64 - 1.
        epochs: Number of epochs; None is without end.
        last_batch: What becomes of the rows at the end of an epoch that do not fill a batch:
            "keep" a shorter batch, "drop" them, "pad" with the last row, or "carry" them into
            the next epoch (at the end of the stream, "carry" keeps them).
        last_round: What becomes of the batches at the end of the stream that do not go round all
            devices: "uneven" hands them out, "drop" does not, "pad" repeats the last one with
            `rows` 0.
        rounds: "stream" deals batches out through all epochs; "epoch" begins a new round in each,
            and then `last_round` is for the end of each epoch.
        global_batch_size: Rows of all devices together, in place of `batch_size`: each gets an
            equal share in a batch. It stays as it is when a position is resumed with another
            number of devices; `fetch_fun` is given it as the hint.
        order: "ticket", or "arrival" to merge chunks as they come: no row is lost or doubled,
            but the order is not repeatable. `fetch(call)` must then raise StopIteration for every
            index from the end of its epoch on.
        num_threads: Threads that serve the workers; as many as workers by default. Not part of
            the stream.
        retries: How often a call that raised is made again (not for functions resumed by replay).
        retry_backoff_s: Seconds before the first retry; doubled each further time.
        repeatable: False where `fetch_fun`, put back, would not give the same rows again: then
            snapshots and state dicts always carry the leftover rows. Refused for a function that
            can only be put back by calling it again.
        writable: Make the arrays of batches private and writable.
        version: Your own version of `fetch_fun` and its data; a snapshot of another is refused.
        depth: Batches on each GPU, ahead of the user and beside the three that he may hold without
            their being copied; and as many pinned ones on the host. 0 goes by their size: 32 MiB,
            from 4 to 64.
        resume: Where to go on: a Snapshot, its bytes, a token, a state dict, the path of a file; a
            `CheckpointStore`, or its folder or URL, for the newest in it; or "latest" for the
            newest in the coordinator's own place, and the beginning where nothing is there yet.
        skip: Go on so many rounds of all devices later, as after rows that spoilt a model. Where
            the source can tell the position, they are not made.
        coordinator: The coordinator to add to; by default one for the process, the same at each
            call until it is stopped.

    Returns:
        The coordinator. Nothing runs before its `start` or its `with` block.

    Raises:
        ConfigError: A setting is wrong.
        ResumeError: `resume` does not fit the feed.
        CheckpointError: What is given as `resume` cannot be read.
    """
    # First of all: from here on there are other locals.
    settings = dict(locals())
    resume, coordinator = settings.pop("resume"), settings.pop("coordinator")
    if not isinstance(coordinator, Coordinator | None):
        raise ConfigError(f"coordinator is {coordinator!r}, expected a Coordinator, or None")
    # Caffe2 has one coordinator for a process; without the argument that is what a call means.
    coordinator = coordinator if coordinator is not None else _default_coordinator()
    coordinator.add(settings, resume)
    return coordinator


def _default_coordinator() -> Coordinator:
    """The coordinator of the process; a new one once it has been stopped, or in a forked child."""
    global _default
    with _lock:
        if _default is None or _default.closed or _default.forked:
            _default = Coordinator()
        return _default
