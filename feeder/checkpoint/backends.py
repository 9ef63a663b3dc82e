"""What a store stands on: a folder, or an object store; which of the two a URL means."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from feeder.checkpoint.format import Reader
from feeder.checkpoint.local import LocalFolder
from feeder.durable import Fs, OsFs
from feeder.errors import ConfigError

OBJECT_STORES = ("s3", "gs", "az", "memory")


class Backend(Protocol):
    """Bytes by name. Every method raises `CheckpointError`."""

    def path_of(self, name: str) -> str:
        """Where it lies, for messages."""

    def claim(self) -> None:
        """Get what writing needs."""

    def create(self, name: str, parts: list[Any]) -> None:
        """Write it once; durable when it returns."""

    def remove(self, name: str) -> None:
        """Take it away."""

    def open(self, name: str) -> AbstractContextManager[Reader]:
        """Its bytes, for a block."""

    def names(self, prefix: str, after: str = "") -> list[str]:
        """The names that begin so, of whatever can be a checkpoint by its name; only those that
        come after a name, as texts. Nothing is opened for it."""

    def close(self) -> None:
        """Let go of what writing needs."""

    def fork(self) -> None:
        """This is a forked child."""


def open_backend(url: str, writer: str, retry_s: float, fs: Fs | None) -> Backend:
    """The backend that a URL means; touches nothing. Raises `ConfigError`."""
    scheme, separator, _ = url.partition("://")
    if not separator:
        return LocalFolder(_checked(url), writer, fs or OsFs())
    if scheme == "file":
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"{url!r} names host {parts.netloc!r}, expected file:///PATH")
        return LocalFolder(_checked(unquote(parts.path)), writer, fs or OsFs())
    if scheme in OBJECT_STORES and url[len(scheme) + 3 :].strip("/"):
        from feeder.checkpoint.objects import ObjectFolder  # only for those that have one

        return ObjectFolder(url, retry_s)
    raise ConfigError(
        f"{url!r} cannot be the place of checkpoints, expected a path, file:///PATH, "
        "s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH"
    )


def _checked(path: str) -> str:
    if not path or "\0" in path:
        raise ConfigError(f"{path!r} cannot be the folder of checkpoints, expected a path")
    return path
