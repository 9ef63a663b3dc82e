"""The settings of a feed: what they mean together, before anything is started."""

from __future__ import annotations

import contextlib
import inspect
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np

from feeder.errors import ConfigError
from feeder.executors.options import Executor, Processes, RayActors, Threads, executor_of, resolve
from feeder.state import codec
from feeder.workers.stream.spec import RunSpec, StreamSpec

# Far above what any machine runs: a number of too many digits is refused, and takes no memory.
MOST_THREADS, MOST_WORKERS, _MOST_DEVICES = 4096, 2**16, 4096
# Where a bound on memory is not set: enough for any batch, and small beside a training host's
# memory.
_MOST_DEFAULT_BYTES = 2**30
# So many calls are ahead of processes that have not answered yet: as many as there are processes,
# up to 64, and of very many an eighth.
_MOST_AHEAD, _AHEAD_SHARE = 64, 8
# Where the two versions of control groups say how much memory a container may use.
_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


class FeedConfig(NamedTuple):
    """The settings of one feed, checked. It never changes; any thread reads it."""

    name: str
    """Its input source name."""
    devices: tuple[str, ...]
    """Its devices, each with a queue of its own."""
    version: str
    """The user's own version of the fetch function and its data, part of the fingerprint."""
    stream: StreamSpec
    """The settings that define its batches."""
    run: RunSpec
    """How it is run."""
    max_buffered_batches: int
    """Batches buffered at most."""
    depth: int
    """Batches on each GPU beside those that the user holds; 0 goes by their size."""
    init_fun: Callable[[Any, Any], Any] | None
    """Called with feed and coordinator once before any thread starts."""
    skip: int
    """Rounds that are left out where it begins."""
    external_loggers: tuple[Any, ...]
    """Objects with a `log(dict)` method that are given the feed's statistics."""
    on_device: Callable[..., Any] | None = None
    """What makes of each batch what is handed out."""
    transcript: str | None = None
    """The folder in which each step is written down that was handed out; None writes none."""
    edit: str | None = None
    """Why a position of other settings goes on with these; None if it does not."""

    def fingerprint(self) -> dict[str, Any]:
        """The declared fields that must be equal for a snapshot to fit."""
        said = _what_it_says(self.stream.fetch)
        return {**self.stream.fingerprint(), "version": self.version, **said}

    def as_it_was(self) -> FeedConfig | None:
        """The settings of the feed as its source was in an earlier format; None where that is
        none."""
        older = getattr(self.stream.fetch, "as_it_was", None)
        fetch = older() if callable(older) else None
        return None if fetch is None else self.with_fetch(fetch)

    def with_fetch(self, fetch: Callable[..., Any]) -> FeedConfig:
        """The settings with another fetch function."""
        run = self.run
        if run.executor is not None:
            # Also where it was given by its name: what is loaded by that has the present format.
            run = run._replace(executor=run.executor.of(fetch))
        return self._replace(stream=self.stream._replace(fetch=fetch), run=run)


def make_config(settings: Mapping[str, Any], first_worker_id: int) -> FeedConfig:
    """Make a feed's settings of the arguments of `init_data_input_workers`, of which each has been
    checked by itself; raises `ConfigError`."""
    names = _names(settings["input_blob_names"])
    executor = executor_of(settings["executor"])
    fetch = given = settings["fetch_fun"]
    if isinstance(fetch, str) and isinstance(executor, Processes | RayActors):
        fetch = resolve(fetch)
    pure, cursor, seek = _form(fetch)
    devices = _devices(settings["devices"])
    stream = StreamSpec(
        fetch=_in_step(fetch, settings["last_batch"]),
        pure=pure,
        cursor=cursor,
        seek=seek,
        names=names,
        axes=_axes(settings["batch_columns"], len(names)),
        batch_size=_batch_size(settings, len(devices)),
        num_workers=settings["num_worker_threads"],
        first_worker_id=first_worker_id,
        seed=settings["seed"],
        epochs=settings["epochs"],
        last_batch=settings["last_batch"],
        last_round=settings["last_round"],
        order=settings["order"],
        dont_rebatch=settings["dont_rebatch"],
        repeatable=settings["repeatable"],
        rounds=settings["rounds"],
        global_batch_size=settings["global_batch_size"],
    )
    _check_together(stream)
    run = _run(settings, stream, executor, given)
    _check_rows_per_call(stream, run.rows_per_call)
    return FeedConfig(
        name=settings["input_source_name"],
        devices=devices,
        version=settings["version"],
        stream=stream,
        run=run,
        max_buffered_batches=settings["max_buffered_batches"],
        depth=settings["depth"],
        skip=settings["skip"],
        init_fun=settings["init_fun"],
        external_loggers=_loggers(settings["external_loggers"]),
        on_device=settings["on_device"],
        transcript=_transcript(settings["transcript"], devices),
        edit=settings["edit"],
    )


