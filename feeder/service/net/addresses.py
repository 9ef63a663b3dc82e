"""Addresses of servers, and the private directory that sockets of a user lie in."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from feeder.errors import ConfigError

MAX_PATH_BYTES = 107
"""The longest path of a unix socket in bytes: `sun_path` has 108, and a zero ends it."""

# A plain name for `ipc://NAME`: no slash, so it cannot lead out of the private directory.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
# Of host names underscores too, which container networks use. ZeroMQ resolves them; this only keeps
# out what would be another syntax to it (";" names a source address).
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_EXPECTED = "expected 'tcp://HOST:PORT', 'ipc:///PATH' or 'ipc://NAME'"


class Address(NamedTuple):
    """Where a server listens: a TCP port or a unix socket; `str` gives its text. Immutable."""

    scheme: Literal["tcp", "ipc"]
    """How peers talk: TCP, or a unix socket."""
    host: str = ""
    """Of TCP: a name, an IPv4 or IPv6 address without brackets, or "*" for all interfaces."""
    port: int = 0
    """Of TCP: 1 to 65535, or 0 for one that the system chooses."""
    path: str = ""
    """Of a unix socket: its absolute path."""

    def __str__(self) -> str:
        if self.scheme == "ipc":
            return f"ipc://{self.path}"
        return f"tcp://{f'[{self.host}]' if self.is_ipv6 else self.host}:{self.port}"

    @property
    def is_ipv6(self) -> bool:
        """Whether the host is an IPv6 address."""
        return ":" in self.host

    @property
    def is_wildcard(self) -> bool:
        """Whether it stands for all interfaces, or for a port that the system chooses."""
        # Such an address can be bound and not connected to.
        every = _ip(self.host)
        return self.scheme == "tcp" and (
            self.host == "*" or self.port == 0 or bool(every and every.is_unspecified)
        )

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can reach it."""
        if self.scheme == "ipc" or self.host == "localhost":
            return True
        ip = _ip(self.host)
        # ::ffff:127.0.0.1 is the loopback of IPv4.
        mapped = getattr(ip, "ipv4_mapped", None) or ip
        return bool(mapped and mapped.is_loopback)


def parse(text: str) -> Address:
    """Return the address that a text names; `ipc://NAME` lies in the private directory.

    ConfigError where it names none, or one that a unix socket cannot have.
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("tcp", "ipc"):
        raise _bad(text, _EXPECTED)
    return _parse_tcp(text, rest) if scheme == "tcp" else _parse_ipc(text, rest)


def _parse_tcp(text: str, rest: str) -> Address:
    # From the right: IPv6 addresses have colons of their own.
    host, _, port = rest.rpartition(":")
    if not host:
        raise _bad(text, "it has no port, expected 'tcp://HOST:PORT'")
    if not re.fullmatch(r"[0-9]{1,5}|\*", port):
        raise _bad(text, f"its port is {port!r}, expected 0 to 65535")
    number = 0 if port == "*" else int(port)
    if number > 65535:
        raise _bad(text, f"its port is {number!r}, expected 0 to 65535")
    return Address(scheme="tcp", host=_parse_host(text, host), port=number)


def _parse_host(text: str, host: str) -> str:
    if host.startswith("[") and host.endswith("]"):
        ip = _ip(host[1:-1])
        if ip is None or ip.version != 6:
            raise _bad(text, f"{host!r} is no IPv6 address")
        return str(ip)
    if host != "*" and not _HOST.fullmatch(host):
        raise _bad(text, f"its host is {host!r}, expected a name or an address, IPv6 in brackets")
    # Names are compared, to find an address that is given twice; DNS knows no case.
    return host.lower()


def _parse_ipc(text: str, rest: str) -> Address:
    if _NAME.fullmatch(rest):
        rest = str(private_path() / f"{rest.removesuffix('.sock')}.sock")
    elif not rest.startswith("/"):
        raise _bad(text, "expected an absolute path as in 'ipc:///run/feed.sock', or a plain name")
    if "\0" in rest or rest.endswith("/"):
        raise _bad(text, "it names no file")
    if (size := len(os.fsencode(rest))) > MAX_PATH_BYTES:
        raise _bad(text, f"its path has {size} bytes, a unix socket takes {MAX_PATH_BYTES} at most")
    # Normalised, since the directory that the path lies in decides whom it is trusted from.
    return Address(scheme="ipc", path=os.path.normpath(rest))


def _bad(text: str, why: str) -> ConfigError:
    return ConfigError(f"{text!r} is no address: {why}")


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def private_path() -> Path:
    """Return this user's directory of sockets, whether it exists or not."""
    # The runtime directory is the user's own and goes with the session. A relative one is an error
    # by its specification, and is ignored.
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(runtime):
        return Path(runtime, "feeder")
    return _in_tmp()


