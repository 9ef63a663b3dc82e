"""Data sets as fetch functions: a call makes one whole batch of this rank, packed into a row.

Which batch a call makes follows from where the run began, the number of the call, and the rank's
share (`feeder/workers/stream/shares.py`). So a run begins anywhere at once, and its feed needs no
position of its own.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import xxhash

from feeder.adapters.packing import LAYOUT, Join, Read, join_none, pack, stack
from feeder.adapters.skips import Left, read_sound, read_together
from feeder.errors import ConfigError, ReplayWarning, ResumeError
from feeder.sources import LeftOut, RecordError
from feeder.state import codec
from feeder.workers.fetch.seeding import RECORD_SEEDS
from feeder.workers.sources.datasets import check_together, take_together
from feeder.workers.sources.orders.options import plan_order
from feeder.workers.sources.stores.reading import Faults
from feeder.workers.stream.batch import Call
from feeder.workers.stream.shares import Place, Share

Columns = tuple[Any, Any]


class Batched(NamedTuple):
    """How samples become a batch."""

    size: int | None
    """Samples of a batch; None if each sample is one as it is."""
    drop_last: bool
    """Whether an epoch's last batch is left out if it is shorter."""
    collate: Callable[[list[Any]], Any] | None
    """The user's function; None to stack."""
    read: Read
    """How a library's own arrays are read."""
    join: Join = join_none
    """How it stacks small ones."""
    global_size: int | None = None
    """Samples of the batches of all ranks together, if these stay for any number of ranks; None if
    the samples of a batch stay."""

    def count(self, samples: int) -> int:
        """The batches of so many samples."""
        size = self.size or 1
        return samples // size if self.drop_last else -(-samples // size)

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        if self.global_size is not None:
            return {"global_batch_size": self.global_size, "drop_last": self.drop_last}
        return {"batch_size": self.size, "drop_last": self.drop_last}

    def columns(self, samples: list[Any], name: Callable[[int], str]) -> Columns:
        """The batch of samples; raises `RecordError` if they make none."""
        if self.collate is not None:
            given = samples[0] if self.size is None else samples
            try:
                made = self.collate(given)
            except StopIteration as error:
                raise RecordError(f"{name(0)} and on: collate_fn raised StopIteration") from error
            except Exception as error:
                error.add_note(f"while collating the batch of {name(0)} and on")
                raise
            return pack(made, self.read, f"{name(0)} and on")
        if self.size is None:
            return pack(samples[0], self.read, name(0))
        return stack(samples, self.read, name, self.join)


EMPTY = np.zeros((1, 1), LAYOUT), np.zeros((1, 1), np.uint8)
"""Stands for the rest of an epoch of which nothing is left: a feed takes an epoch without rows for
a mistake."""


def end_of_epoch(*, is_first: bool) -> Columns:
    """The end of an epoch; what stands for it in the first call of a run."""
    if is_first:
        return EMPTY[0].copy(), EMPTY[1].copy()
    raise StopIteration


def is_empty(columns: Sequence[Any]) -> bool:
    """Whether a batch stands for the rest of an epoch of which nothing is left."""
    return isinstance(columns[0], np.ndarray) and len(columns[0][0]) == 1


def is_told_epochs(dataset: Any) -> bool:
    """Whether a data set or a sampler is told which epoch is read, as `set_epoch` asks for it."""
    return callable(getattr(dataset, "set_epoch", None))


def by_next(iterator: Iterator[Any]) -> Iterator[Any]:
    """What an iterator gives, taken by `next` alone: its own `__iter__` may begin anew."""
    return map(next, repeat(iterator))


def is_iterator(given: Any) -> bool:
    """Whether it can be iterated over once only, as generators."""
    return hasattr(given, "__next__")


_READ_ONCE = (
    "{} {!r} is an iterator, which is read once, and nothing is left for epoch {}: give what "
    "iter() begins anew, or epochs=1"
)