def _check_together(stream: StreamSpec) -> None:
    """Raise `ConfigError` where settings that are sound alone contradict each other."""
    if stream.dont_rebatch and stream.last_batch != "keep":
        raise ConfigError(
            f"last_batch is {stream.last_batch!r}: with dont_rebatch every chunk is a batch, so "
            "nothing is left at the end of an epoch; leave it at 'keep'"
        )
    if stream.dont_rebatch and stream.global_batch_size is not None:
        raise ConfigError(
            f"global_batch_size is {stream.global_batch_size}: with dont_rebatch every chunk is a "
            "batch, of whatever size; give batch_size"
        )
    if stream.rounds == "epoch" and stream.last_batch == "carry":
        raise ConfigError(
            "rounds is 'epoch': with last_batch='carry' rows flow from one epoch into the next, so "
            "that no round begins with an epoch; use another last_batch, or rounds='stream'"
        )
    if not (stream.repeatable or stream.pure or stream.seekable):
        raise ConfigError(
            "repeatable is False, and the fetch function can only be put back by calls that are "
            "made again, so its feed could never be resumed; give it cursor(worker_id) and "
            "seek(worker_id, cursor), use fetch(call), or leave repeatable at True"
        )


def _check_rows_per_call(stream: StreamSpec, rows: int | None) -> None:
    """Raise `ConfigError` where it is not known before a call where its rows belong."""
    if rows is None:
        return
    if not stream.pure:
        raise ConfigError(
            f"rows_per_call is {rows}: the place of a call's rows is known before the call only "
            "for fetch(call); leave it out"
        )
    if stream.batch_size % rows:
        raise ConfigError(
            f"rows_per_call is {rows}, expected a divisor of the {stream.batch_size} rows of a "
            "batch"
        )
    if getattr(stream.fetch, "gives_all_rows", True) is False:
        raise ConfigError(
            f"rows_per_call is {rows}, but the source leaves out defective records; leave it out, "
            "or on_error='skip'"
        )
    against = {
        "dont_rebatch": stream.dont_rebatch and "with dont_rebatch each chunk is a batch",
        "order": stream.order == "arrival" and "with order='arrival' chunks come in any order",
        "last_batch": stream.last_batch == "carry"
        and "with last_batch='carry' rows flow from one epoch into the next",
    }
    for name, why in against.items():
        if why:
            raise ConfigError(f"rows_per_call is {rows}: {why}; leave it out, or {name}")


def _batch_size(settings: Mapping[str, Any], num_devices: int) -> int:
    """Rows per batch, as they are given or as one device's share of a round."""
    size, of_all = settings["batch_size"], settings["global_batch_size"]
    if size is not None and of_all is not None:
        raise ConfigError(
            f"batch_size is {size} and global_batch_size is {of_all}, expected one of the two: the "
            "first follows from the second"
        )
    if of_all is not None:
        return _share(of_all, num_devices)
    if size is None:
        raise ConfigError("batch_size is None, expected a whole number >= 1")
    return int(size)


def _share(size: int, num_devices: int) -> int:
    """Rows of one device's batch, where all devices together have so many."""
    if size % num_devices:
        raise ConfigError(
            f"global_batch_size is {size}, expected a multiple of the {num_devices} devices"
        )
    return size // num_devices


