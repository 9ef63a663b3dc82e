"""Trainers that count batches themselves: where a loader stands for them, and who draws.

They know by a length when an epoch is over, and leave the loop without asking for its end. And what
an order of PyTorch's is drawn from is the generators of the process, which are a trainer's, too: a
run goes on as it would have only where these go on, as well.
"""

from __future__ import annotations

from typing import Any

import torch

from feeder.adapters.torch.feed_loader import FeedLoader
from feeder.adapters.torch.generators import OF_PROCESS, generator_state, set_generator_state
from feeder.adapters.torch.loader import DataLoader
from feeder.errors import ResumeError

LOADERS = (DataLoader, FeedLoader)
"""Those that have states."""


def state_of(loader: Any, *, is_over: bool) -> dict[str, Any]:
    """Where a loader stands; `is_over` says that the trainer takes no more of the loop at hand."""
    if is_over and isinstance(loader, DataLoader):
        loader.leave()
    is_left = is_over and isinstance(loader, FeedLoader) and loader._is_begun
    return {"state": loader.state_dict(), "is_left": is_left}


def load_state(loader: Any, said: dict[str, Any]) -> None:
    """The reverse. Raises `ResumeError`."""
    # A checkpoint of an older feeder has the loader's own.
    loader.load_state_dict(said["state"] if "is_left" in said else said)
    if said.get("is_left"):
        # The next loop leaves this one.
        loader._is_begun = True


def _generators() -> dict[str, Any]:
    """Those of the process, by name."""
    found = dict(OF_PROCESS)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


def draws() -> dict[str, str]:
    """The states of the generators of the process."""
    return {name: generator_state(generator) for name, generator in _generators().items()}


def set_draws(states: dict[str, str]) -> None:
    """The reverse."""
    for name, generator in _generators().items():
        if name in states:
            set_generator_state(generator, states[name])


def of_all_ranks(said: Any) -> list[Any]:
    """What each rank says. All call it at once."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return [said]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, said)
    return found


def of_this_rank(said: list[Any], key: str) -> Any:
    """What this rank said; of another number of ranks what all said alike. Raises `ResumeError`
    where they said different things by that key."""
    is_one = not torch.distributed.is_available() or not torch.distributed.is_initialized()
    rank, ranks = (0, 1) if is_one else (
        torch.distributed.get_rank(), torch.distributed.get_world_size())  # fmt: skip
    if ranks == len(said):
        return said[rank]
    if any(one[key] != said[0][key] for one in said):
        raise ResumeError(
            f"the checkpoint is one of {len(said)} ranks, each with data of its own, and there are "
            f"{ranks} now: go on with as many, or deal one order out by DistributedSampler"
        )
    return said[0]
