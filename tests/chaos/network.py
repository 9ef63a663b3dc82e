"""Hosts that a leg runs on: network namespaces, and a switch between them that does harm.

The switch is a thread that passes Ethernet frames from tap to tap, since a kernel may lack what
delays and loses packets. Needs root and Linux' network namespaces; nothing leaves this machine.
"""

from __future__ import annotations

import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple, Self

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 2, 0x1000
_MOST_BYTES = 65_536
_MAC = slice(0, 6)
_SOURCE = slice(6, 12)


class Harm(NamedTuple):
    """What befalls the frames from one host to another."""

    lost: float = 0.0
    """The part that does not arrive."""
    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to so much more delay, drawn for each frame: one may overtake another."""
    twice: float = 0.0
    """The part that arrives twice."""
    flipped: float = 0.0
    """The part of which one bit is changed."""


CUT = Harm(lost=1.0)


class Network:
    """So many hosts; a context manager. Host `i` has the address `ip(i)`.

    `harm` is read by the switch's thread; whoever sets an item does so in one step.
    """

    def __init__(self, num_hosts: int, seed: int) -> None:
        self.harm: dict[tuple[int, int], Harm] = {}
        """By the hosts that a frame is from and for; nothing befalls others."""
        self._dice = random.Random(seed)
        self._names = [f"feeder-{os.getpid()}-{i}" for i in range(num_hosts)]
        self._taps: list[int] = []
        self._ports: dict[bytes, int] = {}  # by the hardware address of a host's interface
        self._due: list[tuple[float, int, int, bytes]] = []
        self._numbers = itertools.count()
        self._stack = ExitStack()

    @staticmethod
    def ip(host: int) -> str:
        """The address of a host."""
        return f"10.77.0.{host + 1}"

    def inside(self, host: int) -> tuple[str, ...]:
        """The words before a command that is to run on a host."""
        return ("ip", "netns", "exec", self._names[host])

    def move(self, address: str, old: int, new: int) -> None:
        """Another host has an address from now on, and all have been told so."""
        _ip("-n", self._names[old], "addr", "del", f"{address}/24", "dev", "tap")
        _ip("-n", self._names[new], "addr", "add", f"{address}/24", "dev", "tap")
        for name in self._names:
            _ip("-n", name, "neigh", "flush", "dev", "tap")

    def cut(self, host: int, *, deaf: bool = True, mute: bool = True) -> None:
        """What is sent to a host is lost, or what it sends, or both."""
        for other in range(len(self._names)):
            if deaf:
                self.harm[other, host] = CUT
            if mute:
                self.harm[host, other] = CUT

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for host, name in enumerate(self._names):
                _ip("netns", "add", name)
                stack.callback(_ip, "netns", "del", name)
                tap = _open_tap(name)
                stack.callback(os.close, tap)
                self._taps.append(tap)
                within = ("-n", name)
                _ip(*within, "addr", "add", f"{self.ip(host)}/24", "dev", "tap")
                for device in ("lo", "tap"):
                    _ip(*within, "link", "set", device, "up")
            ends, end = os.pipe()
            stack.callback(os.close, ends)
            thread = threading.Thread(target=self.run_switch, args=(ends,), name="switch")
            thread.start()
            stack.callback(thread.join)
            stack.callback(os.close, end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # ---- the switch

    def run_switch(self, ends: int) -> None:
        """Thread body: pass frames on until the other end of a pipe is closed."""
        poll = select.poll()
        for descriptor in (ends, *self._taps):
            poll.register(descriptor, select.POLLIN)
        hosts = {tap: host for host, tap in enumerate(self._taps)}
        while True:
            wait_s = self._due[0][0] - time.monotonic() if self._due else None
            timeout_ms = None if wait_s is None else max(0, 1000 * wait_s)
            for descriptor, _ in poll.poll(timeout_ms):
                if descriptor == ends:
                    return
                with suppress(BlockingIOError):
                    while True:
                        self._take(hosts[descriptor], os.read(descriptor, _MOST_BYTES))
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, host, frame = heapq.heappop(self._due)
                # An interface that is gone, or whose queue is full: as on a wire, it is lost.
                with suppress(OSError):
                    os.write(self._taps[host], frame)

    def _take(self, source: int, frame: bytes) -> None:
        self._ports[frame[_SOURCE]] = source
        target = self._ports.get(frame[_MAC])
        others = [host for host in range(len(self._taps)) if host != source]
        for host in others if target is None else [target]:
            self._send(self.harm.get((source, host), Harm()), host, frame)

    def _send(self, harm: Harm, host: int, frame: bytes) -> None:
        dice = self._dice
        if dice.random() < harm.lost:
            return
        if dice.random() < harm.flipped:
            changed = bytearray(frame)
            changed[dice.randrange(len(frame))] ^= 1 << dice.randrange(8)
            frame = bytes(changed)
        for _ in range(1 + (dice.random() < harm.twice)):
            due = time.monotonic() + harm.delay_s + harm.jitter_s * dice.random()
            heapq.heappush(self._due, (due, next(self._numbers), host, frame))


def is_possible() -> bool:
    """Whether hosts can be made here."""
    name = f"feeder-{os.getpid()}-try"
    if not Path("/dev/net/tun").exists():
        return False
    with suppress(OSError, subprocess.CalledProcessError):
        _ip("netns", "add", name)
        _ip("netns", "del", name)
        return True
    return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _open_tap(name: str) -> int:
    """The descriptor of a new interface `tap` of a namespace: what is sent there is read here."""
    # It is made here, under a name that is free, and keeps its descriptor as it moves.
    here = f"tap{os.urandom(5).hex()}"
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", here.encode(), _IFF_TAP | _IFF_NO_PI))
    _ip("link", "set", here, "netns", name)
    _ip("-n", name, "link", "set", here, "name", "tap")
    return tap
