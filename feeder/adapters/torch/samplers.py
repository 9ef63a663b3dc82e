"""What a loader's samplers are, and what they draw from or say.

PyTorch asks nothing of a sampler but to be iterated over, so what it holds is looked at: samplers
in samplers, generators, states.
"""

from __future__ import annotations

import copy
import numbers
from collections import deque
from collections.abc import Iterator
from itertools import islice
from random import SystemRandom
from types import MemberDescriptorType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from feeder.adapters.datasets import is_stateful
from feeder.adapters.torch import generators
from feeder.errors import ResumeError

_DRAW_NOTHING = (SequentialSampler, DistributedSampler)
DRAW_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DEEPEST = 8
"""Samplers in samplers, and containers in containers, are looked through so far."""
_PLAIN = (numbers.Number, str, bytes, type(None))


def own_generators(loader: Any) -> list[Any]:
    """The generators that a loader and its samplers hold, each once, always in the same order."""
    found: dict[int, Any] = {}
    shared = {id(generator) for generator in generators.OF_PROCESS.values()}
    for part in (loader, *samplers_of(loader)):
        for value in _held(part):
            # That one draws from the system, and has no state.
            is_random = isinstance(value, generators.KINDS) and type(value) is not SystemRandom
            if is_random and id(value) not in shared:
                found.setdefault(id(value), value)
    return list(found.values())


def samplers_of(loader: Any) -> list[Any]:
    """The samplers of a loader, and those in them, also if a data set of a sampler's own lies in
    between: what that draws or says is no order."""
    found: list[Any] = []
    no_orders: list[Any] = []
    waiting = [(loader.batch_sampler, 0), (loader.sampler, 0)]
    while waiting:
        part, depth = waiting.pop(0)
        is_known = any(part is one for one in (loader.dataset, *found, *no_orders))
        if part is None or depth > _DEEPEST or (is_known and depth):
            continue
        # What the loader iterates over is a sampler, whatever else it is.
        is_data = depth > 0 and isinstance(part, Dataset)
        (no_orders if is_data else found).append(part)
        for value in _held(part):
            if isinstance(value, (Sampler, Dataset)) or (not is_data and _may_be_order(value)):
                waiting.append((value, depth + 1))
    return found


def _may_be_order(value: Any) -> bool:
    """Whether it may be a sampler that is not PyTorch's class: not an array, nor a model or a
    loader, whose state is its owner's."""
    is_other = isinstance(value, (type, torch.nn.Module, torch.utils.data.DataLoader))
    is_array = hasattr(value, "shape")
    return hasattr(value, "__iter__") and hasattr(value, "__dict__") and not (is_other or is_array)


def _held(part: Any) -> Iterator[Any]:
    """What an object has as attributes, and in lists, sets and dicts of these."""
    values = [value for _, value in sorted(getattr(part, "__dict__", {}).items())]
    for kind in type(part).__mro__:
        for name, value in vars(kind).items():
            if isinstance(value, MemberDescriptorType):
                values.append(getattr(part, name, None))
            elif isinstance(value, generators.KINDS):
                values.append(value)
    for value in values:
        yield from _unpacked(value, 0)


def _unpacked(value: Any, depth: int) -> Iterator[Any]:
    """A value, and those in it if it is a container of others than numbers and texts."""
    if isinstance(value, MethodType):
        value = value.__self__
    yield value
    if isinstance(value, SimpleNamespace):
        value = vars(value)
    inner = value.values() if isinstance(value, dict) else value
    if depth == _DEEPEST or not isinstance(value, (list, tuple, dict, set, frozenset, deque)):
        return
    # A list of indices or of names is long, and holds nothing else.
    if not all(isinstance(one, _PLAIN) for one in islice(inner, _DEEPEST)):
        for each in inner:
            yield from _unpacked(each, depth + 1)


def innermost(loader: Any) -> Any:
    """The sampler that nobody reads ahead of the batches: below PyTorch's own `BatchSampler`. What
    groups samples by length, say, has read more of its sampler than it has given."""
    part = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(part) is BatchSampler:
        part = part.sampler
    return part


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
    """The sampler that deals one order out to all ranks, if it is PyTorch's own; otherwise None."""
    inner = loader.sampler
    is_plain = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    return inner if is_plain and type(inner) is DistributedSampler else None


def process_generators(samplers: list[Any]) -> tuple[str, ...]:
    """Which generators of the process samplers may draw from."""
    needed: set[str] = set()
    for sampler in samplers:
        kind = type(sampler)
        if kind is BatchSampler or kind in _DRAW_NOTHING:
            continue
        if kind not in DRAW_FROM_TORCH:
            return tuple(generators.OF_PROCESS)
        if sampler.generator is None:
            needed.add("torch")
    return tuple(sorted(needed))