def deal_to(config: FeedConfig, devices: tuple[str, ...]) -> FeedConfig:
    """The settings of a feed that is dealt out to other devices. Raises `ConfigError` where its
    global batch cannot be shared out among them."""
    stream, run = config.stream, config.run
    if stream.global_batch_size is not None:
        size = _share(stream.global_batch_size, len(devices))
        run = run._replace(max_rows=config.max_buffered_batches * size)
        stream = stream._replace(batch_size=size)
        _check_rows_per_call(stream, run.rows_per_call)
    return config._replace(devices=devices, stream=stream, run=run)


def with_numbers(
    config: FeedConfig, sizes: Mapping[str, int], seed: int | None = None
) -> FeedConfig:
    """The settings of a feed with another `batch_size`, or `global_batch_size`, and seed. Raises
    `ConfigError`."""
    stream = config.stream
    here, other = ("batch_size", "global_batch_size")[:: -1 if stream.global_batch_size else 1]
    if other in sizes:
        raise ConfigError(
            f"feed {config.name!r} has no {other}, but {here} {stream.rows_asked}: edit that"
        )
    stream = stream._replace(
        seed=stream.seed if seed is None else seed,
        batch_size=sizes.get("batch_size", stream.batch_size),
        global_batch_size=sizes.get("global_batch_size", stream.global_batch_size),
    )
    run = config.run._replace(max_rows=config.max_buffered_batches * stream.batch_size)
    _check_rows_per_call(stream, run.rows_per_call)
    return deal_to(config._replace(stream=stream, run=run), config.devices)


def _in_step(fetch: Any, last_batch: Any) -> Any:
    """A source as it is best called where rows flow into the next epoch; else `fetch` itself."""
    # Under "carry" the first call of an epoch gives what the last batch lacks, so that each later
    # chunk is a batch of its own and is passed on without a copy.
    carrying = getattr(fetch, "carrying", None)
    return carrying() if callable(carrying) and last_batch == "carry" else fetch


def _what_it_says(fetch: Any) -> dict[str, Any]:
    """The fields that a fetch function declares by `describe()`, as sources do."""
    describe = getattr(fetch, "describe", None)
    if not callable(describe):
        return {}
    fields = describe()
    try:
        # As it comes out of a snapshot again, so that the two can be compared.
        plain = msgpack.unpackb(msgpack.packb(dict(fields)))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"describe() of fetch_fun returned {fields!r}, expected a dict of names and plain "
            f"values: {error}"
        ) from error
    return {f"source.{name}": value for name, value in plain.items()}


def _run(
    settings: Mapping[str, Any], stream: StreamSpec, executor: Executor | None,
    fetch: Any,
) -> RunSpec:  # fmt: skip
    max_bytes, retries = settings["max_buffered_bytes"], settings["retries"]
    if retries and not (stream.pure or stream.seekable):
        raise ConfigError(
            f"retries is {retries}: a call can only be made again by a pure fetch(call), or where "
            "the fetch function has cursor(worker_id) and seek(worker_id, cursor)"
        )
    return RunSpec(
        num_threads=_num_threads(settings, stream, executor),
        max_rows=settings["max_buffered_batches"] * stream.batch_size,
        max_bytes=max_bytes or default_bytes(),
        # A bound that somebody has set holds from the first chunk on. The default lets all workers
        # begin at once: most chunks are far smaller, and a feed should not begin slowly for it.
        guess_bytes=max_bytes or 0,
        timeout_s=settings["timeout"],
        retries=retries,
        retry_backoff_s=settings["retry_backoff_s"],
        writable=settings["writable"],
        debug=os.environ.get("FEEDER_DEBUG", "") not in ("", "0"),
        encode_cursor=codec.pack,
        decode_cursor=codec.unpack,
        executor=_executor(executor, stream, fetch),
        rows_per_call=settings["rows_per_call"],
    )