class Ordered:
    """Samples in their order, or in the shuffled one of `feeder.sources`. Never changes, but for
    what the order caches."""

    def __init__(self, num_samples: int, batched: Batched, *, shuffle: bool, seed: int) -> None:
        self.num_samples, self._batched, self._shuffle = num_samples, batched, shuffle
        options: Any = {"random_shuffle": shuffle}
        self._plan, self._seed = plan_order(num_samples, options, list_shuffle=False), seed
        self._order = self._plan.make(seed)

    def __getstate__(self) -> dict[str, Any]:
        # In another process the order is made anew: it follows from the plan.
        return {**self.__dict__, "_order": None}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields, _order=fields["_plan"].make(fields["_seed"]))

    def find(self, share: Share, epoch: int, index: int, number: int) -> Any:
        """The samples of a rank's batch in a round, counted from a batch of the epoch on; None if
        the epoch has no such round. Any thread."""
        batch = share.batch(number, self.num_batches(epoch), index)
        return None if batch is None else self.samples(epoch, batch)

    def samples(self, epoch: int, batch: int) -> list[int]:
        """The samples of a batch."""
        size = self._batched.size or 1
        last = min(self.num_samples, (batch + 1) * size)
        found: list[int] = self._order.indices(epoch, batch * size, last).tolist()
        return found

    def positions(self, epoch: int, sample: int) -> list[int]:
        """Where a sample comes in an epoch."""
        return self._order.places(epoch, sample)

    def mark(self, epoch: int, index: int) -> bytes | None:
        """What a position has to hold beside numbers, when so many batches have been had."""
        return None

    def num_batches(self, epoch: int) -> int:
        """Batches of all ranks in an epoch."""
        return self._batched.count(self.num_samples)

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        return {"samples": self.num_samples, "shuffle": self._shuffle}


class States(NamedTuple):
    """How a state of the user's object becomes bytes, at once: the object may change it later."""

    pack: Callable[[Any], bytes] = codec.pack
    unpack: Callable[[bytes], Any] = codec.unpack


_EPOCHS = 8
"""Of so many epochs it is known what the sampler gave: a trainer that takes batches ahead may ask
for a position in one before."""


