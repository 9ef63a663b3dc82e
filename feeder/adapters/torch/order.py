"""The indices of a loop, and how the same ones are pulled again.

PyTorch's samplers have no place to go on from, and draw from generators that others draw from, too.
So an order is kept as what it began with: the states of the generators, or one seed. To go on, the
loop is begun again with those and as many batches of indices are pulled as were used; a digest says
whether they are the same. A sampler with `state_dict` and `load_state_dict` is asked itself if its
state is a place: if another one with each batch, and nobody reads it ahead of the batches.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
from array import array
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from types import MemberDescriptorType
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from feeder.errors import ResumeError

_DRAW_NOTHING = (SequentialSampler, DistributedSampler)
_DRAW_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DEEPEST = 8
"""Samplers in samplers are looked through so far."""
_MOST = 64
"""A list of more is no list of samplers."""
_NOTHING = object()


def is_stateful(value: Any) -> bool:
    """Whether it has both methods: a class may have one for its own ends."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


# ---- generators


def generator_state(generator: Any) -> str:
    """The state of a generator as text."""
    if isinstance(generator, torch.Generator):
        return b64encode(generator.get_state().numpy().tobytes()).decode()
    if isinstance(generator, random.Random):
        return json.dumps(generator.getstate())
    return json.dumps(_numpy_state(generator), default=lambda array: array.tolist())


