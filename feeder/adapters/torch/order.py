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
import enum
import functools
import struct
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import xxhash
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from feeder.adapters.torch.generators import (
    OF_PROCESS,
    as_it_was,
    generator_state,
    process_states,
    set_generator_state,
    set_states,
)
from feeder.adapters.torch.samplers import (
    DRAW_FROM_TORCH,
    dealt_sampler,
    load_states,
    own_generators,
    process_generators,
    samplers_of,
    stateful_sampler,
    stateful_samplers,
    states_of,
)
from feeder.errors import ResumeError


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


_new = tuple.__new__

START = Pulled(0, xxhash.xxh3_64().intdigest())


class Reach:
    """How far a loop has pulled its order. Plain numbers: they outlive the loop."""

    __slots__ = ("has_ended", "num")

    def __init__(self) -> None:
        self.num = 0
        """Batches of indices that were pulled."""
        self.has_ended = False
        """Whether the sampler has said that there are no more."""


class _Worth(enum.Enum):
    """What the word of a sampler with a state is worth."""

    OPEN = enum.auto()
    """Of one batch nobody knows whether the next one changes what is said."""
    PLACE = enum.auto()
    """It was another one with each batch: a place."""
    NOTHING = enum.auto()
    """It was the same after two batches."""
    TRIED = enum.auto()
    """A loop goes on from it, so it is a place."""


class _Word:
    """What a sampler with a state says after each batch of indices."""

    def __init__(self, sampler: Any, outer: Any) -> None:
        self._sampler = sampler
        self._batch_size = outer.batch_size if type(outer) is BatchSampler else 0
        self._worth = _Worth.OPEN
        self._said: Any = None

    def go_on_from(self, state: Any) -> None:
        """The sampler stands there."""
        self._sampler.load_state_dict(copy.deepcopy(state))
        self._worth, self._said = _Worth.TRIED, state

    def hear(self, indices: Any, num: int) -> tuple[Any, bool]:
        """The place after a batch, which is number `num` from 1, if it is known to be one; and
        whether the sampler has come to its end."""
        before, (self._said,) = self._said, states_of([self._sampler])
        if num > 1 and self._worth in (_Worth.OPEN, _Worth.PLACE):
            is_same = _are_same(before, self._said)
            self._worth = _Worth.NOTHING if is_same else _Worth.PLACE
        # A shorter batch: whoever made it has seen the end.
        is_last = len(indices) < self._batch_size if self._batch_size else False
        if self._worth is _Worth.NOTHING or (self._worth is _Worth.OPEN and not is_last):
            return None, False
        return self._said, is_last


