"""PyTorch: `FeedLoader` in place of `torch.utils.data.DataLoader`.

```python
from feeder.adapters.torch import DataLoader
```

The arguments are DataLoader's. What is new: the order is the same in each run and shuffled anew in
each epoch, ranks share one order and each reads its own batches alone, and `state_dict()` after any
batch resumes the job bit for bit, with any number of ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import GenericAlias
from typing import Any

import numpy as np
import torch
import torch.distributed
import torch.utils.data
import xxhash
from torch.utils.data.distributed import DistributedSampler

from feeder.adapters.datasets import Batched, Ordered, Sampled, States, check_samples
from feeder.adapters.loop import EpochLoader, Stream
from feeder.adapters.packing import COLUMNS, Array, Leaf, split, unpack
from feeder.adapters.skips import AN_ITERABLE_ENDS, NO_FAULTS, check_on_error
from feeder.adapters.streams import (
    FEEDS,
    Connection,
    Dealt,
    MadeStream,
    Ranks,
    executor_settings,
    find_ranks,
    has_row_per_record,
    read_feed,
    read_function,
    whole,
)
from feeder.adapters.torch.callers import note_reader, tell_saver
from feeder.devices.cuda.torchdriver import import_bindings
from feeder.devices.ondevice import check_rows, wrong
from feeder.errors import ConfigError, ResumeError
from feeder.sources import LeftOut, RecordError, Source
from feeder.state import codec
from feeder.workers.sources.stores.reading import OnError
from feeder.workers.stream.batch import Batch
from feeder.workers.stream.spec import FILE_ORDER

_TIMEOUT_S = 600.0
_PRELOAD = ("feeder.adapters.torch",)

# Names of dtypes that both libraries have; of any other the bytes go over as they are.
_NUMPY = {
    name: np.dtype(name)
    for name in (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
    if hasattr(torch, name)
}  # fmt: skip
# Elements of a batch: a larger one would be copied once more, and by PyTorch's own threads.
_JOINED = 1 << 15
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class FeedLoader(EpochLoader):
    """Batches as tensors, an epoch per loop, with DataLoader's arguments in DataLoader's order.

    Args:
        dataset: What has `__getitem__` and `__len__`, an `IterableDataset` or another iterable, a
            source of `feeder.sources`, a fetch function `fetch(call)`, or a feed or consumer. Where
            it has `set_epoch`, it is told the epoch, from 0 on.
        batch_size: Samples per batch and rank; None gives samples as they are.
        shuffle: Whether each epoch is shuffled, by `seed`: the same in each run.
        sampler: Indices in its own order, for this rank alone. Its `set_epoch` is called.
        batch_sampler: The same in batches.
        num_workers: Processes that read ahead, in which the generators of `random`, `numpy.random`
            and `torch` are seeded for each sample; 0 is one thread.
        collate_fn: Makes a batch of a list of samples: tensors, arrays, numbers, texts and None in
            tuples, lists, dicts and dataclasses. By default samples are stacked.
        pin_memory: Whether tensors lie in pinned memory, where there is a GPU.
        drop_last: Whether an epoch's last batch is left out where it is shorter, and with several
            ranks what does not go round; else the last batch comes again for ranks without one.
        timeout: Seconds for which the data set may give nothing; 0 is 600.
        generator: Where it is given, `seed` is its initial seed.
        prefetch_factor: Batches that are read ahead for each worker; 2 by default.
        persistent_workers: Either: workers stay from epoch to epoch.
        worker_init_fn: Refused: draws are seeded for each sample.
        multiprocessing_context: Refused.
        in_order: Only True.
        seed: Of shuffles, from 0 to 2**64 - 1.
        epochs: After so many epochs a further loop raises; None is without end.
        device: Where tensors are to be, such as "cuda:0". Batches are copied to a GPU ahead, each
            as one piece, beside the GPU's work. You may hold three; of more it makes copies there.
        rank, world_size: By default those of `torch.distributed` if it is initialised; otherwise
            0 and 1, with a warning if the launcher has started more processes. If each rank is to
            read everything, as in some validations, give 0 and 1.
        executor: What reads ahead, in place of `num_workers`: `feeder.Threads(n)`, or
            `feeder.Processes(n)` with its options.
        global_batch_size: Samples per batch of all ranks together, in place of `batch_size`: it is
            the same after a resume with another number of ranks.
        on_device: A function ``fn(batch)`` or ``fn(batch, rng)`` of a batch as the loop would have
            it, which returns what the loop is to have: tensors on the same device, with as many
            rows. On a GPU it runs ahead of the loop, beside the GPU's work, without gradients;
            on the host when a batch is asked for. `rng` is NumPy's generator for the seed, the
            epoch and the batch's number among those of all ranks.
        on_error: "skip" leaves out samples whose `__getitem__` raises `ValueError`, `RuntimeError`
            or, several times, `OSError`: their batches are shorter. `left_out` lists them.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int = 0,
        epochs: int | None = None,
        device: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        executor: Any = None,
        global_batch_size: int | None = None,
        on_error: OnError = "raise",
        on_device: Callable[..., Any] | None = None,
    ) -> None:
        given = dict(locals())
        _check(given)
        num_workers, epochs = given["num_workers"], given["epochs"]
        self.dataset, self.drop_last = dataset, drop_last
        self.sampler, self.batch_sampler = sampler, batch_sampler
        self.num_workers, self.collate_fn, self.timeout = num_workers, collate_fn, timeout
        self.pin_memory = pin_memory
        self._is_of_group = rank is None and world_size is None and _has_group()
        gpu = None if isinstance(dataset, FEEDS) else _gpu(device)
        self._tensors = _Tensors(device, pin_memory, gpu)
        given["devices"] = gpu or "cpu"
        given["on_device"] = on_device and OnTensors(on_device, self._tensors)
        self._makes = on_device is not None
        super().__init__(_stream_of(dataset, given), epochs)
        if self._is_of_group and sampler is None and batch_sampler is None:
            _compare_rows(dataset)
            _compare_files(dataset)
        self.batch_size = given["batch_size"]

    @classmethod
    def connect(
        cls,
        addresses: Any = None,
        *,
        device: Any = None,
        pin_memory: bool = False,
        on_device: Callable[..., Any] | None = None,
        **options: Any,
    ) -> FeedLoader:
        """A loader over one queue of a served feed, with the arguments of `feeder.connect`. Batches
        are dicts of tensors by column."""
        gpu = _gpu(device)
        if gpu is not None:
            options["device"] = gpu
        if on_device is not None:
            options["on_device"] = OnTensors(on_device, _Tensors(device, pin_memory, gpu))
        loader = cls(
            Connection(addresses, options), device=device, pin_memory=pin_memory and gpu is None
        )
        loader._makes = on_device is not None
        return loader

    def __class_getitem__(cls, of: Any) -> Any:
        """The class itself: annotations say what its batches are, as `DataLoader[int]`."""
        return GenericAlias(cls, of)

    _is_kept = False
    """Whether a framework's callback keeps the states."""

    def set_epoch(self, epoch: int) -> None:
        """Nothing: each loop is the next epoch, and is shuffled anew by itself."""

    def state_dict(self, used: int | None = None) -> dict[str, Any]:
        """The position after the last batch that was given, or after so many that were used."""
        tell_saver(self)
        return super().state_dict(used)

    def __iter__(self) -> Iterator[Any]:
        note_reader(self)
        return super().__iter__()

    @property
    def skipped(self) -> int:
        """Reads of samples that were left out since the loader was made, also of batches ahead."""
        skipped: int = self._faults.skipped
        return skipped

    @property
    def left_out(self) -> list[LeftOut]:
        """The first hundred of these, by epoch and batch. A loader that goes on from a state knows
        those before it, if it is of one rank."""
        listed: list[LeftOut] = self._faults.left_out
        return listed

    @property
    def _faults(self) -> Any:
        is_source = isinstance(self.dataset, Source)
        return self.dataset if is_source else getattr(self._stream, "faults", NO_FAULTS)

    @property
    def _is_in_loop(self) -> bool:
        """Whether an epoch is begun, and not given whole."""
        return self._is_begun

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state: the next loop gives the rest of its epoch.

        Raises `ResumeError`; also where another rank of `torch.distributed` has loaded a state of
        another step: rows would be lost, or come twice. Of two such ranks the later one is told.
        """
        super().load_state_dict(state_dict)
        if self._is_of_group and isinstance(self._stream, MadeStream):
            _compare_steps(self._stream.fingerprint, self.step)

    def _convert(self, batch: Batch) -> Any:
        if not self._makes:
            return self._tensors.of(batch)
        # What the function has made, which the feed gives apart.
        tree: Any
        tree, *tensors = batch.columns
        return tree.of(tensors)


# ---- tensors


class _Tensors:
    """How batches become tensors. Fixed when made: any thread calls it."""

    def __init__(self, device: Any, pins: bool, gpu: str | None) -> None:
        # Where batches come on the GPU nothing is moved any more.
        self._device = None if device is None or gpu is not None else torch.device(device)
        self._pins = pins and torch.cuda.is_available() and gpu is None

    def of(self, batch: Batch) -> Any:
        """The tensors of a batch, in its structure."""
        if tuple(batch) == COLUMNS:
            return unpack(batch.columns, self._tensor)
        made = {name: self._moved(_as_tensor(batch[name])) for name in batch}
        # A function that returned a tuple has no names.
        return tuple(made.values()) if "0" in made else made

    def _tensor(self, row: Any, leaf: Leaf) -> torch.Tensor:
        if isinstance(row, torch.Tensor):
            return _view_of(row, leaf)
        return self._moved(_tensor_of(row, leaf))

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._pins:
            tensor = tensor.pin_memory()
        if self._device is not None:
            tensor = tensor.to(self._device, non_blocking=True)
        return tensor


class OnTensors(Dealt):
    """A function of tensors, in the structure that the loop has them in. What it returns leaves the
    feed as a `Tree` and tensors."""

    def __init__(self, function: Callable[..., Any], tensors: _Tensors) -> None:
        super().__init__(function)
        self._tensors = tensors

    def __call__(self, batch: Batch) -> Batch:
        with torch.no_grad():
            return super().__call__(batch)

    def give(self, batch: Batch) -> Any:
        return self._tensors.of(batch)

    def take(
        self, batch: Batch, given: Any, axes: Sequence[int], made: Any
    ) -> tuple[tuple[str, ...], tuple[Any, ...]]:
        try:
            tree, tensors = split(made, _is_tensor)
        except TypeError as error:
            raise wrong(
                f"returned a batch with {error} in it, expected tensors, numbers, texts, None, "
                "or tuples, lists, dicts and dataclasses of these"
            ) from None
        if not tensors:
            raise wrong(
                f"returned {'None' if made is None else f'a {type(made).__name__}'}, expected a "
                "batch of tensors"
            )
        rows = {len(one) for one in split(given, _is_tensor)[1] if one.shape}
        for number, tensor in enumerate(tensors):
            # A collate function may have made tensors of several lengths.
            check_rows(f"tensor {number}", tensor, 0, min(rows) if len(rows) == 1 else None)
        return ("tree", *map(str, range(len(tensors)))), (tree, *tensors)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _tensor_of(row: Any, leaf: Leaf) -> torch.Tensor:
    """A tensor over the bytes of a batch."""
    dtype = _NUMPY.get(leaf.dtype)
    if dtype is not None:
        return torch.from_numpy(np.ndarray(leaf.shape, dtype, row, leaf.offset))
    of: torch.dtype = getattr(torch, leaf.dtype)
    count = int(np.prod(leaf.shape, dtype=np.int64))
    raw = np.ndarray((count * of.itemsize,), np.uint8, row, leaf.offset)
    return torch.from_numpy(raw).view(of).reshape(leaf.shape)


def _view_of(row: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """The same of a batch whose bytes are on a GPU."""
    of: torch.dtype = getattr(torch, leaf.dtype)
    num_bytes = math.prod(leaf.shape) * of.itemsize
    return row[leaf.offset : leaf.offset + num_bytes].view(of).view(leaf.shape)


def _gpu(device: Any) -> str | None:
    """The device of a feed whose batches are copied ahead to that GPU; None where they are moved as
    they are asked for: to no GPU of NVIDIA's, or where PyTorch has not brought the bindings."""
    if device is None or not torch.cuda.is_available():
        return None
    found = torch.device(device)
    if found.type != "cuda" or import_bindings() is None:
        return None
    return f"torch:{torch.cuda.current_device() if found.index is None else found.index}"


