"""Settings, each written once: as a parameter of the function that takes it.

The signature has name, type and default, and in `Annotated` the bounds; the docstring has the line
for people, under `Args:`. From these follow the checks (`check`), the keys of a file and the
variables of the environment (`feeder.config_file.keys`), the flags of the command
(`feeder.cli.flags`) and the page docs/settings.md (docs/write_settings.py).

The signature is the list, because editors and type checkers read it: a struct beside it would be a
second one. Bounds are msgspec's `Meta`. The checks are not its `convert`, which refuses NumPy's
numbers, and whose errors name neither the parameter nor its value.
"""

from __future__ import annotations

import inspect
import operator
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from feeder.errors import ConfigError

MAX_SECONDS = 10**9
"""30 years: what a wait of the operating system can still count, and what is still exact as a float
of the monotonic clock."""
PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Seconds = Annotated[
    float, Meta(gt=0, le=MAX_SECONDS, description="more than 0, at most 1e9", extra={"unit": " s"})
]

_KINDS: dict[Any, tuple[Any, str]] = {
    Callable: (Callable, "a function, or None"),
    Literal: (str, ""),
    bool: (bool, "True or False"),
    float: (Real, "a number of seconds"),
    int: (Integral, "a whole number"),
    str: (str, "a string"),
}
"""By its annotation, what a value has to be, and its words. Anything else is checked by the
function that takes it."""

_BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "ge": (">=", operator.ge),
    "gt": (">", operator.gt),
    "le": ("<=", operator.le),
    "lt": ("<", operator.lt),
    "min_length": ("of length >=", lambda text, least: len(text) >= least),
}
_NO_BOUNDS = Meta()


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One setting, as the signature and the docstring of its function tell it."""

    name: str
    type: Any
    """Its type, without bounds."""
    default: Any
    """Its value where nobody gives one; `inspect.Parameter.empty` where it has to be given."""
    bounds: Meta = _NO_BOUNDS
    """Its bounds. In an error, their `description` tells what is expected in place of them, and
    `extra["unit"]` comes after the value."""
    choices: tuple[str, ...] = ()
    """The texts that it may be: the Literal that is its type, or that annotates `str`."""
    line: str = ""
    """Its line for people."""

    def check(self, value: Any) -> Any:
        """The value, with a number as Python's own. Raises `ConfigError`."""
        kind, *others = (part for part in parts(self.type) if part is not types.NoneType)
        kind = get_origin(kind) or kind
        is_unset = value is None and types.NoneType in parts(self.type)
        if is_unset or others or kind not in _KINDS:
            return value
        taken, words = _KINDS[kind]
        # True is an int to Python, and would be taken for one.
        is_kind = isinstance(value, taken) and isinstance(value, bool) == (kind is bool)
        # Whole also where it is a float: `typing` keeps but one of two annotations that are equal.
        limits = {
            f" {sign} {limit}".removesuffix(".0"): is_kind and holds(value, limit)
            for name, (sign, holds) in _BOUNDS.items()
            if (limit := getattr(self.bounds, name)) is not None
        }
        if is_kind and all(limits.values()) and (not self.choices or value in self.choices):
            return kind(value) if kind in (int, float) else value
        if self.choices:
            words = f"one of {self.choices!r}"
        elif kind is float:
            words += " and".join(limits)
        else:
            words += next((limit for limit, is_kept in limits.items() if not is_kept), "")
        unit = (self.bounds.extra or {}).get("unit", "")
        raise ConfigError(
            f"{self.name} is {value!r}{unit}, expected {self.bounds.description or words}"
        )


def check(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a function, which are its `locals()` before it has others, with numbers as
    Python's own. Raises `ConfigError`."""
    return {name: parameters(function)[name].check(value) for name, value in given.items()}


@cache
def parameters(function: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of a function, by name."""
    # Annotations are texts (`from __future__ import annotations`); the signature alone lacks them.
    plain = {"self": Any, **get_type_hints(function)}
    annotated = {"self": Any, **get_type_hints(function, include_extras=True)}
    # `python -OO` leaves docstrings out, and so the lines.
    doc = inspect.getdoc(function) or ""
    lines = dict(re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", doc, re.MULTILINE))
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        marks = [*parts(plain[name])]
        for part in parts(annotated[name]):
            marks += getattr(part, "__metadata__", ())
        found[name] = Parameter(
            name=name,
            type=plain[name],
            default=parameter.default,
            bounds=next((one for one in marks if isinstance(one, Meta)), _NO_BOUNDS),
            choices=next((get_args(one) for one in marks if get_origin(one) is Literal), ()),
            line=" ".join(lines.get(name, "").split()),
        )
    return found


def parts(kind: Any) -> tuple[Any, ...]:
    """The types of a union; else the type itself."""
    is_union = get_origin(kind) in (Union, types.UnionType)
    return get_args(kind) if is_union else (kind,)
