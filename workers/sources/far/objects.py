"""Objects of stores by their URLs, through obstore (extra `far`): sizes, listings, ranges.

One `Objects` makes all requests of a set of files. obstore makes each request once; making it again
is done here, since only here it is known what an answer must look like, and so that it is counted.
An answer is an error that lasts (missing, refused, changed), which is raised at once, or one that
may pass, after which the request is made again until `RETRY_S` have gone by: the pauses grow and
are drawn at random, so that many processes do not come back at one moment ("Exponential backoff and
jitter", Marc Brooker, AWS, 2015). A store that asks for less (429, 503) holds up every request.
"""

from __future__ import annotations

import importlib
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from threading import Event, Lock
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote, urlsplit

from feeder.workers.errors import ConfigError, ForkedError, StorageError
from feeder.workers.forks import call_in_child
from feeder.workers.sources import extras

SCHEMES = ("s3", "gs", "az", "https", "http", "file")
"""What URLs may begin with."""

RETRY_S = 120.0
"""A request is made again for so many seconds."""
STALL_S = 10.0
"""A request of which no byte comes for so many seconds is given up, and made again."""
# A store answers within some 100 ms; a failing front end of one is mostly gone within a minute or
# two. Not measured (2026-11-28).
_CONNECT_S, _REQUEST_S = 5, 90
# A request takes at most this: less than RETRY_S, so that one that was made again at the last
# moment ends before twice that.
_FIRST_PAUSE_S, _MOST_PAUSE_S, _SLOW_PAUSE_S = 0.1, 10.0, 1.0

_PASSING = (408, 425, 429, 500, 502, 503, 504)
_SLOWER = (429, 503)
_NEVER_PASSING = (
    # A key that the library does not take.
    "Could not parse path",
    # An answer without a size.
    "Content-Length Header missing",
    "Invalid content length",
)
_STATUS = re.compile(r"status code: (\d{3})")
_T = TypeVar("_T")
ENDING = Event()
"""Set when the interpreter ends: no request is made again."""
# The process that has used obstore first: its threads do the work, and a forked child has none.
_used_by = 0
# Draws of its own: the user's generators are not touched.
_draw = random.SystemRandom().uniform


def is_url(path: Any) -> bool:
    """Whether a path is a URL of a store."""
    return isinstance(path, str) and path.partition("://")[0] in SCHEMES and "://" in path


class Known(NamedTuple):
    """What is known of an object: another object at its URL differs in it."""

    url: str
    size: int
    """Its bytes."""
    tag: str
    """Its etag, or when it was changed if the store has no etags."""


@dataclass(slots=True)
class Counts:
    """What the requests of a process have met with. Guarded by the lock of `Objects`."""

    requests: int = 0
    """Ranges that were asked for, each time that they were."""
    bytes: int = 0
    """Bytes that came."""
    retries: int = 0
    """Requests that were made again."""
    slower: int = 0
    """Answers by which a store asked for fewer requests."""
    stalls: int = 0
    """Requests that were given up since no byte came."""
    damaged: int = 0
    """Answers that were cut, or of another range."""