def _read_tensor(value: Any) -> Array | None:
    """The array of a tensor, over its memory where it lies on the host; None for what is none."""
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout is not torch.strided or value.is_quantized:
        raise RecordError(f"a tensor of layout {value.layout} and dtype {value.dtype}, expected a "
                          "dense one")  # fmt: skip
    value = value.detach().cpu().resolve_conj().resolve_neg()
    name = str(value.dtype).removeprefix("torch.")
    if name in _NUMPY:
        return Array(value.numpy(), name)
    return Array(value.contiguous().view(_OF_SIZE[value.dtype.itemsize]).numpy(), name)


def _join_tensors(values: Any) -> Array | None:
    """Small tensors stacked by PyTorch itself, which takes a tenth of the time that reading them
    one by one takes; None for other values and for tensors that are not alike."""
    first = values[0]
    if type(first) is not torch.Tensor or first.numel() * len(values) > _JOINED:
        return None
    dtype, shape, name = first.dtype, first.shape, str(first.dtype).removeprefix("torch.")
    alike = all(
        type(value) is torch.Tensor and value.dtype is dtype and value.shape == shape
        for value in values
    )
    if not alike or name not in _NUMPY or dtype.is_complex or first.layout is not torch.strided:
        return None
    with torch.no_grad():
        try:
            return Array(torch.stack(values).cpu().numpy(), name)
        except RuntimeError:
            # What is wrong with one of them is told by its name.
            return None


