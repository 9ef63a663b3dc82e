"""The indices of a loop, and how the same ones are pulled again.

PyTorch's samplers have no place to go on from, and draw from generators that others draw from, too.
So an order is kept as what it began with: the states of the generators, or one seed. To go on, the
loop is begun again with those and as many batches of indices are pulled as were used; a digest says
whether they are the same. If they are not, a sampler with `state_dict` and `load_state_dict` goes
on from its own state, if that is a place: another state with each batch, and nobody reads the
sampler ahead of the batches.
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
from types import GeneratorType
from typing import Any, NamedTuple

import torch
import xxhash
from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from feeder.adapters.datasets import is_stateful
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
    innermost,
    load_states,
    own_generators,
    process_generators,
    samplers_of,
    stateful_samplers,
    states_of,
)
from feeder.adapters.torch.shuffle import SeededSampler
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
    times: int = 1
    """How often PyTorch iterated over the sampler to begin: twice if it began workers."""
    is_lazy: bool | None = False
    """Whether all that was when the first batch was pulled, and not when the loop was begun. None
    of a state of an older feeder: then so were the process's generators alone, of PyTorch's own
    samplers."""


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
    digest: int | None = None
    """Of all that were pulled; None of a state of an older feeder."""


_new = tuple.__new__
_OLD_LAZY = (BatchSampler, *DRAW_FROM_TORCH)

START = Pulled(0, xxhash.xxh3_64().intdigest())


class Reach:
    """How far a loop has pulled its order. Plain values: they outlive the loop, and any thread may
    read them."""

    __slots__ = ("again", "begun", "has_ended", "pulled")

    def __init__(self, begun: Begun, pulled: Pulled) -> None:
        self.begun = begun
        """What the order began with."""
        self.pulled = pulled
        """Where it stands."""
        self.has_ended = False
        """Whether the sampler has said that there are no more."""
        self.again = (0, START.digest, False)
        """What `drawn` was when a loop that goes on had begun."""

    @property
    def drawn(self) -> tuple[int, int, bool]:
        """How many batches were drawn from the generators, also those that a loop that goes on has
        not pulled yet; the digest of these; and whether the sampler has ended."""
        now = (self.pulled.num, self.pulled.digest, self.has_ended)
        return now if self.has_ended or now[0] > self.again[0] else self.again


class _Worth(enum.Enum):
    """Whether what a sampler says is a place to go on from."""

    OPEN = enum.auto()
    """Of one batch nobody knows whether the next one changes what is said."""
    PLACE = enum.auto()
    """It was another one with each batch: a place."""
    NOTHING = enum.auto()
    """It was the same after two batches."""
    TRIED = enum.auto()
    """The loop goes on from it, so it is a place."""


class _Word:
    """What a sampler's `state_dict` says after each batch of indices, and what that is worth."""

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
        if self._worth is _Worth.NOTHING:
            return None, False
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
        self._outer = loader.batch_sampler
        self._batch_size = getattr(self._outer, "batch_size", None) or 1
        self._own = own_generators(loader)
        self._samplers = samplers_of(loader)
        self._with_state = stateful_samplers(loader)
        self._dealt = dealt_sampler(loader)
        self._inner = inner = innermost(loader)
        # One that draws one seed of the process and nothing else.
        is_random = type(inner) is RandomSampler and inner.generator is None
        self._random = inner if is_random else None
        self._word = _Word(inner, self._outer) if is_stateful(inner) else None
        self._iterator: Iterator[Any] = iter(())
        self._digest = xxhash.xxh3_64()
        if resumed is None:
            said = states_of(self._with_state)
            process = process_states(process_generators(self._samplers))
            begun = Begun(self._own_states(), process, None, self._deal_out(), said, is_after_end)
            self._given = frozenset[int]()
            self.reach = Reach(begun, START)
        else:
            loader._is_loaded = True
            begun, pulled = resumed
            self._given = frozenset(pulled.given)
            self.reach = Reach(begun, START._replace(given=pulled.given))

    def _own_states(self) -> tuple[str, ...]:
        return tuple(map(generator_state, self._own))

    def _deal_out(self) -> tuple[int, int, int] | None:
        sampler = self._dealt
        # One that has nothing for a rank is false.
        return None if sampler is None else (sampler.epoch, sampler.num_replicas, 0)

    # ---- its begin

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """PyTorch's iterator is made, and the order gets to its place: with the generators as they
        were then. Those of the process are the caller's, and stay as they are."""
        if self._resumed is None:
            yield
            return
        begun, pulled = self._resumed
        self._put(self._own, begun.own)
        # A state of an older feeder has either.
        if begun.states or pulled.state is None:
            load_states(self._with_state, begun.states)
        with as_it_was(begun.process):
            yield

    def begin(self, iterator: Iterator[Any], now: Now | None, *, was_pulled: bool) -> None:
        """The iterator over the sampler; inside `beginning`. Raises `ResumeError`.

        `was_pulled`: whether batches were pulled before the first one was given, as for workers."""
        self._iterator = iterator
        if self._resumed is not None:
            self._go_to(*self._resumed, now, was_pulled=was_pulled)
        elif self._with_state and self.reach.begun.is_after_end:
            loader = self._loader()
            if loader is not None and loader._is_loaded:
                self._iterator = chain.from_iterable(self._unspent(iterator))
        # Nothing is drawn before its first batch, and set_epoch may be called until then.
        is_lazy = isinstance(iterator, GeneratorType)
        if is_lazy and not self.reach.pulled.num and not self.reach.begun.is_lazy:
            self._iterator = chain(self._noting(), self._iterator)

    def _put(self, own: list[Any], states: tuple[str, ...]) -> None:
        # A sampler that makes generators when it is iterated over makes these anew; if that is
        # not so, the digest tells.
        if len(own) == len(states):
            set_states(own, states)

    def _go_to(self, begun: Begun, pulled: Pulled, now: Now | None, *, was_pulled: bool) -> None:
        if begun.dealt is not None:
            self._deal(begun.dealt, pulled.num)
            return
        is_old = begun.is_lazy is None and type(self._samplers[0]) in _OLD_LAZY
        if begun.is_lazy or is_old:
            self._set_back(begun, own=not is_old)
        if begun.seed is not None:
            self._iterator = self._seeded(begun.seed)
        word = self._word
        with contextlib.suppress(ResumeError):
            self._go_again(begun, pulled, now, was_pulled=was_pulled)
            return
        if begun.states and not begun.is_after_end:
            # What a sampler says in the middle of a loop that is left may be where it goes on, or
            # where it would go on; then it begins anew if it is iterated over once more.
            self._set_back(begun)
            self._begin_at(START, word, iter(self._samplers[0]))
            with contextlib.suppress(ResumeError):
                self._go_again(begun, pulled, now, was_pulled=was_pulled)
                return
        if word is None or pulled.state is None:
            raise _other_samples()
        # The sampler goes on itself: it depends on more than what a loop begins with.
        self._set_back(begun)
        if now is not None and not now.ahead:
            self._put(self._own, now.own)
        word.go_on_from(pulled.state)
        again = self._over(word, pulled.state) if pulled.is_last else self._samplers[0]
        self._begin_at(pulled, word, iter(again))

    def _set_back(self, begun: Begun, *, own: bool = True) -> None:
        if own:
            self._put(self._own, begun.own)
        for name, state in begun.process:
            set_generator_state(OF_PROCESS[name], state)

    def _begin_at(self, pulled: Pulled, word: _Word | None, iterator: Iterator[Any]) -> None:
        self.reach.pulled, self.reach.has_ended = pulled, False
        self._word, self._digest, self._iterator = word, xxhash.xxh3_64(), iterator

    def _go_again(self, begun: Begun, pulled: Pulled, now: Now | None, *, was_pulled: bool) -> None:
        """Pull what was pulled."""
        if begun.states and begun.is_after_end:
            self._iterator = chain.from_iterable(self._unspent(self._iterator))
        self._pull_again(pulled.num)
        if self._digest.intdigest() != pulled.digest:
            raise _other_samples()
        # As far as it was, before it goes on with what others have left of the generators.
        is_first_ahead = was_pulled and not pulled.num
        num_ahead = is_first_ahead if now is None else now.ahead + now.has_ended
        ahead = [_at_hand(indices) for indices in islice(self._iterator, num_ahead)]
        self._iterator = chain(ahead, self._iterator)
        if now is not None:
            digest = self._digest.copy()
            for indices in ahead:
                digest.update(_bytes_of(indices))
            if now.digest is not None and digest.intdigest() != now.digest:
                raise _other_samples()
            num = pulled.num + len(ahead)
            self.reach.again = num, digest.intdigest(), len(ahead) < num_ahead
            loader = self._loader()
            self._put(self._own if loader is None else own_generators(loader), now.own)
        if ahead:
            # What the sampler says now is of a later batch than the next one.
            self._word = None
        if pulled.num and isinstance(self._inner, SeededSampler):
            self._inner.go_on()

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

    def _over(self, word: _Word, state: Any) -> Iterator[Any]:
        """Nothing: and what a sampler was told meanwhile, as trainers tell an epoch, is nothing for
        the next loop, as if this one had been read here."""
        word.go_on_from(state)
        yield from ()

    def _noting(self) -> Iterator[Any]:
        """Nothing: and what the first batch is drawn from is noted."""
        seed, process = None, process_generators(self._samplers)
        if self._random is not None:
            drawn = torch.Generator()
            drawn.set_state(torch.default_generator.get_state())
            # As RandomSampler draws it.
            seed = int(torch.empty((), dtype=torch.int64).random_(generator=drawn).item())
            process = ()
        self.reach.begun = self.reach.begun._replace(
            own=self._own_states(), process=process_states(process), seed=seed,
            dealt=self._deal_out(), is_lazy=True,
        )  # fmt: skip
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
        self.reach.begun = self.reach.begun._replace(dealt=(epoch, ranks, had))
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
        if type(indices) is not list:  # To ask for the abstract class takes longer.
            indices = _at_hand(indices)
        num = reach.pulled.num + 1
        if self._dealt is None:
            self._digest.update(_bytes_of(indices))
        state, is_last = None, False
        if self._word is not None:
            state, is_last = self._word.hear(indices, num)
        given: tuple[int, ...] = ()
        if self._given:
            given = tuple(sorted(number for number in self._given if number >= num))
        # One for each batch, and half as quick by its class.
        reach.pulled = _new(Pulled, (num, self._digest.intdigest(), state, is_last, given))
        if num - 1 in self._given:
            return next(self)
        return indices

    @property
    def place(self) -> tuple[int, int]:
        """Where the samples of the batch that was pulled last lie in the order that is dealt out to
        the ranks: the first one, and how far from one to the next."""
        dealt = self.reach.begun.dealt
        if self._dealt is None or dealt is None:
            return 0, 0
        _, ranks, had = dealt
        before = (self.reach.pulled.num - 1) * self._batch_size
        return had + before * ranks + self._dealt.rank, ranks


def _other_samples() -> ResumeError:
    return ResumeError(
        "the sampler gives other samples than before the state was taken: give it a generator "
        "attribute, or state_dict() and load_state_dict(state). A state fits only the rank that it "
        "was taken on; if the sampler draws from global generators of PyTorch, NumPy or Python, it "
        "fits only the same number of workers"
    )


def _at_hand(indices: Any) -> Any:
    """A batch of indices that can be read twice: by the digest, and for the samples."""
    return list(indices) if isinstance(indices, Iterator) else indices


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
