"""The keys of a configuration: the parameters of the functions that take its tables.

A file can thus not fall behind the code: a new keyword argument is a new key."""

from __future__ import annotations

import collections.abc
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from typing import Any

import msgspec

from feeder.api import init_data_input_workers
from feeder.checkpoint.policy import KEEP, Checkpointing
from feeder.checkpoint.store import CheckpointStore
from feeder.errors import ConfigError
from feeder.service.server.serve import SAVE_EVERY_S, serve
from feeder.settings import Parameter, PositiveInt, Seconds, parameters, parts

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    types.NoneType: "inf",
}
_EXECUTOR = dict[str, Any] | str | None
"""A text as "processes:4", or a table as {processes = 4, preload = ["numpy"]}."""


def expected(key: Parameter) -> str:
    """The values that a key takes, in words."""
    return " or ".join(_word(part) for part in parts(key.type))


def convert(key: Parameter, value: Any) -> Any:
    """The value, of the key's type; inf is None where a key may be None, which means "no
    bound" and for which TOML has no word. Raises `ConfigError`."""
    if value == float("inf") and allows(key, types.NoneType):
        return None
    try:
        return msgspec.convert(value, key.type)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{key.name} is {value!r}, expected {expected(key)}") from error


def parse(key: Parameter, text: str) -> Any:
    """The value that a text of the environment stands for: what TOML takes it for where that fits
    the key, else the text itself, or its parts between commas. Raises `ConfigError`."""
    # The environment has texts alone: "8" is a number where the key wants one, and "8" itself where
    # it wants a text.
    try:
        return convert(key, tomllib.loads(f"value = {text}")["value"])
    except (tomllib.TOMLDecodeError, RecursionError, ConfigError):
        is_list = allows(key, collections.abc.Sequence) and ("," in text or not allows(key, str))
        return convert(key, text.split(",") if is_list else text)


def allows(key: Parameter, kind: Any) -> bool:
    """Whether a key may have values of a type."""
    return any(kind in (part, typing.get_origin(part)) for part in parts(key.type))


def _word(kind: Any) -> str:
    """The words for a type; of the kinds in the tables below."""
    if typing.get_origin(kind) is collections.abc.Sequence:
        plural = {int: "whole numbers", str: "texts"}
        return f"a list of {plural[typing.get_args(kind)[0]]}"
    return _WORDS.get(kind, "a table")


def _table(
    function: Callable[..., Any], without: set[str], changed: Mapping[str, Any]
) -> dict[str, Parameter]:
    """The parameters of a function that are keys, of the type that a file has for them."""
    return {
        name: replace(key, type=changed.get(name, key.type))
        for name, key in parameters(function).items()
        if name not in without
    }


@cache
def feed_keys() -> dict[str, Parameter]:
    """The keys of [feeds.NAME]: those of `init_data_input_workers`, where the name is that of the
    table, and objects of Python are named MODULE:ATTR."""
    named = {
        "init_fun": str | None,
        "external_loggers": collections.abc.Sequence[str] | None,
        "executor": _EXECUTOR,
    }
    # What trainers were handed out is known to them: their consumers write transcripts, and have
    # the devices that a function may run on.
    without = {
        "fetch_fun", "input_source_name", "resume", "coordinator", "transcript", "on_device"
    }  # fmt: skip
    return {
        "fetch": Parameter(name="fetch", type=str | None, default=None),
        "source": Parameter(name="source", type=str | None, default=None),
        "options": Parameter(name="options", type=dict[str, Any], default={}),
        **_table(init_data_input_workers, without, named),
    }


@cache
def server_keys() -> dict[str, Parameter]:
    """The keys of [server]: those of `serve`."""
    changed = {"keys": str | None, "executor": _EXECUTOR}
    return _table(serve, {"feeds", "checkpoints", "resume"}, changed)


@cache
def checkpoint_keys() -> dict[str, Parameter]:
    """The keys of [checkpoint]: those of `checkpointing`."""
    return _table(checkpointing, set(), {})


def checkpointing(
    url: str | None = None,
    every_s: Seconds = SAVE_EVERY_S,
    keep: PositiveInt | None = KEEP,
    resume: str | None = None,
) -> Checkpointing | None:
    """When and where a server stores what was used, and where it begins; None where it does not
    store. Raises `ConfigError`.

    Args:
        url: Store there what all consumers have used: a folder, or s3://, gs://, az://.
        every_s: How often (default: 30), and once more at the end.
        keep: How many of these checkpoints stay (default: 3).
        resume: Where consumers begin that bring no position: 'latest' of --checkpoint-dir, the path
            of a snapshot or checkpoint, or another folder of checkpoints.
    """
    # `resume` is for `serve`, which knows the feeds.
    return None if url is None else Checkpointing(CheckpointStore(url, keep=keep), every_s=every_s)


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The error text for a name that is not known, with the nearest one that is."""
    names = sorted(known)
    near = get_close_matches(name, names, 1)
    hint = f"did you mean {near[0]!r}" if near else f"expected one of {', '.join(names)}"
    return f"unknown {what} {name!r}: {hint}"
