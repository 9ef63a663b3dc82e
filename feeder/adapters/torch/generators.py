"""The states of generators: of PyTorch's, NumPy's and Python's, as text."""

from __future__ import annotations

import json
import random
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from feeder.errors import ResumeError

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

# `random` and `numpy.random` draw from these; neither library has a public name for them.
OF_PROCESS: dict[str, Any] = {
    "torch": torch.default_generator,
    "random": random._inst,
    "numpy": np.random.mtrand._rand,
}


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


def set_states(own: list[Any], states: tuple[str, ...]) -> None:
    """The reverse of `generator_state`, for the generators of a loader. Raises `ResumeError`."""
    if len(states) != len(own):
        raise ResumeError(
            f"the loader and its samplers have {len(own)} generators of their own, and had "
            f"{len(states)} when the state was taken: make a sampler's generator in its __init__"
        )
    for generator, state in zip(own, states, strict=True):
        set_generator_state(generator, state)


def process_states(names: Iterable[str] = tuple(OF_PROCESS)) -> tuple[tuple[str, str], ...]:
    """The states of generators of the process, by name."""
    return tuple((name, generator_state(OF_PROCESS[name])) for name in names)


def process_generators_now() -> tuple[Any, Any, Any]:
    """Their states as the libraries have them, which takes half the time."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_process_generators(states: tuple[Any, Any, Any]) -> None:
    """The reverse."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@contextmanager
def as_it_was(states: Iterable[tuple[str, str]]) -> Iterator[None]:
    """The generators of the process have these states, and then those again that they have now."""
    kept = process_states()
    try:
        for name, state in states:
            set_generator_state(OF_PROCESS[name], state)
        yield
    finally:
        for name, state in kept:
            set_generator_state(OF_PROCESS[name], state)
