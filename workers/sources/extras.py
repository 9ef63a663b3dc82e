"""Packages that only some sources need: imported when such a source is made."""

from __future__ import annotations

import importlib
from typing import Any

from feeder.workers.errors import ConfigError

_NAMES = {"PIL.Image": "Pillow"}


def load(package: str, extra: str) -> Any:
    """Import a package that an extra of the distribution brings.

    Raises:
        ConfigError: it is not installed.
    """
    module = find(package)
    if module is None:
        name = _NAMES.get(package, package)
        raise ConfigError(f"{name} is not installed: pip install 'feedworks[{extra}]'")
    return module


def find(package: str) -> Any | None:
    """Import a package, or None where it is not installed."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        # The package is there and lacks one of its own: that is another error, and is not hidden.
        if error.name not in (package, package.split(".")[0]):
            raise
        return None
