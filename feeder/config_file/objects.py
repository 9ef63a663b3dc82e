"""Objects of Python that are named as MODULE:ATTR, on the command line or in a file."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from feeder.errors import ConfigError


def split_name(text: str) -> tuple[str, str]:
    """Module and attribute; neither is looked for yet. Raises `ConfigError`."""
    module, _, attribute = text.partition(":")
    names = (*module.split("."), *attribute.split("."))
    if not all(name.isidentifier() for name in names):
        raise ConfigError(f"{text!r} is not MODULE:ATTR, as in 'package.feeds:make'")
    return module, attribute


def load(module_name: str, attribute: str, expected: str) -> Any:
    """The object that MODULE:ATTR names; modules are looked for in the current folder first.

    Raises `ConfigError` where the module cannot be imported, telling where it was looked for, or
    lacks the attribute, which is `expected` to be what the text says.
    """
    # The command `feeder` has no current folder in its path, and `python -m feeder` does: both
    # shall find the module beside the configuration.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # whatever the module does when it is run
        raise ConfigError(_cannot_import(module_name, error)) from error
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise ConfigError(
                f"{module_name!r} has no attribute {attribute!r}, expected {expected}"
            ) from error
    return found


def load_setting(key: str, text: str, expected: str) -> Any:
    """As `load`, of what a setting names."""
    try:
        return load(*split_name(text), expected)
    except ConfigError as error:
        raise ConfigError(f"{key} is {text!r}: {error}") from error


def _cannot_import(module_name: str, error: Exception) -> str:
    path = ", ".join(repr(name or os.getcwd()) for name in sys.path)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is not None and f"{module_name}.".startswith(f"{missing}."):
        return (
            f"no module {missing!r}, expected MODULE:ATTR, as in 'package.feeds:make'; looked for "
            f"in {path}"
        )
    return f"module {module_name!r} cannot be imported: {told(error)}; modules are in {path}"


def told(error: Exception) -> str:
    """An error of the user's own code in one line: its type, its text, and where it was raised."""
    if isinstance(error, SyntaxError):
        where = f"{error.filename}:{error.lineno}"
        return f"{type(error).__name__}: {error.msg}, at {where}"
    frames = traceback.extract_tb(error.__traceback__)
    inner = [frame for frame in frames if not frame.filename.startswith("<frozen importlib")]
    where = f", at {inner[-1].filename}:{inner[-1].lineno}" if inner else ""
    text = " ".join(str(error).split())  # in one line, whatever it was
    return f"{type(error).__name__}: {text}{where}"
