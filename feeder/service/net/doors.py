"""Where a server is reached: a ROUTER for each kind of address that it listens at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from feeder.service.net.addresses import Address
from feeder.service.net.limits import raise_limit
from feeder.service.net.reception import Reception
from feeder.service.net.security import Security, Socket, bind, watch

_MAX_CREDIT = 1024


@dataclass(slots=True, kw_only=True)
class Door:
    """One ROUTER, its monitor, and the addresses that it is bound to."""

    router: Socket
    monitor: Socket
    addresses: list[Address]
    most_bytes: int
    """The longest frame that it takes."""
    reception: Reception = field(init=False)
    """What comes to it."""

    def __post_init__(self) -> None:
        self.reception = Reception(self.router)


def open_doors(security: Security, addresses: Sequence[Address]) -> list[Door]:
    """Listen at all addresses. Raises `ConfigError` where the system refuses."""
    raise_limit()
    doors: list[Door] = []
    for kind in ((False, "ipc"), (False, "tcp"), (True, "tcp")):
        chosen = [a for a in addresses if (security.encrypts(a), a.scheme) == kind]
        if chosen:
            most_bytes = security.most_request_bytes(chosen[0])
            router = security.make_router(_MAX_CREDIT, curve=kind[0], max_message_bytes=most_bytes)
            monitor = watch(router)
            bound = [bind(router, address) for address in chosen]
            doors.append(
                Door(router=router, monitor=monitor, addresses=bound, most_bytes=most_bytes)
            )
    return doors