def _num_threads(settings: Mapping[str, Any], stream: StreamSpec, executor: Executor | None) -> int:
    num_threads = settings["num_threads"]
    if executor is not None and num_threads is not None:
        raise ConfigError(
            f"num_threads is {num_threads!r} and executor is {executor!r}, expected one of the two"
        )
    if isinstance(executor, Threads):
        return executor.num
    if isinstance(executor, Processes | RayActors):
        # Each process has its next calls before it has answered for these. Of very many, some are
        # between two tickets at any time; each thread has some 30 KB. A thread whose call was slow
        # has fallen behind, and comes up again by those calls that are ahead: of 1,000 simulated
        # actors with a slow call in a hundred, 64 ahead were too few, and 125 enough (2026-11-26).
        num = executor.num if isinstance(executor, Processes) else executor.most
        most = num + max(min(num, _MOST_AHEAD), num // _AHEAD_SHARE)
        return most if stream.pure else min(most, stream.num_workers)
    if num_threads is None and stream.num_workers <= MOST_THREADS:
        return stream.num_workers
    if num_threads is None:
        raise ConfigError(
            f"num_worker_threads is {stream.num_workers}, and each worker would have a thread, "
            f"expected at most {MOST_THREADS}; give num_threads"
        )
    return int(num_threads)


def _executor(executor: Executor | None, stream: StreamSpec, fetch: Any) -> Any:
    given = fetch if isinstance(fetch, str) else stream.fetch
    # Else a feed without processes would load them too, and one without actors what these need.
    if isinstance(executor, Processes):
        from feeder.executors.processes import ProcessExecutor

        return ProcessExecutor(executor, given)
    if isinstance(executor, RayActors):
        from feeder.executors.actors import RayExecutor

        return RayExecutor(executor, given)
    return None


def run_on(config: FeedConfig, given: Any) -> FeedConfig:
    """The settings of a feed whose fetch function runs on another executor; None leaves them as
    they are. Raises `ConfigError`."""
    executor = executor_of(given)
    if executor is None:
        return config
    stream = config.stream
    num_threads = _num_threads({"num_threads": None}, stream, executor)
    runs = _executor(executor, stream, stream.fetch)
    return config._replace(run=config.run._replace(num_threads=num_threads, executor=runs))


def default_bytes() -> int:
    """The bound on bytes where none is set: 1 GiB, or a quarter of the memory if that is less."""
    return min(_MOST_DEFAULT_BYTES, memory_bytes() // 4)


def memory_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may use: the machine's memory, or its group's where that is less."""
    most = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in _LIMITS:
        with contextlib.suppress(OSError, ValueError):
            most = min(most, int((cgroup / name).read_text()))
    return most


def _form(fetch: Any) -> tuple[bool, Any, Any]:
    """Whether a fetch function is pure, and its cursor and seek functions: its own attributes, or
    those of the object that it is a method of."""
    if not callable(fetch):
        raise ConfigError(
            f"fetch_fun is {_brief(fetch)}, expected a function fetch(worker_id, batch_size) or "
            f"fetch(call){_hint_of_source(fetch)}"
        )
    num = _num_required(fetch)
    if num not in (1, 2):
        raise ConfigError(
            f"fetch_fun takes {num} arguments, expected fetch(worker_id, batch_size) or fetch(call)"
        )
    if num == 1:
        return True, None, None
    owners = (fetch, getattr(fetch, "__self__", None))
    cursor, seek = (
        next((f for f in (getattr(owner, name, None) for owner in owners) if callable(f)), None)
        for name in ("cursor", "seek")
    )
    if (cursor is None) != (seek is None):
        raise ConfigError(
            f"fetch_fun has {'seek' if cursor is None else 'cursor'} alone; to be resumed at a "
            "cursor it needs both cursor(worker_id) and seek(worker_id, cursor)"
        )
    return False, cursor, seek


def _brief(value: Any) -> str:
    """A value as text; its type where that is long."""
    text = reprlib.repr(value)
    return f"a {type(value).__name__}" if "..." in text else text


def _hint_of_source(data: Any) -> str:
    """How data is fed that came in place of a fetch function; empty where it is none."""
    if isinstance(data, (np.ndarray, Mapping)):
        return "; arrays are fed by feeder.sources.arrays(...)"
    is_dataset = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    if not is_dataset or isinstance(data, (str, bytes)):
        return ""
    return "; what has __len__ and __getitem__ is fed by feeder.sources.records(...)"


def _num_required(fetch: Callable[..., Any]) -> int:
    """How many positional arguments a function requires; where it requires none, how many of the
    two it would be called with it accepts."""
    try:
        parameters = inspect.signature(fetch).parameters.values()
    except (TypeError, ValueError):
        return 2  # Written in C, it tells no signature; the first form is Caffe2's.
    # Required ones count: fetch(call, verbose=False) is a function of a call.
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    accepted = [p for p in parameters if p.kind in positional]
    num_required = sum(p.default is p.empty for p in accepted)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return max(2, num_required)
    return num_required or min(2, len(accepted))


def _names(names: Any) -> tuple[str, ...]:
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        hint = "; feeder has no nets: leave the net out" if hasattr(names, "Proto") else ""
        raise ConfigError(
            f"input_blob_names is {names!r}, expected a list of names in first place{hint}"
        )
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"input_blob_names is {names!r}, expected at least one name, none twice")
    return tuple(names)


def _axes(batch_columns: Any, num: int) -> tuple[int, ...]:
    if batch_columns is None:
        return (0,) * num
    if not isinstance(batch_columns, (list, tuple)) or not all(
        type(axis) is int and 0 <= axis < 32 for axis in batch_columns
    ):
        raise ConfigError(f"batch_columns is {batch_columns!r}, expected one axis per input name")
    if len(batch_columns) != num:
        raise ConfigError(
            f"batch_columns has {len(batch_columns)} axes, expected {num}: one per input name"
        )
    return tuple(batch_columns)


def _devices(devices: Any) -> tuple[str, ...]:
    if isinstance(devices, str):
        devices = (devices,)
    if type(devices) is int and devices > _MOST_DEVICES:
        raise ConfigError(f"devices is {devices}, expected at most {_MOST_DEVICES}")
    if type(devices) is int and devices > 0:
        devices = ("cpu",) if devices == 1 else tuple(f"cpu:{i}" for i in range(devices))
    if not isinstance(devices, Sequence) or not devices:
        raise ConfigError(f"devices is {devices!r}, expected names such as ('cpu',), or a number")
    for device in devices:
        kind, colon, index = device.partition(":") if isinstance(device, str) else ("", "", "")
        plain = index.isdecimal() and index == str(int(index))
        known = kind in ("cpu", "cuda", "torch")
        if not known or bool(colon) != plain or (kind != "cpu" and not plain):
            raise ConfigError(
                f"device is {device!r}, expected 'cpu', 'cpu:<number>', 'cuda:<number>' or "
                "'torch:<number>'"
            )
    if len(set(devices)) != len(devices):
        raise ConfigError(f"devices is {tuple(devices)!r}, expected none of them twice")
    return tuple(devices)


def _transcript(folder: Any, devices: Sequence[str]) -> str | None:
    if folder is None:
        return None
    on_gpu = [device for device in devices if not device.startswith("cpu")]
    if on_gpu:
        raise ConfigError(
            f"transcript is {folder!r}, and the devices are {tuple(devices)!r}: a digest is made of"
            f" rows in memory of the host, and those of {on_gpu[0]!r} are on a GPU when they are "
            "handed out; leave it out, or hand batches out on the host"
        )
    return folder_of(folder)


def folder_of(folder: Any) -> str:
    """The folder of a transcript. Raises `ConfigError`."""
    path = os.fspath(folder) if isinstance(folder, str | os.PathLike) else ""
    if not isinstance(path, str) or not path or "://" in path:
        raise ConfigError(f"transcript is {folder!r}, expected a folder of a file system")
    return path


def _loggers(loggers: Any) -> tuple[Any, ...]:
    loggers = () if loggers is None else loggers
    if not isinstance(loggers, (list, tuple)) or not all(
        callable(getattr(logger, "log", None)) for logger in loggers
    ):
        raise ConfigError(f"external_loggers is {loggers!r}, expected objects with log(dict)")
    return tuple(loggers)