def _as_tensor(array: Any) -> torch.Tensor:
    """A column of a feed as a tensor that may be written to."""
    if not isinstance(array, np.ndarray):
        return torch.as_tensor(array)
    if not array.flags.writeable:
        # PyTorch would write into what others read.
        array = array.copy()
    if array.dtype.name in _NUMPY:
        return torch.from_numpy(array)
    raw = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    of: torch.dtype = getattr(torch, array.dtype.name)
    return raw.view(of).reshape(array.shape)


# ---- states of samplers and iterables

_TENSOR = "tensor of torch"


def _pack_state(state: Any) -> bytes:
    return codec.pack(_map_state(state, _arrays_of))


def _unpack_state(packed: bytes) -> Any:
    return _map_state(codec.unpack(packed), _tensors_of)


def _map_state(value: Any, change: Callable[[Any], Any]) -> Any:
    value = change(value)
    if type(value) is dict:
        return {name: _map_state(child, change) for name, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_state(child, change) for child in value)
    return value


def _arrays_of(value: Any) -> Any:
    """A tensor, as what a position can hold."""
    found = _read_tensor(value)
    return value if found is None else {_TENSOR: found.dtype, "values": found.values}


def _tensors_of(value: Any) -> Any:
    if type(value) is not dict or _TENSOR not in value:
        return value
    return torch.from_numpy(value["values"]).view(getattr(torch, value[_TENSOR]))


