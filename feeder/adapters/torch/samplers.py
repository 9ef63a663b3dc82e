"""What a loader's samplers are, and what they draw from or say.

PyTorch asks nothing of a sampler but to be iterated over, so what it holds is looked at: samplers
in samplers, generators, states.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import MemberDescriptorType
from typing import Any

import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from feeder.adapters.torch import generators
from feeder.errors import ResumeError

_DRAW_NOTHING = (SequentialSampler, DistributedSampler)
DRAW_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DEEPEST = 8
"""Samplers in samplers are looked through so far."""
_MOST = 64
"""A list of more is no list of samplers."""


def is_stateful(value: Any) -> bool:
    """Whether it has both methods: a class may have one for its own ends."""
    return all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))


def own_generators(loader: Any) -> list[Any]:
    """The generators that a loader and its samplers hold, each once, always in the same order."""
    found: dict[int, Any] = {}
    shared = {id(generator) for generator in generators.OF_PROCESS.values()}
    for part in (loader, *samplers_of(loader)):
        for value in _held(part):
            if isinstance(value, generators.KINDS) and id(value) not in shared:
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
            elif isinstance(value, generators.KINDS):
                values.append(value)
    for value in values:
        yield value
        if type(value) in (list, tuple, dict) and len(value) <= _MOST:
            yield from value.values() if type(value) is dict else value


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
