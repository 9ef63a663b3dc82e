"""Key files of CURVE: a server's pair, a pair per client, and the list of clients allowed in.

::

    DIR/server.key_secret     stays on the server's host
    DIR/server.key            goes to every trainer's host
    DIR/clients/NAME.key      whom the server lets in
    DIR/NAME.key_secret       goes to the trainer's host, with server.key

The files have the form that the tools of ZeroMQ read and write.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from pathlib import Path
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from feeder.errors import ConfigError

logger = logging.getLogger("feeder")

SERVER = "server"
CLIENTS = "clients"
DEFAULT_CLIENT = "client"
PUBLIC = ".key"
SECRET = ".key_secret"

# A key file has some hundred bytes; what is longer is none, and is not read to its end.
_MAX_BYTES = 4096
# A client's name becomes a file name: no slash, and no dot at the start.
_CLIENT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
# Read by one pattern and not by a parser of ZPL: other tools write comments and sections around it.
_LINE = re.compile(rb'^\s*(public|secret)-key\s*=\s*"([^"]*)"\s*$', re.MULTILINE)


class ServerKeys(NamedTuple):
    """What a server needs; keys are 40 bytes of Z85 text. Immutable."""

    public: bytes
    """Its public key, which its clients must know."""
    secret: bytes
    """Its secret key."""
    allowed: frozenset[bytes]
    """The public keys of the clients that may connect."""
    clients: Path | None = None
    """The folder that they were read from; None where they were not."""

    def __repr__(self) -> str:
        # Without the secret: it may end up in a log.
        return f"ServerKeys(public={self.public!r}, allowed={self.allowed!r})"

    @classmethod
    def from_directory(cls, directory: str | os.PathLike[str]) -> ServerKeys:
        """Read the server's pair and the allow-list, `clients/*.key`, of a directory."""
        folder = Path(directory)
        clients = folder / CLIENTS
        for one in (folder, clients):
            _check_folder(one)
        public, secret = read_secret(folder / (SERVER + SECRET))
        return cls(public=public, secret=secret, allowed=read_allowed(clients), clients=clients)


class ClientKeys(NamedTuple):
    """What a consumer needs; keys are 40 bytes of Z85 text. Immutable."""

    public: bytes
    """Its public key, which the server must allow."""
    secret: bytes
    """Its secret key."""
    server: bytes
    """The public key that the server must prove to have."""

    def __repr__(self) -> str:
        return f"ClientKeys(public={self.public!r}, server={self.server!r})"

    @classmethod
    def from_directory(
        cls, directory: str | os.PathLike[str], name: str | None = None
    ) -> ClientKeys:
        """Read a client's pair and `server.key` of a directory; no name: its only client."""
        folder = Path(directory)
        _check_folder(folder)
        public, secret = read_secret(folder / ((name or _only_client(folder)) + SECRET))
        return cls(public=public, secret=secret, server=read_public(folder / (SERVER + PUBLIC)))


class AllowedClients:
    """The clients that may connect, as their folder has them now.

    The thread that answers for newcomers asks it for each of them, and it reads the folder again
    where that has changed; any thread may have it read. A key that is gone or cannot be read lets
    nobody in, also where it was the last one. A folder that cannot be read leaves the list as it
    was, and into one that anybody may write no client is new. The keys are replaced as a whole.
    """

    def __init__(self, keys: ServerKeys) -> None:
        self._keys, self._folder = keys.allowed, keys.clients
        self._seen = self._look()

    def get(self, key: bytes) -> bool:
        """Whether a client with this public key may connect."""
        if self._folder is not None and self._look() != self._seen:
            self.read()
        return key in self._keys

    def read(self) -> None:
        """Read the folder again."""
        if self._folder is None:
            return
        # First: what changes while it is read is seen as a change the next time.
        self._seen = self._look()
        if isinstance(self._seen, str):
            logger.error("the clients that may connect stay those of before: %s", self._seen)
            return
        found = set()
        for path in sorted(self._folder.glob(f"*{PUBLIC}")):
            try:
                found.add(read_public(path))
            except ConfigError as error:
                logger.error("a client may not connect, since its key cannot be read: %s", error)
        keys = frozenset(found)
        try:
            _check_folder(self._folder)
        except ConfigError as error:
            logger.error("no new client may connect: %s", error)
            keys &= self._keys
        added, gone = len(keys - self._keys), len(self._keys - keys)
        self._keys = keys
        logger.info("%d clients may connect: %d are new, %d are gone", len(keys), added, gone)

    def _look(self) -> Any:
        """What changes when a file of the folder does."""
        try:
            with os.scandir(self._folder or ".") as files:
                stats = [(file.name, file.stat()) for file in files]
            return sorted((name, one.st_ino, one.st_mtime_ns, one.st_size) for name, one in stats)
        except OSError as error:
            return str(error)


def _check_folder(folder: Path) -> None:
    """Raise `ConfigError` if others may put a key into a folder."""
    with contextlib.suppress(OSError):  # Whoever reads the files in it says more.
        _check_writers("key folder", folder, folder.stat())


def _check_writers(kind: str, path: Path, status: os.stat_result) -> None:
    """Raise `ConfigError` if others than this user and root may change a file or a folder."""
    # Root's files too: a volume of secrets is mounted as root's.
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{kind} {str(path)!r} belongs to uid {status.st_uid}, expected {os.geteuid()} or root"
        )
    if (mode := stat.S_IMODE(status.st_mode)) & stat.S_IWOTH:
        raise ConfigError(
            f"{kind} {str(path)!r} has mode {mode:04o}: anybody on this host may let a "
            f"client in; look at its keys, then chmod o-w {str(path)!r}"
        )


