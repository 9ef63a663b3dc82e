"""The keys of a configuration with their types and defaults, read from the signatures.

A file can thus not fall behind the code: a new keyword argument is a new key."""

from __future__ import annotations

import collections.abc
import inspect
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec

from feeder.api import init_data_input_workers
from feeder.checkpoint.policy import KEEP
from feeder.errors import ConfigError
from feeder.service.server.serve import SAVE_EVERY_S, serve

REQUIRED = inspect.Parameter.empty
"""The default of a key that has none."""

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    type(None): "inf",
}


_EXECUTOR = dict[str, Any] | str | None
"""A text as "processes:4", or a table as {processes = 4, preload = ["numpy"]}."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key that a table may have."""

    name: str
    """Its name, that of the keyword argument."""
    type: Any
    """The type that its value is converted to."""
    default: Any
    """Its value where nobody gives one."""

    @property
    def expected(self) -> str:
        """The values that it takes, in words."""
        return " or ".join(_word(part) for part in _parts(self.type))

    def convert(self, value: Any) -> Any:
        """The value, of the key's type; inf is None where a key may be None, for which TOML has
        no word. Raises `ConfigError`."""
        # TOML has no null; where a setting may be None, None means "no bound", so inf stands for
        # it.
        if value == float("inf") and _allows(self.type, type(None)):
            return None
        try:
            return msgspec.convert(value, self.type)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self.name} is {value!r}, expected {self.expected}") from error

    def parse(self, text: str) -> Any:
        """The value that a text of the environment stands for: what TOML takes it for where that
        fits the key, else the text itself, or its parts between commas. Raises `ConfigError`."""
        # The environment has texts alone: "8" is a number where the key wants one, and "8" itself
        # where it wants a text.
        try:
            return self.convert(tomllib.loads(f"value = {text}")["value"])
        except (tomllib.TOMLDecodeError, RecursionError, ConfigError):
            listed = _allows(self.type, collections.abc.Sequence)
            is_list = listed and ("," in text or not _allows(self.type, str))
            return self.convert(text.split(",") if is_list else text)


def _parts(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _allows(kind: Any, one: Any) -> bool:
    return any(one in (part, typing.get_origin(part)) for part in _parts(kind))


def _word(kind: Any) -> str:
    """The words for a type; of the kinds in the tables below."""
    if typing.get_origin(kind) is collections.abc.Sequence:
        plural = {int: "whole numbers", str: "texts"}
        return f"a list of {plural[typing.get_args(kind)[0]]}"
    return _WORDS.get(kind, "a table")


def _of(function: Callable[..., Any], without: set[str], changed: Mapping[str, Any]) -> list[Key]:
    """A key for each parameter of a function, its type from the annotation or as `changed`."""
    # Annotations are texts (`from __future__ import annotations`); the signature alone lacks them.
    hints = typing.get_type_hints(function)
    return [
        Key(name=name, type=changed.get(name, hints[name]), default=parameter.default)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in without
    ]


def _table(keys: Iterable[Key]) -> dict[str, Key]:
    return {key.name: key for key in keys}


@cache
def feed_keys() -> dict[str, Key]:
    """The keys of [feeds.NAME]: those of `init_data_input_workers`, where the name is that of the
    table, and objects of Python are named MODULE:ATTR."""
    named = {
        "init_fun": str | None,
        "external_loggers": collections.abc.Sequence[str] | None,
        "executor": _EXECUTOR,
    }
    without = {"fetch_fun", "input_source_name", "resume", "coordinator"}
    return _table(
        [
            Key(name="fetch", type=str | None, default=None),
            Key(name="source", type=str | None, default=None),
            Key(name="options", type=dict[str, Any], default={}),
            *_of(init_data_input_workers, without, named),
        ]
    )


@cache
def server_keys() -> dict[str, Key]:
    """The keys of [server]: those of `serve`."""
    changed = {"keys": str | None, "executor": _EXECUTOR}
    return _table(_of(serve, {"feeds", "checkpoints", "resume"}, changed))


@cache
def checkpoint_keys() -> dict[str, Key]:
    """The keys of [checkpoint]: where and when a server stores what was used, and where it begins;
    those of `CheckpointStore`, `Checkpointing` and `serve`."""
    return _table(
        [
            Key(name="url", type=str | None, default=None),
            Key(name="every_s", type=float, default=SAVE_EVERY_S),
            Key(name="keep", type=int | None, default=KEEP),
            Key(name="resume", type=str | None, default=None),
        ]
    )


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The error text for a name that is not known, with the nearest one that is."""
    names = sorted(known)
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}" if near else f"expected one of {', '.join(names)}"
    return f"unknown {what} {name!r}: {hint}"