STATES = States(_pack_state, _unpack_state)
"""States with tensors in them, as those of PyTorch's generators are."""


# ---- what is read


def _stream_of(dataset: Any, given: dict[str, Any]) -> Stream:
    """The stream that a loader of these arguments reads."""
    if isinstance(dataset, FEEDS):
        _refuse(given, "a feed has its own", _OF_DATA_SETS)
        return read_feed(dataset)
    sampler = given["sampler"] if given["batch_sampler"] is None else given["batch_sampler"]
    if sampler is not None:
        names = ("shuffle", "rank", "world_size", "global_batch_size")
        _refuse(given, "a sampler says what this rank reads", names)
        ranks = find_ranks(0, 1, drops=False)
    else:
        ranks = _ranks(given)
    if (rows := given["global_batch_size"]) is not None:
        given["batch_size"], rest = divmod(rows, ranks.share.num)
        if rest:
            raise ConfigError(
                f"global_batch_size is {rows}, expected a multiple of the {ranks.share.num} ranks"
            )
    seed = given["seed"] if given["generator"] is None else given["generator"].initial_seed()
    batched = Batched(given["batch_size"], given["drop_last"], given["collate_fn"], _read_tensor,
                      _join_tensors, given["global_batch_size"])  # fmt: skip
    prefetch = given["prefetch_factor"] or 2
    settings = {
        "seed": seed,
        "timeout": given["timeout"] or _TIMEOUT_S,
        "devices": given["devices"],
        "on_device": given["on_device"],
        "max_buffered_batches": max(2, prefetch * max(1, given["num_workers"])),
        **executor_settings(given["num_workers"], given["executor"], _PRELOAD),
    }
    kind = _kind_of(dataset)
    if kind != "map":
        _refuse(given, _SKIPS[kind], ("on_error",))
    if kind == "function":
        _refuse(given, "a fetch function is its own data set", _OF_SAMPLES)
    if kind == "function" or (kind == "source" and not has_row_per_record(dataset)):
        _refuse(given, "a source has its own order and batches", _OF_SAMPLES)
        return read_function(dataset, batched, ranks, settings, given["epochs"])
    indices: Any = None
    if sampler is not None:
        is_batches = given["batch_sampler"] is not None
        batched = batched._replace(size=batched.size or 1) if is_batches else batched
        indices = Sampled(
            sampler, batched, seed, is_batch_sampler=is_batches, make_generator=_generator,
            states=STATES, shared=_shared_of(sampler),
        )  # fmt: skip
    if kind == "map" and indices is None:
        num = check_samples(dataset)
        indices = Ordered(num, batched, shuffle=bool(given["shuffle"]), seed=seed)
    if kind != "map":
        what = (
            "an iterable is its own order" if kind == "iterable" else "a source has its own order"
        )
        _refuse(given, what, ("shuffle", "sampler", "batch_sampler"))
    if kind == "iterable" and ranks.share.num > 1:
        warnings.warn(
            f"each of the {ranks.share.num} ranks reads all of the iterable, and keeps its own "
            "batches: serve it once and use FeedLoader.connect, or give a data set with "
            "__getitem__",
            stacklevel=4,
        )
    return MadeStream(
        kind, dataset, batched, ranks, indices=indices, settings=settings,
        epochs=given["epochs"], states=STATES, skips=check_on_error(given["on_error"]),
    )  # fmt: skip