def _numpy_state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def set_generator_state(generator: Any, state: str) -> None:
    """The reverse of `generator_state`."""
    if isinstance(generator, torch.Generator):
        raw = np.frombuffer(b64decode(state), np.uint8).copy()
        generator.set_state(torch.from_numpy(raw))
    elif isinstance(generator, random.Random):
        version, numbers, gauss = json.loads(state)
        generator.setstate((version, tuple(numbers), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(json.loads(state))
    else:
        generator.set_state(_arrays(json.loads(state)))


def _arrays(state: Any) -> Any:
    """A state of NumPy's, with arrays again for the lists that JSON has made of them."""
    inner = state["state"]
    if "key" in inner and isinstance(inner["key"], list):
        inner["key"] = np.array(inner["key"], np.uint32 if len(inner["key"]) > 8 else np.uint64)
    if "counter" in inner:
        inner["counter"] = np.array(inner["counter"], np.uint64)
    if "buffer" in state:
        state["buffer"] = np.array(state["buffer"], np.uint64)
    return state


_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

# `random` and `numpy.random` draw from these; neither library has a public name for them.
_PROCESS: dict[str, Any] = {
    "torch": torch.default_generator,
    "random": random._inst,
    "numpy": np.random.mtrand._rand,
}


def own_generators(loader: Any) -> list[Any]:
    """The generators that a loader and its samplers hold, each once, always in the same order."""
    found: dict[int, Any] = {}
    shared = {id(generator) for generator in _PROCESS.values()}
    for part in (loader, *samplers_of(loader)):
        for value in _held(part):
            if isinstance(value, _GENERATORS) and id(value) not in shared:
                found.setdefault(id(value), value)
    return list(found.values())


def samplers_of(loader: Any) -> list[Any]:
    """The samplers of a loader, and those in them, also if a data set of a sampler's own lies in
    between: what that draws or says is no order."""
    found: list[Any] = []
    waiting = [(loader.batch_sampler, 0), (loader.sampler, 0)]
    while waiting:
        part, depth = waiting.pop(0)
        is_known = part is loader.dataset or any(part is one for one in found)
        if part is None or depth > _DEEPEST or is_known:
            continue
        found.append(part)
        is_data = isinstance(part, Dataset)
        for value in _held(part):
            if isinstance(value, (Sampler, Dataset)) or (not is_data and _may_be_order(value)):
                waiting.append((value, depth + 1))
    return [part for part in found if not isinstance(part, Dataset)]


def _may_be_order(value: Any) -> bool:
    """Whether it may be a sampler that is not PyTorch's class: not an array, nor a model or a
    loader, whose state is its owner's."""
    is_other = isinstance(value, (type, torch.nn.Module, torch.utils.data.DataLoader))
    is_array = hasattr(value, "shape")
    return hasattr(value, "__iter__") and hasattr(value, "__dict__") and not (is_other or is_array)


def _held(part: Any) -> Iterator[Any]:
    """What an object has as attributes, and in short lists and dicts of these."""
    values = [value for _, value in sorted(getattr(part, "__dict__", {}).items())]
    for kind in type(part).__mro__:
        for name, value in vars(kind).items():
            if isinstance(value, MemberDescriptorType):
                values.append(getattr(part, name, None))
            elif isinstance(value, _GENERATORS):
                values.append(value)
    for value in values:
        yield value
        if type(value) in (list, tuple, dict) and len(value) <= _MOST:
            yield from value.values() if type(value) is dict else value


def set_states(own: list[Any], states: tuple[str, ...]) -> None:
    """The reverse of `generator_state` for all of `own_generators`. Raises `ResumeError`."""
    if len(states) != len(own):
        raise ResumeError(
            f"the loader and its samplers have {len(own)} generators of their own, and had "
            f"{len(states)} when the state was taken"
        )
    for generator, state in zip(own, states, strict=True):
        set_generator_state(generator, state)


def process_states(names: Iterable[str] = tuple(_PROCESS)) -> tuple[tuple[str, str], ...]:
    """The states of generators of the process, by name."""
    return tuple((name, generator_state(_PROCESS[name])) for name in names)


@contextmanager
def as_it_was(states: Iterable[tuple[str, str]]) -> Iterator[None]:
    """The generators of the process have these states, and then those again that they have now."""
    kept = process_states()
    try:
        for name, state in states:
            set_generator_state(_PROCESS[name], state)
        yield
    finally:
        for name, state in kept:
            set_generator_state(_PROCESS[name], state)


def stateful_sampler(loader: Any) -> Any:
    """The sampler with a state of which nobody reads ahead of the batches; None if there is none.
    What groups samples by length, say, has read more of its sampler than it has given."""
    part = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(part) is BatchSampler:
        part = part.sampler
    return part if is_stateful(part) else None


def stateful_samplers(loader: Any) -> list[Any]:
    """All samplers with a state."""
    return [part for part in samplers_of(loader) if is_stateful(part)]


def states_of(samplers: list[Any]) -> tuple[Any, ...]:
    """What they say."""
    # They go on, and may change what they said.
    return tuple(copy.deepcopy(sampler.state_dict()) for sampler in samplers)


def load_states(samplers: list[Any], states: tuple[Any, ...]) -> None:
    """The reverse. Raises `ResumeError`."""
    if len(samplers) != len(states):
        raise ResumeError(
            f"the loader has {len(samplers)} samplers with a state, and had {len(states)} when the "
            "state was taken"
        )
    for sampler, state in zip(samplers, states, strict=True):
        sampler.load_state_dict(copy.deepcopy(state))


def dealt_sampler(loader: Any) -> DistributedSampler[Any] | None:
    """The sampler that deals one order out to all ranks, if it is PyTorch's own; else None."""
    inner = loader.sampler
    is_plain = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    return inner if is_plain and type(inner) is DistributedSampler else None


def _process_generators(samplers: list[Any]) -> tuple[str, ...]:
    """Which generators of the process samplers may draw from."""
    needed: set[str] = set()
    for sampler in samplers:
        kind = type(sampler)
        if kind is BatchSampler or kind in _DRAW_NOTHING:
            continue
        if kind not in _DRAW_FROM_TORCH:
            return tuple(_PROCESS)
        if sampler.generator is None:
            needed.add("torch")
    return tuple(sorted(needed))


# ---- the order of one loop


class Begun(NamedTuple):
    """What the order of a loop began with."""

    own: tuple[str, ...] = ()
    """The states of the samplers' own generators."""
    process: tuple[tuple[str, str], ...] = ()
    """The states of generators of the process, by name."""
    seed: int | None = None
    """The seed that a `RandomSampler` without a generator drew; then no state of the process."""
    dealt: tuple[int, int, int] | None = None
    """Of PyTorch's `DistributedSampler`: its epoch, the ranks that the order is dealt out to, and
    the samples that all ranks had had of it before."""
    states: tuple[Any, ...] = ()
    """What the samplers with a state said."""
    is_after_end: bool = True
    """Whether that may be of the end of a loop, and is not of one that was left."""


class Pulled(NamedTuple):
    """Where an order stands."""

    num: int
    """Batches of indices that were pulled."""
    digest: int
    """Of these."""
    state: Any = None
    """What a sampler with a state says, if that is a place."""
    is_last: bool = False
    """Whether a sampler with a state has come to its end: its state may be one of a next loop."""
    given: tuple[int, ...] = ()
    """Later batches that were given before their turn, as with in_order=False."""


class Now(NamedTuple):
    """What was when a state was told. Others may draw from the generators of a loader, as a
    validation loader does, and workers' batches are pulled ahead of those that are given."""

    own: tuple[str, ...]
    """The states of the generators of the loader and its samplers."""
    ahead: int
    """Batches that were pulled and not given."""
    has_ended: bool
    """Whether the sampler has said after these that there are no more."""


START = Pulled(0, xxhash.xxh3_64().intdigest())


class Order:
    """The batches of indices of one loop. Owned by the thread that iterates over the loader."""

    def __init__(
        self, loader: Any, resumed: tuple[Begun, Pulled] | None, *, is_after_end: bool = True
    ) -> None:
        """Call it before PyTorch's iterator is made, and `begin` after that. `is_after_end`: no
        loop that somebody has read from was left before this one."""
        self._resumed = resumed
        self._outer, self._batch_size = loader.batch_sampler, loader.batch_size or 1
        # Not the loader: one whose workers persist keeps its loop, and they end when it is dropped.
        self._own = own_generators(loader)
        self._samplers = samplers_of(loader)
        # What it draws from is looked at when it does: `BatchSampler` is a generator function.
        index_sampler = self._samplers[0]
        self._is_lazy = type(index_sampler) in (BatchSampler, *_DRAW_FROM_TORCH)
        self._random = self._find_random() if self._is_lazy else None
        self._stateful = stateful_sampler(loader)
        self._states = stateful_samplers(loader)
        # What was loaded into the samplers, and not iterated over since.
        self._loaded = loader._loaded
        if resumed is not None:
            self._loaded.add("loop")
        # What the sampler said after the batch that was pulled last, and whether that was another
        # thing each time.
        self._said: Any = None
        self._is_place = self._watches = True
        self._dealt = dealt_sampler(loader)
        self._iterator: Iterator[Any] = iter(())
        self._digest = xxhash.xxh3_64()
        self.num = 0
        """Batches of indices that were pulled."""
        self.has_ended = False
        """Whether the sampler has said that there are no more."""
        self._is_last = False
        self._given = frozenset(() if resumed is None else resumed[1].given)
        # Whether it is known what the first batch is drawn from.
        self._is_noted = not self._is_lazy
        if resumed is not None:
            self.begun = resumed[0]
            self._is_noted |= self.begun.seed is not None or bool(self.begun.process)
        else:
            own = tuple(map(generator_state, self._own))
            # One that has nothing for a rank is false.
            sampler = self._dealt
            dealt = None if sampler is None else (sampler.epoch, sampler.num_replicas, 0)
            said = states_of(self._states)
            self.begun = Begun(own, self._note(lazily=False), None, dealt, said, is_after_end)

    def _find_random(self) -> Any:
        """The sampler that draws one seed of the process and nothing else."""
        inner = self._samplers[-1]
        plain = all(type(sampler) is BatchSampler for sampler in self._samplers[:-1])
        return inner if plain and type(inner) is RandomSampler and inner.generator is None else None

    def _note(self, *, lazily: bool) -> tuple[tuple[str, str], ...]:
        if lazily != self._is_lazy:
            return ()
        return process_states(_process_generators(self._samplers))

    # ---- its begin

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """PyTorch's iterator is made, and the order gets to its place: with the generators as they
        were then. Those of the process are the caller's, and stay as they are."""
        if self._resumed is None:
            yield
            return
        begun, pulled = self._resumed
        set_states(self._own, begun.own)
        if self._goes_on(pulled):
            self._stateful.load_state_dict(copy.deepcopy(pulled.state))
        else:
            load_states(self._states, begun.states)
        with as_it_was(begun.process):
            yield

    def _goes_on(self, pulled: Pulled) -> bool:
        """Whether the sampler itself goes on from there."""
        return self._stateful is not None and pulled.state is not None

    def begin(self, iterator: Iterator[Any], now: Now | None, *, was_pulled: bool) -> None:
        """The iterator over the sampler; inside `beginning`. Raises `ResumeError`.

        `was_pulled`: whether batches were pulled before the first one was given, as for workers."""
        self._iterator = iterator
        if self._resumed is None:
            if self._loaded and self._states and self.begun.is_after_end:
                self._iterator = self._unspent(iterator)
            return
        begun, pulled = self._resumed
        if self._goes_on(pulled):
            # That it is a place was seen before; the digest is not gone on with.
            self.num, self._is_last, self._watches = pulled.num, pulled.is_last, False
            self._said = pulled.state
            if pulled.is_last:
                self._iterator = self._over(pulled.state)
            return
        if begun.dealt is not None:
            self._deal(begun.dealt, pulled.num)
            return
        if begun.seed is not None:
            self._iterator = self._seeded(begun.seed)
        for name, state in begun.process if self._is_lazy else ():
            set_generator_state(_PROCESS[name], state)
        if begun.states and begun.is_after_end:
            self._iterator = self._unspent(self._iterator)
        self._pull_again(pulled.num)
        if now is not None:
            # As far as it was, before it goes on with what others have left of the generators.
            ahead = list(islice(self._iterator, now.ahead + now.has_ended))
            self._iterator = chain(ahead, self._iterator)
            set_states(self._own, now.own)
        elif was_pulled and not pulled.num:
            # Drawn with the generators as they were, and not as they are when it is given.
            self._iterator = chain(list(islice(self._iterator, 1)), self._iterator)
        if self._digest.intdigest() != pulled.digest:
            raise _other_samples()

    def _pull_again(self, num: int) -> None:
        for _ in range(num):
            try:
                self._pull()
            except StopIteration:
                raise _other_samples() from None

    def _unspent(self, iterator: Iterator[Any]) -> Iterator[Any]:
        """A sampler may say of its end that it has given all: what comes next is then nothing, and
        after that all of it."""
        first = next(iterator, _NOTHING)
        self._loaded.clear()
        if first is _NOTHING:
            yield from self._samplers[0]
        else:
            yield first
            yield from iterator

    def _over(self, state: Any) -> Iterator[Any]:
        """Nothing: and what a sampler was told meanwhile, as trainers tell an epoch, is nothing for
        the next loop, as if this one had been read here."""
        self._stateful.load_state_dict(state)
        yield from ()

    def _seeded(self, seed: int) -> Iterator[Any]:
        if self._random is None:
            raise ResumeError("the state is one of a RandomSampler, which the loader has no more")
        # With a generator of its own it draws as it does with the seed that it draws.
        again = copy.copy(self._random)
        again.generator = torch.Generator().manual_seed(seed)
        return self._in_batches(again)

    def _in_batches(self, indices: Any) -> Iterator[Any]:
        outer = self._outer
        if outer is None:
            return iter(indices)
        return iter(BatchSampler(indices, outer.batch_size, outer.drop_last))

    def _deal(self, then: tuple[int, int, int], num: int) -> None:
        """Deal what the ranks have not had out to as many ranks as there are now."""
        sampler, (epoch, ranks, had) = self._dealt, then
        if sampler is None:
            raise ResumeError(
                "the state is one of a DistributedSampler, which the loader has no more"
            )
        if sampler.epoch != epoch:
            raise ResumeError(
                f"the state is one of epoch {epoch} of the DistributedSampler, and set_epoch was "
                f"called with {sampler.epoch}"
            )
        if sampler.num_replicas != ranks:
            if self._given:
                raise ResumeError(
                    f"the state is one of {ranks} ranks that gave batches before their turn, as "
                    f"in_order=False has it: it fits each rank by itself, and there are "
                    f"{sampler.num_replicas} now"
                )
            left = len(sampler.dataset) - had
            of_each = left // ranks if sampler.drop_last else -(-left // ranks)
            had += min(num * self._batch_size, of_each) * ranks
            ranks, num = sampler.num_replicas, 0
        self.begun = self.begun._replace(dealt=(epoch, ranks, had))
        self._iterator = self._in_batches(_rest_of(sampler, had))
        self._pull_again(num)

    # ---- batches of indices

    def __iter__(self) -> Order:
        return self

    def __next__(self) -> Any:
        if not self._is_noted:
            self._note_first()
        indices = self._pull()
        while self.num - 1 in self._given:
            indices = self._pull()
        return indices

    def _note_first(self) -> None:
        """What the first batch is drawn from."""
        self._is_noted = True
        if self._random is None:
            self.begun = self.begun._replace(process=self._note(lazily=True))
            return
        drawn = torch.Generator()
        drawn.set_state(torch.default_generator.get_state())
        # As RandomSampler draws it.
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=drawn).item())
        self.begun = self.begun._replace(seed=seed)

    def _pull(self) -> Any:
        try:
            indices = next(self._iterator)
        except StopIteration:
            self.has_ended = True
            raise
        self.num += 1
        if self._dealt is None:
            self._digest.update(_bytes_of(indices))
        if self._stateful is not None:
            before, (self._said,) = self._said, states_of([self._stateful])
            if self.num > 1 and self._watches:
                self._is_place &= not _are_same(before, self._said)
            # A shorter batch: whoever made it has seen the end.
            is_batched = type(self._outer) is BatchSampler
            self._is_last = is_batched and len(indices) < self._outer.batch_size
        return indices

    @property
    def pulled(self) -> Pulled:
        """Where it stands."""
        # Asked with each batch, and nearly always empty.
        given: tuple[int, ...] = ()
        if self._given:
            given = tuple(sorted(number for number in self._given if number >= self.num))
        if self._stateful is None:
            return Pulled(self.num, self._digest.intdigest(), None, False, given)
        # Of one batch nobody knows whether the next one would change what is said.
        is_place = self._is_place and (self.num > 1 or self._is_last or not self._watches)
        state = self._said if is_place else None
        is_last = is_place and self._is_last
        return Pulled(self.num, self._digest.intdigest(), state, is_last, given)

    @property
    def place(self) -> tuple[int, int]:
        """Where the samples of the batch that was pulled last lie in the order that is dealt out to
        the ranks: the first one, and how far from one to the next."""
        if self._dealt is None or self.begun.dealt is None:
            return 0, 0
        _, ranks, had = self.begun.dealt
        before = (self.num - 1) * self._batch_size
        return had + before * ranks + self._dealt.rank, ranks


