"""The public names: what each is, how it is called, and what a public class has.

The modules in which they live are left out: they are not public.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import feeder
import feeder.job

PUBLIC: dict[str, ModuleType] = {
    "feeder": feeder, "feeder.sources": feeder.sources, "feeder.job": feeder.job,
}  # fmt: skip
SPECIAL = (
    "__bytes__", "__call__", "__contains__", "__enter__", "__exit__", "__getitem__", "__iter__",
    "__len__", "__next__",
)  # fmt: skip
"""Methods that a user calls without their names."""


def is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in sys.stdlib_module_names


def members(cls: type) -> dict[str, str]:
    """What a class has for its users, from itself and from bases that are not Python's own."""
    found: dict[str, Any] = {}
    for base in filter(is_ours, reversed(cls.__mro__)):
        found |= dict.fromkeys(inspect.get_annotations(base)) | vars(base)
    names = (name for name in sorted(found) if name in SPECIAL or not name.startswith("_"))
    return {name: described(found[name]) for name in names}


def described(value: Any) -> str:
    if isinstance(value, classmethod | staticmethod):
        return f"{type(value).__name__} {signature(value.__func__)}"
    return f"method {signature(value)}" if inspect.isfunction(value) else "attribute"


def signature(function: Any) -> str:
    """Names, kinds and defaults of parameters. Types are left out: many have names of our own."""
    found = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=parameter.empty) for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=parameters, return_annotation=found.empty))


def is_made_by_us(cls: type) -> bool:
    """Whether a class says itself how it is made."""
    made = ({"__init__", "__new__"} & vars(base).keys() for base in filter(is_ours, cls.__mro__))
    return any(made) and not getattr(cls, "_is_protocol", False)


def told(value: Any) -> dict[str, Any]:
    if isinstance(value, ModuleType):
        return {"kind": "module"}
    if not isinstance(value, type):
        return {"kind": "function", "signature": signature(value)}
    return {
        "kind": "class",
        "bases": [base.__name__ for base in value.__mro__[1:] if is_public(base)],
        "made by": signature(value) if is_made_by_us(value) else None,
        "members": members(value),
    }


def is_public(cls: type) -> bool:
    return not is_ours(cls) or any(cls.__name__ in page.__all__ for page in PUBLIC.values())


def make(folder: Path) -> dict[str, Any]:
    return {
        name: {public: told(getattr(page, public)) for public in sorted(page.__all__)}
        for name, page in PUBLIC.items()
    }