def _shared_of(sampler: Any) -> dict[str, Any] | None:
    """What the samplers of all ranks have alike, where each is PyTorch's own for ranks."""
    sampler = getattr(sampler, "sampler", sampler)
    if getattr(type(sampler), "__iter__", None) is not DistributedSampler.__iter__:
        return None
    return {
        "num_replicas": sampler.num_replicas,
        "sampler_seed": sampler.seed,
        "sampler_shuffle": sampler.shuffle,
    }


def _kind_of(dataset: Any) -> Any:
    if isinstance(dataset, type):
        raise ConfigError(f"dataset is the class {dataset.__name__}, expected an object of it")
    if isinstance(dataset, Source):
        return "source"
    # First, since an IterableDataset has __getitem__ too, which raises.
    if isinstance(dataset, torch.utils.data.IterableDataset):
        return "iterable"
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return "map"
    if isinstance(dataset, torch.utils.data.Dataset):
        raise ConfigError(
            f"dataset {type(dataset).__name__} has no __len__: give it one, or make it an "
            "IterableDataset"
        )
    if isinstance(dataset, Iterable):
        return "iterable"
    if callable(dataset):
        return "function"
    raise ConfigError(
        f"dataset is a {type(dataset).__name__}, expected a Dataset, an IterableDataset, a source "
        "of feeder.sources, a fetch function fetch(call), a feed or a consumer"
    )


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _has_group() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


_num_said: dict[str, int] = {}
"""How often this process has told the other ranks something about a matter. Owner: the thread that
makes loaders and loads their states."""


def _say(matter: str, value: str) -> tuple[int, str] | None:
    """Tell the other ranks a value that is to be equal on all of them. Returns a rank that has told
    another one before, and what it told; of two ranks that differ the later one is told.

    Through the group's store: a collective operation would wait for ranks that do not take part.
    """
    store_of = getattr(torch.distributed.distributed_c10d, "_get_default_store", None)
    if store_of is None or torch.distributed.get_backend() == "mpi":
        return None
    store, mine = store_of(), torch.distributed.get_rank()
    number = _num_said[matter] = _num_said.get(matter, 0) + 1
    place = f"feeder/{matter}/{number}"
    store.set(f"{place}/{mine}", value)
    for rank in range(torch.distributed.get_world_size()):
        key = f"{place}/{rank}"
        if rank != mine and store.check([key]) and (other := store.get(key).decode()) != value:
            return rank, other
    return None


def _compare_steps(fingerprint: bytes, step: int) -> None:
    """Raise `ResumeError` if another rank has loaded a state of another step."""
    found = _say(fingerprint.hex(), str(step))
    if found is not None:
        mine, (rank, other) = torch.distributed.get_rank(), found
        raise ResumeError(
            f"rank {mine}'s checkpoint is of step {step}, rank {rank}'s of step {other}; have "
            "all ranks load the checkpoint of one step"
        )