class Sampled:
    """Samples in the order of a sampler, or of a batch sampler, which belongs to this rank alone.

    It is iterated once per epoch, and told which one if it asks (`set_epoch`). If it draws from
    a `generator` of PyTorch, it is given one that is seeded by its own seed and the epoch. A
    position holds that seed or the state that the sampler had at the epoch's start, and a digest of
    what it gave since, which a resume compares. The lock guards all fields.
    """

    def __init__(
        self, sampler: Any, batched: Batched, seed: int, *, is_batch_sampler: bool,
        make_generator: Callable[[int], Any], states: States, shared: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._sampler, self._batched, self._seed = sampler, batched, seed
        self._gives_batches = is_batch_sampler
        self._make_generator, self._states = make_generator, states
        # What the samplers of all ranks have alike, if each follows from it and from its rank:
        # then a position of one is a position of all, and their digests differ.
        self._shared = shared
        self._has_state = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._parts = [sampler, getattr(sampler, "sampler", None)]
        self._seeds = [None if self._has_state else _seed_of(part) for part in self._parts]
        self.is_read_once = is_iterator(sampler)
        self._lock = threading.Lock()
        self._epoch = -1
        self._given: Iterator[Any] = iter(())
        self._batches: list[Any] = []
        # By epoch: its state at the start, and the digests after each batch.
        self._known: dict[int, tuple[bytes | None, list[bytes]]] = {}
        self._resumed: tuple[int, int, bytes | None, bytes] | None = None

    def resume(self, epoch: int, index: int, mark: bytes | None) -> None:
        """Begin in this epoch, behind so many of its batches."""
        with self._lock:
            if mark is None and not index:
                state, digest = self._state_at(epoch), b""
            else:
                state, digest = (None, b"") if mark is None else codec.unpack(mark)
            if state is not None and not self._has_state:
                self._seeds = codec.unpack(state)
            self._epoch, self._known = -1, {}
            self._resumed = epoch, index, state, digest

    def find(self, share: Share, epoch: int, index: int, number: int) -> Any:
        with self._lock:
            self._enter(epoch)
            wanted = index + number
            while len(self._batches) <= wanted:
                batch = next(self._given, None)
                if batch is None:
                    if not self._batches and self.is_read_once:
                        raise RecordError(_READ_ONCE.format("sampler", self._sampler, epoch))
                    return None
                self._note(epoch, batch)
            return self._batches[wanted]

    def _note(self, epoch: int, batch: Any) -> None:
        self._batches.append(batch)
        _, digests = self._known[epoch]
        before = digests[-1] if digests else b""
        digest = xxhash.xxh3_64_digest(before + repr(batch).encode())
        digests.append(b"" if self._shared is not None else digest)
        if self._resumed is not None and self._resumed[:2] == (epoch, len(self._batches)):
            if self._resumed[3] not in (b"", digests[-1]):
                raise ResumeError(
                    f"the sampler gave other samples in epoch {epoch} than before: one that draws "
                    "at random needs a generator attribute, set_epoch(epoch), or state_dict() and "
                    "load_state_dict(state); and a state is one of the rank whose sampler it was"
                )
            self._resumed = None

    def _enter(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        state = self._state_at(epoch)
        for part, seed in zip(self._parts, self._seeds, strict=True):
            if is_told_epochs(part):
                part.set_epoch(epoch)
            if hasattr(part, "generator") and not self._has_state:
                part.generator = self._make_generator(_mixed(self._seed, epoch, seed))
        given = self._begun(state)
        self._given = given if self._gives_batches else _cut(given, self._batched)
        self._epoch, self._batches = epoch, []
        # The batches that are being used may be of an epoch before.
        self._known = {e: self._known[e] for e in self._known if e > epoch - _EPOCHS}
        self._known[epoch] = state, []

    def _begun(self, state: bytes | None) -> Iterator[Any]:
        """What the sampler gives in an epoch that begins with this state."""
        if not self._has_state or state is None:
            return by_next(iter(self._sampler))
        self._sampler.load_state_dict(self._states.unpack(state))
        given = by_next(iter(self._sampler))
        for first in given:
            return chain([first], given)
        # A state of an epoch's end may say that nothing is left of it: what follows is the next.
        return by_next(iter(self._sampler))

    def _state_at(self, epoch: int) -> bytes | None:
        """The state of the sampler at an epoch's start; None if it has none."""
        if not self._has_state:
            return codec.pack(self._seeds) if any(s is not None for s in self._seeds) else None
        if epoch in self._known:
            return self._known[epoch][0]
        resumed = self._resumed
        if resumed is not None and resumed[0] == epoch and resumed[2] is not None:
            return resumed[2]
        # How far an epoch was read that was left depends on timing: its end does not.
        if next(self._given, None) is not None:
            if not hasattr(type(self._sampler), "__len__"):
                raise ConfigError(
                    f"epoch {self._epoch} of sampler {type(self._sampler).__name__} was left, "
                    "which has a state and may have no end: give it __len__"
                )
            for _ in self._given:
                pass
        return self._states.pack(self._sampler.state_dict())

    def mark(self, epoch: int, index: int) -> bytes | None:
        with self._lock:
            if not index:
                state = self._state_at(epoch)
                return None if state is None else codec.pack([state, b""])
            if epoch not in self._known:
                resumed = self._resumed
                if resumed is not None and resumed[:2] == (epoch, index):
                    # A position that was loaded and not gone on from comes back as it was.
                    return codec.pack([*resumed[2:]])
                # Other processes have asked theirs, which gives the same.
                self._enter(epoch)
            state, digests = self._known[epoch]
            while len(digests) < index and epoch == self._epoch:
                self._note(epoch, next(self._given))
            return codec.pack([state, digests[index - 1]])

    def num_batches(self, epoch: int) -> int:
        count: int = len(self._sampler)
        return count if self._gives_batches else self._batched.count(count)

    def describe(self) -> dict[str, Any]:
        length = getattr(type(self._sampler), "__len__", None) and len(self._sampler)
        found = {"sampler": type(self._sampler).__name__, "sampler_len": length}
        return found if self._shared is None else {**found, **self._shared}

    def __getstate__(self) -> dict[str, Any]:
        if self._has_state:
            raise ConfigError(
                f"sampler {type(self._sampler).__name__} has a state, which is kept in this "
                "process: give executor=feeder.Threads(n)"
            )
        fields = self.__dict__ | {"_given": iter(()), "_epoch": -1, "_batches": []}
        del fields["_lock"]
        return fields

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields, _lock=threading.Lock())


Indices = Ordered | Sampled
"""Which samples each batch of an epoch has."""


def _mixed(seed: int, epoch: int, own: int | None) -> int:
    parts = f"{seed} {epoch}" if own is None else f"{seed} {epoch} {own}"
    return xxhash.xxh3_64_intdigest(parts.encode()) >> 1


def _seed_of(part: Any) -> int | None:
    """The seed of a sampler's own generator; None if it has none."""
    generator: Any = getattr(part, "generator", None)
    return generator.initial_seed() if hasattr(generator, "initial_seed") else None


def _cut(samples: Iterator[Any], batched: Batched) -> Iterator[list[Any]]:
    size = batched.size or 1
    while batch := list(islice(samples, size)):
        if len(batch) < size and batched.drop_last:
            return
        yield batch


def _number(sample: Any) -> int:
    """A number for a sample's seed; samplers may give keys of any kind."""
    is_number = isinstance(sample, int) and 0 <= sample < 2**63
    return sample if is_number else xxhash.xxh3_64_intdigest(repr(sample).encode()) >> 1


class MapBatches:
    """Batches of what has `__getitem__`: a pure fetch function, for any thread. What it notes is
    the same for all threads: they read one epoch at a time where it matters."""

    ignores_worker_ids = True
    _epoch_told = -1

    def __init__(
        self, dataset: Any, indices: Indices, batched: Batched, share: Share, place: Place,
        faults: Faults,
    ) -> None:  # fmt: skip
        self._dataset, self._indices, self._batched = dataset, indices, batched
        self._share, self._place, self._faults = share, place, faults

    def __call__(self, call: Call) -> Columns:
        epoch = self._place.epoch + call.epoch
        index = 0 if call.epoch else self._place.index
        wanted = self._indices.find(self._share, epoch, index, call.index)
        if wanted is None:
            return end_of_epoch(is_first=call.index == call.epoch == 0)
        if self._epoch_told != epoch and is_told_epochs(self._dataset):
            self._dataset.set_epoch(epoch)
            self._epoch_told = epoch
        if self._batched.size is None:
            wanted = wanted if isinstance(wanted, list) else [wanted]
        samples, left = self._take(list(wanted), call._replace(epoch=epoch))
        if left:
            self._leave_out(left, wanted, call)
            wanted = [one for number, one in enumerate(wanted) if number not in left]
        return self._batched.columns(samples, lambda i: f"sample {wanted[i]}")

    def _take(self, wanted: list[Any], call: Call) -> tuple[list[Any], Left]:
        """The samples, and what is left out of them."""
        skips, take = self._faults.may_skip, getattr(self._dataset, "__getitems__", None)
        name = f"sample {wanted[0]}" if wanted else ""

        def begin() -> None:
            RECORD_SEEDS.seed(call, _number(wanted[0]))

        if take is not None and not skips:
            begin()
            return check_together(take_together(take, wanted), wanted, name), {}
        if take is not None and (made := read_together(take, wanted, begin)) is not None:
            return check_together(list(made), wanted, name), {}
        if skips:
            return read_sound(wanted, partial(self._read, call), None)
        return [self._read(call, sample) for sample in wanted], {}

    def _read(self, call: Call, sample: Any, number: int = 0) -> Any:
        RECORD_SEEDS.seed(call, _number(sample))
        try:
            return self._dataset[sample]
        except StopIteration as error:
            # Passed on, it would end the epoch.
            raise RecordError(f"sample {sample}: raised StopIteration") from error
        except Exception as error:
            error.add_note(f"while reading sample {sample}")
            raise

    def _leave_out(self, left: Left, wanted: list[Any], call: Call) -> None:
        """List what a call leaves out. A batch of which nothing is left is an error: other ranks
        have one, and a state counts batches."""
        for number, why in left.items():
            name = f"sample {wanted[number]}"
            self._faults.leave_out(LeftOut(*self._place_of(call), name, why))
        if len(left) == len(wanted):
            raise RecordError(
                f"no sample of a batch can be read, of which the first is sample {wanted[0]}: "
                f'{left[0]}; sources.records(dataset, on_error="skip") as the data set fills '
                "batches up"
            )

    def _place_of(self, call: Call) -> tuple[int, int]:
        """The epoch of a call, and the batches of all ranks before it in this epoch."""
        before = 0 if call.epoch else self._place.index
        return self._place.epoch + call.epoch, before + call.index * self._share.num

    @property
    def skipped(self) -> int:
        """Reads of samples that were left out."""
        return self._faults.skipped

    @property
    def left_out(self) -> list[LeftOut]:
        """These, by the calls of this run."""
        place, share, found = self._place, self._share, []
        for one in self._faults.left_out:
            epoch = one.epoch - place.epoch
            call = one.call if epoch else one.call - place.index
            if epoch >= 0 and call >= 0:
                found.append(one._replace(epoch=epoch, call=call // share.num))
        return found

    def count_skipped(self, num: int, left_out: Iterable[tuple[int, int, str, str]] = ()) -> None:
        """Count what a copy of this, in another process, has left out."""
        self._faults.count(num, [
            (*self._place_of(Call(call, epoch, 0, 1, 0)), name, why)
            for epoch, call, name, why in left_out
        ])  # fmt: skip

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        return {**self._batched.describe(), **self._indices.describe()}


class SourceBatches:
    """Batches of a source of `feeder.sources`: a pure fetch function, for any thread."""

    ignores_worker_ids = True

    def __init__(self, source: Any, batched: Batched, share: Share, place: Place) -> None:
        self._source, self._batched, self._share, self._place = source, batched, share, place

    def __call__(self, call: Call) -> Columns:
        epoch = self._place.epoch + call.epoch
        index = 0 if call.epoch else self._place.index
        batch = self._share.batch(call.index, self.num_batches(epoch), index)
        if batch is None:
            return end_of_epoch(is_first=call.index == call.epoch == 0)
        size = self._batched.size or 1
        there = Call(batch, epoch, 0, size, call.seed)
        return pack(self._source(there), self._batched.read, f"batch {batch} of epoch {epoch}")

    def num_batches(self, epoch: int) -> int:
        """Batches of all ranks in an epoch."""
        return self._batched.count(self._source.rows(epoch, self._batched.size or 1))

    def as_it_was(self) -> SourceBatches | None:
        """The same of the source in an earlier format."""
        older = self._source.as_it_was()
        return older and SourceBatches(older, self._batched, self._share, self._place)

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        return {**self._batched.describe(), **self._source.describe()}


_FRESH: tuple[int, Any, bool] = (0, None, False)


class IteratedBatches:
    """Batches of what is iterated over: `fetch(worker_id, batch_size)` of one worker, which reads
    whole rounds and keeps this rank's batch.

    If the iterable or its iterator has `state_dict` and `load_state_dict`, a position has that
    state; otherwise it has the number of samples, and a resume reads so many again. Owned by the
    thread that calls.
    """

    def __init__(
        self, dataset: Any, batched: Batched, share: Share, place: Place, mark: bytes | None,
        seed: int, states: States,
    ) -> None:  # fmt: skip
        self._dataset, self._batched, self._share, self._states = dataset, batched, share, states
        self._call = Call(0, place.epoch, 0, 1, seed)
        # The samples that were read of the epoch, the state after them, and whether they were all:
        # what a finished iterator says of its state is not to be relied on.
        self._samples = 0
        self._state: bytes | None = None
        self._is_done = False
        if mark is not None:
            self._samples, self._state, self._is_done = codec.unpack(mark)
        self._iterator: Iterator[Any] | None = None
        self._owner: Any = None
        self._is_first, self._has_ended = True, False

    @property
    def is_replayed(self) -> bool:
        """Whether samples are read again to find its place."""
        return self._samples > 0 and self._state is None and not self._is_done

    def __call__(self, worker_id: int, batch_size: int) -> Columns:
        if self._has_ended:
            self._has_ended = False
            raise StopIteration
        if self._iterator is None and not self._is_done:
            self._begin()
        # By the samples before it and not by the call, whose number counts from where a run began.
        RECORD_SEEDS.seed(self._call, self._samples)
        share, size = self._share, self._batched.size or 1
        made: list[list[Any]] = []
        while len(made) < share.num:
            samples = [] if self._is_done else list(islice(self._iterator or (), size))
            self._is_done = len(samples) < size
            if not samples or (len(samples) < size and self._batched.drop_last):
                break
            made.append(samples)
        first = self._samples
        is_over = not made or (share.drops and len(made) < share.num)
        if is_over and not first:
            # A trainer would go through epochs of nothing.
            epoch, dataset = self._call.epoch, self._dataset
            once = _READ_ONCE.format("dataset", dataset, epoch) if is_iterator(dataset) else None
            raise RecordError(once or f"epoch {epoch} of {type(dataset).__name__} has no batch")
        if is_over:
            self._iterator, self._owner = None, None
            self._samples, self._state, self._is_done = _FRESH
            self._call = self._call._replace(epoch=self._call.epoch + 1)
            # What stands for the rest is a chunk, and the epoch ends with the call after it.
            is_first, self._is_first = self._is_first, False
            self._has_ended = is_first
            return end_of_epoch(is_first=is_first)
        self._is_first = False
        self._samples += sum(map(len, made))
        at = min(share.rank, len(made) - 1)
        number = first + at * size
        return self._batched.columns(made[at], lambda i: f"sample {number + i} of the iterable")

    def _begin(self) -> None:
        dataset, state = self._dataset, self._state
        if is_told_epochs(dataset):
            dataset.set_epoch(self._call.epoch)
        owner = dataset if is_stateful(dataset) else None
        if owner is not None and state is not None:
            owner.load_state_dict(self._states.unpack(state))
        iterator = iter(dataset)
        if owner is None and is_stateful(iterator):
            owner = iterator
            if state is not None:
                owner.load_state_dict(self._states.unpack(state))
        if state is None:
            for _ in islice(by_next(iterator), self._samples):
                pass
        elif owner is None:
            raise ResumeError("the position has a state, and the iterable takes none now")
        self._iterator, self._owner = by_next(iterator), owner

    def cursor(self, worker_id: int) -> Any:
        """Where it stands after its last call."""
        state = self._state
        if self._is_done:
            state = None
        elif self._owner is not None:
            state = self._states.pack(self._owner.state_dict())
        return [self._samples, state, self._is_done]

    def seek(self, worker_id: int, cursor: Any) -> None:
        """Go back to where a run began; feeds that are made of it begin there."""
        self._samples, self._state, self._is_done = cursor
        self._iterator = self._owner = None

    def describe(self) -> dict[str, Any]:
        """What must be equal for a position to fit."""
        return self._batched.describe()


def is_stateful(value: Any) -> bool:
    """Whether it has both methods: a class may have one for its own ends."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def warn_of_replay(*, stacklevel: int) -> None:
    """Warn that samples are read again, at the user's line."""
    warnings.warn(
        "the loader is resumed by reading the samples again that it had: give the iterable "
        "state_dict() and load_state_dict(state), or use a data set with __getitem__",
        ReplayWarning,
        stacklevel=stacklevel + 1,
    )


def check_samples(dataset: Sequence[Any]) -> int:
    """The length of a data set; raises `ConfigError` if it has none."""
    try:
        length = len(dataset)
    except TypeError as error:
        raise ConfigError(
            f"dataset {type(dataset).__name__} has no length: give __len__, or iterate over it"
        ) from error
    if not length:
        raise ConfigError(f"dataset {type(dataset).__name__} is empty, expected a sample at least")
    return length