class Objects:
    """Objects of stores, with one set of storage options. Any thread; what changes, the connections
    and the counts, is under the lock."""

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(options or {})
        self._stores: dict[str, Any] = {}
        self._start()

    def _start(self) -> None:
        """What a process has for itself, and a forked child anew. Not the connections: the child
        does not use them, and to close them may need a lock of obstore's."""
        self._lock = Lock()
        self._held_until = 0.0
        self._counts = Counts()
        call_in_child(self._start)

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Objects.__init__(self, state["_options"])

    def counts(self) -> dict[str, int]:
        """The counts, by name."""
        with self._lock:
            return asdict(self._counts)

    # ---- what can be asked

    def known(self, url: str) -> Known:
        """Size and tag of an object.

        Raises:
            StorageError: it is missing or refused, or the store does not answer.
        """
        obstore = load()
        store, key = self._store(url)
        return _known(url, self._again(url, lambda: obstore.head(store, key)))

    def listed(self, folder: str) -> list[Known]:
        """The objects below a folder, at any depth, in the order of their URLs.

        Raises:
            StorageError: the listing is refused, or the store does not answer.
        """
        obstore = load()
        root = root_of(folder)
        if root.startswith("http"):
            raise StorageError(f"{folder!r} cannot be listed over HTTP: name its files")
        store, key = self._store(folder.rstrip("/") + "/")
        pages = self._again(folder, lambda: [*obstore.list(store, prefix=key or None)])
        found = [(str(meta["path"]), meta) for page in pages for meta in page]
        if root.startswith("file"):
            found = [(quote(path), meta) for path, meta in found]
        return sorted(_known(f"{root}/{path}", meta) for path, meta in found)

    def found(self, url: str) -> bytes | None:
        """All of an object; None if it is not there, or cannot be had."""
        obstore = load()
        store, key = self._store(url)
        try:
            return self._again(url, lambda: bytes(obstore.get(store, key).bytes()))
        except StorageError:
            return None

    def put(self, url: str, data: bytes) -> None:
        """Write an object.

        Raises:
            StorageError: the store refuses it, or does not answer.
        """
        obstore = load()
        store, key = self._store(url)
        self._again(url, lambda: obstore.put(store, key, data))

    def read(self, known: Known, start: int, stop: int) -> bytes:
        """The bytes of an object from `start` to `stop` - 1. Raises as `bring` does."""
        parts: list[bytes] = []
        self.bring(known, start, stop, stop - start, parts.append)
        return parts[0]

    def bring(
        self, known: Known, start: int, stop: int, size: int, arrived: Callable[[bytes], None]
    ) -> None:
        """The same in parts of `size` bytes, the last one of what is left: `arrived` takes each as
        soon as it is there. What has arrived is not asked for again.

        Raises:
            StorageError: the object is missing, refused or another one by now, or the store does
                not answer.
        """
        obstore, at = load(), start
        store, key = self._store(known.url)

        def ask() -> None:
            nonlocal at
            if at == stop:
                # The answer broke off behind its last byte.
                return
            with self._lock:
                self._counts.requests += 1
            options: dict[str, Any] = {"range": (at, stop)}
            if known.tag.startswith('"'):
                options["if_match"] = known.tag
            result = obstore.get(store, key, options=options)
            # A store may pass over what it is asked to compare.
            if (now := _known(known.url, result.meta)) != known:
                raise _changed(known, f"it has {now.size} bytes and the tag {now.tag}")
            if tuple(result.range) != (at, stop):
                raise _Damaged(f"bytes of {result.range} came")
            held = b""
            for chunk in result.stream(size):
                held += chunk
                while len(held) >= (length := min(size, stop - at)) > 0:
                    part, held = held[:length], held[length:]
                    at += length
                    with self._lock:
                        self._counts.bytes += length
                    try:
                        arrived(part)
                    except Exception as error:
                        # No failure of the store: `arrived` must not get this part again, which
                        # it would take for the next one.
                        raise StorageError(f"{known.url!r} is not read: {error}") from error
            if at < stop:
                raise _Damaged(f"{stop - at - len(held)} bytes did not come")

        self._again(known.url, ask, known)

    # ---- making a request again

    def _again(self, url: str, ask: Callable[[], _T], known: Known | None = None) -> _T:
        """What a request gives, which is made again while it may still succeed."""
        end, pause_s = time.monotonic() + RETRY_S, _FIRST_PAUSE_S
        while True:
            self._wait_while_held()
            try:
                return ask()
            except StorageError:
                raise
            except Exception as error:
                if (lasting := _lasting(url, error, known)) is not None:
                    raise lasting from error
                if isinstance(error, _Damaged) or "Requested" in str(error):
                    self._look_again(known)
                self._count(error)
                if time.monotonic() + pause_s > end:
                    raise StorageError(
                        f"{url!r} cannot be read: for {RETRY_S:.0f} s: {_first_line(error)}"
                    ) from error
            with self._lock:
                self._counts.retries += 1
            if ENDING.wait(_draw(0, pause_s)):
                raise StorageError(f"{url!r} is not read: the process ends")
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _look_again(self, known: Known | None) -> None:
        """Raise StorageError if an object of which a wrong range came is another one."""
        if known is None:
            return
        store, key = self._store(known.url)
        try:
            now = _known(known.url, load().head(store, key))
        except Exception:
            # The request itself is made again, and says what is wrong.
            return
        if now != known:
            raise _changed(known, f"it has {now.size} bytes and the tag {now.tag}")

    def _count(self, error: Exception) -> None:
        text = str(error)
        status = int(found[1]) if (found := _STATUS.search(text)) else 0
        with self._lock:
            self._counts.slower += status in _SLOWER
            self._counts.stalls += "kind: Timeout" in text
            self._counts.damaged += isinstance(error, _Damaged) or (
                "Requested" in text or "kind: Interrupted" in text
            )
            if status in _SLOWER:
                self._held_until = time.monotonic() + _draw(_SLOW_PAUSE_S / 2, _SLOW_PAUSE_S)

    def _wait_while_held(self) -> None:
        with self._lock:
            left = self._held_until - time.monotonic()
        if left > 0:
            ENDING.wait(left)

    # ---- connections

    def _store(self, url: str) -> tuple[Any, str]:
        """The store of an object, and the object's key there."""
        global _used_by
        _used_by = _used_by or os.getpid()
        if _used_by != os.getpid():
            raise ForkedError(
                "object stores cannot be used in a forked child of a process that has used them: "
                "start children with the spawn method, or make the first source of a URL in the "
                "child"
            )
        root = root_of(url)
        with self._lock:
            if root not in self._stores:
                self._stores[root] = _connect(root, self._options)
            key = url[len(root) + 1 :]
            return self._stores[root], unquote(key) if root.startswith(("http", "file")) else key