def _compare_rows(dataset: Any) -> None:
    """Warn if another rank deals out another data set: then each may hold its own rows already."""
    if not hasattr(dataset, "__len__"):
        return
    kind, num = type(dataset).__name__, len(dataset)
    of = getattr(dataset, "indices", None) if kind == "Subset" else None
    told = repr([num, of, getattr(dataset, "_fingerprint", None)])
    which = xxhash.xxh3_64_hexdigest(told.encode())
    found = _say(f"rows of {kind}", f"{num} {which}")
    if found is not None:
        mine, (rank, other) = torch.distributed.get_rank(), found
        warnings.warn(
            f"rank {mine} has {num} samples in its {kind}, and rank {rank} has "
            f"{other.split()[0]} in one with others: FeedLoader deals one data set out to all "
            "ranks; if each has its own rows already, give rank=0, world_size=1 or use DataLoader",
            stacklevel=3,
        )


def _compare_files(dataset: Any) -> None:
    """Raise `ConfigError` if another rank reads other files, or in another order: rows would come
    twice, and others never."""
    if not isinstance(dataset, Source):
        return
    told = {name: value for name, value in dataset.describe().items() if name.endswith(FILE_ORDER)}
    if found := told and _say(f"files of {dataset.kind}", repr(told)):
        mine, (rank, other) = torch.distributed.get_rank(), found
        raise ConfigError(
            f"rank {mine} has the files {told}, and rank {rank} {other}: all ranks must read the "
            "same files in the same order; sort the paths, or give a pattern or a folder, whose "
            "files are sorted"
        )


def _ranks(given: dict[str, Any]) -> Ranks:
    """Rank and world size as they are given, or as `torch.distributed` has them."""
    rank, world_size = given["rank"], given["world_size"]
    if rank is None and world_size is None and _has_group():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return find_ranks(rank, world_size, drops=given["drop_last"])


# ---- arguments

_OF_SAMPLES = ("shuffle", "sampler", "batch_sampler", "collate_fn")
_OF_DATA_SETS = (*_OF_SAMPLES, "batch_size", "num_workers", "drop_last", "timeout", "generator",
                 "prefetch_factor", "seed", "epochs", "rank", "world_size", "executor",
                 "global_batch_size", "on_error", "on_device")  # fmt: skip
_NUMBERS = {
    "num_workers": 0, "batch_size": 1, "prefetch_factor": 1, "epochs": 1, "global_batch_size": 1,
}  # fmt: skip
_DEFAULTS = {
    "batch_size": 1, "num_workers": 0, "drop_last": False, "timeout": 0, "seed": 0, "shuffle": None,
    "on_error": "raise",
}  # fmt: skip
_SKIPS = {
    "iterable": AN_ITERABLE_ENDS, "source": "a source leaves out by itself: give it on_error",
    "function": "a fetch function returns the rows that it has",
}  # fmt: skip


def _refuse(given: dict[str, Any], why: str, names: Iterable[str]) -> None:
    """Raise `ConfigError` where one of the arguments is given."""
    for name in names:
        if given[name] is not None and given[name] != _DEFAULTS.get(name):
            if name == "shuffle" and given[name] is False:
                continue
            raise ConfigError(f"{name} is {given[name]!r}: {why}; leave it out")


def _check(given: dict[str, Any]) -> None:
    """Raise `ConfigError` where an argument cannot be what it is."""
    refused = {
        "worker_init_fn": "draws of a data set are seeded for each sample",
        "multiprocessing_context": "workers are started by feeder; give executor=",
    }
    for name, why in refused.items():
        if given[name] is not None:
            raise ConfigError(f"{name} is {given[name]!r}: {why}; leave it out")
    if not given["in_order"]:
        raise ConfigError(
            "in_order is False, expected True: the order of batches is their position"
        )
    if given["pin_memory_device"]:
        raise ConfigError(
            f"pin_memory_device is {given['pin_memory_device']!r}: give device= and pin_memory=True"
        )
    for name, least in _NUMBERS.items():
        if given[name] is not None or name == "num_workers":
            given[name] = whole(name, given[name], least)
    if given["generator"] is not None and given["seed"]:
        raise ConfigError("seed and generator are given, expected one of the two")
    if given["sampler"] is not None and given["batch_sampler"] is not None:
        raise ConfigError("sampler and batch_sampler are given, expected one of the two")
    if given["batch_sampler"] is not None:
        _refuse(given, "batch_sampler makes the batches", ("batch_size", "drop_last"))
    if given["global_batch_size"] is not None:
        _refuse(given, "global_batch_size is given", ("batch_size",))
    if given["batch_size"] is None and given["drop_last"]:
        raise ConfigError("drop_last is True, and batch_size is None: there are no batches")
