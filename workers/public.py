"""The module by which users know a class or function, wherever its code stands.

A decorator sets it, and not the module that hands the name out: an error may be raised, printed and
pickled before anybody has looked up its public name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def public(module: str) -> Callable[[_T], _T]:
    """Have a class or function say that it lives in `module`: in tracebacks, `help()` and `repr`,
    and in pickles, which then outlive a move of its code.

    It goes above all other decorators: `dataclass` still needs the true module, to look up the
    names in annotations there.
    """

    def set_module(definition: _T) -> _T:
        definition.__module__ = module
        return definition

    return set_module
