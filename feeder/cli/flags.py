"""The flags for settings that a configuration has too, and the settings with both laid over."""

from __future__ import annotations

import argparse
import collections.abc
import os
import re
from collections.abc import Iterator
from typing import Any

from feeder.cli.arguments import address, count, seconds
from feeder.config_file.keys import allows, checkpoint_keys, server_keys
from feeder.config_file.settings import Setting, Settings, read_settings
from feeder.config_file.toml import TomlFile, read_toml
from feeder.errors import ConfigError
from feeder.service.server.part import read_queues
from feeder.settings import Parameter

CONFIG = "FEEDER_CONFIG"
"""The variable that names the configuration where --config does not."""

_FLAGS = {
    "server.addresses": "--bind ADDR",
    "server.queues": "--queues N",
    "server.replicas": "--replicas R",
    "server.executor": "--executor KIND[:N]",
    "server.keys": "--keys DIR",
    "server.insecure": "--insecure",
    "server.lease": "--lease SECONDS",
    "server.exit_when": "--exit-when",
    "server.status": "--status [HOST:]PORT",
    "checkpoint.url": "--checkpoint-dir DIR",
    "checkpoint.every_s": "--checkpoint-every SECONDS",
    "checkpoint.keep": "--keep N",
    "server.skip": "--skip N",
    "checkpoint.resume": "--resume WHERE",
}
"""What the flags of keys are called, and their values in the help, in its order. Behind these comes
any other key, by its own name."""


def _flags() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The path of each key, its flag, and how argparse reads that."""
    keys = {f"server.{name}": key for name, key in server_keys().items()}
    keys |= {f"checkpoint.{name}": key for name, key in checkpoint_keys().items()}
    for path, key in ({path: keys[path] for path in _FLAGS} | keys).items():
        own_name = f"--{key.name.replace('_', '-')} {key.name.upper()}"
        flag, _, word = _FLAGS.get(path, own_name).partition(" ")
        yield path, flag, {"help": _help(key), **_reading(key, word)}


def _help(key: Parameter) -> str:
    """The first sentence of a setting's line."""
    text = re.split(r"\.(?: |$)", key.line.replace("`", ""))[0].replace("%", "%%")
    if allows(key, collections.abc.Sequence):
        text = text.replace(" (default", "; may be given several times (default", 1)
    return text[:1].lower() + text[1:]


def _reading(key: Parameter, word: str) -> dict[str, Any]:
    """What argparse is told of a key, by its type."""
    if key.choices:
        return {"choices": key.choices}
    if allows(key, bool):
        return {"action": "store_true"}
    if allows(key, collections.abc.Sequence):
        kind = address if key.name == "addresses" else str
        return {"metavar": word, "action": "append", "type": kind}
    if allows(key, str):
        return {"metavar": word, **({"type": _queues} if key.name == "queues" else {})}
    number = seconds if allows(key, float) else count(key.bounds.ge or 0, key.bounds.le)
    return {"metavar": word, "type": number}


def _queues(text: str) -> int | str:
    """A number of queues, or some of a number; an argparse type."""
    try:
        num, part = read_queues(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text if part or num is None else num


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags; those that are not given leave nothing in the namespace."""
    for path, flag, how in _flags():
        # Suppressed: a flag's default would stand over the environment and the file.
        parser.add_argument(flag, dest=path, default=argparse.SUPPRESS, **how)


def read(arguments: argparse.Namespace, name: str | None) -> Settings:
    """The settings: flags over the environment over the file `name`, else the one that
    FEEDER_CONFIG names, over defaults. Raises `ConfigError`."""
    given: dict[str, dict[str, Setting]] = {}
    for path, flag, _ in _flags():
        if path in arguments:
            section, key = path.split(".")
            given.setdefault(section, {})[key] = Setting(getattr(arguments, path), flag)
    name = name or os.environ.get(CONFIG)
    file = read_toml(name) if name else TomlFile(name="", data={}, lines={})
    return read_settings(file, os.environ, given)
