"""What `feeder.serve` is told, checked before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from feeder.checkpoint.policy import Checkpointing
from feeder.errors import ConfigError
from feeder.service.net.addresses import Address, check_binds, default_address, parse
from feeder.service.net.keys import ServerKeys

SAVE_EVERY_S = 30.0
"""How often a server stores what was used, where it is not told."""


def check_arguments(
    addresses: str | Sequence[str] | None,
    *,
    queues: int | None,
    keys: str | os.PathLike[str] | None,
    insecure: bool,
    lease: float,
    exit_when: str,
    status: str | int | None,
) -> tuple[list[Address], ServerKeys | None]:
    """The addresses and keys that arguments of `serve` stand for; raises `ConfigError`."""
    if exit_when not in ("never", "acknowledged"):
        raise ConfigError(f"exit_when is {exit_when!r}, expected 'never' or 'acknowledged'")
    if queues is not None and (type(queues) is not int or not 1 <= queues <= 4096):
        raise ConfigError(f"queues is {queues!r}, expected a whole number from 1 to 4096")
    if type(lease) not in (int, float) or not 0 < lease <= 1e9:
        raise ConfigError(f"lease is {lease!r} s, expected more than 0, at most 1e9")
    if status is not None:
        from feeder.observe.status.port import parse_place

        parse_place(status)
    texts = (addresses,) if isinstance(addresses, str) else addresses
    found = [default_address()] if texts is None else [parse(text) for text in texts]
    check_binds(found, curve=keys is not None, insecure=insecure)
    return found, None if keys is None else ServerKeys.read(keys)


def check_checkpoints(given: Any) -> Checkpointing | None:
    """When a server stores what was used, and where; raises `ConfigError`."""
    if given is None:
        return None
    policy = Checkpointing.of(given)
    if policy.every_batches is not None:
        raise ConfigError(
            f"every_batches is {policy.every_batches}, which a server cannot keep to, since its "
            "consumers stand at different batches; use every_s"
        )
    return policy if policy.every_s is not None else replace(policy, every_s=SAVE_EVERY_S)