def _only_client(folder: Path) -> str:
    """Return the name of the only client whose secret key lies there; `ConfigError` otherwise."""
    names = sorted(path.name.removesuffix(SECRET) for path in folder.glob(f"*{SECRET}"))
    names = [name for name in names if name != SERVER]
    if len(names) != 1:
        held = " and ".join(map(repr, names)) or "none"
        raise ConfigError(f"directory {str(folder)!r} has keys of {held}, expected one client's")
    return names[0]


def read_allowed(*paths: str | os.PathLike[str]) -> frozenset[bytes]:
    """Read public keys: each path is a key file, or a directory of `*.key` files."""
    files: list[Path] = []
    for path in map(Path, paths):
        files += sorted(path.glob(f"*{PUBLIC}")) if path.is_dir() else [path]
    # An empty list would let nobody in, which looks like a wrong key to every client.
    if not files:
        raise ConfigError(
            f"no client's public key in {' or '.join(repr(os.fspath(path)) for path in paths)}, "
            "nobody could connect: make one with 'feeder keygen DIR --name NAME'"
        )
    return frozenset(map(read_public, files))


def read_public(path: str | os.PathLike[str]) -> bytes:
    """Read the public key of a file."""
    return _key(_read(Path(path), secret=False), b"public", Path(path))


def read_secret(path: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    """Read a pair, (public, secret); ConfigError where others than its owner can read the file."""
    text = _read(Path(path), secret=True)
    public, secret = _key(text, b"public", Path(path)), _key(text, b"secret", Path(path))
    # A pair that does not match fails in the handshake only, without a word about the reason.
    if zmq.curve_public(secret) != public:
        raise ConfigError(f"key file {str(path)!r} is damaged: its keys are no pair")
    return public, secret


def _read(path: Path, *, secret: bool) -> bytes:
    try:
        # The open file is checked, not the path: it could be exchanged in between. A FIFO would be
        # waited for, by a thread that then lets nobody in.
        with open(path, "rb", opener=lambda at, flags: os.open(at, flags | os.O_NONBLOCK)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"key file {str(path)!r} is no regular file")
            if secret:
                _check_secret(path, status)
            _check_writers("key file", path, status)
            return file.read(_MAX_BYTES)
    except OSError as error:
        raise ConfigError(
            f"key file {str(path)!r} cannot be read ({error.strerror}): "
            "make keys with 'feeder keygen DIR'"
        ) from error


def _check_secret(path: Path, status: os.stat_result) -> None:
    if (mode := stat.S_IMODE(status.st_mode)) & 0o077:
        raise ConfigError(
            f"secret key file {str(path)!r} has mode {mode:04o}, expected 0600: others may have "
            "read it, so make new keys, or chmod it where you know that nobody did"
        )


def _key(text: bytes, kind: bytes, path: Path) -> bytes:
    found = dict(_LINE.findall(text)).get(kind)
    if found is None:
        raise ConfigError(f"key file {str(path)!r} has no {kind.decode()} key")
    try:
        # Encoded again, as Z85 has texts that stand for more than 32 bits and wrap around.
        if len(found) != 40 or z85.encode(z85.decode(found)) != found:
            raise ValueError("not 32 bytes as Z85 text")
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"key file {str(path)!r} has a {kind.decode()} key that is none, "
            "expected 40 characters of Z85"
        ) from error
    return bytes(found)


def make_keys(directory: str | os.PathLike[str], name: str = DEFAULT_CLIENT) -> list[Path]:
    """Make a pair for the client `name`, and one for the server where there is none yet.

    Returns the files written. Nothing is overwritten: ConfigError where the client is there.
    """
    if name == SERVER or not _CLIENT_NAME.fullmatch(name):
        raise ConfigError(
            f"client name {name!r}, expected letters, digits and '._-', and another than {SERVER!r}"
        )
    folder, clients = Path(directory), Path(directory, CLIENTS)
    try:
        # This user's alone: whoever can write there says who comes in.
        for made in (folder, clients):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        client = (clients / (name + PUBLIC), folder / (name + SECRET))
        server = (folder / (SERVER + PUBLIC), folder / (SERVER + SECRET))
        _require_none(client)
        # The server's pair is made once; a further client is added to it.
        if not server[1].exists():
            _require_none(server)
            return [*_write_pair(*server), *_write_pair(*client)]
        read_secret(server[1])
        return _write_pair(*client)
    except OSError as error:
        raise ConfigError(
            f"keys cannot be written to {str(folder)!r} ({error.strerror})"
        ) from error


def _require_none(pair: tuple[Path, Path]) -> None:
    for path in pair:
        # A link that leads nowhere is something too.
        if os.path.lexists(path):
            raise ConfigError(f"{str(path)!r} is there: it is not overwritten, give another --name")


def _write_pair(public_path: Path, secret_path: Path) -> list[Path]:
    # The secret first: interrupted in between, a client without a public key is one nobody knows.
    public, secret = zmq.curve_keypair()
    _write(secret_path, 0o600, "secret, for one host alone", public, secret)
    _write(public_path, 0o644, "public", public, None)
    return [secret_path, public_path]


def _write(path: Path, mode: int, what: str, public: bytes, secret: bytes | None) -> None:
    lines = [f"# feeder: CURVE key, {what}", "curve", f'    public-key = "{public.decode()}"']
    if secret is not None:
        lines.append(f'    secret-key = "{secret.decode()}"')
    # The mode is given at the making: with a chmod later others could open the file in between.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(path, flags, mode), "w") as file:
        file.write("\n".join(lines) + "\n")
