"""`init_data_input_workers`, the front door: it adds a feed to a coordinator."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ParamSpec, TypeVar

from msgspec import Meta

from feeder.config import MOST_THREADS, MOST_WORKERS
from feeder.errors import ConfigError
from feeder.executors.options import Processes, RayActors, Threads
from feeder.feeds.coordinator import Coordinator
from feeder.settings import MAX_SECONDS, NonNegativeInt, PositiveInt, check
from feeder.workers.public import public
from feeder.workers.stream.spec import LastBatch, LastRound, Order, Rounds

# Guards the coordinator of the process: two threads may add their first feeds at a time.
_lock = threading.Lock()
_default: Coordinator | None = None


_P = ParamSpec("_P")
_R = TypeVar("_R")

_DATA_SET = "give a data set to feeder.adapters.torch.DataLoader, which has it"
_COUNTERPARTS = {
    "batch_sampler": f"fetch(call) says which rows a batch has; or {_DATA_SET}",
    "collate_fn": f"use feeder.sources.records(dataset, collate=...); or {_DATA_SET}",
    "dataset": "use feeder.sources.records(dataset) as fetch_fun; or give it to "
    "feeder.adapters.torch.DataLoader",
    "drop_last": 'use last_batch="drop"',
    "generator": "use seed=",
    "multiprocessing_context": "use executor=feeder.Processes(n)",
    "num_workers": "use num_threads=n, or executor=feeder.Processes(n) for functions that compute "
    "in Python",
    "persistent_workers": "leave it out, since workers stay from epoch to epoch",
    "pin_memory": 'use devices="cuda:0", whose batches come through pinned memory',
    "prefetch_factor": "use max_buffered_batches=",
    "sampler": f"fetch(call) draws its rows with call.rng; or {_DATA_SET}",
    "shuffle": "the order is the one of fetch_fun: sources have random_shuffle=True; or "
    f"{_DATA_SET}",
    "worker_init_fn": "use init_fun=; random draws are seeded by call.rng",
}
"""Arguments of PyTorch's DataLoader, and what is here in their place."""