def _other_samples() -> ResumeError:
    return ResumeError(
        "the sampler gives other samples than before the state was taken: give it a generator "
        "attribute, or state_dict() and load_state_dict(state). A state fits only the rank that it "
        "was taken on; if the sampler draws from global generators of PyTorch, NumPy or Python, it "
        "fits only the same number of workers"
    )


def _are_same(one: Any, other: Any) -> bool:
    """Whether two states are, as far as can be told."""
    with contextlib.suppress(Exception):
        return bool(one == other)
    return repr(one) == repr(other)


def _bytes_of(indices: Any) -> Any:
    """What a digest is made of: numbers as they are, which takes a fifth of the time."""
    try:
        return array("q", indices)
    except (TypeError, OverflowError):
        return repr(indices).encode("utf-8", "surrogatepass")


def _rest_of(sampler: DistributedSampler[Any], had: int) -> list[int]:
    """What a rank has of an order of which all ranks have had so many samples already: the same as
    PyTorch's if they have had none."""
    num = len(sampler.dataset)
    if sampler.shuffle:
        drawn = torch.Generator().manual_seed(sampler.seed + sampler.epoch)
        order: list[int] = torch.randperm(num, generator=drawn).tolist()
    else:
        order = list(range(num))
    rest, ranks = order[had:], sampler.num_replicas
    if sampler.drop_last:
        rest = rest[: len(rest) // ranks * ranks]
    elif rest:
        missing = -len(rest) % ranks
        rest += (order * -(-missing // num))[:missing]
    return rest[sampler.rank :: ranks]