class Order:
    """The batches of indices of one loop. Owned by the thread that iterates over the loader."""

    def __init__(
        self, loader: Any, resumed: tuple[Begun, Pulled] | None, *, is_after_end: bool = True
    ) -> None:
        """Call it before PyTorch's iterator is made, and `begin` after that. `is_after_end`: no
        loop that somebody has read from was left before this one."""
        # Weak: a loader whose workers persist keeps its loop, and they end when it is dropped.
        self._loader = weakref.ref(loader)
        self._resumed = resumed
        self._outer, self._batch_size = loader.batch_sampler, loader.batch_size or 1
        self._own = own_generators(loader)
        self._samplers = samplers_of(loader)
        self._with_state = stateful_samplers(loader)
        self._dealt = dealt_sampler(loader)
        # What it draws from is looked at when it does: `BatchSampler` is a generator function.
        self._is_lazy = type(self._samplers[0]) in (BatchSampler, *DRAW_FROM_TORCH)
        self._random = self._find_random() if self._is_lazy else None
        asked = stateful_sampler(loader)
        self._word = None if asked is None else _Word(asked, self._outer)
        self._iterator: Iterator[Any] = iter(())
        self._digest = xxhash.xxh3_64()
        self._given = frozenset(() if resumed is None else resumed[1].given)
        self.reach = Reach()
        self.pulled = START if resumed is None else START._replace(given=resumed[1].given)
        """Where it stands."""
        if resumed is not None:
            loader._is_loaded = True
            self.begun = resumed[0]
            """What it began with."""
        else:
            own = tuple(map(generator_state, self._own))
            process = () if self._is_lazy else self._process_states()
            # One that has nothing for a rank is false.
            sampler = self._dealt
            dealt = None if sampler is None else (sampler.epoch, sampler.num_replicas, 0)
            said = states_of(self._with_state)
            self.begun = Begun(own, process, None, dealt, said, is_after_end)

    def _find_random(self) -> Any:
        """The sampler that draws one seed of the process and nothing else."""
        inner = self._samplers[-1]
        plain = all(type(sampler) is BatchSampler for sampler in self._samplers[:-1])
        return inner if plain and type(inner) is RandomSampler and inner.generator is None else None

    def _process_states(self) -> tuple[tuple[str, str], ...]:
        return process_states(process_generators(self._samplers))

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
        if self._word is not None and pulled.state is not None:
            self._word.go_on_from(pulled.state)
        else:
            load_states(self._with_state, begun.states)
        with as_it_was(begun.process):
            yield

    def begin(self, iterator: Iterator[Any], now: Now | None, *, was_pulled: bool) -> None:
        """The iterator over the sampler; inside `beginning`. Raises `ResumeError`.

        `was_pulled`: whether batches were pulled before the first one was given, as for workers."""
        self._iterator = iterator
        if self._resumed is not None:
            self._go_to(*self._resumed, now, was_pulled=was_pulled)
        elif self._with_state and self.begun.is_after_end:
            loader = self._loader()
            if loader is not None and loader._is_loaded:
                self._iterator = chain.from_iterable(self._unspent(iterator))
        if self._is_lazy and self.begun.seed is None and not self.begun.process:
            self._iterator = chain(self._noting(), self._iterator)

    def _go_to(self, begun: Begun, pulled: Pulled, now: Now | None, *, was_pulled: bool) -> None:
        if self._word is not None and pulled.state is not None:
            self.reach.num, self.pulled = pulled.num, pulled
            if pulled.is_last:
                self._iterator = self._over(pulled.state)
            return
        if begun.dealt is not None:
            self._deal(begun.dealt, pulled.num)
            return
        if begun.seed is not None:
            self._iterator = self._seeded(begun.seed)
        for name, state in begun.process if self._is_lazy else ():
            set_generator_state(OF_PROCESS[name], state)
        if begun.states and begun.is_after_end:
            self._iterator = chain.from_iterable(self._unspent(self._iterator))
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
                next(self)
            except StopIteration:
                raise _other_samples() from None

    def _unspent(self, iterator: Iterator[Any]) -> Iterator[Iterable[Any]]:
        """A sampler may say of its end that it has given all: what comes next is then nothing, and
        after that all of it."""
        first = list(islice(iterator, 1))
        loader = self._loader()
        if loader is not None:
            loader._is_loaded = False
        yield first
        yield iterator if first else self._samplers[0]

    def _over(self, state: Any) -> Iterator[Any]:
        """Nothing: and what a sampler was told meanwhile, as trainers tell an epoch, is nothing for
        the next loop, as if this one had been read here."""
        assert self._word is not None
        self._word.go_on_from(state)
        yield from ()

    def _noting(self) -> Iterator[Any]:
        """Nothing: and what the first batch is drawn from is noted."""
        if self._random is None:
            self.begun = self.begun._replace(process=self._process_states())
        else:
            drawn = torch.Generator()
            drawn.set_state(torch.default_generator.get_state())
            # As RandomSampler draws it.
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=drawn).item())
            self.begun = self.begun._replace(seed=seed)
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
        reach = self.reach
        try:
            indices = next(self._iterator)
        except StopIteration:
            reach.has_ended = True
            raise
        reach.num = num = reach.num + 1
        if self._dealt is None:
            self._digest.update(_bytes_of(indices))
        state, is_last = None, False
        if self._word is not None:
            state, is_last = self._word.hear(indices, num)
        given: tuple[int, ...] = ()
        if self._given:
            given = tuple(sorted(number for number in self._given if number >= num))
        # One for each batch, and half as quick by its class.
        self.pulled = _new(Pulled, (num, self._digest.intdigest(), state, is_last, given))
        if num - 1 in self._given:
            return next(self)
        return indices

    @property
    def place(self) -> tuple[int, int]:
        """Where the samples of the batch that was pulled last lie in the order that is dealt out to
        the ranks: the first one, and how far from one to the next."""
        if self._dealt is None or self.begun.dealt is None:
            return 0, 0
        _, ranks, had = self.begun.dealt
        before = (self.reach.num - 1) * self._batch_size
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


def _bytes_of(indices: Any) -> bytes:
    """What a digest is made of: numbers as they are, which takes a tenth of the time."""
    try:
        packed: bytes = _packer(len(indices))(*indices)
        return packed
    except (TypeError, struct.error):
        return repr(indices).encode("utf-8", "surrogatepass")


@functools.cache
def _packer(num: int) -> Any:
    return struct.Struct(f"{num}q").pack


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