def _names_counterparts(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Have a call with an argument of DataLoader's raise what is to be given in its place."""

    @functools.wraps(function)
    def checked(*arguments: _P.args, **named: _P.kwargs) -> _R:
        for name in _COUNTERPARTS.keys() & named.keys():
            raise ConfigError(
                f"{name} is {named[name]!r}: init_data_input_workers has no {name}; "
                f"{_COUNTERPARTS[name]}"
            )
        return function(*arguments, **named)

    return checked


@public("feeder")
@_names_counterparts
def init_data_input_workers(
    input_blob_names: Sequence[str],
    fetch_fun: Callable[..., Any] | str,
    batch_size: PositiveInt | None = None,
    num_worker_threads: Annotated[int, Meta(ge=1, le=MOST_WORKERS)] = 2,
    input_source_name: Annotated[str, Meta(min_length=1, description="a string")] = "train",
    max_buffered_batches: PositiveInt = 100,
    init_fun: Callable[[Any, Any], Any] | None = None,
    external_loggers: Sequence[Any] | None = None,
    dont_rebatch: bool = False,
    batch_columns: Sequence[int] | None = None,
    timeout: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] = 600.0,
    *,
    max_buffered_bytes: PositiveInt | None = None,
    devices: int | str | Sequence[str] = ("cpu",),
    seed: Annotated[int, Meta(ge=0, le=2**64 - 1)] = 0,
    epochs: PositiveInt | None = 1,
    last_batch: Annotated[str, LastBatch] = "keep",
    last_round: Annotated[str, LastRound] = "uneven",
    rounds: Annotated[str, Rounds] = "stream",
    global_batch_size: PositiveInt | None = None,
    order: Annotated[str, Order] = "ticket",
    num_threads: Annotated[int, Meta(ge=0, le=MOST_THREADS)] | None = None,
    executor: Threads | Processes | RayActors | Mapping[str, Any] | str | None = None,
    rows_per_call: PositiveInt | None = None,
    retries: NonNegativeInt = 0,
    retry_backoff_s: Annotated[float, Meta(ge=0, le=MAX_SECONDS)] = 1.0,
    repeatable: bool = True,
    writable: bool = False,
    version: str = "",
    depth: Annotated[int, Meta(ge=0, le=1024)] = 0,
    on_device: Callable[..., Any] | None = None,
    resume: Any = None,
    skip: NonNegativeInt = 0,
    edit: Annotated[str, Meta(min_length=1, description="a text")] | None = None,
    transcript: str | os.PathLike[str] | None = None,
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
            function must start over. Sources have this form. With ``cursor(worker_id)`` and
            ``seek(worker_id, cursor)`` the first form is resumed at once instead of by replay;
            `cursor` must work before the first call too.
        batch_size: Rows per batch; also the hint that `fetch_fun` is given. None only with
            `global_batch_size`.
        num_worker_threads: Number of worker ids, W. Part of the stream.
        input_source_name: The name of the feed.
        max_buffered_batches: Bound on the rows between `fetch_fun` and the user, in batches. See
            docs/tuning.md#buffers.
        init_fun: Called as ``init_fun(feed, coordinator)`` once, before any thread starts.
        external_loggers: Objects whose ``log(dict)`` gets statistics each minute and at the stop.
        dont_rebatch: Make each chunk with rows a batch, of whatever size.
        batch_columns: The axis of each column that is rows; all 0 by default.
        timeout: Counts while a batch is waited for: seconds for which `fetch_fun` may give
            nothing, or the reader of another device may take nothing.
        max_buffered_bytes: Bound on the same rows in bytes; the bound that is reached first counts.
            None is 1 GiB, or a quarter of the memory of the container where that is less.
        devices: A number of host queues, or names: ``("cpu:0", "cpu:1")``, or of GPUs:
            ``("cuda:0", "cuda:1")``, whose batches are arrays of CuPy; ``"torch:0"`` gives tensors
            of PyTorch on GPU 0 (docs/gpu.md). Batch number `step` goes to device `step` modulo
            their number. A position may be resumed with any number of them: where it lies in the
            middle of a round, the rest of that round is made and dropped.
        seed: Seed of `Call.rng` and of shuffles, from 0 to ``2**64 - 1``.
        epochs: Number of epochs; None is without end.
        last_batch: What becomes of the rows at the end of an epoch that do not fill a batch:
            "keep" a shorter batch, "drop" them, "pad" with the last row, or "carry" them into
            the next epoch (at the end of the stream, "carry" keeps them). See
            docs/batches.md#epochs-and-the-rows-that-do-not-fill-a-batch.
        last_round: What becomes of the batches at the end of the stream that do not go round all
            devices: "uneven" hands them out, "drop" does not, "pad" repeats the last one with
            `rows` 0. See docs/batches.md#several-devices.
        rounds: "stream" deals batches out through all epochs; "epoch" begins a new round in each,
            and then `last_round` is for the end of each epoch.
        global_batch_size: Rows of all devices together, in place of `batch_size`: each gets an
            equal share in a batch. It stays as it is when a position is resumed with another
            number of devices; `fetch_fun` is given it as the hint.
        order: "ticket" merges chunks by number, "arrival" as their calls finish: no row is lost or
            doubled, but the order is not repeatable. `fetch(call)` must then raise StopIteration
            for every index from the end of its epoch on.
        num_threads: Threads that serve the workers; as many as workers by default. With 0 the
            thread that asks for a batch makes the calls for it, nothing is read ahead, and no
            thread runs; for one device of the host. Not part of the stream.
        executor: What `fetch_fun` runs on: ``feeder.Threads(n)``, which is the same as
            `num_threads`; ``feeder.Processes(n)``, for functions that compute in Python;
            "processes", as many as there are cores, shared out among the ranks of the host
            (`LOCAL_WORLD_SIZE`); "processes:4"; or ``feeder.RayActors(n)``, for more than one
            host has cores for, also as "ray:4" or "ray:1-8". Not part of the stream. A function
            for processes or actors can be pickled, is named by "MODULE:ATTR", or needs
            cloudpickle. See docs/processes.md and docs/scale.md.
        rows_per_call: Rows that each call of ``fetch(call)`` gives, an epoch's last excepted, which
            may give fewer; a divisor of the rows of a batch. `Call.out` and `Call.empty` then give
            memory of the batch itself, and what is written there is not copied. Not part of the
            stream. See docs/fetching.md#rows-written-where-they-belong.
        retries: How often a call that raised is made again (not for functions resumed by replay).
        retry_backoff_s: Seconds before the first retry; doubled each further time.
        repeatable: False where `fetch_fun`, put back, would not give the same rows again: then
            snapshots and state dicts always carry the leftover rows. Refused for a function that
            can only be put back by calling it again.
        writable: Make the arrays of batches private and writable.
        version: Your own version of `fetch_fun` and its data, part of the fingerprint: a snapshot
            of another is refused.
        depth: Batches that are on each GPU ahead of the user, beside the three that the user may
            hold without a copy; as many lie in pinned memory of the host. 0 chooses by their size:
            32 MiB of batches, from 4 to 64.
        on_device: A function ``fn(batch)`` or ``fn(batch, rng)`` that returns the arrays that are
            handed out, by name. On a GPU it runs ahead of the user, on the stream of the copies, so
            also with other names, shapes and dtypes; on the host when a batch is handed out. `rng`
            is NumPy's generator for (seed, epoch, index of the batch). Not part of the stream. See
            docs/gpu.md#work-on-the-device.
        resume: Where to go on: a Snapshot, its bytes, a token, a state dict, the path of a file; a
            `CheckpointStore`, or its folder or URL, for the newest in it; or "latest" for the
            newest in the coordinator's own place, and the beginning where nothing is there yet.
            See docs/checkpoints.md.
        skip: Go on so many rounds of all devices later, for example after rows that spoilt a
            model. Where the source can tell the place, the batches before it are not made. See
            docs/positions.md#any-number-of-devices.
        edit: Why the run goes on with other data than it had: weights, sources, records or batch
            sizes. Without it a position of other settings is refused; with it each source goes on
            at its place, and the position holds what was changed, where, and this text. See
            docs/editing.md.
        transcript: A folder in which a digest of each batch that is handed out is written down, in
            a chain: `feeder compare` finds the first step in which two runs differ. A run that goes
            on from a position goes on in the same chain. Not part of the stream. See
            docs/transcripts.md.
        coordinator: The coordinator to add to; by default one for the process, the same at each
            call until it is stopped.

    Returns:
        The coordinator. Nothing runs before its `start` or its `with` block.

    Raises:
        ConfigError: A setting is wrong.
        ResumeError: `resume` does not fit the feed.
        CheckpointError: What is given as `resume` cannot be read.
    """
    settings = check(init_data_input_workers, locals())
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
            _default.is_default = True
        return _default
