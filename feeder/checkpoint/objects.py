"""Checkpoints as objects of an object store, through obstore (extra `objectstore`).

An object is there whole or not at all, and is written only where there is none of its name yet:
the store itself decides who comes first. Credentials, region and endpoint come from the
environment, as for other tools: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``AWS_ALLOW_HTTP``
and so on.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from feeder.checkpoint.format import MAGIC
from feeder.checkpoint.names import is_name
from feeder.errors import CheckpointError, ConfigError

# A store that does not answer a connection is down; a request may be a large checkpoint on a slow
# line.
_CONNECT_S, _REQUEST_S = 5, 300
# Time alone bounds how often a call is made again: obstore's own limit of ten ends after 12 s.
_MAX_RETRIES = 1_000_000
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 15.0
# obstore makes requests and reads again by itself, but not a listing whose answer was cut. It has
# no class for that error; one that a server refuses says "list request" here, and is final.
_CUT_LISTING = "list response body"
# Written beside each object: whose it is.
_MARK = "feeder-put"
_ALLOW_HTTP = ("AWS_ALLOW_HTTP", "AZURE_ALLOW_HTTP", "ALLOW_HTTP")
_WHOLE_BYTES = 64 * 2**20
"""Up to this size an object is one request. A larger one is uploaded in parts, never joined
in memory; S3 takes no more than 5 GB in one request."""
_PIECE_BYTES = 2**20
_PART_BYTES, _MOST_PARTS = 16 * 2**20, 9_000
"""Of one part, and how many: S3 takes 10,000."""
_in_memory: dict[str, Any] = {}
# The process whose threads do obstore's work: a forked child has none, and would wait for ever.
_process: int | None = None


def _pieces(views: list[memoryview]) -> Iterator[bytes]:
    """The bytes of an upload, some at a time."""
    for view in views:
        for at in range(0, len(view), _PIECE_BYTES):
            yield bytes(view[at : at + _PIECE_BYTES])


class ObjectReader:
    """One object, read by the thread that opened it."""

    def __init__(self, folder: ObjectFolder, name: str, size: int) -> None:
        self._folder, self._name = folder, name
        self.path = folder.path_of(name)
        self.size = size

    def read_into(self, buffer: memoryview, at: int) -> None:
        """Fill a buffer with the bytes from offset `at` on."""
        with self._folder.calling("read", self._name) as (obstore, store):
            data = memoryview(obstore.get_range(store, self._name, start=at, length=len(buffer)))
        if len(data) != len(buffer):
            raise CheckpointError(
                f"cannot read checkpoint {self.path!r}: {len(data)} bytes came, expected "
                f"{len(buffer)}"
            )
        buffer[:] = data


class ObjectFolder:
    """A place in an object store. Any thread may use it; the mutex guards the connection.

    `clock` and `wait` are for tests.
    """

    def __init__(
        self,
        url: str,
        retry_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._retry_s = retry_s
        self._clock = clock
        self._wait = wait or threading.Event().wait
        self._store: Any = None
        self._mutex = threading.Lock()

    def path_of(self, name: str) -> str:
        """Where a checkpoint lies, for messages."""
        return f"{self.url}/{name}"

    # ---- written

    def claim(self) -> None:
        """Nothing: there are no locks here, and a name is written once."""

    def create(self, name: str, parts: list[Any]) -> None:
        """Write an object once; durable when it returns."""
        views = [memoryview(part).cast("B") for part in parts if len(memoryview(part).cast("B"))]
        size, mark = sum(map(len, views)), os.urandom(16).hex()
        with self.calling("write", name) as (obstore, store):
            if size <= _WHOLE_BYTES:
                self._claim(obstore, store, name, b"".join(views), mark)
                return
            # A multipart upload cannot be refused where the name is taken. So the name is taken
            # first, by what is no whole checkpoint; the end of the upload puts all in its place.
            self._claim(obstore, store, name, MAGIC, mark)
            try:
                obstore.put(
                    store, name, _pieces(views), use_multipart=True, attributes={_MARK: mark},
                    chunk_size=max(_PART_BYTES, -(-size // _MOST_PARTS)), max_concurrency=4,
                )  # fmt: skip
            except BaseException:
                with contextlib.suppress(Exception):
                    obstore.delete(store, name)
                raise

    def _claim(self, obstore: Any, store: Any, name: str, data: bytes, mark: str) -> None:
        """Put a small object where there is none yet."""
        try:
            obstore.put(
                store, name, data, mode="create", use_multipart=False, attributes={_MARK: mark}
            )
        except obstore.exceptions.AlreadyExistsError as error:
            # A call that was made again because its answer was lost finds what it wrote.
            if obstore.get(store, name).attributes.get(_MARK) != mark:
                raise FileExistsError(name) from error

    def remove(self, name: str) -> None:
        """Take an object away."""
        with self.calling("remove", name) as (obstore, store):
            obstore.delete(store, name)

    # ---- read

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[ObjectReader]:
        """An object, for a block."""
        with self.calling("read", name) as (obstore, store):
            size = int(obstore.head(store, name)["size"])
        yield ObjectReader(self, name, size)

    def names(self, prefix: str, after: str = "") -> list[str]:
        """The objects that may be checkpoints, by their names."""
        folder = prefix.rpartition("/")[0]
        with self.calling("list", folder) as (obstore, store):
            found = self._list(obstore, store, folder, after)
        return [n for n in found if is_name(n) and n.startswith(prefix) and n > after]

    def _list(self, obstore: Any, store: Any, folder: str, after: str) -> list[str]:
        """A whole listing: one that is cut is asked for anew, for `retry_s` seconds."""
        end, pause_s = self._clock() + self._retry_s, _FIRST_PAUSE_S
        while True:
            try:
                pages = obstore.list(store, prefix=folder or None, offset=after or None)
                return [str(meta["path"]) for page in pages for meta in page]
            except obstore.exceptions.GenericError as error:
                if _CUT_LISTING not in str(error) or self._clock() + pause_s > end:
                    raise
            self._wait(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    # ---- life

    def close(self) -> None:
        """Nothing is held."""

    def after_fork(self) -> None:
        """This is a forked child."""
        self._mutex = threading.Lock()

    @contextlib.contextmanager
    def calling(self, doing: str, name: str) -> Iterator[tuple[Any, Any]]:
        """obstore and the store, and what their errors mean."""
        path = self.path_of(name)
        obstore = _obstore()
        try:
            with self._mutex:
                if self._store is None:
                    self._store = _connect(obstore, self.url, self._retry_s)
            yield obstore, self._store
        except FileExistsError as error:
            raise CheckpointError(
                f"checkpoint {path!r} exists; each is written once, choose another name"
            ) from error
        except (OSError, ValueError, obstore.exceptions.BaseError) as error:
            told = str(error).split("\n", 1)[0]
            raise CheckpointError(
                f"cannot {doing} checkpoint {path!r}: {told}; look at the store's address and "
                "credentials"
            ) from error


def _obstore() -> Any:
    """The package, in a process where it works."""
    global _process
    if _process not in (None, os.getpid()):
        raise CheckpointError(
            "object stores cannot be used in a forked child of a process that uses them; start "
            "children with the spawn method"
        )
    _process = os.getpid()
    try:
        return importlib.import_module("obstore")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "obstore is not installed: pip install 'feedworks[objectstore]'"
        ) from error


def _connect(obstore: Any, url: str, retry_s: float) -> Any:
    """A store that gives up after `retry_s` seconds; it is not asked anything yet."""
    stores = importlib.import_module("obstore.store")
    if url.startswith("memory:"):
        return _in_memory.setdefault(url, stores.MemoryStore())
    allow_http = any(os.environ.get(name, "").lower() in ("1", "true") for name in _ALLOW_HTTP)
    return stores.from_url(
        url,
        client_options={
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "timeout": timedelta(seconds=_REQUEST_S),
            "allow_http": allow_http,
        },
        retry_config={
            "max_retries": _MAX_RETRIES,
            "retry_timeout": timedelta(seconds=retry_s),
            "backoff": {
                "init_backoff": timedelta(seconds=_FIRST_PAUSE_S),
                "max_backoff": timedelta(seconds=_MAX_PAUSE_S),
                "base": 2,
            },
        },
    )