def _in_tmp() -> Path:
    # Anybody may make a directory of this name in /tmp, so it is checked each time.
    return Path("/tmp", f"feeder-{os.geteuid()}")


def private_file(name: str) -> Path:
    """Return the path for a unix socket whose name we advertise.

    It lies in this user's directory of sockets, or in the one in /tmp where there is no such or its
    path is too long. Raises `ConfigError`.
    """
    try:
        path = private_directory() / name
        if len(os.fsencode(path)) <= MAX_PATH_BYTES:
            return path
    except ConfigError:
        if private_path() == _in_tmp():
            raise
    return private_directory(_in_tmp()) / name


def private_directory(path: Path | None = None, *, create: bool = True) -> Path:
    """Return this user's directory of sockets, checked, and made where it is missing.

    ConfigError where it is not this user's own directory with mode 0700: whoever owns it could
    put a server of their own in the place of ours.
    """
    # Made, then checked: in /tmp another user may have made it first.
    path = path or private_path()
    if create:
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"directory {str(path)!r} for sockets cannot be made ({error.strerror}): "
                "set XDG_RUNTIME_DIR, or give an address as in 'ipc:///PATH'"
            ) from error
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Raise ConfigError unless `path` is a directory of this user's with mode 0700."""
    try:
        status = path.lstat()  # Not stat: a link could be changed after the check.
    except OSError as error:
        raise ConfigError(f"no directory of sockets at {str(path)!r} ({error.strerror})") from error
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no directory"
        raise ConfigError(f"{str(path)!r} is {kind}, expected a directory of yours: remove it")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"directory {str(path)!r} belongs to uid {status.st_uid}, expected {os.geteuid()}: "
            "set XDG_RUNTIME_DIR to a directory of your own"
        )
    # The setgid bit is let pass: a Kubernetes volume with an fsGroup hands it down to directories,
    # and it lets nobody in.
    if (mode := stat.S_IMODE(status.st_mode)) & ~stat.S_ISGID != 0o700:
        raise ConfigError(f"directory {str(path)!r} has mode {mode:04o}, expected 0700: chmod it")


def default_address() -> Address:
    """Return the address of a server that was given none: a socket in the private directory."""
    return parse("ipc://default")


def check_binds(addresses: Iterable[Address], *, curve: bool, insecure: bool = False) -> None:
    """Raise ConfigError unless a server may listen at all of `addresses` at once.

    `curve` says whether it has keys. Without them a port that other hosts can reach takes
    `insecure`: anybody could read the batches, and move the feed. A pure function.
    """
    seen: set[Address] = set()
    for address in addresses:
        # Port 0 may be given twice: the system chooses two.
        if address in seen and not (address.scheme == "tcp" and address.port == 0):
            raise ConfigError(f"address {str(address)!r} is given twice")
        seen.add(address)
        if not (address.is_loopback or curve or insecure):
            raise ConfigError(
                f"address {str(address)!r} can be reached from other hosts, and there are no keys: "
                "make some with 'feeder keygen DIR' and give '--keys DIR', or bind to 127.0.0.1, "
                "or accept that anybody may connect with '--insecure'"
            )
    if not seen:
        raise ConfigError("a server needs an address to listen at, expected one at least")


def open_to_users(addresses: Iterable[Address], *, curve: bool) -> list[str]:
    """Those of a server's addresses at which any user of this host may connect."""
    return [str(one) for one in addresses if one.scheme == "tcp" and one.is_loopback and not curve]


def check_connects(addresses: Iterable[Address]) -> None:
    """Raise ConfigError unless a consumer can connect to each of `addresses`.

    One in the private directory is trusted only where that directory is sound; a missing one is
    no error, since its server may come later.
    """
    named = tuple(addresses)
    if not named:
        raise ConfigError("a consumer needs the address of a server, expected one at least")
    for address in named:
        if address.is_wildcard:
            raise ConfigError(
                f"address {str(address)!r} is one to listen at: name the server's host and port"
            )
        # Else another user's server there would be taken for ours.
        if Path(address.path).parent == private_path() and os.path.lexists(private_path()):
            check_private(private_path())