def load() -> Any:
    """The package obstore."""
    return extras.load("obstore", "far")


def root_of(url: str) -> str:
    """The part of a URL that names the store: scheme and bucket, container or host."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _connect(root: str, options: Mapping[str, Any]) -> Any:
    load()
    given = dict(options)
    told = given.pop("allow_http", os.environ.get("AWS_ALLOW_HTTP", ""))
    allow_http = root.startswith("http:") or str(told).lower() in ("1", "true")
    settings: dict[str, Any] = {} if root.startswith("file") else {
        "client_options": {
            "allow_http": allow_http,
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "read_timeout": timedelta(seconds=STALL_S),
            "timeout": timedelta(seconds=_REQUEST_S),
        },
        "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=RETRY_S)},
    }  # fmt: skip
    if given and not root.startswith(("file", "http")):
        settings["config"] = given
    try:
        return importlib.import_module("obstore.store").from_url(f"{root}/", **settings)
    except Exception as error:
        raise ConfigError(f"{root!r} is no store: {_first_line(error)}") from error


def _known(url: str, meta: Any) -> Known:
    return Known(url, int(meta["size"]), str(meta["e_tag"] or meta["last_modified"]))


class _Damaged(Exception):
    """An answer that is not what was asked for."""


def _lasting(url: str, error: Exception, known: Known | None) -> StorageError | None:
    """The error for the user, if a request that is made again would meet with it again."""
    if not isinstance(error, Exception) or isinstance(error, _Damaged):
        return None
    failures = importlib.import_module("obstore.exceptions")
    status = int(found[1]) if (found := _STATUS.search(str(error))) else 0
    # obstore says of a 405 too that nothing is there.
    if isinstance(error, FileNotFoundError) and status in (0, 404, 410):
        return StorageError(f"{url!r} is missing")
    if any(text in str(error) for text in _NEVER_PASSING):
        return StorageError(f"{url!r} cannot be read: {_first_line(error)}")
    if isinstance(error, failures.PermissionDeniedError | failures.UnauthenticatedError):
        return StorageError(f"{url!r} is refused: {_first_line(error)}; look at the credentials")
    if isinstance(error, failures.PreconditionError) or status == 416:
        return _changed(known, _first_line(error)) if known else None
    if 400 <= status < 500 and status not in _PASSING:
        return StorageError(f"{url!r} cannot be read: {_first_line(error)}")
    if isinstance(error, failures.GenericError | OSError):
        return None
    if isinstance(error, failures.BaseError):
        return StorageError(f"{url!r} cannot be read: {_first_line(error)}")
    return None


def _changed(known: Known | None, what: str) -> StorageError:
    assert known is not None
    return StorageError(
        f"{known.url!r} has changed since the source was made, when it had {known.size} bytes and "
        f"the tag {known.tag}: {what}; make the source anew"
    )


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]
